"""A matrix as codes and scales, by rounding to the nearest. Scales are rounded to the type in which they are stored
before codes are computed, so that codes fit the scales that are read back.
"""

from dataclasses import dataclass
from typing import Literal

import torch

E4M3_LARGEST = 448.0
_SHRUNK = tuple(1 - step / 40 for step in range(17))
"""Factors of a group's largest magnitude that are tried as the largest code's value: 1 to 0.6."""

Kind = Literal["int4", "int4 with zeros", "int8", "fp8", "ternary"]


@dataclass(frozen=True)
class Rounded:
    """A quantized matrix: values are codes, less the zero point of their group, times its scale."""

    kind: Kind
    codes: torch.Tensor
    """[out, in]: int8, or e4m3 for fp8."""
    scales: torch.Tensor
    """[out, groups] or [1]."""
    group: int | None = None
    """Inputs of a group; None: all."""
    zeros: torch.Tensor | None = None
    """[out, groups], int8: the codes of 0; None: 0 everywhere."""

    def values(self) -> torch.Tensor:
        """[out, in], float32."""
        codes = self.codes.float()
        if self.zeros is not None:
            codes -= self._of_columns(self.zeros.float())
        return codes * self._of_columns(self.scales.float())

    def _of_columns(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if self.group is None else numbers.repeat_interleave(self.group, dim=1)


def to_int8(weight: torch.Tensor) -> Rounded:
    """Symmetric, a scale for each row."""
    scales = _not_zero(weight.float().abs().amax(1, keepdim=True) / 127)
    return Rounded("int8", (weight.float() / scales).round().clamp(-127, 127).to(torch.int8), scales)


def to_fp8(weight: torch.Tensor) -> Rounded:
    """e4m3, a scale for each row."""
    scales = _not_zero(weight.float().abs().amax(1, keepdim=True) / E4M3_LARGEST)
    codes = (weight.float() / scales).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return Rounded("fp8", codes, scales)


def to_ternary(weight: torch.Tensor) -> Rounded:
    """-1, 0 or 1 times the mean magnitude (BitNet b1.58, Ma et al. 2024, arXiv 2402.17764)."""
    scale = _not_zero(weight.float().abs().mean().reshape(1))
    return Rounded("ternary", (weight.float() / scale).round().clamp(-1, 1).to(torch.int8), scale)


def to_int4(weight: torch.Tensor, group: int | None, scale_dtype: torch.dtype) -> Rounded:
    """Symmetric, a scale for each group of a row's inputs."""
    scales = int4_scales(weight, group or weight.shape[1], scale_dtype)
    wide = scales.float().repeat_interleave(group or weight.shape[1], dim=1)
    return Rounded("int4", (weight.float() / wide).round().clamp(-8, 7).to(torch.int8), scales, group)


def int4_scales(weight: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[out, groups]: for each group the scale, out of some that clip it more or less, with the least squared error."""
    parts = weight.float().reshape(len(weight), -1, group)
    largest = parts.abs().amax(2)
    best = torch.full_like(largest, torch.inf)
    scales = torch.zeros_like(largest)
    for factor in _SHRUNK:
        tried = _not_zero(largest * (factor / 7.5)).to(dtype)
        wide = tried.float().unsqueeze(2)
        error = ((parts / wide).round().clamp(-8, 7) * wide - parts).square().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, tried.float(), scales)
    return scales.to(dtype)


def int4_ranges(weight: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest weight of each group of a row's inputs, or 0: [out, groups] each."""
    parts = weight.float().reshape(len(weight), -1, group or weight.shape[1])
    return parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)


def to_int4_in_ranges(
    weight: torch.Tensor, group: int | None, lows: torch.Tensor, highs: torch.Tensor, scale_dtype: torch.dtype
) -> Rounded:
    """With zero points: the 16 codes of a group go from its low, at most 0, to its high, at least 0."""
    scales = _not_zero((highs - lows) / 15).to(scale_dtype)
    zeros = (-8 - lows / scales.float()).round().clamp(-8, 7)
    width = group or weight.shape[1]
    codes = weight.float().reshape(len(weight), -1, width) / scales.float().unsqueeze(2)
    codes = (codes.round_() + zeros.unsqueeze(2)).clamp_(-8, 7).to(torch.int8)
    return Rounded("int4 with zeros", codes.reshape(weight.shape), scales, group, zeros.to(torch.int8))


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales > 2.0**-24, scales, torch.ones_like(scales))


def group_of(columns: int, wanted: int) -> int | None:
    """The largest group size up to the wanted one, halving it, that divides the inputs; None: the whole row."""
    while wanted >= 16:
        if columns % wanted == 0:
            return wanted
        wanted //= 2
    return None
