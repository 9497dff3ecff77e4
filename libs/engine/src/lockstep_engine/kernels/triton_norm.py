"""Root mean square norm that first adds to the residual, in Triton: one program for each row."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(out, x, delta, weight, eps, width: tl.constexpr, block: tl.constexpr, added: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    wide = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if added:
        total = wide + tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)
        stored = total.to(x.dtype.element_ty)
        tl.store(x + row + at, stored, mask=inside)
        wide = stored.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = wide * factor * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add delta to x in place, rounded to its type; then x over its root mean square, times weight.

    Args:
        x: [..., width], contiguous, any float type; computed in float32.
        delta: of the same shape, type and layout, or None.
        weight: [width], contiguous.
        eps: added to the mean of squares.

    Returns:
        [..., width], of x's type.

    Raises:
        ValueError: a shape or layout is not as above.
    """
    width = weight.shape[0]
    if x.shape[-1] != width or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"add_rms_norm: x {tuple(x.shape)} is not contiguous rows of {width}")
    if delta is not None and (delta.shape != x.shape or delta.dtype != x.dtype or not delta.is_contiguous()):
        raise ValueError(f"add_rms_norm: delta {tuple(delta.shape)} is not like x {tuple(x.shape)}")
    out = torch.empty_like(x)
    rows = x.numel() // width
    if rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm[rows,](
            out, x, x if delta is None else delta, weight, eps,
            width=width, block=block, added=delta is not None, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out
