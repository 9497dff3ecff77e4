"""The gate of a SiLU-gated feed-forward layer, in Triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _silu_mul(out, gate_up, inner: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < inner
    gate = tl.load(gate_up + row * (2 * inner) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * inner) + inner + at, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + at, result.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half, computed in float32.

    Args:
        gate_up: [rows, 2 * inner], contiguous, any float type.

    Returns:
        [rows, inner], of the same type.

    Raises:
        ValueError: the shape or layout is not as above.
    """
    rows, width = gate_up.shape
    if width % 2 or not gate_up.is_contiguous():
        raise ValueError(f"silu_mul: {tuple(gate_up.shape)} is not contiguous rows of two halves")
    inner = width // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(inner))
        _silu_mul[rows, triton.cdiv(inner, block)](out, gate_up, inner=inner, block=block, num_warps=4)
    return out
