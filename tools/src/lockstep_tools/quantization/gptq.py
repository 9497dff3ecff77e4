"""GPTQ: rounds a matrix column by column, and moves each column's error to those that are not rounded yet (Frantar et
al. 2022, arXiv 2210.17323; the activation order with fixed groups as in its authors' code).
"""

import torch

from lockstep_tools.quantization.rounding import Rounded, int4_scales

_BLOCK = 128
"""Columns whose updates of the others are collected."""
_DAMPING = 0.01


def to_int4_by_hessian(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    group: int | None,
    scale_dtype: torch.dtype,
    *,
    by_activation: bool = True,
) -> Rounded:
    """4-bit codes that keep the layer's outputs rather than its weights.

    Args:
        weight: [out, in].
        hessian: [in, in], the sum of x xᵀ over the layer's inputs x; all 0 if it has had none.
        group: inputs that share a scale; None: all.
        scale_dtype: the type of the stored scales.
        by_activation: round the inputs with the largest activations first. Groups stay neighbouring inputs.
    """
    work = weight.float().clone()
    columns = work.shape[1]
    width = group or columns
    diagonal = hessian.diagonal()
    scales = int4_scales(work, width, scale_dtype)
    order = torch.argsort(diagonal, descending=True, stable=True) if by_activation else torch.arange(columns)
    work = work[:, order]
    step_scales = scales.float()[:, order // width]
    inverse = _inverse_root(hessian[order][:, order])
    codes = torch.empty_like(work)
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        part, errors = work[:, first:last].clone(), torch.empty(len(work), last - first)
        for column in range(last - first):
            place = first + column
            scale = step_scales[:, place]
            code = (part[:, column] / scale).round().clamp(-8, 7)
            codes[:, place] = code
            error = (part[:, column] - code * scale) / inverse[place, place]
            part[:, column:] -= error[:, None] * inverse[place, place:last][None]
            errors[:, column] = error
        work[:, last:] -= errors @ inverse[first:last, last:]
    unordered = torch.empty_like(codes)
    unordered[:, order] = codes
    return Rounded("int4", unordered.to(torch.int8), scales, group)


def _inverse_root(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, in float64 while it is computed."""
    wide = hessian.double()
    mean = wide.diagonal().mean()
    if not mean > 0:
        return torch.eye(len(wide))
    damped = wide + torch.eye(len(wide), dtype=wide.dtype) * (_DAMPING * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    root: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root.float()
