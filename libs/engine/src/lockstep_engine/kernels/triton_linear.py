"""Products of which a row's bits depend on that row alone, in Triton: linear layers, batched products, and the experts
of a mixture in one launch.

Every product, of any number of rows, is computed by one build of a kernel with one tile: a program sums over the input
features in ascending order into one float32 accumulator, and rounds once. Nothing is split over programs, and nothing
is chosen by the number of rows, which no build knows. Weights are the left operand, so that a tile of tokens may be
narrow where a decode step has few of them, and every step reads a weight once for 64 tokens.

The twins of these kernels are in `tests/twins.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """Shape of a program. It must not depend on the number of rows."""

    outs: int
    """Output features."""
    tokens: int
    ins: int
    """Input features of one step of the sum."""
    warps: int
    stages: int


NARROW = Tile(outs=64, tokens=64, ins=64, warps=4, stages=4)
"""For 16 bits: 64 KiB of shared memory, which every GPU since Ampere has."""
WIDE = Tile(outs=32, tokens=32, ins=32, warps=4, stages=2)
"""For float32, which is multiplied without the matrix units: they would round it."""


@triton.jit
def _sum_products(
    weight, ins_stride, x, ins, even: tl.constexpr,
    block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """[block_n, block_t] sums of rows of weights [block_n, 1] and rows of x [1, block_t], both given by addresses."""
    k = tl.arange(0, block_k)
    acc = tl.full((block_n, block_t), 0.0, tl.float32)
    for begin in range(0, ins, block_k):
        at = begin + k
        if even:
            w = tl.load(weight + (at * ins_stride)[None, :])
            columns = tl.load(x + at[:, None])
        else:
            w = tl.load(weight + (at * ins_stride)[None, :], mask=(at < ins)[None, :], other=0.0)
            columns = tl.load(x + at[:, None], mask=(at < ins)[:, None], other=0.0)
        acc = tl.dot(w, columns, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    out, x, weight, bias, tokens, outs, ins, batch_stride, outs_stride, ins_stride,
    even: tl.constexpr, biased: tl.constexpr,
    block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * block_t + tl.arange(0, block_t)).to(tl.int64)
    n = (tl.program_id(1) * block_n + tl.arange(0, block_n)).to(tl.int64)
    # Rows beyond the last are computed like the last one and not stored: no sum looks at its neighbours.
    x_rows = x + (batch * tokens + tl.minimum(t, tokens - 1))[None, :] * ins
    w_rows = weight + batch * batch_stride + tl.minimum(n, outs - 1)[:, None] * outs_stride
    acc = _sum_products(w_rows, ins_stride, x_rows, ins, even, block_n, block_t, block_k)
    if biased:
        acc += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
    at = (batch * tokens + t)[None, :] * outs + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(t < tokens)[None, :] & (n < outs)[:, None])


@triton.jit(do_not_specialize=["pairs", "choices"])
def _grouped(
    out, x, weight, bias, order, ends, tile_ends, pairs, choices, outs, ins, experts,
    even: tl.constexpr, biased: tl.constexpr, experts_pad: tl.constexpr,
    block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
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
        end = tl.load(ends + expert)
        place = first + (tile - first_tile) * block_t + tl.arange(0, block_t)
        pair = tl.load(order + tl.minimum(place, pairs - 1)).to(tl.int64)
        n = (tl.program_id(1) * block_n + tl.arange(0, block_n)).to(tl.int64)
        x_rows = x + (pair // choices)[None, :] * ins
        w_rows = weight + (expert.to(tl.int64) * outs + tl.minimum(n, outs - 1)[:, None]) * ins
        acc = _sum_products(w_rows, 1, x_rows, ins, even, block_n, block_t, block_k)
        if biased:
            acc += tl.load(bias + expert.to(tl.int64) * outs + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
        at = pair[None, :] * outs + n[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=(place < end)[None, :] & (n < outs)[:, None])


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
    tile = tile_for(x.dtype)
    if bias is not None and bias.shape != (weight.shape[2],):
        raise ValueError(f"product: bias {tuple(bias.shape)} is not [{weight.shape[2]}]")
    batch, tokens, ins = x.shape
    outs = weight.shape[2]
    out = torch.empty(batch, tokens, outs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, weight = x.contiguous(), weight.to(x.dtype)
    batch_stride, ins_stride, outs_stride = weight.stride()
    _linear[triton.cdiv(tokens, tile.tokens), triton.cdiv(outs, tile.outs), batch](
        out, x, weight, x if bias is None else bias.contiguous(), tokens, outs, ins,
        batch_stride if batch > 1 else 0, outs_stride, ins_stride,
        even=ins % tile.ins == 0, biased=bias is not None,
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

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int, dtype: torch.dtype) -> "Groups":
        """From the experts [tokens, choices] of each token, in a product of this type."""
        tile = tile_for(dtype)
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True).int()
        every = torch.arange(experts, dtype=flat.dtype, device=flat.device)
        counts = (flat.unsqueeze(0) == every.unsqueeze(1)).sum(1)
        tiles = (counts + (tile.tokens - 1)) // tile.tokens
        return cls(order, counts.cumsum(0).int(), tiles.cumsum(0).int(), chosen.shape[1], tile)


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
    if groups.tile != tile_for(x.dtype) or len(groups.ends) != experts:
        raise ValueError(f"grouped: the groups are of {len(groups.ends)} experts, or of another type")
    out = torch.empty(pairs, outs, dtype=x.dtype, device=x.device)
    if pairs:
        tile = groups.tile
        most = min(pairs, triton.cdiv(pairs, tile.tokens) + experts)  # an expert's last tile may be partly filled
        _grouped[most, triton.cdiv(outs, tile.outs)](
            out, x, weight, x if bias is None else bias.contiguous(), groups.order, groups.ends, groups.tile_ends,
            pairs, 1 if per_pair else choices, outs, ins, experts,
            even=ins % tile.ins == 0, biased=bias is not None, experts_pad=triton.next_power_of_2(experts),
            block_n=tile.outs, block_t=tile.tokens, block_k=tile.ins,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def tile_for(dtype: torch.dtype) -> Tile:
    """The tile of all products of a type.

    Raises:
        ValueError: there is no kernel for the type.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return NARROW
    if dtype is torch.float32:
        return WIDE
    raise ValueError(f"product: {dtype} is not supported")
