"""Sums and softmax over the last dimension, in Triton: one program for each row, whose order of summation depends on
the row's width alone.
"""

import torch
import triton
import triton.language as tl

_WIDEST = 4096


@triton.jit
def _sum_rows(out, x, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    acc = tl.full((block,), 0.0, tl.float32)
    for begin in range(0, width, block):
        acc += tl.load(x + row * width + begin + at, mask=begin + at < width, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(acc, 0).to(out.dtype.element_ty))


@triton.jit
def _softmax(out, x, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    peaks = tl.full((block,), float("-inf"), tl.float32)
    for begin in range(0, width, block):
        inside = begin + at < width
        peaks = tl.maximum(peaks, tl.load(x + row + begin + at, mask=inside, other=float("-inf")).to(tl.float32))
    peak = tl.max(peaks, 0)
    acc = tl.full((block,), 0.0, tl.float32)
    for begin in range(0, width, block):
        inside = begin + at < width
        acc += tl.exp(tl.load(x + row + begin + at, mask=inside, other=float("-inf")).to(tl.float32) - peak)
    total = tl.sum(acc, 0)
    for begin in range(0, width, block):
        inside = begin + at < width
        wide = tl.load(x + row + begin + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row + begin + at, (tl.exp(wide - peak) / total).to(out.dtype.element_ty), mask=inside)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., width], any float type → [...], summed in float32, of x's type."""
    out = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if out.numel():
        width = x.shape[-1]
        _sum_rows[out.numel(),](out, x.contiguous(), width, **_block(width))
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, computed in float32, of x's type."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        width = x.shape[-1]
        _softmax[out.numel() // width,](out, x, width, **_block(width))
    return out


def _block(width: int) -> dict[str, int | bool]:
    block = min(_WIDEST, triton.next_power_of_2(width))
    return {"block": block, "num_warps": min(8, max(1, block // 512)), "enable_fp_fusion": False}
