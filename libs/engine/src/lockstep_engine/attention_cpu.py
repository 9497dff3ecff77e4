"""Paged attention on the CPU by the compiled kernel, which reads blocks in place instead of gathering them."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from lockstep_engine.attention import StepAttention, StepLayout
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kernels import cpu
from lockstep_engine.kernels.cpu_structs import AttentionCall, PlainStepCall
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring

_SMALL = 32
"""Most sequences of a step whose attention is kept, and most forms of which one is."""


class CompiledAttention(StepAttention):
    """`StepAttention` by the compiled kernel."""

    def __init__(self, cache: KvCache, step: StepLayout) -> None:
        self._found = cpu.Places(step.lengths, step.tables.shape[1])
        # Beside those of `Places` only where some queries see blocks hot that others see cold.
        self._tables = self._found.tables if step.hot_tables is None else np.ascontiguousarray(step.tables)
        super().__init__(cache, step)
        self.tokens = len(self._owners)
        self._threads = torch.get_num_threads()
        widens = cache.hot_window is not None and int(step.lengths.max()) >= cpu.WIDEN
        scratch = cpu.attention_scratch(self._tables.shape[1], cache.head_dim, widens=widens)
        self._scratch = torch.empty(self._threads, scratch)
        self._moves: NDArray[np.int32] | None = None
        hot_window = cache.hot_window
        self._call = AttentionCall(
            tables=cpu.address(self._tables),
            hot_tables=None if step.hot_tables is None else cpu.address(self._found.tables),
            width=self._tables.shape[1],
            first_cold=cache.first_cold,
            sink=0 if hot_window is None else hot_window.sink,
            hot_blocks_before=-1 if hot_window is None else hot_window.size,
            owners=cpu.address(self._owners),
            positions=self.positions.data_ptr(),
            tokens=self.tokens,
        )
        self._set_moves(step.moves)

    def enter(self, step: StepLayout) -> None:
        """Become the attention of another step of the same form: its sequences have as many tokens each, its tables are
        as wide, and neither of them has hot tables.
        """
        count = self._found.find(step.starts, step.tables)
        if count:
            self._cache.clear(self._found.entered[:count])
        self._set_moves(step.moves)

    def _set_moves(self, moves: NDArray[np.int32] | None) -> None:
        self._call.move_count = count = 0 if moves is None else len(moves)
        if moves is not None and count:
            self._moves = np.ascontiguousarray(moves)
            self._call.moves = cpu.address(self._moves)

    def _places(self, step: StepLayout) -> tuple[NDArray[np.int32], torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self._found
        count = found.find(step.starts, step.tables if step.hot_tables is None else step.hot_tables)
        return found.owners, found.positions, found.cells, found.entered[:count]

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cpu.store(self._cache.calls[layer], _by_components(keys), _by_components(values), self._cells)

    def _attend(self, layer: int, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        dtype = queries.dtype
        heads, tokens, dim = queries.shape
        queries = _by_components(queries).float()
        out = torch.empty(tokens, heads, dim)
        call = self._call
        call.out, call.q = out.data_ptr(), queries.data_ptr()
        call.q_head_stride, call.q_token_stride, _ = queries.stride()
        call.heads, call.scale = heads, scoring.scale
        call.window, call.soft_cap = scoring.window or 0, scoring.soft_cap or 0.0
        bias = None if scoring.bias is None else _full_blocks(scoring.bias)
        if bias is not None:
            call.bias_width = bias.shape[1]
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        call.bias, call.sinks = (None if each is None else each.data_ptr() for each in (bias, sinks))
        cpu.attention(call, self._cache.calls[layer], self._scratch, self._threads)
        call.bias = call.sinks = None
        return out.to(dtype)

    def give_to(self, step: PlainStepCall) -> None:
        """Set what a step of plain layers needs of its attention, which must outlive the step."""
        step.attention, step.caches = ctypes.addressof(self._call), ctypes.addressof(self._cache.calls)
        step.cells = self._cells.data_ptr()
        step.scratch, step.scratch_size = self._scratch.data_ptr(), self._scratch.shape[1]


class DecodingAttention:
    """Attention of the steps of one rank. Those that decode have few forms, and to make one takes longer than a layer
    of a small model: so a step takes over what an earlier one of its form has made.
    """

    def __init__(self) -> None:
        self._cache: KvCache | None = None
        self._kept: dict[tuple[bytes, int, int], CompiledAttention] = {}
        """By the numbers of tokens of the sequences, the width of the tables and the number of threads."""

    def of(self, cache: KvCache, step: StepLayout) -> CompiledAttention:
        """The attention of a step, valid until the next call."""
        sequences = len(step.lengths)
        if sequences > _SMALL or step.hot_tables is not None:
            return CompiledAttention(cache, step)
        if self._cache is not cache:
            self._cache, self._kept = cache, {}
        key = (step.lengths.tobytes(), step.tables.shape[1], torch.get_num_threads())
        kept = self._kept.get(key)
        if kept is not None:
            kept.enter(step)
            return kept
        made = CompiledAttention(cache, step)
        if made.tokens == sequences:
            if len(self._kept) >= _SMALL:
                self._kept.clear()
            self._kept[key] = made
        return made


def _by_components(x: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, dim] in a layout in which a head's components are adjacent."""
    return x if x.stride(2) == 1 else x.contiguous()


def _full_blocks(bias: torch.Tensor) -> torch.Tensor:
    """A bias [heads, positions] in float32 padded to full blocks."""
    return functional.pad(bias.float(), (0, -bias.shape[1] % BLOCK_SIZE)).contiguous()
