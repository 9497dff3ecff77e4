"""Linear layers on weights that stay codes of 8 or 4 bits, in Triton: y = x W^T, where a value of W is a code's number
less the zero point of its group, times the scale of its group, plus the offset of its group.

A program widens codes as it reads them, to the values that loading would give: computed in float32 and rounded once to
the type of x. They are then multiplied and summed as `triton_linear` does it, in the same segments and in the same
order, so that a row's bits depend on that row alone, and are those of the widened weight.

Codes of 8 bits are int8. Those of 4 bits are packed in words (`quantized.coded.pack`).

The twin of the kernel is in `tests/twins.py`.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from lockstep_engine.kernels.codes import Codes
from lockstep_engine.kernels.tiles import PRODUCT_ROWS
from lockstep_engine.kernels.triton_linear import WIDE, Split, Tile, add_up, leave, write

_NARROW = (
    Tile(outs=64, tokens=16, ins=128, warps=4, stages=4),
    Tile(outs=64, tokens=64, ins=128, warps=4, stages=3),
)
"""As in `triton_linear`, for as many rows."""
_BROAD = Tile(outs=128, tokens=128, ins=64, warps=8, stages=3)
"""For more rows. Wider tiles lack registers for the codes."""


_RAISED = tl.constexpr(8388608.0)
"""2^23. A float32 that is so much larger than an integer from 0 to 2^23 - 1 has the integer in its lowest bits: no
conversion is needed, which is slow on some GPUs, and the difference to another integer is exact.
"""


@triton.jit
def _values(
    codes, table, scales, zeros, shift, first, end,
    even: tl.constexpr, packed: tl.constexpr, zeroed: tl.constexpr, tabled: tl.constexpr, per_127: tl.constexpr,
    added: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """[block_n, block_k], float32: the values of inputs from `first` on, which are of one group. `codes`: addresses of
    rows [block_n, 1]; `scales`, `zeros`: addresses of the rows' in the group [block_n]; `table`: [16], or anything.
    `added`: `zeros` are offsets.
    """
    at = first // 8 + tl.arange(0, block_k // 8) if packed else first + tl.arange(0, block_k)
    if even:
        read = tl.load(codes + at[None, :])
    else:
        read = tl.load(codes + at[None, :], mask=(at < (end // 8 if packed else end))[None, :], other=0)
    if packed:
        code = (read[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        code = tl.reshape(code, (block_n * block_k,) if tabled else (block_n, block_k))
    else:
        code = read.to(tl.int32) + 128
    if tabled:
        number = tl.reshape(tl.gather(table, code, 0), (block_n, block_k))
    else:
        number = (code | 0x4B000000).to(tl.float32, bitcast=True)
        number -= (tl.load(zeros)[:, None] if zeroed else shift) + _RAISED
    value = number * tl.load(scales)[:, None]
    if added:
        value += tl.load(zeros)[:, None]
    return value * 0.007874015748031496 if per_127 else value


@triton.jit
def _sum_coded(
    codes, scales, zeros, table, shift, group, outs, x, present, begin, end, segment,
    even: tl.constexpr, segmented: tl.constexpr, packed: tl.constexpr, zeroed: tl.constexpr, tabled: tl.constexpr,
    per_127: tl.constexpr, added: tl.constexpr, block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """As `triton_linear`'s sum of products, of rows of codes [block_n, 1]. `scales`, `zeros`: addresses of those of the
    rows in the first group [block_n]; `added`: `zeros` are offsets.
    """
    k = tl.arange(0, block_k)
    acc = tl.full((block_n, block_t), 0.0, tl.float32)
    total = tl.full((block_n, block_t), -0.0, tl.float32)
    left = segment
    if tabled:
        table = tl.load(table + tl.arange(0, 16))
    for first in range(begin, end, block_k):
        at = first + k
        own = (first // group).to(tl.int64) * outs
        value = _values(
            codes, table, scales + own, zeros + own, shift, first, end,
            even, packed, zeroed, tabled, per_127, added, block_n, block_k,
        )  # fmt: skip
        if even:
            columns = tl.load(x + at[:, None], mask=present[None, :], other=0.0)
        else:
            columns = tl.load(x + at[:, None], mask=(at < end)[:, None] & present[None, :], other=0.0)
        acc = tl.dot(value.to(columns.dtype), columns, acc, input_precision="ieee")
        if segmented:
            left -= block_k
            if (left == 0) & (first + block_k < end):
                total += acc
                acc = tl.full((block_n, block_t), 0.0, tl.float32)
                left = segment
    if segmented:
        acc += total
    return acc


@triton.jit(do_not_specialize=["tokens", "count", "group", "shift"])
def _coded(
    out, x, codes, scales, zeros, table, bias, parts, counters, tokens, outs, ins, segment, count, group, shift,
    even: tl.constexpr, biased: tl.constexpr, segmented: tl.constexpr, split: tl.constexpr,
    packed: tl.constexpr, zeroed: tl.constexpr, tabled: tl.constexpr, per_127: tl.constexpr, added: tl.constexpr,
    block_n: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """`split`: each of the `count` segments has a program. `shift`: what is subtracted from codes without zero points,
    where those of 8 bits begin at 0. `added`: `zeros` are offsets.
    """
    tile = tl.program_id(1) // count if split else tl.program_id(1)
    t = (tl.program_id(0) * block_t + tl.arange(0, block_t)).to(tl.int64)
    n = (tile * block_n + tl.arange(0, block_n)).to(tl.int64)
    present = t < tokens
    row = tl.minimum(n, outs - 1)
    code_rows = codes + row[:, None] * (ins // 8 if packed else ins)
    x_rows = x + t[None, :] * ins
    at = t[None, :] * outs + n[:, None]
    stored = present[None, :] & (n < outs)[:, None]
    if split:
        part = tl.program_id(1) % count
        begin = part * segment
        end = tl.minimum(begin + segment, ins)
        acc = _sum_coded(
            code_rows, scales + row, zeros + row, table, shift, group, outs, x_rows, present, begin, end, segment,
            even, False, packed, zeroed, tabled, per_127, added, block_n, block_t, block_k,
        )  # fmt: skip
        counter = counters + tile * tl.num_programs(0) + tl.program_id(0)
        size = tokens.to(tl.int64) * outs
        if leave(parts, counter, part, count, size, at, stored, acc):
            total = add_up(parts, counter, count, size, at, stored)
            write(out, at, stored, total, bias, n, outs, biased)
    else:
        acc = _sum_coded(
            code_rows, scales + row, zeros + row, table, shift, group, outs, x_rows, present, 0, ins, segment,
            even, segmented, packed, zeroed, tabled, per_127, added, block_n, block_t, block_k,
        )  # fmt: skip
        write(out, at, stored, acc, bias, n, outs, biased)


def product(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [rows, in] by a weight of codes [out, in], transposed, and add bias [out] before rounding.

    Args:
        x: float16, bfloat16 or float32.
        weight: on x's device.
        bias: any float type.

    Returns:
        [rows, out], of x's type.

    Raises:
        ValueError: a shape or type is not as above.
    """
    outs, ins = weight.outs, weight.ins
    if x.dim() != 2 or x.shape[1] != ins:
        raise ValueError(f"product: x {tuple(x.shape)} does not fit codes of {ins} inputs")
    if bias is not None and bias.shape != (outs,):
        raise ValueError(f"product: bias {tuple(bias.shape)} is not [{outs}]")
    tokens = len(x)
    tile = tile_for(x.dtype, tokens, weight)
    out = torch.empty(tokens, outs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x.contiguous()
    rows, columns = triton.cdiv(tokens, tile.tokens), triton.cdiv(outs, tile.outs)
    split = Split.of(out, outs, ins, rows * columns, few=tokens <= PRODUCT_ROWS[-1])
    scales, table = weight.scales, weight.table
    zeros = next((each for each in (weight.zeros, weight.offsets) if each is not None), scales)
    _coded[rows, columns * split.programs](
        out, x, weight.codes, scales, zeros, scales if table is None else table,
        x if bias is None else bias.contiguous(), split.parts, split.counters,
        tokens, outs, ins, split.segment, split.count, weight.group, weight.shift if weight.packed else 128.0,
        even=ins % tile.ins == 0, biased=bias is not None, segmented=split.count > 1, split=split.programs > 1,
        packed=weight.packed, zeroed=weight.zeros is not None, tabled=table is not None, per_127=weight.per_127,
        added=weight.offsets is not None,
        block_n=tile.outs, block_t=tile.tokens, block_k=tile.ins,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def tile_for(dtype: torch.dtype, rows: int, weight: Codes) -> Tile:
    """The tile of a product: a step of its sum has inputs of one group.

    Args:
        dtype: of x.
        rows: of x.
        weight: the codes.

    Raises:
        ValueError: there is no kernel for the type.
    """
    if dtype is torch.float32:
        tile = WIDE
    elif dtype in (torch.float16, torch.bfloat16):
        tile = next((each for most, each in zip(PRODUCT_ROWS, _NARROW, strict=False) if rows <= most), _BROAD)
    else:
        raise ValueError(f"product: {dtype} is not supported")
    if weight.group >= weight.ins:
        return tile
    return replace(tile, ins=min(tile.ins, weight.group & -weight.group))  # a power of two that divides the group
