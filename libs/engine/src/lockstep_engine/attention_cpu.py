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


class CompiledAttention(StepAttention):
    """`StepAttention` by the compiled kernel."""

    def __init__(self, cache: KvCache, step: StepLayout) -> None:
        self._tables = np.ascontiguousarray(step.tables)
        self._hot_tables = None if step.hot_tables is None else np.ascontiguousarray(step.hot_tables)
        super().__init__(cache, step)
        self._threads = torch.get_num_threads()
        widens = cache.hot_window is not None and int(step.lengths.max()) >= cpu.WIDEN
        scratch = cpu.attention_scratch(self._tables.shape[1], cache.head_dim, widens=widens)
        self._scratch = torch.empty(self._threads, scratch)
        self._moves = None if step.moves is None else np.ascontiguousarray(step.moves)
        hot_window = cache.hot_window
        self._call = AttentionCall(
            tables=cpu.address(self._tables),
            hot_tables=None if self._hot_tables is None else cpu.address(self._hot_tables),
            moves=None if self._moves is None else cpu.address(self._moves),
            width=self._tables.shape[1],
            move_count=0 if self._moves is None else len(self._moves),
            first_cold=cache.first_cold,
            sink=0 if hot_window is None else hot_window.sink,
            hot_blocks_before=-1 if hot_window is None else hot_window.size,
            owners=cpu.address(self._owners),
            positions=self.positions.data_ptr(),
            tokens=len(self._owners),
        )

    def _places(self, step: StepLayout) -> tuple[NDArray[np.int32], torch.Tensor, torch.Tensor, torch.Tensor]:
        starts, lengths = (np.ascontiguousarray(each, np.int32) for each in (step.starts, step.lengths))
        return cpu.places(starts, lengths, self._tables if self._hot_tables is None else self._hot_tables)

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


def _by_components(x: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, dim] in a layout in which a head's components are adjacent."""
    return x if x.stride(2) == 1 else x.contiguous()


def _full_blocks(bias: torch.Tensor) -> torch.Tensor:
    """A bias [heads, positions] in float32 padded to full blocks."""
    return functional.pad(bias.float(), (0, -bias.shape[1] % BLOCK_SIZE)).contiguous()
