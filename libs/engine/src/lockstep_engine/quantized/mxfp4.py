"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss stores its stacked experts.

    NAME_blocks  uint8 [experts, out, in / 32, 16]  two e2m1 codes in a byte, the first in the lower four bits
    NAME_scales  uint8 [experts, out, in / 32]      e8m0: the exponent of two, plus 127

The model's parameter NAME is [experts, in, out]. Source: gpt-oss, `Checkpoint._get_mxfp4_tensor`.
"""

import torch

from lockstep_engine.quantized.coded import unpack
from lockstep_engine.quantized.tensors import Tensors

_GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])


class Mxfp4Experts:
    """The stacked experts `name`."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self._tensors, self._blocks, self._scales = tensors, f"{name}_blocks", f"{name}_scales"
        stored = tensors.expect(self._blocks, (), ("U8",))
        if len(stored) != 4 or stored[3] != _GROUP // 2:
            raise tensors.refusal(f"tensor {self._blocks} has shape {stored}, which is not [experts, out, groups, 16]")
        tensors.expect(self._scales, [stored[:3]], ("U8",))
        self.shape = (stored[0], stored[2] * _GROUP, stored[1])

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        """See `StoredWeight.read`. One expert at a time is widened."""
        groups = slice(start // _GROUP, -(-end // _GROUP)) if dim == 1 else slice(0, self.shape[1] // _GROUP)
        experts = range(start, end) if dim == 0 else range(self.shape[0])
        outputs = slice(start, end) if dim == 2 else slice(0, self.shape[2])
        inside = slice(start - groups.start * _GROUP, end - groups.start * _GROUP) if dim == 1 else slice(None)
        parts = [self._expert(expert, outputs, groups)[:, inside].t() for expert in experts]
        return torch.stack(parts)

    def _expert(self, number: int, outputs: slice, groups: slice) -> torch.Tensor:
        """[outputs, inputs of the groups]."""
        index = (slice(number, number + 1), outputs, groups)
        codes = unpack(self._tensors.read(self._blocks, *index, slice(None))[0], 4, 2)
        exponents = self._tensors.read(self._scales, *index)[0].to(torch.int32) - 127
        return torch.ldexp(_VALUES[codes.long()], exponents.unsqueeze(-1)).flatten(1)
