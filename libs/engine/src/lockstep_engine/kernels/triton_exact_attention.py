"""Paged attention for GPUs in which a query's bits depend on that query and its keys alone: not on whether it is
decoded or part of a prompt's chunk, on where the chunk began, on other sequences, or on how many programs share the
work.

- Keys are taken in tiles, and tiles in segments, that begin at fixed positions. A segment has an online softmax of its
  own: first over its tiles of cold blocks, then over those of hot ones, both in ascending order.
- A query's result folds its segments from the first to the last. A prompt's program walks over the segments and folds
  in registers; decoding writes down each segment's partial result, and a second kernel folds these by the same
  expressions. How many programs compute the segments of a sequence may therefore be chosen freely.
- Both forms have the same tiles of keys. Sums over keys are products with ones, not a tree over threads, maxima are
  exact in any order, and all else is computed element by element, without the compiler fusing multiplications and
  additions where it sees fit. So rows, warps and stages may differ, as far as a product's bits do not depend on the
  instruction that multiplies (`wgmma` on a tile of 64 rows, `mma` on one of 16). That is so on an H200, where all
  tiles gave the same bits; a rank's test at its start compares both forms.
- A tile or segment that a query does not see changes nothing in its row: weights are 0 and factors 1.
"""

import torch
import triton
import triton.language as tl

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kernels import triton_fp8
from lockstep_engine.kernels.tiles import Shape
from lockstep_engine.kernels.triton_attention import (
    Paged,
    Tiles,
    _check,
    _cold_ids,
    _load_cold,
    _load_tile,
    _score,
)
from lockstep_engine.kernels.triton_fp8 import decode
from lockstep_engine.layer_cache import LayerCache
from lockstep_engine.scoring import Scoring

_BLOCK = tl.constexpr(BLOCK_SIZE)
_LOG2E = tl.constexpr(1.4426950408889634)
SEGMENT = 512
"""Keys of a segment. Another number gives other bits."""
ROWS = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 16}
"""Rows of a program in prefill, unless more query heads share a key/value head."""
_DECODE_ROWS = 16
"""The same in decoding."""


@triton.jit
def _add_tile(acc, peak, totals, scores, visible, v, v_scales, scaled: tl.constexpr):
    """Add one tile of keys to a segment's softmax; scores are in units of log 2, totals [m, 16] have equal columns."""
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - base)[:, None]
    weights = tl.exp2(scores - base[:, None])
    ones = tl.full((scores.shape[1], 16), 1.0, tl.float32).to(v.dtype)
    totals = tl.dot(weights.to(v.dtype), ones, totals * shrink, input_precision="ieee")
    if scaled:
        # The largest scale is multiplied last, because half precision would lose the weights of small values. It is
        # that of the keys that the row sees: other rows of the tile may see more.
        most = tl.maximum(tl.max(tl.where(visible, v_scales[None, :], 0.0), 1), 1e-37)[:, None]
        weights = weights * tl.where(visible, v_scales[None, :] * (1.0 / most), 0.0)
        acc = acc * shrink + tl.dot(weights.to(v.dtype), v, input_precision="ieee") * most
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink, input_precision="ieee")
    return acc, new_peak, totals


@triton.jit
def _shares(peak, other_peak):
    """The peak of two softmaxes together, and the factors of both."""
    top = tl.maximum(peak, other_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(peak - base), tl.exp2(other_peak - base)


@triton.jit(do_not_specialize=["hot_blocks", "cold_blocks", "width", "window", "sink_blocks", "hot_blocks_before",
                               "bias_stride", "segments"])  # fmt: skip
def _attend_exact(  # noqa: C901, PLR0912, PLR0915 - one kernel: functions in it would cost registers
    out, partial, stats,
    q, q_head_stride, q_token_stride,
    keys, values, hot_blocks,
    cold_keys, cold_values, key_scales, value_scales, cold_blocks,
    tables, hot_tables, width, tile_sequences, tile_firsts, starts, lengths, rows,
    bias, bias_stride, sinks,
    scale, soft_cap, window, sink_blocks, hot_blocks_before, segments,
    per_head: tl.constexpr, dim: tl.constexpr, dim_pad: tl.constexpr,
    block_m: tl.constexpr, block_q: tl.constexpr, block_n: tl.constexpr, segment_keys: tl.constexpr,
    split_up: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, biased: tl.constexpr, sunk: tl.constexpr,
    compressed: tl.constexpr, scaled: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # as in `triton_attention`
    kv_head, share = tl.program_id(1), tl.program_id(2)
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
    segment_tiles: tl.constexpr = segment_keys // block_n
    first_position = start + first
    end = start + tl.minimum(first + block_q, length)
    begin = tl.maximum(first_position - window + 1, 0) if windowed else 0
    end_block = (end + _BLOCK - 1) // _BLOCK
    begin_block = begin // _BLOCK
    first_tile = begin // block_n
    end_tile = (end + block_n - 1) // block_n
    cold_tile, cold_end_tile, hot_tile, sink_end_tile, cold_end, hot_begin = 0, 0, first_tile, 0, 0, 0
    if compressed:
        cold_end = tl.maximum((end - 1) // _BLOCK - hot_blocks_before, 0)
        hot_begin = tl.maximum(first_position // _BLOCK - hot_blocks_before, 0)
        cold_tile = tl.maximum(begin, sink_blocks * _BLOCK) // block_n
        cold_end_tile = (cold_end * _BLOCK + block_n - 1) // block_n
        if hot_begin > sink_blocks:
            hot_tile = tl.maximum(begin, hot_begin * _BLOCK) // block_n
            sink_end_tile = tl.minimum((sink_blocks * _BLOCK + block_n - 1) // block_n, hot_tile)

    n = tl.arange(0, block_n)
    offsets = n % _BLOCK
    table = sequence.to(tl.int64) * width
    bias_row = head * bias_stride
    tile_blocks: tl.constexpr = block_n // _BLOCK
    row_tables = tables + table
    from_block, spare = tl.maximum(begin_block, sink_blocks), hot_blocks + cold_blocks - 1  # the last one stays zero
    words_at = kv_head.to(tl.int64) * cold_blocks * (dim * _BLOCK // 4)
    scales_at = kv_head.to(tl.int64) * cold_blocks * _BLOCK
    head_keys, head_values = cold_keys + words_at, cold_values + words_at
    head_key_scales, head_value_scales = key_scales + scales_at, value_scales + scales_at
    cold_queries, cold_scale = queries, tl.full((block_m, 1), scale, tl.float32)
    if scaled and queries.dtype != tl.float32:
        # GPUs convert fp8 to float16 much faster than to bfloat16; queries are scaled into float16's range.
        wide = queries.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)[:, None]
        cold_queries, cold_scale = (wide / largest).to(tl.float16), largest * scale

    merged_peak = tl.full((block_m,), float("-inf"), tl.float32)
    merged_total = tl.full((block_m,), 0.0, tl.float32)
    if sunk and not split_up:
        merged_peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2E
        merged_total = tl.full((block_m,), 1.0, tl.float32)
    merged = tl.full((block_m, dim_pad), 0.0, tl.float32)

    first_segment = first_tile // segment_tiles
    for segment in range(first_segment + share, (end_tile + segment_tiles - 1) // segment_tiles, tl.num_programs(2)):
        from_tile, to_tile = segment * segment_tiles, (segment + 1) * segment_tiles
        peak = tl.full((block_m,), float("-inf"), tl.float32)
        totals = tl.full((block_m, 16), 0.0, tl.float32)
        acc = tl.full((block_m, dim_pad), 0.0, tl.float32)
        if compressed:
            cold_from, cold_to = tl.maximum(cold_tile, from_tile), tl.minimum(cold_end_tile, to_tile)
            if scaled:
                # As in `triton_attention`: words are read into registers one tile ahead, the table two.
                key_block = tl.arange(0, block_n // 4) // (_BLOCK // 4) + cold_from * tile_blocks
                block = n // _BLOCK + cold_from * tile_blocks
                to_block = tl.minimum(cold_end, cold_to * tile_blocks)
                key_ids = _cold_ids(row_tables, key_block, from_block, to_block, hot_blocks, spare)
                ids = _cold_ids(row_tables, block, from_block, to_block, hot_blocks, spare)
                k_words, v_words, k_scales, v_scales = _load_cold(
                    head_keys, head_values, head_key_scales, head_value_scales, key_ids, ids, offsets, dim, dim_pad
                )
                cold_k = decode(k_words, cold_queries.dtype, native)
                cold_v = decode(v_words, cold_queries.dtype, native)
                key_ids = _cold_ids(row_tables, key_block + tile_blocks, from_block, to_block, hot_blocks, spare)
                ids = _cold_ids(row_tables, block + tile_blocks, from_block, to_block, hot_blocks, spare)
                for key_tile in tl.range(cold_from, cold_to, num_stages=1):
                    k_words, v_words, next_k_scales, next_v_scales = _load_cold(
                        head_keys, head_values, head_key_scales, head_value_scales, key_ids, ids, offsets, dim, dim_pad
                    )
                    key_ids = _cold_ids(
                        row_tables, key_block + 2 * tile_blocks, from_block, to_block, hot_blocks, spare
                    )
                    ids = _cold_ids(row_tables, block + 2 * tile_blocks, from_block, to_block, hot_blocks, spare)
                    at = key_tile * block_n + n
                    visible = valid[:, None] & ((block >= from_block) & (block < to_block))[None, :]
                    visible = visible & (block[None, :] < (position // _BLOCK - hot_blocks_before)[:, None])
                    if windowed:
                        visible = visible & (at[None, :] > (position - window)[:, None])
                    scores = _score(
                        cold_queries, cold_k, k_scales, at, bias, bias_row, visible, cold_scale, soft_cap, True, capped,
                        biased,
                    )  # fmt: skip
                    acc, peak, totals = _add_tile(acc, peak, totals, scores, visible, cold_v, v_scales, True)
                    cold_k = decode(k_words, cold_queries.dtype, native)
                    cold_v = decode(v_words, cold_queries.dtype, native)
                    k_scales, v_scales = next_k_scales, next_v_scales
                    key_block += tile_blocks
                    block += tile_blocks
            else:
                for key_tile in range(cold_from, cold_to):
                    at = key_tile * block_n + n
                    block = key_tile * tile_blocks + n // _BLOCK
                    held = (block >= begin_block) & (block >= sink_blocks) & (block < cold_end)
                    ids = tl.load(row_tables + block, mask=held, other=hot_blocks) - hot_blocks
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
                    acc, peak, totals = _add_tile(acc, peak, totals, scores, visible, v, none, False)

        sink_from = tl.maximum(first_tile, from_tile)
        sinks_here = tl.maximum(tl.minimum(sink_end_tile, to_tile) - sink_from, 0)
        hot_from = tl.maximum(hot_tile, from_tile)
        hot_here = tl.maximum(tl.minimum(end_tile, to_tile) - hot_from, 0)
        all_seen_here = 0
        if block_q > 1 and not (windowed or compressed):
            # All queries see all keys of tiles before the first query's.
            every, each_row = tl.full((block_n,), True, tl.int1), tl.full((1, 1), True, tl.int1)
            all_seen_here = tl.maximum(tl.minimum((first_position + 1) // block_n, to_tile) - hot_from, 0)
            for key_tile in range(hot_from, hot_from + all_seen_here):
                at = key_tile * block_n + n
                ids = tl.load(hot_tables + table + at // _BLOCK)
                pieces = kv_head.to(tl.int64) * hot_blocks + ids
                k, v = _load_tile(keys, values, pieces, offsets, d, every, every, dim, dim_pad > dim)
                none = tl.full((block_n,), 0.0, tl.float32)
                scores = _score(queries, k, none, at, bias, bias_row, each_row, scale, soft_cap, False, capped, biased)
                acc, peak, totals = _add_tile(acc, peak, totals, scores, each_row, v, none, False)
        for step in range(all_seen_here, sinks_here + hot_here):
            key_tile = tl.where(step < sinks_here, sink_from + step, hot_from + step - sinks_here)
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
            acc, peak, totals = _add_tile(acc, peak, totals, scores, visible, v, none, False)

        total = tl.max(totals, 1)  # its columns are equal
        if split_up:
            kept = block_q * per_head
            part = ((tile * tl.num_programs(1) + kv_head) * kept + m).to(tl.int64) * segments + segment
            tl.store(partial + part[:, None] * dim + d[None, :], acc, mask=inside)
            tl.store(stats + part * 2, peak, mask=valid)
            tl.store(stats + part * 2 + 1, total, mask=valid)
        else:
            merged_peak, keep, add = _shares(merged_peak, peak)
            merged_total = merged_total * keep + total * add
            merged = merged * keep[:, None] + acc * add[:, None]

    if not split_up:
        heads = tl.num_programs(1) * per_head
        result = merged / tl.where(merged_total == 0.0, 1.0, merged_total)[:, None]
        out_at = (row * heads + head)[:, None] * dim + d[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["window", "segments"])
def _fold_segments(
    out, partial, stats, sinks, tile_sequences, tile_firsts, starts, lengths, rows, window, segments,
    per_head: tl.constexpr, dim: tl.constexpr, dim_pad: tl.constexpr,
    block_q: tl.constexpr, segment_keys: tl.constexpr, windowed: tl.constexpr, sunk: tl.constexpr,
):  # fmt: skip
    """A row's result from the partial ones of its segments, in ascending order."""
    tile, kv_head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequences + tile)
    first = tl.load(tile_firsts + tile)
    length = tl.load(lengths + sequence)
    token = first + m // per_head
    if token < length:
        first_position = tl.load(starts + sequence) + first
        end = first_position - first + tl.minimum(first + block_q, length)
        begin = tl.maximum(first_position - window + 1, 0) if windowed else 0
        head = kv_head * per_head + m % per_head
        peak, total = float("-inf"), 0.0
        if sunk:
            peak, total = tl.load(sinks + head).to(tl.float32) * _LOG2E, 1.0
        d = tl.arange(0, dim_pad)
        acc = tl.full((dim_pad,), 0.0, tl.float32)
        base = ((tile * tl.num_programs(1) + kv_head) * (block_q * per_head) + m).to(tl.int64) * segments
        for segment in range(begin // segment_keys, (end + segment_keys - 1) // segment_keys):
            part = base + segment
            of_segment = tl.load(partial + part * dim + d, mask=d < dim, other=0.0)
            peak, keep, add = _shares(peak, tl.load(stats + part * 2))
            total = total * keep + tl.load(stats + part * 2 + 1) * add
            acc = acc * keep + of_segment * add
        row = (tl.load(rows + sequence) + token).to(tl.int64)
        heads = tl.num_programs(1) * per_head
        result = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(out + (row * heads + head) * dim + d, result.to(out.dtype.element_ty), mask=d < dim)


def attend(
    queries: torch.Tensor,
    layer: LayerCache,
    paged: Paged,
    scoring: Scoring,
    tiles: Tiles,
    out: torch.Tensor,
) -> None:
    """As `triton_attention.attend`, with `tiles` of `queries_a_tile` queries (whole results) or one (by segments).

    `tiles.splits` programs share the segments of a tile of one query. It changes no bit.

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
    split_up = tiles.queries == 1
    block_m = rows_of(per_head, queries.dtype, decoding=split_up)
    if tiles.queries * per_head > block_m:
        raise ValueError(f"attend: {tiles.queries} queries with {per_head} heads are more than {block_m} rows")
    shape = shape_for(dim_pad, block_m, queries.dtype, scaled=scaled)
    count, segments = len(tiles.sequences), triton.cdiv(paged.tables.shape[1] * BLOCK_SIZE, SEGMENT)
    shares = min(tiles.splits, segments) if split_up else 1
    partial = stats = out
    if split_up:
        parts = count * kv_heads * per_head * segments
        partial = torch.empty(parts * dim, dtype=torch.float32, device=out.device)
        stats = torch.empty(parts * 2, dtype=torch.float32, device=out.device)
    plain = scoring.soft_cap is None and scoring.bias is None
    sinks = stats if scoring.sinks is None else scoring.sinks
    _attend_exact[count, kv_heads, shares](
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
        sinks,
        scoring.scale * _LOG2E.value if plain else scoring.scale, scoring.soft_cap or 0.0, scoring.window or 0,
        paged.sink, paged.hot_blocks_before, segments,
        per_head=per_head, dim=dim, dim_pad=dim_pad,
        block_m=block_m, block_q=tiles.queries, block_n=shape.keys, segment_keys=SEGMENT, split_up=split_up,
        windowed=scoring.window is not None, capped=scoring.soft_cap is not None, biased=scoring.bias is not None,
        sunk=scoring.sinks is not None, compressed=cold is not None, scaled=scaled,
        native=triton_fp8.native(),
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if split_up:
        _fold_segments[count, kv_heads, per_head](
            out, partial, stats, sinks, tiles.sequences, tiles.firsts, paged.starts, paged.lengths, paged.rows,
            scoring.window or 0, segments,
            per_head=per_head, dim=dim, dim_pad=dim_pad, block_q=1, segment_keys=SEGMENT,
            windowed=scoring.window is not None, sunk=scoring.sinks is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def shape_for(dim_pad: int, block_m: int, dtype: torch.dtype, *, scaled: bool = False) -> Shape:
    """A shape whose keys, on which bits depend, follow from type, width and compression alone.

    Args:
        dim_pad: width of a head, rounded up to a power of two.
        block_m: rows of a program.
        dtype: the queries' type.
        scaled: cold blocks are fp8.
    """
    if dtype is torch.float32:
        return Shape(keys=32 if dim_pad <= 128 else 16, warps=4, stages=1)
    keys = 32 if dim_pad > 128 or (scaled and dim_pad > 64) else 64
    # Measured on an H200, torch 2.11, Triton 3.6, with Llama-3-8B's heads: decoding of fp8 blocks takes 523 us with 32
    # keys and two warps, 706 with 64 and four; a chunk takes 1196 us with four warps, 2217 with eight.
    if block_m <= 32:  # decode: several programs on a multiprocessor hide each other's waits
        return Shape(keys, warps=2 if block_m <= 16 and dim_pad <= 128 else 4, stages=2)
    if dim_pad <= 128:
        return Shape(keys, warps=4 if block_m <= 64 else 8, stages=2)
    return Shape(keys, warps=8 if block_m <= 64 else 16, stages=1)


def rows_of(per_head: int, dtype: torch.dtype, *, decoding: bool = False) -> int:
    """Rows of a program: queries of a tile times the query heads of a key/value head, filled up."""
    rows: int = max(_DECODE_ROWS if decoding else ROWS[dtype], triton.next_power_of_2(per_head))
    return rows


def queries_a_tile(per_head: int, dtype: torch.dtype) -> int:
    """Successive queries of a sequence that share a program in prefill. One: prefill has the form of decoding."""
    queries: int = rows_of(per_head, dtype) // per_head
    return queries
