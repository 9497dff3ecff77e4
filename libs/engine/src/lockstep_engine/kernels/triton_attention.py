"""Paged attention for GPUs, over hot and cold blocks in one call, in Triton.

A program takes a tile of queries (some tokens of one sequence, with all query heads of one key/value head, so that a
key is read once for all of them) and walks over tiles of keys: first the blocks that its queries see cold, then those
that they see hot, in one online softmax. Decode is the same kernel with one token a tile and a sequence's keys split
over several programs, whose partial results a second kernel puts together.

Nothing outside a sequence's tokens counts, so unused cells may hold anything. Of cold blocks in fp8 what a tile does
not hold is read from the pool's last block, which is never written: it stays zero. Tiles of keys begin at fixed
positions: what a query computes for a key does not depend on the other queries of its tile.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels import triton_fp8
from lockstep_engine.kernels.tiles import DECODE_PROGRAMS, LIMITS, MAX_SPLITS, GpuLimits, Shape, limits_of, shape_for
from lockstep_engine.kernels.tiles import splits_for as split_keys
from lockstep_engine.kernels.triton_fp8 import decode
from lockstep_engine.layer_cache import LayerCache
from lockstep_engine.scoring import Scoring

_BLOCK = tl.constexpr(BLOCK_SIZE)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(keys, values, pieces, offsets, d, held, seen, dim: tl.constexpr, padded: tl.constexpr):
    """Keys [dim_pad, n] and values [n, dim_pad] at offsets [n] of pieces [n] (a head's part of a block).

    Keys are read for whole blocks that are `held`, so that one access reads 16 of them; scores of keys that are not
    visible are masked later. Values are read only where `seen`: a weight of 0 does not hide a NaN.
    """
    key_held, value_seen = held[None, :], seen[:, None]
    if padded:
        key_held = key_held & (d < dim)[:, None]
        value_seen = value_seen & (d < dim)[None, :]
    base = pieces * (dim * _BLOCK)
    key_at = keys + (base[None, :] + (d[:, None] * _BLOCK + offsets[None, :]))
    value_at = values + (base[:, None] + (offsets[:, None] * dim + d[None, :]))
    k = tl.load(tl.max_contiguous(tl.multiple_of(key_at, (1, _BLOCK)), (1, _BLOCK)), mask=key_held, other=0)
    v = tl.load(value_at, mask=value_seen, other=0)
    return k, v


@triton.jit
def _cold_ids(row_tables, block, from_block, to_block, hot_blocks, spare):
    """Numbers in the cold pool of a sequence's blocks [n]; that of `spare` for those that are not in [from, to)."""
    held = (block >= from_block) & (block < to_block)
    return tl.load(row_tables + block, mask=held, other=spare) - hot_blocks


@triton.jit
def _log2(x):
    """Logarithm of positive float32 numbers, at most 0.09 too small: their bits as a number."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 8388608.0) - 127.0


@triton.jit
def _load_cold(keys, values, key_scales, value_scales, key_ids, ids, offsets, dim: tl.constexpr, dim_pad: tl.constexpr):
    """Keys [dim_pad, n / 4] and values [n, dim_pad / 4] of fp8 blocks of a head, as words of four codes, and the scales
    [n] of both. `key_ids` [n / 4] and `ids` [n] are the blocks' numbers.

    All of it is read: where a tile has no block, a block that stays zero is read.
    """
    d = tl.arange(0, dim_pad)
    word = tl.arange(0, dim_pad // 4)
    key_word = tl.arange(0, key_ids.shape[0]) % (_BLOCK // 4)
    piece_words: tl.constexpr = dim * _BLOCK // 4
    key_at = keys + ((key_ids.to(tl.int64) * piece_words)[None, :] + (d[:, None] * (_BLOCK // 4) + key_word[None, :]))
    value_at = values + ((ids.to(tl.int64) * piece_words)[:, None] + (offsets[:, None] * (dim // 4) + word[None, :]))
    key_at = tl.max_contiguous(tl.multiple_of(key_at, (1, _BLOCK)), (1, _BLOCK // 4))
    if dim_pad > dim:
        k = tl.load(key_at, mask=(d < dim)[:, None], other=0)
        v = tl.load(value_at, mask=(word < dim // 4)[None, :], other=0)
    else:
        k, v = tl.load(key_at), tl.load(value_at)
    scale_at = ids.to(tl.int64) * _BLOCK + offsets
    return k, v, tl.load(key_scales + scale_at), tl.load(value_scales + scale_at)


@triton.jit
def _fold(acc, peak, totals, scores, visible, v, v_scales, scaled: tl.constexpr, deferred: tl.constexpr):
    """Add one tile of keys to the online softmax (Milakov and Gimelshein 2018); scores are in units of log 2.

    `scaled`: the peak is that of weights times the scales of values, so that these products, which are rounded to half
    precision, are at most 1 and the largest of them are exact enough, whatever the scales. Totals are then as much
    larger as scales are smaller than 1. `deferred`: `totals` is [m, n], to be summed after the last tile.
    """
    scores = tl.where(visible, scores, float("-inf"))
    if scaled:
        new_peak = tl.maximum(peak, tl.max(scores + _log2(v_scales)[None, :], 1))
    else:
        new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    totals = totals * shrink[:, None] + weights if deferred else totals * shrink + tl.sum(weights, 1)
    if scaled:
        weights = weights * v_scales[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, totals


@triton.jit
def _score(q, k, key_scales, keys_at, bias, bias_row, visible, scale, soft_cap, scaled: tl.constexpr,
           capped: tl.constexpr, biased: tl.constexpr):  # fmt: skip
    """Scores [m, n] of queries and keys in units of log 2; `scale` is in these units unless `capped` or `biased`."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if scaled:
        scores = scores * key_scales[None, :]
    if capped:
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E / soft_cap)) + 1.0))
    if biased:
        scores += tl.load(bias + bias_row[:, None] + keys_at[None, :], mask=visible, other=0.0)
    if capped or biased:
        scores = scores * _LOG2E
    return scores


@triton.jit(do_not_specialize=["hot_blocks", "cold_blocks", "width", "window", "sink_blocks", "hot_blocks_before",
                               "bias_stride", "splits"])  # fmt: skip
def _attend(  # noqa: C901, PLR0912, PLR0915 - one kernel: functions in it would cost registers
    out, partial, stats,
    q, q_head_stride, q_token_stride,
    keys, values, hot_blocks,
    cold_keys, cold_values, key_scales, value_scales, cold_blocks,
    tables, hot_tables, width, tile_sequences, tile_firsts, starts, lengths, rows,
    bias, bias_stride, sinks,
    scale, soft_cap, window, sink_blocks, hot_blocks_before, splits,
    per_head: tl.constexpr, dim: tl.constexpr, dim_pad: tl.constexpr,
    block_m: tl.constexpr, block_q: tl.constexpr, block_n: tl.constexpr, split_up: tl.constexpr,
    windowed: tl.constexpr, capped: tl.constexpr, biased: tl.constexpr, sunk: tl.constexpr,
    compressed: tl.constexpr, scaled: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    # A prompt's last tiles have the most keys: begun last, they would be computed while other multiprocessors are idle.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequences + tile)
    first = tl.load(tile_firsts + tile)
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence)

    # Row m is token m // per_head of the tile, for query head m % per_head of this key/value head.
    m = tl.arange(0, block_m)
    token = first + m // per_head
    head = kv_head * per_head + m % per_head
    valid = (m < block_q * per_head) & (token < length)
    position = start + token
    d = tl.arange(0, dim_pad)
    row = (tl.load(rows + sequence) + token).to(tl.int64)
    inside = valid[:, None] & (d < dim)[None, :]
    q_at = row[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    queries = tl.load(q + q_at, mask=inside, other=0.0)

    # The tile's keys are [begin, end). Some query of the tile sees blocks [sink_blocks, cold_end) cold; some query sees
    # blocks before sink_blocks and from hot_begin on hot.
    first_position = start + first
    end = start + tl.minimum(first + block_q, length)
    begin = tl.maximum(first_position - window + 1, 0) if windowed else 0
    end_block = (end + _BLOCK - 1) // _BLOCK
    begin_block = begin // _BLOCK
    first_tile = begin // block_n
    end_tile = (end + block_n - 1) // block_n
    cold_tile, cold_tiles, hot_tile, sink_tiles, cold_end, hot_begin = 0, 0, first_tile, 0, 0, 0
    if compressed:
        cold_end = tl.maximum((end - 1) // _BLOCK - hot_blocks_before, 0)
        hot_begin = tl.maximum(first_position // _BLOCK - hot_blocks_before, 0)
        cold_tile = tl.maximum(begin, sink_blocks * _BLOCK) // block_n
        cold_tiles = tl.maximum((cold_end * _BLOCK + block_n - 1) // block_n - cold_tile, 0)
        if hot_begin > sink_blocks:
            hot_tile = tl.maximum(begin, hot_begin * _BLOCK) // block_n
            sink_end = tl.minimum((sink_blocks * _BLOCK + block_n - 1) // block_n, hot_tile)
            sink_tiles = tl.maximum(sink_end - first_tile, 0)
    tiles = cold_tiles + sink_tiles + tl.maximum(end_tile - hot_tile, 0)
    share = (tiles + splits - 1) // splits
    share_begin = tl.minimum(split * share, tiles)
    share_end = tl.minimum(share_begin + share, tiles)

    peak = tl.full((block_m,), float("-inf"), tl.float32)
    # Decoding sums weights after the last tile: a sum over a tile's keys is one over warps.
    deferred: tl.constexpr = block_q == 1
    totals = tl.full((block_m, block_n) if deferred else (block_m,), 0.0, tl.float32)
    acc = tl.full((block_m, dim_pad), 0.0, tl.float32)
    n = tl.arange(0, block_n)
    offsets = n % _BLOCK
    table = sequence.to(tl.int64) * width
    bias_row = head * bias_stride

    if compressed:
        cold_queries, cold_scale = queries, tl.full((block_m, 1), scale, tl.float32)
        if scaled and queries.dtype != tl.float32:
            # GPUs convert fp8 to float16 much faster than to bfloat16; queries are scaled into float16's range.
            wide = queries.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)[:, None]
            cold_queries, cold_scale = (wide / largest).to(tl.float16), largest * scale
        cold_share_end = tl.minimum(share_end, cold_tiles)
        tile_blocks: tl.constexpr = block_n // _BLOCK
        if scaled:
            # Triton's pipeline would copy words to shared memory, to be read, converted and written there once more,
            # and would wait for each tile's table. So a tile's words are read into registers while the tile before it
            # is computed, and its part of the table one tile earlier.
            words_at = kv_head.to(tl.int64) * cold_blocks * (dim * _BLOCK // 4)
            scales_at = kv_head.to(tl.int64) * cold_blocks * _BLOCK
            head_keys, head_values = cold_keys + words_at, cold_values + words_at
            head_key_scales, head_value_scales = key_scales + scales_at, value_scales + scales_at
            key_block = tl.arange(0, block_n // 4) // (_BLOCK // 4) + (cold_tile + share_begin) * tile_blocks
            block = n // _BLOCK + (cold_tile + share_begin) * tile_blocks
            from_block = tl.maximum(begin_block, sink_blocks)
            to_block = tl.minimum(cold_end, (cold_tile + cold_share_end) * tile_blocks)
            spare = hot_blocks + cold_blocks - 1  # stays zero
            row_tables = tables + table
            key_ids = _cold_ids(row_tables, key_block, from_block, to_block, hot_blocks, spare)
            ids = _cold_ids(row_tables, block, from_block, to_block, hot_blocks, spare)
            k_words, v_words, k_scales, v_scales = _load_cold(
                head_keys, head_values, head_key_scales, head_value_scales, key_ids, ids, offsets, dim, dim_pad
            )
            # Converted in the turn before: where a product's operand is made by `join`, Triton gives the product a
            # layout that needs each register moved.
            cold_k = decode(k_words, cold_queries.dtype, native)
            cold_v = decode(v_words, cold_queries.dtype, native)
            key_ids = _cold_ids(row_tables, key_block + tile_blocks, from_block, to_block, hot_blocks, spare)
            ids = _cold_ids(row_tables, block + tile_blocks, from_block, to_block, hot_blocks, spare)
            for step in tl.range(share_begin, cold_share_end, num_stages=1):
                k_words, v_words, next_k_scales, next_v_scales = _load_cold(
                    head_keys, head_values, head_key_scales, head_value_scales, key_ids, ids, offsets, dim, dim_pad
                )
                key_ids = _cold_ids(row_tables, key_block + 2 * tile_blocks, from_block, to_block, hot_blocks, spare)
                ids = _cold_ids(row_tables, block + 2 * tile_blocks, from_block, to_block, hot_blocks, spare)
                at = (cold_tile + step) * block_n + n
                visible = ((block >= from_block) & (block < to_block))[None, :]
                if block_q > 1:
                    visible = visible & (block[None, :] < (position // _BLOCK - hot_blocks_before)[:, None])
                if windowed:
                    visible = visible & (at[None, :] > (position - window)[:, None])
                scores = _score(
                    cold_queries, cold_k, k_scales, at, bias, bias_row, visible, cold_scale, soft_cap, True, capped,
                    biased,
                )  # fmt: skip
                acc, peak, totals = _fold(acc, peak, totals, scores, visible, cold_v, v_scales, True, deferred)
                cold_k = decode(k_words, cold_queries.dtype, native)
                cold_v = decode(v_words, cold_queries.dtype, native)
                k_scales, v_scales = next_k_scales, next_v_scales
                key_block += tile_blocks
                block += tile_blocks
        else:
            for step in range(share_begin, cold_share_end):
                at = (cold_tile + step) * block_n + n
                block = (cold_tile + step) * (block_n // _BLOCK) + n // _BLOCK
                held = (block >= begin_block) & (block >= sink_blocks) & (block < cold_end)
                ids = tl.load(tables + table + block, mask=held, other=hot_blocks) - hot_blocks
                pieces = kv_head.to(tl.int64) * cold_blocks + ids
                k, v = _load_tile(cold_keys, cold_values, pieces, offsets, d, held, held, dim, dim_pad > dim)
                visible = valid[:, None] & held[None, :]
                visible = visible & (block[None, :] < (position // _BLOCK - hot_blocks_before)[:, None])
                if windowed:
                    visible = visible & (at[None, :] > (position - window)[:, None])
                none = tl.full((block_n,), 0.0, tl.float32)
                scores = _score(
                    cold_queries, k, none, at, bias, bias_row, visible, cold_scale, soft_cap, False, capped, biased
                )
                acc, peak, totals = _fold(acc, peak, totals, scores, visible, v, none, False, deferred)
    if sunk:  # noqa: SIM102 - one is known when the kernel is built
        if split == 0:
            # Not before cold blocks, so that only their own weights count for the peak of these.
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2E
            top = tl.maximum(peak, sink)
            base = tl.where(top == float("-inf"), 0.0, top)
            shrink = tl.exp2(peak - base)
            acc = acc * shrink[:, None]
            if deferred:
                totals = totals * shrink[:, None] + tl.where(n == 0, 1.0, 0.0)[None, :] * tl.exp2(sink - base)[:, None]
            else:
                totals = totals * shrink + tl.exp2(sink - base)
            peak = top

    hot_from = tl.maximum(share_begin, cold_tiles)
    if block_q > 1 and not (windowed or compressed):
        # All queries see all keys of tiles before the first query's.
        every, each_row = tl.full((block_n,), True, tl.int1), tl.full((1, 1), True, tl.int1)
        all_seen_end = tl.minimum((first_position + 1) // block_n, share_end)
        for key_tile in range(hot_from, all_seen_end):
            at = key_tile * block_n + n
            ids = tl.load(hot_tables + table + at // _BLOCK)
            pieces = kv_head.to(tl.int64) * hot_blocks + ids
            k, v = _load_tile(keys, values, pieces, offsets, d, every, every, dim, dim_pad > dim)
            none = tl.full((block_n,), 0.0, tl.float32)
            scores = _score(queries, k, none, at, bias, bias_row, each_row, scale, soft_cap, False, capped, biased)
            acc, peak, totals = _fold(acc, peak, totals, scores, each_row, v, none, False, deferred)
        hot_from = tl.maximum(hot_from, all_seen_end)
    for step in range(hot_from, share_end):
        hot_step = step - cold_tiles
        key_tile = tl.where(hot_step < sink_tiles, first_tile + hot_step, hot_tile + hot_step - sink_tiles)
        at = key_tile * block_n + n
        block = key_tile * (block_n // _BLOCK) + n // _BLOCK
        held = (block >= begin_block) & (block < end_block)
        if compressed:
            held = held & ((block < sink_blocks) | (block >= hot_begin))
        ids = tl.load(hot_tables + table + block, mask=held, other=0)
        pieces = kv_head.to(tl.int64) * hot_blocks + ids
        seen = held & (at < end)
        k, v = _load_tile(keys, values, pieces, offsets, d, held, seen, dim, dim_pad > dim)
        visible = valid[:, None] & seen[None, :] & (at[None, :] <= position[:, None])
        if compressed:
            recent = block[None, :] >= (position // _BLOCK - hot_blocks_before)[:, None]
            visible = visible & (recent | (block < sink_blocks)[None, :])
        if windowed:
            visible = visible & (at[None, :] > (position - window)[:, None])
        none = tl.full((block_n,), 0.0, tl.float32)
        scores = _score(queries, k, none, at, bias, bias_row, visible, scale, soft_cap, False, capped, biased)
        acc, peak, totals = _fold(acc, peak, totals, scores, visible, v, none, False, deferred)

    total = tl.sum(totals, 1) if deferred else totals
    if not split_up:
        heads = tl.num_programs(1) * per_head
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = (row * heads + head)[:, None] * dim + d[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=inside)
    else:
        kept = block_q * per_head
        part = ((tile * tl.num_programs(1) + kv_head) * kept + m).to(tl.int64) * splits + split
        tl.store(partial + part[:, None] * dim + d[None, :], acc, mask=inside & (total > 0.0)[:, None])
        tl.store(stats + part * 2, peak, mask=valid)
        tl.store(stats + part * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["splits"])
def _reduce(
    out, partial, stats, tile_sequences, tile_firsts, lengths, rows, splits,
    per_head: tl.constexpr, dim: tl.constexpr, dim_pad: tl.constexpr,
    block_q: tl.constexpr, max_splits: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """A row's result from the partial ones of its splits; those that saw no key have a total of 0."""
    tile, kv_head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequences + tile)
    token = tl.load(tile_firsts + tile) + m // per_head
    if token < tl.load(lengths + sequence):
        heads = tl.num_programs(1) * per_head
        base = ((tile * tl.num_programs(1) + kv_head) * (block_q * per_head) + m).to(tl.int64) * splits
        d = tl.arange(0, dim_pad)
        every = tl.arange(0, max_splits)
        peaks = tl.load(stats + (base + every) * 2, mask=every < splits, other=float("-inf"))
        totals = tl.load(stats + (base + every) * 2 + 1, mask=every < splits, other=0.0)
        top = tl.max(peaks, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(totals * tl.exp2(peaks - top), 0)
        acc = tl.full((dim_pad,), 0.0, tl.float32)
        for begin in range(0, splits, chunk):
            split = begin + tl.arange(0, chunk)
            part = base + split
            weight = tl.exp2(tl.load(stats + part * 2, mask=split < splits, other=float("-inf")) - top)
            saw = tl.load(stats + part * 2 + 1, mask=split < splits, other=0.0) > 0.0
            mask = saw[:, None] & (d < dim)[None, :]
            rows_of = tl.load(partial + part[:, None] * dim + d[None, :], mask=mask, other=0.0)
            acc += tl.sum(rows_of * weight[:, None], 0)
        row = (tl.load(rows + sequence) + token).to(tl.int64)
        head = kv_head * per_head + m % per_head
        result = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(out + (row * heads + head) * dim + d, result.to(out.dtype.element_ty), mask=d < dim)


@dataclass(frozen=True)
class Paged:
    """A step's sequences and where their blocks are: int32 tensors on the cache's device."""

    tables: torch.Tensor
    """[sequences, width]: blocks in order of position, each in the version that the last query of its sequence sees:
    ids below the layer's number of hot blocks are hot, those from it on cold; -1: unused."""
    hot_tables: torch.Tensor
    """[sequences, width]: the hot version of blocks that some query of the step sees hot. `tables` itself in a step
    whose sequences have one query each."""
    starts: torch.Tensor
    """[sequences]: position of the first query; -1: a padding row, which sees nothing."""
    lengths: torch.Tensor
    """[sequences]: number of queries."""
    rows: torch.Tensor
    """[sequences]: row of the first query among the step's tokens."""
    hot_window: HotWindow | None = None
    """Decides which blocks a query sees cold; None: no block."""

    @property
    def sink(self) -> int:
        """Blocks that every query sees hot."""
        return 0 if self.hot_window is None else self.hot_window.sink

    @property
    def hot_blocks_before(self) -> int:
        """A query in block q sees block b cold if b is no sink and q - b is greater than this."""
        return 2**30 if self.hot_window is None else self.hot_window.size


@dataclass(frozen=True)
class Tiles:
    """Tiles of queries, as tensors on the device. A tile holds successive queries of one sequence."""

    sequences: torch.Tensor
    """[tiles], int32: the sequence of each tile."""
    firsts: torch.Tensor
    """[tiles], int32: the first query of each tile, counted from the sequence's first query of the step."""
    queries: int
    """Most queries of a tile."""
    splits: int = 1
    """Programs that share a tile's keys."""


def attend(
    queries: torch.Tensor,
    layer: LayerCache,
    paged: Paged,
    scoring: Scoring,
    tiles: Tiles,
    out: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    """Attention of the queries in `tiles` over their sequences' cached keys and values; its twin is `tests/twins.py`.

    Args:
        queries: [heads, tokens, dim], last stride 1; heads is a multiple of the layer's kv heads. float16, bfloat16 or
            float32, like the hot blocks.
        layer: the layer's blocks. Keys [kv heads, blocks, dim, 16], values [kv heads, blocks, 16, dim], contiguous;
            cold ones uint8 with float32 scales [kv heads, blocks, 16] (dim a multiple of 4), or in the hot blocks'
            type without.
        paged: the step's sequences.
        scoring: `bias` and `sinks` float32.
        tiles: the queries to compute.
        out: [tokens, heads, dim], contiguous, of the queries' type; rows of other queries are left alone.
        shape: None: chosen by types and widths.

    Raises:
        ValueError: a shape, type or layout is not as above.
    """
    _check(queries, layer, paged, scoring, tiles, out)
    heads, _, dim = queries.shape
    kv_heads, hot_blocks = layer.keys.shape[:2]
    per_head = heads // kv_heads
    cold = layer.cold
    scaled = cold is not None and cold.key_scales is not None
    dim_pad = max(16, triton.next_power_of_2(dim))
    block_m = max(16, triton.next_power_of_2(tiles.queries * per_head))
    fp8 = {"scaled": scaled, "native": triton_fp8.native()}
    shape = shape or shape_for(dim_pad, block_m, queries.dtype, limits(queries.device).shared_bytes, **fp8)
    count, splits = len(tiles.sequences), tiles.splits
    rows = count * kv_heads * tiles.queries * per_head
    partial = stats = out
    if splits > 1:
        partial = torch.empty(rows * splits * dim, dtype=torch.float32, device=out.device)
        stats = torch.empty(rows * splits * 2, dtype=torch.float32, device=out.device)
    plain = scoring.soft_cap is None and scoring.bias is None
    _attend[count, kv_heads, splits](
        out, partial, stats,
        queries, queries.stride(0) if heads > 1 else dim, queries.stride(1),
        layer.keys, layer.values, hot_blocks,
        layer.keys if cold is None else cold.keys.view(torch.int32) if scaled else cold.keys,
        layer.values if cold is None else cold.values.view(torch.int32) if scaled else cold.values,
        cold.key_scales if cold is not None and scaled else stats,
        cold.value_scales if cold is not None and scaled else stats,
        1 if cold is None else cold.keys.shape[1],
        paged.tables, paged.hot_tables, paged.tables.shape[1],
        tiles.sequences, tiles.firsts, paged.starts, paged.lengths, paged.rows,
        stats if scoring.bias is None else scoring.bias, 0 if scoring.bias is None else scoring.bias.shape[1],
        stats if scoring.sinks is None else scoring.sinks,
        scoring.scale * _LOG2E.value if plain else scoring.scale, scoring.soft_cap or 0.0, scoring.window or 0,
        paged.sink, paged.hot_blocks_before, splits,
        per_head=per_head, dim=dim, dim_pad=dim_pad,
        block_m=block_m, block_q=tiles.queries, block_n=shape.keys, split_up=splits > 1,
        windowed=scoring.window is not None, capped=scoring.soft_cap is not None, biased=scoring.bias is not None,
        sunk=scoring.sinks is not None, compressed=cold is not None, scaled=scaled,
        native=triton_fp8.native(),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if splits > 1:
        _reduce[count, kv_heads, tiles.queries * per_head](
            out, partial, stats, tiles.sequences, tiles.firsts, paged.lengths, paged.rows, splits,
            per_head=per_head, dim=dim, dim_pad=dim_pad,
            block_q=tiles.queries, max_splits=MAX_SPLITS, chunk=16, num_warps=4,
        )  # fmt: skip


def queries_a_tile(per_head: int, dim: int, dtype: torch.dtype) -> int:
    """Successive queries of a sequence that share a program in prefill; each has `per_head` query heads there."""
    # GPUs that convert fp8 by arithmetic would put up to 3 KiB a thread aside with 64 rows of heads of 256.
    wide = 64 if triton_fp8.native() else 32
    rows = 16 if dtype is torch.float32 else 128 if dim <= 128 else wide
    return max(1, rows // per_head)


def splits_for(tiles: int, kv_heads: int, context: int, device: torch.device) -> int:
    """`tiles.splits_for` for a device."""
    return split_keys(tiles, kv_heads, context, DECODE_PROGRAMS * processors(device))


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def limits(device: torch.device) -> GpuLimits:
    """What a program may have on a GPU. Of one on paper, Triton's driver knows it."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks shared_memory_per_block_optin
        capability = 10 * properties.major + properties.minor
        return limits_of(capability, properties.shared_memory_per_block_optin)
    if triton.knobs.runtime.interpret:
        return LIMITS[90]
    driver = triton.runtime.driver.active
    return limits_of(driver.get_current_target().arch, driver.utils.get_device_properties(0)["max_shared_mem"])


def _check(
    queries: torch.Tensor, layer: LayerCache, paged: Paged, scoring: Scoring, tiles: Tiles, out: torch.Tensor
) -> None:
    heads, tokens, dim = queries.shape
    kv_heads, blocks = layer.keys.shape[:2]
    cold = layer.cold
    checks = (
        (queries.stride(2) == 1, "queries are not contiguous in their last dimension"),
        (heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} key/value heads evenly"),
        (layer.keys.shape == (kv_heads, blocks, dim, BLOCK_SIZE), f"keys are {tuple(layer.keys.shape)}"),
        (layer.values.shape == (kv_heads, blocks, BLOCK_SIZE, dim), f"values are {tuple(layer.values.shape)}"),
        (layer.keys.is_contiguous() and layer.values.is_contiguous(), "the cache is not contiguous"),
        (queries.dtype == layer.keys.dtype == layer.values.dtype == out.dtype, "types differ"),
        (queries.dtype in TYPES, f"{queries.dtype} is not supported"),
        (cold is None or _cold_fits(layer), "cold blocks do not fit the hot ones"),
        (out.shape == (tokens, heads, dim) and out.is_contiguous(), "out is not [tokens, heads, dim]"),
        *index_checks(paged, tiles),
        (scoring.bias is None or len(scoring.bias) == heads, "bias is not [heads, positions]"),
        (scoring.sinks is None or scoring.sinks.shape == (heads,), "sinks is not [heads]"),
    )
    for holds, sentence in checks:
        if not holds:
            raise ValueError(f"attend: {sentence}")


TYPES = (torch.float16, torch.bfloat16, torch.float32)


def index_checks(paged: Paged, tiles: Tiles) -> tuple[tuple[bool, str], ...]:
    """What a step's tables, positions and tiles must be: whether it holds, and what to say if it does not."""
    sequences = len(paged.starts)
    indices = (
        paged.tables, paged.hot_tables, paged.starts, paged.lengths, paged.rows, tiles.sequences, tiles.firsts
    )  # fmt: skip
    return (
        (
            all(each.dtype is torch.int32 and each.is_contiguous() for each in indices),
            "tables and positions are not contiguous int32",
        ),
        (
            paged.tables.shape == paged.hot_tables.shape and len(paged.tables) == sequences,
            "tables are not [sequences, width]",
        ),
        (len(paged.lengths) == len(paged.rows) == sequences, "starts, lengths and rows differ in length"),
        (1 <= tiles.splits <= MAX_SPLITS, f"{tiles.splits} splits"),
    )


def _cold_fits(layer: LayerCache) -> bool:
    cold = layer.cold
    assert cold is not None
    kv_heads, _, dim, _ = layer.keys.shape
    blocks = cold.keys.shape[1]
    scales = cold.key_scales, cold.value_scales
    plain = all(each is None for each in scales)
    fp8 = dim % 4 == 0 and all(each is not None and each.shape == (kv_heads, blocks, BLOCK_SIZE) for each in scales)
    dtype = layer.keys.dtype if plain else torch.uint8
    return (
        (plain or fp8)
        and cold.keys.dtype == cold.values.dtype == dtype
        and cold.keys.shape == (kv_heads, blocks, dim, BLOCK_SIZE)
        and cold.values.shape == (kv_heads, blocks, BLOCK_SIZE, dim)
        and cold.keys.is_contiguous()
        and cold.values.is_contiguous()
    )
