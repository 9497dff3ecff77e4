"""Paged attention over latents (DeepSeek's multi-head latent attention) for GPUs, in Triton.

A token's key is its latent and a rotary part beside it, and its value is the latent once more: the cache holds both in
one tensor, and a program reads a tile of it once for scores and sums. There is one key/value head, so that the rows of
a program are some query heads of some tokens; programs of other heads read the same keys again, from the second cache.

One kernel serves both modes, in decoding and in prefill. A program computes segments of the keys: of fixed keys in the
exact mode, as `triton_exact_attention` does, with the same folding; else each program has one segment, whose length
follows from the sequence and the number of programs. In a segment cold blocks come before hot ones.

Nothing outside a sequence's tokens counts, so unused cells may hold anything.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kernels import triton_attention, triton_exact_attention, triton_fp8
from lockstep_engine.kernels.tiles import MAX_SPLITS, Shape, latent_rows, latent_shape
from lockstep_engine.kernels.tiles import splits_for as split_keys
from lockstep_engine.kernels.triton_attention import (
    TYPES,
    Paged,
    Tiles,
    _cold_ids,
    _fold,
    _reduce,
    index_checks,
)
from lockstep_engine.kernels.triton_exact_attention import _add_tile, _fold_segments, _shares
from lockstep_engine.kernels.triton_fp8 import decode
from lockstep_engine.layer_cache import LayerCache
from lockstep_engine.scoring import Scoring

_BLOCK = tl.constexpr(BLOCK_SIZE)
_LOG2E = tl.constexpr(1.4426950408889634)
_OF_A_PROMPT = 2**10
"""More rows than a program can have."""
PARTIAL_BYTES = 2**28
"""Most memory of partial results in the exact mode, where four tiles take no more. They are as many as the segments of
the longest context: with 163,840 tokens and 16 heads of DeepSeek-V3 a tile has 10 MiB. The largest step, whose memory
is measured at the start, may have too many sequences to split their keys, and then has none of them."""
_ALIGNED = 4
"""int32 numbers in 16 bytes: a part of the tiles that begins at a multiple needs no build of its own."""


@triton.jit
def _load_part(keys, blocks, offsets, d, held, first: tl.constexpr, count: tl.constexpr, dim: tl.constexpr):
    """Components `first` + d [k] of the keys at offsets [n] of blocks [n]: [k, n]; d from `count` on is filling."""
    base = blocks.to(tl.int64) * (dim * _BLOCK)
    at = keys + (base[None, :] + ((first + d)[:, None] * _BLOCK + offsets[None, :]))
    inside = held[None, :]
    if d.shape[0] > count:
        inside = inside & (d < count)[:, None]
    return tl.load(tl.max_contiguous(tl.multiple_of(at, (1, _BLOCK)), (1, _BLOCK)), mask=inside, other=0)


@triton.jit
def _load_words(words, blocks, d, first: tl.constexpr, count: tl.constexpr, dim: tl.constexpr):
    """Components `first` + d [k] of fp8 keys of blocks [n / 4], as words [k, n / 4] of four tokens' codes. All of it is
    read: where a tile has no block, a block that stays zero is read.
    """
    word = tl.arange(0, blocks.shape[0]) % (_BLOCK // 4)
    base = blocks.to(tl.int64) * (dim * _BLOCK // 4)
    at = words + (base[None, :] + ((first + d)[:, None] * (_BLOCK // 4) + word[None, :]))
    at = tl.max_contiguous(tl.multiple_of(at, (1, _BLOCK)), (1, _BLOCK // 4))
    if d.shape[0] > count:
        return tl.load(at, mask=(d < count)[:, None], other=0)
    else:
        return tl.load(at)


@triton.jit
def _add(
    acc, peak, totals, q_latent, q_rest, k_latent, k_rest, scales, visible, scale, scaled: tl.constexpr,
    exact: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to a segment's softmax; `scale` is in units of log 2."""
    scores = tl.dot(q_latent, k_latent, input_precision="ieee")
    scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee") * scale
    if scaled:
        scores = scores * scales[None, :]
    if exact:
        acc, peak, totals = _add_tile(acc, peak, totals, scores, visible, tl.trans(k_latent), scales, scaled)
    else:
        acc, peak, totals = _fold(acc, peak, totals, scores, visible, tl.trans(k_latent), scales, scaled, False)
    return acc, peak, totals


@triton.jit
def _add_hot(
    acc, peak, totals, q_latent, q_rest, keys, tables, at, held, position, valid, scale,
    sink_blocks, hot_begin, hot_blocks_before,
    latent: tl.constexpr, rest: tl.constexpr, compressed: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """Add one tile of hot keys at positions `at` [n], as far as they are `held`."""
    block, offsets = at // _BLOCK, at % _BLOCK
    if compressed:
        held = held & ((block < sink_blocks) | (block >= hot_begin))
    ids = tl.load(tables + block, mask=held, other=0)
    c, r = tl.arange(0, q_latent.shape[1]), tl.arange(0, q_rest.shape[1])
    k_latent = _load_part(keys, ids, offsets, c, held, 0, latent, latent + rest)
    k_rest = _load_part(keys, ids, offsets, r, held, latent, rest, latent + rest)
    visible = valid[:, None] & held[None, :] & (at[None, :] <= position[:, None])
    if compressed:
        recent = block[None, :] >= (position // _BLOCK - hot_blocks_before)[:, None]
        visible = visible & (recent | (block < sink_blocks)[None, :])
    none = tl.full((at.shape[0],), 0.0, tl.float32)
    return _add(acc, peak, totals, q_latent, q_rest, k_latent, k_rest, none, visible, scale, False, exact)


@triton.jit
def _segment(  # noqa: PLR0915 - one loop over keys
    q_latent, q_rest, keys, cold_keys, scales, hot_blocks, cold_blocks, tables, hot_tables,
    first_position, position, end, valid, from_tile, to_tile, scale, sink_blocks, hot_blocks_before,
    latent: tl.constexpr, rest: tl.constexpr, block_n: tl.constexpr,
    compressed: tl.constexpr, scaled: tl.constexpr, native: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """The partial result of the tiles [from, to) of keys: sums [m, latent], peaks and totals [m]."""
    block_m: tl.constexpr = q_latent.shape[0]
    dim: tl.constexpr = latent + rest
    tile_blocks: tl.constexpr = block_n // _BLOCK
    c, r, n = tl.arange(0, q_latent.shape[1]), tl.arange(0, q_rest.shape[1]), tl.arange(0, block_n)
    offsets = n % _BLOCK
    end_block, end_tile = (end + _BLOCK - 1) // _BLOCK, (end + block_n - 1) // block_n
    none = tl.full((block_n,), 0.0, tl.float32)
    peak = tl.full((block_m,), float("-inf"), tl.float32)
    totals = tl.full((block_m, 16) if exact else (block_m,), 0.0, tl.float32)
    acc = tl.full((block_m, q_latent.shape[1]), 0.0, tl.float32)
    # Some query of the tile sees blocks [sink_blocks, cold_end) cold; some query sees blocks before sink_blocks and
    # from hot_begin on hot.
    cold_end, hot_begin, hot_tile, sink_end_tile = 0, 0, 0, 0
    if compressed:
        cold_end = tl.maximum((end - 1) // _BLOCK - hot_blocks_before, 0)
        hot_begin = tl.maximum(first_position // _BLOCK - hot_blocks_before, 0)
        if hot_begin > sink_blocks:
            hot_tile = hot_begin // tile_blocks
            sink_end_tile = tl.minimum((sink_blocks + tile_blocks - 1) // tile_blocks, hot_tile)
        cold_from = tl.maximum(sink_blocks // tile_blocks, from_tile)
        cold_to = tl.minimum((cold_end + tile_blocks - 1) // tile_blocks, to_tile)
        if scaled:
            cold_latent, cold_rest, cold_scale = q_latent, q_rest, tl.full((block_m, 1), scale, tl.float32)
            if q_latent.dtype != tl.float32:
                # GPUs convert fp8 to float16 much faster than to bfloat16; queries are scaled into float16's range.
                wide_latent, wide_rest = q_latent.to(tl.float32), q_rest.to(tl.float32)
                largest = tl.maximum(tl.max(tl.abs(wide_latent), 1), tl.max(tl.abs(wide_rest), 1))
                largest = tl.maximum(largest, 1e-30)[:, None]
                cold_latent, cold_rest = (wide_latent / largest).to(tl.float16), (wide_rest / largest).to(tl.float16)
                cold_scale = largest * scale
            # As in `triton_attention`: words are read into registers one tile ahead, the table two.
            spare = hot_blocks + cold_blocks - 1  # stays zero
            to_block = tl.minimum(cold_end, cold_to * tile_blocks)
            key_block = tl.arange(0, block_n // 4) // (_BLOCK // 4) + cold_from * tile_blocks
            block = n // _BLOCK + cold_from * tile_blocks
            key_ids = _cold_ids(tables, key_block, sink_blocks, to_block, hot_blocks, spare)
            ids = _cold_ids(tables, block, sink_blocks, to_block, hot_blocks, spare)
            codes_latent = decode(_load_words(cold_keys, key_ids, c, 0, latent, dim), cold_latent.dtype, native)
            codes_rest = decode(_load_words(cold_keys, key_ids, r, latent, rest, dim), cold_latent.dtype, native)
            k_scales = tl.load(scales + ids.to(tl.int64) * _BLOCK + offsets)
            key_ids = _cold_ids(tables, key_block + tile_blocks, sink_blocks, to_block, hot_blocks, spare)
            ids = _cold_ids(tables, block + tile_blocks, sink_blocks, to_block, hot_blocks, spare)
            for _ in tl.range(cold_from, cold_to, num_stages=1):
                latent_words = _load_words(cold_keys, key_ids, c, 0, latent, dim)
                rest_words = _load_words(cold_keys, key_ids, r, latent, rest, dim)
                next_scales = tl.load(scales + ids.to(tl.int64) * _BLOCK + offsets)
                key_ids = _cold_ids(tables, key_block + 2 * tile_blocks, sink_blocks, to_block, hot_blocks, spare)
                ids = _cold_ids(tables, block + 2 * tile_blocks, sink_blocks, to_block, hot_blocks, spare)
                visible = valid[:, None] & ((block >= sink_blocks) & (block < to_block))[None, :]
                visible = visible & (block[None, :] < (position // _BLOCK - hot_blocks_before)[:, None])
                acc, peak, totals = _add(
                    acc, peak, totals, cold_latent, cold_rest, codes_latent, codes_rest, k_scales, visible, cold_scale,
                    True, exact,
                )  # fmt: skip
                codes_latent = decode(latent_words, cold_latent.dtype, native)
                codes_rest = decode(rest_words, cold_latent.dtype, native)
                k_scales = next_scales
                key_block += tile_blocks
                block += tile_blocks
        else:
            for key_tile in range(cold_from, cold_to):
                block = key_tile * tile_blocks + n // _BLOCK
                held = (block >= sink_blocks) & (block < cold_end)
                ids = tl.load(tables + block, mask=held, other=hot_blocks) - hot_blocks
                k_latent = _load_part(cold_keys, ids, offsets, c, held, 0, latent, dim)
                k_rest = _load_part(cold_keys, ids, offsets, r, held, latent, rest, dim)
                visible = valid[:, None] & held[None, :]
                visible = visible & (block[None, :] < (position // _BLOCK - hot_blocks_before)[:, None])
                acc, peak, totals = _add(
                    acc, peak, totals, q_latent, q_rest, k_latent, k_rest, none, visible, scale, False, exact
                )

    sinks_here = tl.maximum(tl.minimum(sink_end_tile, to_tile) - from_tile, 0)
    hot_from = tl.maximum(hot_tile, from_tile)
    hot_here = tl.maximum(tl.minimum(end_tile, to_tile) - hot_from, 0)
    # The last tile of keys may end within a block, and is then read key by key: a weight of 0 does not hide a NaN.
    ragged = (hot_here > 0) & (to_tile >= end_tile) & (end % block_n != 0)
    whole = sinks_here + hot_here - ragged.to(tl.int32)
    for step in range(whole):
        at = tl.where(step < sinks_here, from_tile + step, hot_from + step - sinks_here) * block_n + n
        acc, peak, totals = _add_hot(
            acc, peak, totals, q_latent, q_rest, keys, hot_tables, at, at // _BLOCK < end_block, position, valid, scale,
            sink_blocks, hot_begin, hot_blocks_before, latent, rest, compressed, exact,
        )  # fmt: skip
    if ragged:
        at = (end_tile - 1) * block_n + n
        acc, peak, totals = _add_hot(
            acc, peak, totals, q_latent, q_rest, keys, hot_tables, at, at < end, position, valid, scale,
            sink_blocks, hot_begin, hot_blocks_before, latent, rest, compressed, exact,
        )  # fmt: skip
    return acc, peak, tl.max(totals, 1) if exact else totals  # in the exact mode its columns are equal


@triton.jit(do_not_specialize=["hot_blocks", "cold_blocks", "width", "sink_blocks", "hot_blocks_before", "parts"])
def _attend_latent(
    out, partial, stats,
    q, q_head_stride, q_token_stride,
    keys, hot_blocks, cold_keys, scales, cold_blocks,
    tables, hot_tables, width, tile_sequences, tile_firsts, starts, lengths, rows,
    scale, sink_blocks, hot_blocks_before, parts,
    heads: tl.constexpr, latent: tl.constexpr, latent_pad: tl.constexpr, rest: tl.constexpr, rest_pad: tl.constexpr,
    block_m: tl.constexpr, block_h: tl.constexpr, block_q: tl.constexpr, block_n: tl.constexpr,
    segment_keys: tl.constexpr, split_up: tl.constexpr, exact: tl.constexpr,
    compressed: tl.constexpr, scaled: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # as in `triton_attention`
    share = tl.program_id(2)
    sequence = tl.load(tile_sequences + tile)
    first = tl.load(tile_firsts + tile)
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence)

    # Row m is token m // block_h of the tile, for head m % block_h of the program's heads.
    m = tl.arange(0, block_m)
    token = first + m // block_h
    head = tl.program_id(1) * block_h + m % block_h
    valid = (m < block_q * block_h) & (head < heads) & (token < length)
    position = start + token
    c, r = tl.arange(0, latent_pad), tl.arange(0, rest_pad)
    row = (tl.load(rows + sequence) + token).to(tl.int64)
    q_at = (q + row * q_token_stride + head.to(tl.int64) * q_head_stride)[:, None]
    inside = valid[:, None] & (c < latent)[None, :]
    q_latent = tl.load(q_at + c[None, :], mask=inside, other=0.0)
    q_rest = tl.load(q_at + latent + r[None, :], mask=valid[:, None] & (r < rest)[None, :], other=0.0)

    first_position = start + first
    end = start + tl.minimum(first + block_q, length)
    end_tile = (end + block_n - 1) // block_n
    table = sequence.to(tl.int64) * width
    part = (tile.to(tl.int64) * heads + head) * parts
    if not exact:
        segment_tiles = (end_tile + parts - 1) // parts
        acc, peak, total = _segment(
            q_latent, q_rest, keys, cold_keys, scales, hot_blocks, cold_blocks, tables + table, hot_tables + table,
            first_position, position, end, valid, share * segment_tiles,
            tl.minimum((share + 1) * segment_tiles, end_tile), scale, sink_blocks, hot_blocks_before,
            latent, rest, block_n, compressed, scaled, native, False,
        )  # fmt: skip
        if split_up:
            at = partial + (part + share)[:, None] * latent + c[None, :]
            tl.store(at, acc, mask=inside & (total > 0.0)[:, None])
            tl.store(stats + (part + share) * 2, peak, mask=valid)
            tl.store(stats + (part + share) * 2 + 1, total, mask=valid)
    else:
        peak = tl.full((block_m,), float("-inf"), tl.float32)
        total = tl.full((block_m,), 0.0, tl.float32)
        acc = tl.full((block_m, latent_pad), 0.0, tl.float32)
        fixed_tiles: tl.constexpr = segment_keys // block_n
        for segment in range(share, (end_tile + fixed_tiles - 1) // fixed_tiles, tl.num_programs(2)):
            segment_acc, segment_peak, segment_total = _segment(
                q_latent, q_rest, keys, cold_keys, scales, hot_blocks, cold_blocks, tables + table, hot_tables + table,
                first_position, position, end, valid, segment * fixed_tiles, (segment + 1) * fixed_tiles,
                scale, sink_blocks, hot_blocks_before,
                latent, rest, block_n, compressed, scaled, native, True,
            )  # fmt: skip
            if split_up:
                at = partial + (part + segment)[:, None] * latent + c[None, :]
                tl.store(at, segment_acc, mask=inside)
                tl.store(stats + (part + segment) * 2, segment_peak, mask=valid)
                tl.store(stats + (part + segment) * 2 + 1, segment_total, mask=valid)
            else:
                peak, keep, add = _shares(peak, segment_peak)
                total = total * keep + segment_total * add
                acc = acc * keep[:, None] + segment_acc * add[:, None]
    if not split_up:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = (row * heads + head)[:, None] * latent + c[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=inside)


def attend(
    queries: torch.Tensor,
    layer: LayerCache,
    paged: Paged,
    scoring: Scoring,
    tiles: Tiles,
    out: torch.Tensor,
    shape: Shape | None = None,
    *,
    exact: bool = False,
) -> None:
    """Attention of the queries in `tiles` over their sequences' cached latents; its twin is `tests/twins.py`.

    Args:
        queries: [heads, tokens, dim], last stride 1; float16, bfloat16 or float32, like the hot blocks.
        layer: a layer with one key/value head whose values are the first `latent` components of its keys. Keys
            [1, blocks, dim, 16], contiguous; cold ones uint8 with float32 scales [1, blocks, 16] (widths multiples of
            4), or in the hot blocks' type without.
        paged: the step's sequences.
        scoring: its scale; nothing else is served.
        tiles: the queries to compute: one of a sequence, or at most `queries_a_tile`.
        out: [tokens, heads, latent], contiguous, of the queries' type; rows of other queries are left alone.
        shape: None: chosen by types and widths. Its keys decide about bits in the exact mode.
        exact: a query's bits depend on that query and its keys alone; `tiles.splits` changes none.

    Raises:
        ValueError: a shape, type or layout is not as above.
    """
    _check(queries, layer, paged, scoring, tiles, out)
    heads, _, dim = queries.shape
    latent, cold, dtype = layer.latent, layer.cold, queries.dtype
    scales = None if cold is None else cold.key_scales
    split_up = tiles.splits > 1
    rows = rows_of(heads * tiles.queries, dtype, queries.device, exact=exact, scaled=scales is not None)
    block_h = min(heads, rows)
    if tiles.queries * block_h > rows:
        raise ValueError(f"attend: {tiles.queries} queries with {block_h} heads are more than {rows} rows")
    latent_pad = max(16, triton.next_power_of_2(latent))
    shape = shape or latent_shape(dtype)
    count, shares = len(tiles.sequences), tiles.splits if split_up else 1
    parts, segment = shares, triton_exact_attention.SEGMENT
    if exact:
        parts = triton.cdiv(paged.tables.shape[1] * BLOCK_SIZE, segment)
        shares = min(shares, parts)
    if exact and split_up:
        at_once = max(1, PARTIAL_BYTES // (heads * parts * latent * 4 * _ALIGNED)) * _ALIGNED
        if count > at_once:
            for some in _turns(tiles, at_once):
                attend(queries, layer, paged, scoring, some, out, shape, exact=True)
            return
    partial = stats = out
    if split_up:
        partial = torch.empty(count * heads * parts * latent, dtype=torch.float32, device=out.device)
        stats = torch.empty(count * heads * parts * 2, dtype=torch.float32, device=out.device)
    _attend_latent[count, triton.cdiv(heads, block_h), shares](
        out, partial, stats,
        queries, queries.stride(0) if heads > 1 else dim, queries.stride(1),
        layer.keys, layer.keys.shape[1],
        layer.keys if cold is None else cold.keys if scales is None else cold.keys.view(torch.int32),
        stats if scales is None else scales, 1 if cold is None else cold.keys.shape[1],
        paged.tables, paged.hot_tables, paged.tables.shape[1],
        tiles.sequences, tiles.firsts, paged.starts, paged.lengths, paged.rows,
        scoring.scale * _LOG2E.value, paged.sink, paged.hot_blocks_before, parts,
        heads=heads, latent=latent, latent_pad=latent_pad,
        rest=dim - latent, rest_pad=max(16, triton.next_power_of_2(dim - latent)),
        block_m=rows, block_h=block_h, block_q=tiles.queries, block_n=shape.keys,
        segment_keys=segment, split_up=split_up, exact=exact,
        compressed=cold is not None, scaled=scales is not None, native=triton_fp8.native(),
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=not exact,
    )  # fmt: skip
    if split_up and exact:
        _fold_segments[count, 1, heads](
            out, partial, stats, stats, tiles.sequences, tiles.firsts, paged.starts, paged.lengths, paged.rows,
            0, parts,
            per_head=heads, dim=latent, dim_pad=latent_pad, block_q=1, segment_keys=segment,
            windowed=False, sunk=False, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    elif split_up:
        _reduce[count, 1, heads](
            out, partial, stats, tiles.sequences, tiles.firsts, paged.lengths, paged.rows, parts,
            per_head=heads, dim=latent, dim_pad=latent_pad,
            block_q=1, max_splits=MAX_SPLITS, chunk=16, num_warps=4,
        )  # fmt: skip


def _turns(tiles: Tiles, at_once: int) -> Iterator[Tiles]:
    """Tiles of one query each in parts, whose programs are about as many as those of all would be."""
    count = len(tiles.sequences)
    splits = min(MAX_SPLITS, tiles.splits * triton.cdiv(count, at_once))
    for begin in range(0, count, at_once):
        part = slice(begin, begin + at_once)
        yield Tiles(tiles.sequences[part], tiles.firsts[part], tiles.queries, splits)


def rows_of(needed: int, dtype: torch.dtype, device: torch.device, *, exact: bool, scaled: bool) -> int:
    """Rows of a program where so many are needed, by it and by others; see `tiles.latent_rows`."""
    return latent_rows(needed, dtype, triton_attention.limits(device).shared_bytes, exact=exact, scaled=scaled)


def queries_a_tile(heads: int, layer: LayerCache, *, exact: bool = False) -> int:
    """Successive queries of a sequence that share a program in prefill, with all of their heads or some of them."""
    scaled = layer.cold is not None and layer.cold.key_scales is not None
    return max(1, rows_of(_OF_A_PROMPT, layer.keys.dtype, layer.keys.device, exact=exact, scaled=scaled) // heads)


def splits_for(tiles: int, context: int, device: torch.device) -> int:
    """As `triton_attention.splits_for`: a multiprocessor has room for one program."""
    return split_keys(tiles, 1, context, triton_attention.processors(device))


def _check(
    queries: torch.Tensor, layer: LayerCache, paged: Paged, scoring: Scoring, tiles: Tiles, out: torch.Tensor
) -> None:
    heads, tokens, dim = queries.shape
    latent = layer.latent
    for holds, sentence in (
        (0 < latent < dim, f"values of {latent} components are no part of keys of {dim}"),
        (layer.keys.shape[0] == 1, f"there are {layer.keys.shape[0]} key/value heads, not one"),
        (layer.keys.shape[2:] == (dim, BLOCK_SIZE), f"keys are {tuple(layer.keys.shape)}"),
        (layer.keys.is_contiguous(), "the cache is not contiguous"),
        (queries.stride(2) == 1, "queries are not contiguous in their last dimension"),
        (queries.dtype == layer.keys.dtype == out.dtype, "types differ"),
        (queries.dtype in TYPES, f"{queries.dtype} is not supported"),
        (layer.cold is None or _cold_fits(layer), "cold blocks do not fit the hot ones"),
        (out.shape == (tokens, heads, latent) and out.is_contiguous(), "out is not [tokens, heads, latent]"),
        (_is_plain(scoring), "windows, soft caps, biases and sinks are not served"),
        (tiles.splits == 1 or tiles.queries == 1, "keys are split in decoding only"),
        *index_checks(paged, tiles),
    ):
        if not holds:
            raise ValueError(f"attend: {sentence}")


def _is_plain(scoring: Scoring) -> bool:
    return all(each is None for each in (scoring.window, scoring.soft_cap, scoring.bias, scoring.sinks))


def _cold_fits(layer: LayerCache) -> bool:
    cold = layer.cold
    assert cold is not None
    blocks, dim = cold.keys.shape[1], layer.keys.shape[2]
    scales = cold.key_scales
    plain = scales is None
    fp8 = dim % 4 == 0 and layer.latent % 4 == 0 and scales is not None and scales.shape == (1, blocks, BLOCK_SIZE)
    return (
        (plain or fp8)
        and cold.keys.dtype == (layer.keys.dtype if plain else torch.uint8)
        and cold.keys.shape == (1, blocks, dim, BLOCK_SIZE)
        and cold.keys.is_contiguous()
    )
