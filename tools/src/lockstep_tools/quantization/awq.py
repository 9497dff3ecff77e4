"""AWQ: inputs with large activations are scaled up before their weights are rounded, and what gives them is scaled down
(Lin et al. 2023, arXiv 2306.00978). The scales are powers of the inputs' mean magnitudes.

Errors are those of the matrices' outputs. With the sum of x xᵀ over the inputs they need no inputs: the squared error
of an output is d xxᵀ dᵀ with the error d of its row. As in the paper, scales are searched first, with whole ranges,
then how far each group's range is clipped, with the error of that group's part of the output.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from lockstep_engine.quantized.tensors import Tensors

from lockstep_tools.quantization.folds import Fold
from lockstep_tools.quantization.layers import InputProducts, Unit
from lockstep_tools.quantization.rounding import Rounded, group_of, int4_ranges, to_int4_in_ranges

_GRID = 20
"""Exponents that are tried: 0, 1/20 … 19/20."""
_MOST = 64.0
"""Of a scale and its inverse: a scaled norm still fits in float16."""
_CLIPPED = tuple(1 - step / 20 for step in range(10))
"""Factors of a group's range that are tried."""


@dataclass(frozen=True)
class Matrix:
    """What the search needs of a matrix."""

    weight: torch.Tensor
    """[out, in]."""
    products: torch.Tensor
    """[in, in], the sum of x xᵀ over its inputs x."""
    group: int | None
    """Inputs that share a scale; None: all."""


def scale_layer(
    folds: Sequence[Fold],
    products: InputProducts,
    quantized: Set[str],
    tensors: Tensors,
    group_size: int,
    scale_dtype: torch.dtype,
) -> tuple[list[Unit], int]:
    """Scale a layer's weights in place, and the products to what the inputs are then.

    Args:
        folds: the layer's.
        products: of its inputs before.
        quantized: stored names of the matrices that will be quantized.
        tensors: the float checkpoint.
        group_size: the wanted one.
        scale_dtype: the type of the stored scales of groups.

    Returns:
        Parameters that are changed and will not be quantized, and the number of matrices whose inputs are scaled and
        that will be.
    """
    changed: dict[str, Unit] = {}
    count = 0
    for fold in folds:
        seen = [each for each in fold.consumers if each.inputs in products.sums]
        matrices = [
            Matrix(each.value, products.sums[each.inputs], group_of(each.value.shape[1], group_size))
            for each in seen
            if each.stored in quantized
        ]
        if not matrices:
            continue
        touched = [*fold.consumers, *([fold.producer] if fold.outputs.dim() == 2 else [])]
        in_float = [each for each in touched if each.stored not in quantized]
        dtype = tensors.read(fold.vectors[0].stored).dtype if fold.vectors else torch.float32

        def usable(scales: torch.Tensor, fold: Fold = fold, dtype: torch.dtype = dtype) -> torch.Tensor:
            return fold.storable(scales, dtype)

        magnitudes = torch.stack([products.magnitudes[each.inputs] for each in seen]).sum(0)
        scales = find_scales(matrices, magnitudes, scale_dtype, usable, powers_of_two=bool(in_float))
        fold.apply(scales)
        for place in {each.inputs for each in seen}:
            products.sums[place] /= scales[:, None] * scales
        changed |= {each.stored: each for each in [*fold.vectors, *in_float]}
        count += len(matrices)
    return list(changed.values()), count


def find_scales(
    matrices: Sequence[Matrix],
    magnitudes: torch.Tensor,
    scale_dtype: torch.dtype,
    usable: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
    *,
    powers_of_two: bool = False,
) -> torch.Tensor:
    """The scales with the least error of the matrices' outputs, all of which have the same inputs: [in].

    Args:
        matrices: those that will be rounded.
        magnitudes: [in], the mean of |x| for each input, times any number.
        scale_dtype: the type of the stored scales of groups.
        usable: the scales that are possible in place of some others.
        powers_of_two: other matrices stay in float; powers of two change none of their bits.
    """
    best, least = torch.ones_like(magnitudes), torch.inf
    for step in range(_GRID):
        scales = magnitudes.clamp(min=1e-4 * float(magnitudes.max())).pow(step / _GRID)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1 / _MOST, _MOST)
        scales = usable(scales.log2().round().exp2() if powers_of_two else scales)
        error = 0.0
        for each in matrices:
            scaled = each.weight * scales
            rounded = to_int4_in_ranges(scaled, each.group, *int4_ranges(scaled, each.group), scale_dtype)
            wrong = (rounded.values() - scaled) / scales
            error += float(((wrong @ each.products) * wrong).sum())
        if error < least:
            best, least = scales, error
    return best


def to_int4(
    weight: torch.Tensor, products: torch.Tensor | None, group: int | None, scale_dtype: torch.dtype
) -> Rounded:
    """4-bit codes with zero points; the range of each group is clipped as far as its part of the output gains by it.

    Args:
        weight: [out, in].
        products: [in, in], the sum of x xᵀ over its inputs x; None: all weights count the same.
        group: inputs that share a scale; None: all.
        scale_dtype: the type of the stored scales.
    """
    width = group or weight.shape[1]
    lows, highs = int4_ranges(weight, group)
    if products is None:
        blocks = torch.eye(width).expand(lows.shape[1], -1, -1)
    else:
        blocks = torch.stack(_diagonal(products, width))
    least, factors = torch.full_like(lows, torch.inf), torch.ones_like(lows)
    for factor in _CLIPPED:
        rounded = to_int4_in_ranges(weight, group, lows * factor, highs * factor, scale_dtype)
        wrong = (rounded.values() - weight).reshape(len(weight), -1, width).transpose(0, 1)  # [groups, out, width]
        error = ((wrong @ blocks) * wrong).sum(2).t()
        factors = torch.where(error < least, factor, factors)
        least = torch.minimum(error, least)
    return to_int4_in_ranges(weight, group, lows * factors, highs * factors, scale_dtype)


def _diagonal(products: torch.Tensor, width: int) -> list[torch.Tensor]:
    starts = range(0, len(products), width)
    return [products[start : start + width, start : start + width] for start in starts]
