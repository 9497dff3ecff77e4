"""Paged attention on a GPU: prepares a step for the Triton kernels and calls them.

A step's sequences with one query go through the decode form of the kernel (keys split over programs), the others
through the prefill form; in the exact mode both give a query the same bits.
`DecodeAttention` and `ChunkAttention` serve steps that are recorded once and replayed: they read positions and tables
from tensors that stay in place.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from lockstep_engine.attention import StepAttention, StepLayout
from lockstep_engine.chunk_graphs import ChunkInputs
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kernels import (
    triton_attention,
    triton_compress,
    triton_exact_attention,
    triton_latent,
    triton_store,
)
from lockstep_engine.kernels.triton_attention import Paged, Tiles
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.layer_cache import LayerCache
from lockstep_engine.scoring import Scoring
from lockstep_engine.transfers import to_device_at_once

_STRIDE = 16
"""Strides that are multiples of this need one build of a kernel, others a second one."""
_PLACES_EACH = 4
"""Places for sequences of a recorded step for each one that is expected to decode. Keys are split over so many more
programs than if all did; where all do, programs run in turns."""


@dataclass(frozen=True)
class Rotation:
    """How queries and keys of merged projections are rotated."""

    cosine: torch.Tensor
    """[tokens, rotated]"""
    sine: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """Weights [dim] of the norms of queries and keys before they are rotated."""
    eps: float
    heads: int


class TritonAttention(StepAttention):
    """`StepAttention` by the Triton kernels.

    Args:
        cache: as for `StepAttention`.
        step: as for `StepAttention`.
        exact: a query's bits must not depend on what else the step computes.
    """

    def __init__(self, cache: KvCache, step: StepLayout, *, exact: bool = False) -> None:
        super().__init__(cache, step)
        self._exact = exact
        lengths = step.lengths
        rows = (np.cumsum(lengths) - lengths).astype(np.int32)
        hot_tables = step.tables if step.hot_tables is None else step.hot_tables
        moves = np.empty((0, 2), np.int32) if step.moves is None else step.moves
        single, self._long = (lengths == 1).nonzero()[0], (lengths > 1).nonzero()[0]
        self._lengths = lengths
        arrays = [step.tables, hot_tables, step.starts, lengths, rows, single, np.zeros_like(single), moves]
        tables, hot, starts, counts, firsts, sequences, zeros, self._moves = _to_device(arrays, cache.keys.device)
        self._paged = Paged(tables, hot, starts, counts, firsts, cache.hot_window)
        splits = _splits_for(cache, max(1, len(single)), step.tables.shape[1])
        self._single = Tiles(sequences, zeros, 1, splits) if len(single) else None
        self._long_tiles: dict[int, Tiles] = {}

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        triton_store.store(self._cache.layer(layer), _laid_out(keys), _laid_out(values), self._cells)

    def _attend(self, layer: int, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        return self._compute(layer, _laid_out(queries), scoring)

    def attend_merged(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """`attend` for a layer's merged projections, whose queries are rotated in place.

        Args:
            layer: number of the layer.
            qkv: [tokens, (heads + 2 * kv heads) * head dim], contiguous.
            rotation: how queries and keys are rotated.
            scale: as in `Scoring`.
            window: as in `Scoring`.

        Returns:
            [tokens, heads * head dim].
        """
        triton_store.rotate_store(
            self._cache.layer(layer),
            qkv,
            rotation.cosine,
            rotation.sine,
            self._cells,
            heads=rotation.heads,
            norms=rotation.norms,
            eps=rotation.eps,
        )
        dim = self._cache.head_dim
        queries = qkv.view(len(qkv), -1, dim)[:, : rotation.heads].transpose(0, 1)
        return self._compute(layer, queries, Scoring(scale, window)).flatten(1)

    def _compute(self, layer: int, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        cache = self._cache.layer(layer)
        if len(self._moves) and cache.cold is not None:
            triton_compress.compress(self._cache.cold_layers(layer), self._moves)
        heads, tokens, dim = queries.shape
        out = torch.empty(tokens, heads, cache.latent or dim, dtype=queries.dtype, device=queries.device)
        for tiles in (self._single, self._prefill(heads // self._cache.kv_heads, queries.dtype, cache)):
            if tiles is None:
                continue
            if cache.latent:
                triton_latent.attend(queries, cache, self._paged, scoring, tiles, out, exact=self._exact)
            else:
                attend = triton_exact_attention.attend if self._exact else triton_attention.attend
                attend(queries, cache, self._paged, scoring, tiles, out)
        return out

    def _prefill(self, per_head: int, dtype: torch.dtype, layer: LayerCache) -> Tiles | None:
        if not len(self._long):
            return None
        size = self._queries_a_tile(per_head, dtype, layer)
        if size not in self._long_tiles:
            counts = -(-self._lengths[self._long] // size)
            owners = np.repeat(self._long, counts)
            firsts = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
            sequences, first_queries = _to_device([owners, firsts], self._cache.keys.device)
            self._long_tiles[size] = Tiles(sequences, first_queries, size)
        return self._long_tiles[size]

    def _queries_a_tile(self, per_head: int, dtype: torch.dtype, layer: LayerCache) -> int:
        if layer.latent:
            return triton_latent.queries_a_tile(per_head, layer, exact=self._exact)
        if self._exact:
            return triton_exact_attention.queries_a_tile(per_head, dtype)
        return triton_attention.queries_a_tile(per_head, self._cache.head_dim, dtype)


class DecodeAttention(TritonAttention):
    """A step of sequences with one query each, from tensors on the device that may change between replays.

    Args:
        cache: the rank's cache.
        positions: [sequences], int64: positions of the queries; -1: a padding row, which sees and stores nothing.
        tables: [sequences, width], int32, as in `StepLayout`.
        exact: as for `TritonAttention`.
    """

    def __init__(self, cache: KvCache, positions: torch.Tensor, tables: torch.Tensor, *, exact: bool = False) -> None:
        device, count = positions.device, len(positions)
        self._cache = cache
        self._exact = exact
        self.positions = positions.clamp_min(0)
        blocks = tables.gather(1, (self.positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1).long()
        cells = blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self._cells = cells.masked_fill(positions < 0, -1)
        every = torch.arange(count, dtype=torch.int32, device=device)
        self._paged = Paged(tables, tables, positions.int(), torch.ones_like(every), every, cache.hot_window)
        splits = _splits_for(cache, count, tables.shape[1])
        self._single = Tiles(every, torch.zeros_like(every), 1, splits)
        self._moves = every.new_empty(0, 2)
        self._long = np.empty(0, np.int64)


class ChunkAttention(TritonAttention):
    """A step of chunks and decoding sequences, from tensors on the device that may change between replays.

    Grids have the most tiles that a step of this size can have. The tokens that no sequence has belong to one more
    sequence, the last, whose positions are negative: it sees and stores nothing, and gets zeros. Tiles that are not
    needed are of that sequence, too.

    Args:
        cache: the rank's cache.
        inputs: the step.
        exact: as for `TritonAttention`.
    """

    def __init__(self, cache: KvCache, inputs: ChunkInputs, *, exact: bool = False) -> None:
        device, tokens, count = inputs.ids.device, len(inputs.ids), len(inputs.lengths)
        self._cache = cache
        self._exact = exact
        self._tokens = tokens
        lengths = torch.cat([inputs.lengths, tokens - inputs.lengths.sum(0, keepdim=True, dtype=torch.int32)])
        starts = pad(inputs.starts, (0, 1), value=-1 - tokens)
        ends = lengths.cumsum(0, dtype=torch.int32)
        firsts = ends - lengths
        index = torch.arange(tokens, dtype=torch.int32, device=device)
        owners = torch.searchsorted(ends, index, right=True)
        places = (index + (starts - firsts)[owners]).long()
        self.positions = places.clamp_min(0)
        blocks = inputs.hot_tables[owners, self.positions // BLOCK_SIZE].long()
        self._cells = (blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE).masked_fill(places < 0, -1)
        self._paged = Paged(inputs.tables, inputs.hot_tables, starts, lengths, firsts, cache.hot_window)
        every = torch.arange(count, dtype=torch.int32, device=device)
        splits = _splits_for(cache, max(1, count // _PLACES_EACH), inputs.tables.shape[1])
        single = every.masked_fill(inputs.lengths != 1, count)
        self._single = Tiles(single, torch.zeros_like(single), 1, splits)
        self._moves = inputs.moves
        self._long_tiles = {}

    def _prefill(self, per_head: int, dtype: torch.dtype, layer: LayerCache) -> Tiles:
        size = self._queries_a_tile(per_head, dtype, layer)
        if size not in self._long_tiles:
            if self._exact and size == 1 and not layer.latent:
                raise RuntimeError(f"{per_head} query heads to a key head take memory for each token of a chunk")
            lengths = self._paged.lengths
            last = len(lengths) - 1
            # A sequence begins at most one tile that its queries do not fill, and a long one has at least two queries.
            most = self._tokens // size + min(len(lengths), self._tokens // 2)
            counts = ((lengths + (size - 1)) // size).masked_fill(lengths < 2, 0)
            ends = counts.cumsum(0, dtype=torch.int32)
            index = torch.arange(most, dtype=torch.int32, device=lengths.device)
            owners = torch.searchsorted(ends, index, right=True, out_int32=True).clamp_max(last)
            firsts = (index - (ends - counts)[owners]) * size
            self._long_tiles[size] = Tiles(owners, firsts, size)
        return self._long_tiles[size]


def _splits_for(cache: KvCache, sequences: int, width: int) -> int:
    """Over how many programs the keys of so many decoding sequences are split, whose tables are so wide."""
    longest, device = width * BLOCK_SIZE, cache.keys.device
    if cache.latent:
        return triton_latent.splits_for(sequences, longest, device)
    return triton_attention.splits_for(sequences, cache.kv_heads, longest, device)


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, dim] with strides for which the same kernels serve any number of tokens."""
    if x.stride(2) == 1 and x.shape[2] % _STRIDE == 0:
        return x
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _to_device(arrays: list[NDArray[np.integer]], device: torch.device) -> list[torch.Tensor]:
    """int32 tensors of these shapes, in one copy."""
    return to_device_at_once([array.astype(np.int32, copy=False) for array in arrays], device)
