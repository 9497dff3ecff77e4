"""Paged attention for one step: where its tokens' keys and values go, and which blocks its queries look at.

`StepAttention` is what a model's layers see. Sequences that decode and sequences that prefill go through the same
call, and a query row's result does not depend on what else is in the step.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kernels import cpu, gpu
from lockstep_engine.kv_cache import KvCache


@dataclass(frozen=True)
class StepLayout:
    """A step's sequences; their tokens stand one after the other."""

    starts: NDArray[np.int32]
    """[sequences]: position of the first token."""
    lengths: NDArray[np.int32]
    """[sequences]: tokens."""
    tables: NDArray[np.int32]
    """[sequences, width]: ids of the blocks (see `kv_cache`), each in the version that the step's last query of the
    sequence sees; -1 where unused."""
    hot_tables: NDArray[np.int32] | None = None
    """[sequences, width]: ids of the hot blocks, -1 where no query of the step sees the block hot. None: `tables` has
    them, because no block is seen in both versions."""
    moves: NDArray[np.int32] | None = None
    """[n, 2]: full hot blocks, and the cold ones that each layer makes of them when it has stored the step's keys and
    values; without `first_cold`."""


def layout_of_one(
    cache: KvCache, start: int, length: int, hot: NDArray[np.int32], cold: NDArray[np.int32]
) -> StepLayout:
    """A step of one sequence that has both versions of all its blocks, so that nothing need be moved in or out.

    Args:
        cache: what the blocks are of.
        start: position of the first token; all before it have been computed, in steps like this one.
        length: tokens.
        hot: ids of the hot blocks, in order.
        cold: of the cold ones, without `first_cold`.
    """
    used, rule = -(-(start + length) // BLOCK_SIZE), cache.rule
    hot_tables = np.ascontiguousarray(hot[None, :used])
    tables, made = hot_tables.copy(), slice(0)
    if rule is not None:
        last = rule.first_hot(used - 1)
        tables[0, rule.sink : last] = cold[rule.sink : last] + cache.first_cold
        made = slice(rule.first_hot(max(start - 1, 0) // BLOCK_SIZE), last)
    moves = np.stack([hot[made], cold[made]], axis=1)
    return StepLayout(np.array([start], np.int32), np.array([length], np.int32), tables, hot_tables, moves)


class StepAttention(ABC):
    """Attention for one step, used by all layers.

    Args:
        cache: the rank's cache. Blocks that a sequence enters in this step are zeroed.
        step: what is in the step.
    """

    def __init__(self, cache: KvCache, step: StepLayout) -> None:
        lengths = step.lengths
        owners = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        positions = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths - step.starts, lengths)
        hot_tables = step.tables if step.hot_tables is None else step.hot_tables
        blocks = hot_tables[owners, positions // BLOCK_SIZE].astype(np.int64)
        offsets = positions % BLOCK_SIZE
        device = cache.keys.device
        self._cache = cache
        self._owners = owners
        self.positions = torch.from_numpy(positions).to(device, non_blocking=True)
        """[tokens]"""
        self._slots = torch.from_numpy(blocks * BLOCK_SIZE + offsets).to(device, non_blocking=True)
        entered = blocks[offsets == 0]
        if len(entered):
            cache.clear(torch.from_numpy(entered).to(device, non_blocking=True))

    @abstractmethod
    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values and attend over the whole context.

        Args:
            layer: number of the layer.
            queries: [heads, tokens, head dim].
            keys, values: [kv heads, tokens, head dim]; heads is a multiple of kv heads.
            scale: of the scores.
            window: a query sees this many last keys, itself included; None: all.
            soft_cap: scores s become c * tanh(s / c) (Gemma 2).

        Returns:
            [tokens, heads, head dim].
        """


class CompiledAttention(StepAttention):
    """The CPU kernel: reads blocks where they lie, instead of gathering them first."""

    def __init__(self, cache: KvCache, step: StepLayout) -> None:
        super().__init__(cache, step)
        self._tables = np.ascontiguousarray(step.tables)
        self._threads = torch.get_num_threads()
        widens = cache.rule is not None and int(step.lengths.max()) >= cpu.WIDEN
        scratch = cpu.attention_scratch(self._tables.shape[1], cache.head_dim, widens=widens)
        self._scratch = torch.empty(self._threads, scratch)
        self._hot_tables = None if step.hot_tables is None else np.ascontiguousarray(step.hot_tables)
        self._moves = None if step.moves is None else np.ascontiguousarray(step.moves)
        rule = cache.rule
        self._call = cpu.AttentionCall(
            tables=self._tables.ctypes.data,
            hot_tables=None if self._hot_tables is None else self._hot_tables.ctypes.data,
            moves=None if self._moves is None else self._moves.ctypes.data,
            width=self._tables.shape[1],
            move_count=0 if self._moves is None else len(self._moves),
            first_cold=cache.first_cold,
            sink=0 if rule is None else rule.sink,
            hot_window=-1 if rule is None else rule.size,
            owners=self._owners.ctypes.data,
            positions=self.positions.data_ptr(),
            tokens=len(self._owners),
        )

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """See `StepAttention.attend`."""
        blocks = self._cache.calls[layer]
        cpu.store(blocks, keys, values, self._slots)
        heads, tokens, dim = queries.shape
        out = torch.empty(tokens, heads, dim)
        call = self._call
        call.out, call.q = out.data_ptr(), queries.data_ptr()
        call.q_head_stride, call.q_token_stride, last = queries.stride()
        assert last == 1
        call.heads, call.scale = heads, scale
        call.window, call.soft_cap = window or 0, soft_cap or 0.0
        cpu.attention(call, blocks, self._scratch, self._threads)
        return out

    def attend_merged(
        self, layer: int, qkv: torch.Tensor, rotation: cpu.RopeCall, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """`attend`, from a layer's merged projections, which are rotated in place.

        Args:
            layer: number of the layer.
            qkv: [tokens, (heads + 2 * kv heads) * head dim], contiguous.
            rotation: how, with its tensors set but for `qkv` and `tokens`.
            scale: of the scores.
            window: as in `attend`.

        Returns:
            [tokens, heads * head dim].
        """
        call = self._call
        out = torch.empty(qkv.shape[0], rotation.heads * rotation.dim)
        rotation.qkv, rotation.tokens = qkv.data_ptr(), qkv.shape[0]
        call.out = out.data_ptr()
        call.heads, call.scale, call.window, call.soft_cap = rotation.heads, scale, window or 0, 0.0
        cpu.rotated_attention(rotation, call, self._cache.calls[layer], self._slots, self._scratch, self._threads)
        return out


def step_attention(cache: KvCache, step: StepLayout, *, deterministic: bool, plain: bool = False) -> StepAttention:
    """The best attention for the cache's device and dtype.

    Args:
        deterministic: a query's result must not depend on the other sequences; the Triton kernels' does.
        plain: the model needs what the CPU kernel cannot do.
    """
    from lockstep_engine.attention_torch import TorchAttention  # noqa: PLC0415 - it builds on this module

    if not deterministic and gpu.usable(cache.keys.device, cache.keys.dtype, cache.head_dim):
        from lockstep_engine.attention_triton import TritonAttention  # noqa: PLC0415 - and on Triton

        return TritonAttention(cache, step)
    if not plain and cpu.available(cache.keys) and cpu.usable(cache.head_dim):
        return CompiledAttention(cache, step)
    return TorchAttention(cache, step, deterministic=deterministic)
