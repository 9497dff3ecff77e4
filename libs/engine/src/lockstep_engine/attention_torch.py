"""Paged attention in plain torch: the oracle for the kernels, and what runs where they cannot.

A step mixes sequences that decode (one token) and sequences that prefill (a chunk). Both see the same arithmetic for
a given
query row, whatever else is in the step, if matrix products treat each row alike:
- keys are padded to whole partitions of 128, masked scores are -inf, and the softmax of a row ignores them exactly;
- probabilities times values is summed within a partition by one product of fixed depth, over partitions in order, so
  that a row gets the same bits however many partitions its neighbours need;
- a product never has a single row (`pad_rows`): libraries send that case through a matrix-vector routine with other
rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.attention import StepAttention, StepLayout
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kv_cache import KvCache

PARTITION = 128
_PARTITION_BLOCKS = PARTITION // BLOCK_SIZE


@dataclass
class _Group:
    """Sequences that go through attention in one call: all decode, or one prefills."""

    tokens: slice | torch.Tensor
    """Which of the step's tokens are theirs."""
    sequences: int
    queries: int
    """Tokens a sequence."""
    index: torch.Tensor
    """Their blocks, for `KvCache.gather`."""
    key_positions: torch.Tensor
    """[keys]"""
    query_positions: torch.Tensor
    """[sequences, queries, 1]"""
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def mask(self, per_head: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Added to the scores: [sequences, per_head * queries, keys], 0 where a query sees a key, else -inf. Kept
        for the step.
        """
        mask = self.masks.get((per_head, window))
        if mask is None:
            hidden = self.key_positions > self.query_positions
            if window is not None:
                hidden |= self.key_positions <= self.query_positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            mask = mask.repeat(1, per_head, 1)
            self.masks[per_head, window] = mask
        return mask


class TorchAttention(StepAttention):
    """`StepAttention` in plain torch."""

    def __init__(self, cache: KvCache, step: StepLayout, *, deterministic: bool) -> None:
        super().__init__(cache, step)
        self._deterministic = deterministic
        self._groups = self._group(step.starts, step.lengths, np.cumsum(step.lengths), step.tables)

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
        self._cache.store(layer, keys, values, self._slots)
        if len(self._groups) == 1:
            return self._attend_group(self._groups[0], layer, queries, scale, window, soft_cap)
        out = torch.empty_like(queries.transpose(0, 1), memory_format=torch.contiguous_format)
        for group in self._groups:
            out[group.tokens] = self._attend_group(group, layer, queries[:, group.tokens], scale, window, soft_cap)
        return out

    def _attend_group(
        self,
        group: _Group,
        layer: int,
        queries: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        heads, tokens, dim = queries.shape
        kv_heads = self._cache.kv_heads
        per_head = heads // kv_heads
        rows = group.sequences * kv_heads
        # [heads, sequences * queries, dim] -> [sequences * kv heads, query heads of a kv head * queries, dim]
        q = queries.view(kv_heads, per_head, group.sequences, group.queries, dim)
        q = q.permute(2, 0, 1, 3, 4).reshape(rows, per_head * group.queries, dim)
        pad_rows = self._deterministic and q.shape[1] == 1
        if pad_rows:
            q = q.expand(rows, 2, dim)
        mask = group.mask(2 if pad_rows else per_head, window, q.dtype)
        k, v = self._cache.gather(layer, group.index, rows)
        if group.sequences > 1:
            mask = mask.repeat_interleave(kv_heads, 0) if kv_heads > 1 else mask
        scores = _scores(q, k, mask, scale, soft_cap)
        weights = torch.softmax(scores, dim=-1)
        out = self._weighted_sum(weights, v)
        if pad_rows:
            out = out[:, :1]
        out = out.view(group.sequences, kv_heads, per_head, group.queries, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(tokens, heads, dim)

    def _weighted_sum(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[rows, queries, keys] x [rows, keys, dim] -> [rows, queries, dim]."""
        rows, queries, keys = weights.shape
        partitions = keys // PARTITION
        if partitions == 1 or not self._deterministic:
            return torch.bmm(weights, values)
        parts = weights.view(rows, queries, partitions, PARTITION).transpose(1, 2)
        sums = torch.bmm(
            parts.reshape(rows * partitions, queries, PARTITION), values.view(rows * partitions, PARTITION, -1)
        ).view(rows, partitions, queries, -1)
        out = sums[:, 0]
        for partition in range(1, partitions):
            out = out + sums[:, partition]
        return out

    def _group(
        self, starts: NDArray[np.int32], lengths: NDArray[np.int32], ends: NDArray[np.int64], tables: NDArray[np.int32]
    ) -> list[_Group]:
        """Decoding sequences by size of their context (to the next power of two of partitions), prefilling ones
        alone.
        """
        partitions = -(-(starts + lengths) // PARTITION)
        decoding: dict[int, list[int]] = {}
        groups: list[_Group] = []
        for sequence, length in enumerate(lengths.tolist()):
            if length == 1:
                bucket = 1 << (int(partitions[sequence]) - 1).bit_length()
                decoding.setdefault(bucket, []).append(sequence)
            else:
                end = int(ends[sequence])
                groups.append(
                    self._make_group(slice(end - length, end), [sequence], starts, length, partitions, tables)
                )
        whole = len(decoding) == 1 and not groups
        for members in decoding.values():
            tokens = slice(None) if whole else torch.from_numpy(ends[members] - 1).to(self._cache.keys.device)
            groups.append(self._make_group(tokens, members, starts, 1, partitions, tables))
        return groups

    def _make_group(
        self,
        tokens: slice | torch.Tensor,
        members: Sequence[int],
        starts: NDArray[np.int32],
        queries: int,
        partitions: NDArray[np.int32],
        tables: NDArray[np.int32],
    ) -> _Group:
        device = self._cache.keys.device
        width = int(partitions[members].max()) * _PARTITION_BLOCKS
        rows = np.full((len(members), width), -1, dtype=np.int32)
        used = min(width, tables.shape[1])
        rows[:, :used] = tables[members, :used]
        positions = starts[members].astype(np.int64)[:, None, None] + np.arange(queries)[None, :, None]
        return _Group(
            tokens=tokens,
            sequences=len(members),
            queries=queries,
            index=self._cache.block_index(rows),
            key_positions=torch.arange(width * BLOCK_SIZE, device=device),
            query_positions=torch.from_numpy(positions).to(device),
        )


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    """[rows, queries, dim] x [rows, keys, dim] -> masked scores [rows, queries, keys]."""
    if soft_cap is None:
        return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    return scores.add_(mask)
