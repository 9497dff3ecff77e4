"""Products of which a row's bits depend on that row alone, in Triton: linear layers, batched products, and the experts
of a mixture in one launch.

The arithmetic of an element is a function of the layer's shape. The input features are cut in segments at fixed
positions. A segment is summed in ascending order into one float32 accumulator by the matrix units; the segments' sums
are added in ascending order in float32; the result is rounded once. With few rows each segment has a program of its
own, so that a decode step fills the GPU, and the last of them to end adds up what all have left. With many rows one
program walks over all segments. Both give the same bits.

Tiles follow the number of rows. All of them multiply by the same instruction, whose result for an element does not
depend on the width of the tile: a rank's self-test at its start compares all tiles, and says so where it is not so.
Weights are the left operand, so that a tile of tokens may be narrow.

The twins of these kernels are in `tests/twins.py`.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from lockstep_engine.kernels import triton_attention
from lockstep_engine.kernels.tiles import PRODUCT_ROWS


@dataclass(frozen=True)
class Tile:
    """Shape of a program. No bit of a result depends on it."""

    outs: int
    """Output features."""
    tokens: int
    ins: int
    """Input features of one step of the sum; it divides `_SEGMENT_UNIT`."""
    warps: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of its parts of x and of the weights, of 16 bits."""
        return (self.outs + self.tokens) * self.ins * 2 * self.stages


_NARROW = (
    Tile(outs=64, tokens=16, ins=128, warps=4, stages=4),
    Tile(outs=64, tokens=64, ins=128, warps=4, stages=3),
)
"""For 16 bits and up to as many rows as `PRODUCT_ROWS` begins with. All take less than 99 KiB of shared memory, which
every GPU since Ampere has.
"""
_BROAD = Tile(outs=128, tokens=128, ins=64, warps=8, stages=3)
"""For 16 bits and more rows, where the next two are not chosen or the GPU has no shared memory for them."""
_BROAD_SEGMENTED = Tile(outs=128, tokens=128, ins=64, warps=8, stages=4)
_BROAD_ONE_SEGMENT = Tile(outs=256, tokens=128, ins=64, warps=8, stages=3)
"""For layers of one segment: without a second accumulator a thread has registers for so many results."""
WIDE = Tile(outs=32, tokens=32, ins=32, warps=4, stages=2)
"""For float32, which is multiplied without the matrix units: they would round it."""

_SEGMENT_UNIT = 512
"""Segments are multiples of it, and a layer that has no more inputs has one segment."""
_PROGRAMS = 256
"""Programs of a decode step that keep the memory of a GPU busy, about. Part of the arithmetic, therefore not the number
of this GPU's multiprocessors."""
_PROGRAM_OUTS = 64
"""Output features of such a program."""
_MOST_TILES = 2**16
"""Tiles of which the segments have programs of their own, at most: each has a counter."""


def segment_of(outs: int, ins: int) -> int:
    """Inputs of a segment of a layer, but for its last one: a multiple of `_SEGMENT_UNIT`, or all of them."""
    parts = max(1, _PROGRAMS // triton.cdiv(outs, _PROGRAM_OUTS))
    segment: int = triton.cdiv(triton.cdiv(ins, parts), _SEGMENT_UNIT) * _SEGMENT_UNIT
    return min(segment, ins)


@triton.jit
def _sum_products(
    weight, ins_stride, x, present, begin, end, segment, even: tl.constexpr, segmented: tl.constexpr,
    block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """[block_n, block_t] sums over inputs begin..end of rows of weights [block_n, 1] and rows of x [1, block_t], both
    given by addresses. `segmented`: these are several segments, of which the first begins at `begin`. They are in one
    loop, so that reads for the next one are under way when one ends.

    Rows of x that are not `present` are zeros, and are not read: reads of one address by all programs wait for each
    other.
    """
    k = tl.arange(0, block_k)
    acc = tl.full((block_n, block_t), 0.0, tl.float32)
    total = tl.full((block_n, block_t), -0.0, tl.float32)  # the first sum that is added stays what it is
    left = segment
    for first in range(begin, end, block_k):
        at = first + k
        if even:
            w = tl.load(weight + (at * ins_stride)[None, :])
            columns = tl.load(x + at[:, None], mask=present[None, :], other=0.0)
        else:
            w = tl.load(weight + (at * ins_stride)[None, :], mask=(at < end)[None, :], other=0.0)
            columns = tl.load(x + at[:, None], mask=(at < end)[:, None] & present[None, :], other=0.0)
        acc = tl.dot(w, columns, acc, input_precision="ieee")
        if segmented:
            left -= block_k
            if (left == 0) & (first + block_k < end):
                total += acc
                acc = tl.full((block_n, block_t), 0.0, tl.float32)
                left = segment
    if segmented:
        acc += total
    return acc


@triton.jit
def leave(parts, counter, part, count, size, at, stored, acc):
    """Write a segment's sums to parts [count, size] of float32. Returns whether the tile's other segments are there."""
    tl.store(parts + part * size + at, acc, mask=stored)
    tl.debug_barrier()  # all threads have stored before one of them says so
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1


@triton.jit
def add_up(parts, counter, count, size, at, stored):
    """The segments' sums of a tile, in ascending order. The counter is 0 again for the next launch."""
    tl.store(counter, 0)
    total = tl.load(parts + at, mask=stored, other=0.0, cache_modifier=".cg")
    for part in range(1, count):
        total += tl.load(parts + part * size + at, mask=stored, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def write(out, at, stored, total, bias, n, outs, biased: tl.constexpr):
    """Add the bias of outputs n, if there is one, and write results rounded."""
    if biased:
        total += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["tokens", "count"])
def _linear(
    out, x, weight, bias, parts, counters, tokens, outs, ins, segment, count,
    batch_stride, outs_stride, ins_stride,
    even: tl.constexpr, biased: tl.constexpr, segmented: tl.constexpr, split: tl.constexpr,
    block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """`split`: each of the `count` segments has a program."""
    batch = tl.program_id(2).to(tl.int64)
    tile = tl.program_id(1) // count if split else tl.program_id(1)
    t = (tl.program_id(0) * block_t + tl.arange(0, block_t)).to(tl.int64)
    n = (tile * block_n + tl.arange(0, block_n)).to(tl.int64)
    present = t < tokens
    x_rows = x + (batch * tokens + t)[None, :] * ins
    w_rows = weight + batch * batch_stride + tl.minimum(n, outs - 1)[:, None] * outs_stride
    at = (batch * tokens + t)[None, :] * outs + n[:, None]
    stored = present[None, :] & (n < outs)[:, None]
    if split:
        part = tl.program_id(1) % count
        begin = part * segment
        end = tl.minimum(begin + segment, ins)
        acc = _sum_products(
            w_rows, ins_stride, x_rows, present, begin, end, segment, even, False, block_n, block_t, block_k
        )
        counter = counters + (tl.program_id(2) * (tl.num_programs(1) // count) + tile) * tl.num_programs(0)
        counter += tl.program_id(0)
        size = tl.num_programs(2).to(tl.int64) * tokens * outs
        if leave(parts, counter, part, count, size, at, stored, acc):
            total = add_up(parts, counter, count, size, at, stored)
            write(out, at, stored, total, bias, n, outs, biased)
    else:
        acc = _sum_products(
            w_rows, ins_stride, x_rows, present, 0, ins, segment, even, segmented, block_n, block_t, block_k
        )
        write(out, at, stored, acc, bias, n, outs, biased)


@triton.jit(do_not_specialize=["pairs", "choices", "count"])
def _grouped(
    out, x, weight, bias, parts, counters, order, ends, tile_ends, pairs, choices, outs, ins, segment, count, experts,
    even: tl.constexpr, biased: tl.constexpr, segmented: tl.constexpr, split: tl.constexpr,
    experts_pad: tl.constexpr, block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Tile i belongs to the first expert whose tiles end after it; there are more programs than tiles."""
    tile = tl.program_id(0)
    every = tl.arange(0, experts_pad)
    all_ends = tl.load(tile_ends + every, mask=every < experts, other=2**30)
    expert = tl.sum((all_ends <= tile).to(tl.int32), 0)
    if expert < experts:
        before = tl.maximum(expert - 1, 0)
        first_tile = tl.where(expert > 0, tl.load(tile_ends + before), 0)
        first = tl.where(expert > 0, tl.load(ends + before), 0)
        end_place = tl.load(ends + expert)
        place = first + (tile - first_tile) * block_t + tl.arange(0, block_t)
        present = place < end_place
        pair = tl.load(order + tl.minimum(place, pairs - 1)).to(tl.int64)
        column = tl.program_id(1) // count if split else tl.program_id(1)
        n = (column * block_n + tl.arange(0, block_n)).to(tl.int64)
        x_rows = x + (pair // choices)[None, :] * ins
        w_rows = weight + (expert.to(tl.int64) * outs + tl.minimum(n, outs - 1)[:, None]) * ins
        own_bias = bias + expert.to(tl.int64) * outs
        at = pair[None, :] * outs + n[:, None]
        stored = present[None, :] & (n < outs)[:, None]
        if split:
            part = tl.program_id(1) % count
            begin = part * segment
            end = tl.minimum(begin + segment, ins)
            acc = _sum_products(w_rows, 1, x_rows, present, begin, end, segment, even, False, block_n, block_t, block_k)
            counter = counters + column * tl.num_programs(0) + tile
            size = pairs.to(tl.int64) * outs
            if leave(parts, counter, part, count, size, at, stored, acc):
                total = add_up(parts, counter, count, size, at, stored)
                write(out, at, stored, total, own_bias, n, outs, biased)
        else:
            acc = _sum_products(w_rows, 1, x_rows, present, 0, ins, segment, even, segmented, block_n, block_t, block_k)
            write(out, at, stored, acc, own_bias, n, outs, biased)


@dataclass(frozen=True)
class Split:
    """How the segments of a launch are spread over programs."""

    segment: int
    count: int
    """Segments."""
    programs: int
    """Programs of a tile: one, or one for each segment."""
    parts: torch.Tensor
    """[count, results], float32: sums of segments; any tensor, if one program has them all."""
    counters: torch.Tensor
    """[tiles], int32: how many segments of each tile are there."""

    @classmethod
    def of(cls, out: torch.Tensor, outs: int, ins: int, tiles: int, *, few: bool) -> "Split":
        """For a launch of `tiles` tiles with the results `out`; `few`: it has few rows."""
        segment = segment_of(outs, ins)
        count = triton.cdiv(ins, segment)
        if count == 1 or not few or tiles > _MOST_TILES:
            return cls(segment, count, 1, out, out)
        parts = torch.empty(count, out.numel(), dtype=torch.float32, device=out.device)
        return cls(segment, count, count, parts, counters(out.device)[:tiles])


@cache
def counters(device: torch.device) -> torch.Tensor:
    """[_MOST_TILES], int32, that are zero before and after each launch. So no two launches may run at the same time."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [batch, rows, in] by weight [batch, in, out] of any strides, and add bias [out] before rounding.

    Args:
        x: float16, bfloat16 or float32.
        weight: converted to the type of `x` if it has another.
        bias: any float type.

    Returns:
        [batch, rows, out], of x's type.

    Raises:
        ValueError: a shape or type is not as above.
    """
    if x.dim() != 3 or weight.dim() != 3 or x.shape[0] != weight.shape[0] or x.shape[2] != weight.shape[1]:
        raise ValueError(f"product: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    batch, tokens, ins = x.shape
    outs = weight.shape[2]
    tile = tile_for(x.dtype, tokens, x.device, one_segment=segment_of(outs, ins) == ins)
    if bias is not None and bias.shape != (outs,):
        raise ValueError(f"product: bias {tuple(bias.shape)} is not [{outs}]")
    out = torch.empty(batch, tokens, outs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, weight = x.contiguous(), weight.to(x.dtype)
    batch_stride, ins_stride, outs_stride = weight.stride()
    rows, columns = triton.cdiv(tokens, tile.tokens), triton.cdiv(outs, tile.outs)
    split = Split.of(out, outs, ins, batch * rows * columns, few=tokens <= PRODUCT_ROWS[-1])
    _linear[rows, columns * split.programs, batch](
        out, x, weight, x if bias is None else bias.contiguous(), split.parts, split.counters,
        tokens, outs, ins, split.segment, split.count,
        batch_stride if batch > 1 else 0, outs_stride, ins_stride,
        even=ins % tile.ins == 0, biased=bias is not None, segmented=split.count > 1, split=split.programs > 1,
        block_n=tile.outs, block_t=tile.tokens, block_k=tile.ins,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Groups:
    """Which rows each expert of a mixture computes, all on the device, so that nothing waits for the host."""

    order: torch.Tensor
    """[pairs], int32: pairs of a token and a choice, sorted by expert; pair = token * choices + choice."""
    ends: torch.Tensor
    """[experts], int32: end of each expert's pairs in `order`."""
    tile_ends: torch.Tensor
    """[experts], int32: end of each expert's tiles."""
    choices: int
    tile: Tile
    dtype: torch.dtype

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int, dtype: torch.dtype) -> "Groups":
        """From the experts [tokens, choices] of each token, in a product of this type."""
        flat = chosen.flatten()
        tile = tile_for(dtype, len(flat) // experts, flat.device)
        order = torch.argsort(flat, stable=True).int()
        every = torch.arange(experts, dtype=flat.dtype, device=flat.device)
        counts = (flat.unsqueeze(0) == every.unsqueeze(1)).sum(1)
        tiles = (counts + (tile.tokens - 1)) // tile.tokens
        return cls(order, counts.cumsum(0).int(), tiles.cumsum(0).int(), chosen.shape[1], tile, dtype)


def grouped(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups, *, per_pair: bool
) -> torch.Tensor:
    """Products of rows with the weights of their experts, in one launch.

    Args:
        x: [tokens, in], or [pairs, in] if `per_pair`, contiguous.
        weight: [experts, out, in], contiguous, of x's type.
        bias: [experts, out] or None.
        groups: which rows each expert has.
        per_pair: each pair of a token and a choice has a row of its own.

    Returns:
        [pairs, out], of x's type.

    Raises:
        ValueError: a shape, type or layout is not as above.
    """
    experts, outs, ins = weight.shape
    pairs, choices = len(groups.order), groups.choices
    rows = pairs if per_pair else pairs // choices
    if x.shape != (rows, ins) or x.dtype != weight.dtype or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"grouped: x {tuple(x.shape)} of {x.dtype} does not fit {rows} rows of {ins} {weight.dtype}")
    if groups.dtype != x.dtype or len(groups.ends) != experts:
        raise ValueError(f"grouped: the groups are of {len(groups.ends)} experts, or of another type")
    out = torch.empty(pairs, outs, dtype=x.dtype, device=x.device)
    if pairs:
        tile = groups.tile
        most = min(pairs, triton.cdiv(pairs, tile.tokens) + experts)  # an expert's last tile may be partly filled
        columns = triton.cdiv(outs, tile.outs)
        split = Split.of(out, outs, ins, most * columns, few=pairs <= PRODUCT_ROWS[-1])
        _grouped[most, columns * split.programs](
            out, x, weight, x if bias is None else bias.contiguous(), split.parts, split.counters,
            groups.order, groups.ends, groups.tile_ends, pairs, 1 if per_pair else choices,
            outs, ins, split.segment, split.count, experts,
            even=ins % tile.ins == 0, biased=bias is not None, segmented=split.count > 1, split=split.programs > 1,
            experts_pad=triton.next_power_of_2(experts),
            block_n=tile.outs, block_t=tile.tokens, block_k=tile.ins,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def tile_for(dtype: torch.dtype, rows: int, device: torch.device, *, one_segment: bool = False) -> Tile:
    """The tile of a product.

    Args:
        dtype: of x.
        rows: of x; of experts, as many as an expert has on average.
        device: where it runs.
        one_segment: whether it is a layer of one segment. False for experts: on some GPUs they lack registers for its
            tile.

    Raises:
        ValueError: there is no kernel for the type.
    """
    if dtype is torch.float32:
        return WIDE
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"product: {dtype} is not supported")
    for most, tile in zip(PRODUCT_ROWS, _NARROW, strict=False):
        if rows <= most:
            return tile
    if one_segment and rows <= PRODUCT_ROWS[-1]:
        return _BROAD
    broad = _BROAD_ONE_SEGMENT if one_segment else _BROAD_SEGMENTED
    return broad if broad.shared_bytes <= triton_attention.limits(device).shared_bytes else _BROAD
