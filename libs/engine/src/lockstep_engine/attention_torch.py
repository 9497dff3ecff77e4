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
from lockstep_engine.config import BLOCK_SIZE, HotWindow
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
    """Their hot blocks, for `KvCache.gather`."""
    cold_index: torch.Tensor | None
    """Their cold blocks, for `KvCache.gather_cold`; None: none of their queries sees one."""
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

    def sees_cold(self, per_head: int, rule: HotWindow) -> torch.Tensor:
        """[sequences, per_head * queries, keys]: a query sees the cold version of a key."""
        key_blocks, query_blocks = self.key_positions // BLOCK_SIZE, self.query_positions // BLOCK_SIZE
        cold = (key_blocks >= rule.sink) & (query_blocks - key_blocks > rule.size)
        return cold.repeat(1, per_head, 1)


class TorchAttention(StepAttention):
    """`StepAttention` in plain torch."""

    def __init__(self, cache: KvCache, step: StepLayout, *, deterministic: bool) -> None:
        super().__init__(cache, step)
        self._deterministic = deterministic
        self._moves = step.moves
        self._hot_tables = step.tables if step.hot_tables is None else step.hot_tables
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
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StepAttention.attend`.

        Args:
            bias: [heads, context length], added to a head's scores by the position of the key (ALiBi).
            sinks: [heads], the score of a key without a value that every query sees (GPT-OSS).
        """
        self._cache.store(layer, keys, values, self._slots)
        if self._moves is not None and len(self._moves):
            self._cache.compress(self._moves, layer)
        scoring = _Scoring(scale, window, soft_cap, bias, sinks)
        if len(self._groups) == 1:
            return self._attend_group(self._groups[0], layer, queries, scoring)
        out = torch.empty_like(queries.transpose(0, 1), memory_format=torch.contiguous_format)
        for group in self._groups:
            out[group.tokens] = self._attend_group(group, layer, queries[:, group.tokens], scoring)
        return out

    def _attend_group(
        self,
        group: _Group,
        layer: int,
        queries: torch.Tensor,
        scoring: "_Scoring",
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
        mask = group.mask(2 if pad_rows else per_head, scoring.window, q.dtype)
        k, v = self._cache.gather(layer, group.index, rows)
        if group.sequences > 1:
            mask = mask.repeat_interleave(kv_heads, 0) if kv_heads > 1 else mask
        scores = _scores(q, k, mask, scoring.scale, scoring.soft_cap)
        cold: _Cold | None = None
        if group.cold_index is not None and self._cache.rule is not None:
            sees = group.sees_cold(2 if pad_rows else per_head, self._cache.rule)
            sees = sees.repeat_interleave(kv_heads, 0) if group.sequences > 1 and kv_heads > 1 else sees
            cold = _Cold(sees, *self._cache.gather_cold(layer, group.cold_index, rows))
            scores = torch.where(sees, cold.scores(q, mask, scoring), scores)
        if scoring.bias is not None:
            scores = scores + scoring.row_bias(group, kv_heads, 2 if pad_rows else q.shape[1])
        weights = scoring.softmax(scores, kv_heads)
        if cold is None:
            out = self._weighted_sum(weights, v)
        else:
            out = self._weighted_sum(weights.masked_fill(cold.seen, 0), v)
            out = out + self._weighted_sum(cold.weights(weights), cold.values)
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
        used = min(width, tables.shape[1])

        def rows_of(tables: NDArray[np.int32]) -> NDArray[np.int32]:
            rows = np.full((len(members), width), -1, dtype=np.int32)
            rows[:, :used] = tables[members, :used]
            return rows

        rows = rows_of(tables)
        has_cold = bool((rows >= self._cache.first_cold).any())
        positions = starts[members].astype(np.int64)[:, None, None] + np.arange(queries)[None, :, None]
        return _Group(
            tokens=tokens,
            sequences=len(members),
            queries=queries,
            index=self._cache.block_index(rows_of(self._hot_tables)),
            cold_index=self._cache.cold_index(rows) if has_cold else None,
            key_positions=torch.arange(width * BLOCK_SIZE, device=device),
            query_positions=torch.from_numpy(positions).to(device),
        )


@dataclass(frozen=True)
class _Cold:
    """What a group's queries see of cold blocks. Scales go to scores and weights, so that keys and values stay the
    codes.
    """

    seen: torch.Tensor
    """[rows or 1, queries, keys]: a query sees the cold version of a key."""
    keys: torch.Tensor
    values: torch.Tensor
    """[rows, keys, dim] each."""
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    """[rows, keys] each; None: the codes are the components."""

    def scores(self, q: torch.Tensor, mask: torch.Tensor, scoring: "_Scoring") -> torch.Tensor:
        """As `_scores`, with the cold keys."""
        scores = torch.bmm(q, self.keys.transpose(1, 2)).mul_(scoring.scale)
        if self.key_scales is not None:
            scores.mul_(self.key_scales.unsqueeze(1))
        if scoring.soft_cap is not None:
            scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
        return scores.add_(mask)

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights [rows, queries, keys] of cold values, times their scales; 0 where a query sees the hot one."""
        weights = weights.masked_fill(~self.seen, 0)
        return weights if self.value_scales is None else weights.mul_(self.value_scales.unsqueeze(1))


@dataclass(frozen=True)
class _Scoring:
    """How scores are made and weighed; see `TorchAttention.attend`."""

    scale: float
    window: int | None
    soft_cap: float | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None

    def row_bias(self, group: _Group, kv_heads: int, rows: int) -> torch.Tensor:
        """The bias for scores [sequences * kv heads, rows, keys], whose rows are query heads, each with its queries."""
        assert self.bias is not None
        known = group.key_positions.clamp_max(self.bias.shape[1] - 1)
        bias = self.bias[:, known].view(kv_heads, -1, len(known))
        return bias.repeat_interleave(rows // bias.shape[1], 1).repeat(group.sequences, 1, 1)

    def softmax(self, scores: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Weights of scores [sequences * kv heads, query heads of a kv head * queries, keys]."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        rows, length, _ = scores.shape
        sinks = self.sinks.to(scores.dtype).view(kv_heads, -1)
        sinks = sinks.repeat_interleave(length // sinks.shape[1], 1).repeat(rows // kv_heads, 1)
        return torch.softmax(torch.cat([scores, sinks.unsqueeze(-1)], dim=-1), dim=-1)[..., :-1]


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    """[rows, queries, dim] x [rows, keys, dim] -> masked scores [rows, queries, keys]."""
    if soft_cap is None:
        return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    return scores.add_(mask)
