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
from lockstep_engine.kernels import cpu
from lockstep_engine.kv_cache import KvCache


@dataclass(frozen=True)
class StepLayout:
    """A step's sequences; their tokens stand one after the other."""

    starts: NDArray[np.int32]
    """[sequences]: position of the first token."""
    lengths: NDArray[np.int32]
    """[sequences]: tokens."""
    tables: NDArray[np.int32]
    """[sequences, width]: block numbers, -1 where unused."""


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
        blocks = step.tables[owners, positions // BLOCK_SIZE].astype(np.int64)
        offsets = positions % BLOCK_SIZE
        device = cache.keys.device
        self._cache = cache
        self._owners = owners
        self.positions = torch.from_numpy(positions).to(device)
        """[tokens]"""
        self._slots = torch.from_numpy(blocks * BLOCK_SIZE + offsets).to(device)
        entered = blocks[offsets == 0]
        if len(entered):
            cache.clear(torch.from_numpy(entered).to(device))

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
        longest = int((step.starts + step.lengths).max())
        self._scratch = torch.empty(self._threads, longest + 32)
        _, kv_heads, blocks, dim, _ = cache.keys.shape
        self._call = cpu.AttentionCall(
            tables=self._tables.ctypes.data,
            width=self._tables.shape[1],
            owners=self._owners.ctypes.data,
            positions=self.positions.data_ptr(),
            tokens=len(self._owners),
            kv_heads=kv_heads,
            blocks=blocks,
            dim=dim,
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
        key_cache, value_cache = self._cache.layer(layer)
        cpu.store(key_cache, value_cache, keys, values, self._slots)
        heads, tokens, dim = queries.shape
        out = torch.empty(tokens, heads, dim)
        call = self._call
        call.out, call.q = out.data_ptr(), queries.data_ptr()
        call.q_head_stride, call.q_token_stride, last = queries.stride()
        assert last == 1
        call.keys, call.values = key_cache.data_ptr(), value_cache.data_ptr()
        call.heads, call.scale = heads, scale
        call.window, call.soft_cap = window or 0, soft_cap or 0.0
        cpu.attention(call, self._scratch, self._threads)
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
        key_cache, value_cache = self._cache.layer(layer)
        call = self._call
        out = torch.empty(qkv.shape[0], rotation.heads * rotation.dim)
        rotation.qkv, rotation.tokens = qkv.data_ptr(), qkv.shape[0]
        call.out, call.keys, call.values = out.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        call.heads, call.scale, call.window, call.soft_cap = rotation.heads, scale, window or 0, 0.0
        cpu.rotated_attention(rotation, call, self._slots, self._scratch, self._threads)
        return out


def step_attention(cache: KvCache, step: StepLayout, *, deterministic: bool) -> StepAttention:
    """The best attention for the cache's device and dtype."""
    from lockstep_engine.attention_torch import TorchAttention  # noqa: PLC0415 - it builds on this module

    if cpu.available(cache.keys) and cpu.usable(cache.head_dim):
        return CompiledAttention(cache, step)
    return TorchAttention(cache, step, deterministic=deterministic)
