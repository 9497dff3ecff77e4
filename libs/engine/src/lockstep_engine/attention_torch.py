"""Paged attention in plain torch, for devices and types that no kernel serves.

A step mixes sequences that decode (one token) and sequences that prefill (a chunk). Both see the same arithmetic for a
given query row, whatever else is in the step:
- keys are padded to full partitions of 128, masked scores are -inf, and the softmax of a row ignores them exactly;
- products are those of `rowwise`, one partition at a time, and probabilities times values are summed over partitions in
  order, so that a row gets the same bits however many partitions its neighbours need.
On a GPU, and where it need not be deterministic, products are torch's own. In either case everything between 16-bit
inputs and the result is float32, as the scales of cold blocks and biases are, and is rounded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine import rowwise
from lockstep_engine.attention import StepAttention, StepLayout
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels.cpu import Function
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring

PARTITION = 128
_PARTITION_BLOCKS = PARTITION // BLOCK_SIZE


@dataclass
class _Group:
    """Sequences whose attention is computed in one call: several that decode, or one that prefills."""

    tokens: slice | torch.Tensor
    """The step's tokens that belong to these sequences."""
    sequences: int
    queries: int
    """Tokens of each sequence."""
    hot_rows: NDArray[np.int32]
    """[sequences, blocks]: ids of their hot blocks."""
    cold_index: torch.Tensor | None
    """Their cold blocks, for `KvCache.gather_cold`; None: none of their queries sees one."""
    key_positions: torch.Tensor
    """[keys]"""
    query_positions: torch.Tensor
    """[sequences, queries, 1]"""
    indices: dict[int, torch.Tensor] = field(default_factory=dict)
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def index(self, cache: KvCache, layer: int) -> torch.Tensor:
        """Their hot blocks, for `KvCache.gather`. Kept for the step, for layers with as many blocks."""
        blocks = cache.layer(layer).keys.shape[1]
        if blocks not in self.indices:
            self.indices[blocks] = cache.block_index(self.hot_rows, layer)
        return self.indices[blocks]

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

    def sees_cold(self, per_head: int, hot_window: HotWindow) -> torch.Tensor:
        """[sequences, per_head * queries, keys]: whether a query sees the cold version of a key."""
        key_blocks, query_blocks = self.key_positions // BLOCK_SIZE, self.query_positions // BLOCK_SIZE
        cold = (key_blocks >= hot_window.sink) & (query_blocks - key_blocks > hot_window.size)
        return cold.repeat(1, per_head, 1)


class TorchAttention(StepAttention):
    """`StepAttention` in plain torch."""

    def __init__(self, cache: KvCache, step: StepLayout, *, deterministic: bool) -> None:
        super().__init__(cache, step)
        self._exact = deterministic and cache.keys.is_cpu
        self._moves = step.moves
        self._hot_tables = step.tables if step.hot_tables is None else step.hot_tables
        self._groups = self._group(step.starts, step.lengths, np.cumsum(step.lengths), step.tables)

    def _attend(self, layer: int, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        if self._moves is not None and len(self._moves):
            self._cache.compress(self._moves, layer)
        if len(self._groups) == 1:
            return self._attend_group(self._groups[0], layer, queries, scoring)
        heads, tokens, dim = queries.shape
        out = queries.new_empty(tokens, heads, self._cache.latent or dim)
        for group in self._groups:
            out[group.tokens] = self._attend_group(group, layer, queries[:, group.tokens], scoring)
        return out

    def _attend_group(
        self,
        group: _Group,
        layer: int,
        queries: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        heads, tokens, dim = queries.shape
        kv_heads = self._cache.kv_heads
        per_head = heads // kv_heads
        rows = group.sequences * kv_heads
        # [heads, sequences * queries, dim] -> [sequences * kv heads, query heads of a kv head * queries, dim]
        q = queries.reshape(kv_heads, per_head, group.sequences, group.queries, dim)
        q = q.permute(2, 0, 1, 3, 4).reshape(rows, per_head * group.queries, dim)
        mask = group.mask(per_head, scoring.window, q.dtype)
        k, v = self._cache.gather(layer, group.index(self._cache, layer), rows)
        if group.sequences > 1:
            mask = mask.repeat_interleave(kv_heads, 0) if kv_heads > 1 else mask
        scores = _scores(self._products(q, k), scoring, None)
        cold: _Cold | None = None
        has_cold = self._cache.layer(layer).cold is not None
        if has_cold and group.cold_index is not None and self._cache.hot_window is not None:
            sees = group.sees_cold(per_head, self._cache.hot_window)
            sees = sees.repeat_interleave(kv_heads, 0) if group.sequences > 1 and kv_heads > 1 else sees
            cold = _Cold(sees, *self._cache.gather_cold(layer, group.cold_index, rows))
            scores = torch.where(sees, _scores(self._products(q, cold.keys), scoring, cold.key_scales), scores)
        scores = scores + mask
        if scoring.bias is not None:
            scores = scores + _row_bias(scoring.bias, group, kv_heads, q.shape[1])
        weights = _softmax(scores, scoring.sinks, kv_heads)
        if cold is None:
            out = self._weighted_sum(weights, v)
        else:
            out = self._weighted_sum(weights.masked_fill(cold.seen, 0), v)
            out = out + self._weighted_sum(cold.weights(weights), cold.values)
        out = out.to(v.dtype).view(group.sequences, kv_heads, per_head, group.queries, -1)
        return out.permute(0, 3, 1, 2, 4).reshape(tokens, heads, -1)

    def _products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """[rows, queries, dim] x [rows, keys, dim] -> [rows, queries, keys], in float32."""
        q, k = q.float(), k.float()
        if not self._exact:
            return torch.bmm(q, k.transpose(1, 2))
        parts = [rowwise.product(q, part.transpose(1, 2)) for part in torch.split(k, PARTITION, dim=1)]
        return torch.cat(parts, dim=2)

    def _weighted_sum(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[rows, queries, keys] in float32 x [rows, keys, dim] -> [rows, queries, dim] in float32."""
        values = values.float()
        if not self._exact:
            return torch.bmm(weights, values)
        pairs = zip(torch.split(weights, PARTITION, dim=2), torch.split(values, PARTITION, dim=1), strict=True)
        first, *others = (rowwise.product(part.contiguous(), part_values) for part, part_values in pairs)
        for other in others:
            first = first + other
        return first

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
        all_decode = len(decoding) == 1 and not groups
        for members in decoding.values():
            tokens = slice(None) if all_decode else torch.from_numpy(ends[members] - 1).to(self._cache.keys.device)
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
        has_cold = self._cache.hot_window is not None and bool((rows >= self._cache.first_cold).any())
        positions = starts[members].astype(np.int64)[:, None, None] + np.arange(queries)[None, :, None]
        return _Group(
            tokens=tokens,
            sequences=len(members),
            queries=queries,
            hot_rows=rows_of(self._hot_tables),
            cold_index=self._cache.cold_index(rows) if has_cold else None,
            key_positions=torch.arange(width * BLOCK_SIZE, device=device),
            query_positions=torch.from_numpy(positions).to(device),
        )


@dataclass(frozen=True)
class _Cold:
    """What a group's queries see of cold blocks. Keys and values are codes; scores and weights are multiplied by the
    scales.
    """

    seen: torch.Tensor
    """[rows or 1, queries, keys]: whether a query sees the cold version of a key."""
    keys: torch.Tensor
    values: torch.Tensor
    """[rows, keys, dim] each."""
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    """[rows, keys] each; None: keys and values are not compressed."""

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights [rows, queries, keys] of cold values, times their scales; 0 where a query sees the hot one."""
        weights = weights.masked_fill(~self.seen, 0)
        return weights if self.value_scales is None else weights.mul_(self.value_scales.unsqueeze(1))


def _row_bias(bias: torch.Tensor, group: _Group, kv_heads: int, rows: int) -> torch.Tensor:
    """The bias for scores [sequences * kv heads, rows, keys], whose rows are query heads, each with its queries."""
    known = group.key_positions.clamp_max(bias.shape[1] - 1)
    bias = bias[:, known].view(kv_heads, -1, len(known))
    return bias.repeat_interleave(rows // bias.shape[1], 1).repeat(group.sequences, 1, 1)


def _scores(products: torch.Tensor, scoring: Scoring, key_scales: torch.Tensor | None) -> torch.Tensor:
    """Scores of products [rows, queries, keys], scaled and capped."""
    scores = products * scoring.scale
    if key_scales is not None:
        scores = scores * key_scales.unsqueeze(1)
    if scoring.soft_cap is None:
        return scores
    return rowwise.apply(Function.TANH, scores / scoring.soft_cap) * scoring.soft_cap


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, kv_heads: int) -> torch.Tensor:
    """Weights of scores [sequences * kv heads, query heads of a kv head * queries, keys]."""
    if sinks is None:
        return rowwise.softmax(scores)
    rows, length, _ = scores.shape
    sinks = sinks.to(scores.dtype).view(kv_heads, -1)
    sinks = sinks.repeat_interleave(length // sinks.shape[1], 1).repeat(rows // kv_heads, 1)
    # first, so that its place does not depend on the number of keys
    return rowwise.softmax(torch.cat([sinks.unsqueeze(-1), scores], dim=-1))[..., 1:]
