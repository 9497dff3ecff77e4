"""A weight of codes of 8 or 4 bits as a GPU's kernel reads it."""

from dataclasses import dataclass

import torch

from lockstep_engine.kernels.tiles import LEAST_GROUP
from lockstep_engine.quantized.coded import IN_WORD


@dataclass(frozen=True)
class Codes:
    """A weight [out, in] as the GPU's kernel reads it."""

    codes: torch.Tensor
    """Contiguous: int8 [out, in], or int32 [out, in / 8] of packed codes."""
    scales: torch.Tensor
    """[groups, out], float32, contiguous."""
    group: int
    """Neighbouring inputs that share a scale: a multiple of `LEAST_GROUP`, or all."""
    zeros: torch.Tensor | None = None
    """Zero points, integers shaped like `scales`, float32, contiguous; packed codes alone may have them."""
    shift: float = 0.0
    """A zero point that all groups have, an integer; packed codes alone may have it."""
    table: torch.Tensor | None = None
    """[16], float32: the numbers that packed codes stand for; None: themselves. It comes without zero points."""
    per_127: bool = False
    """Values are multiplied by 1 / 127 after their scale."""
    offsets: torch.Tensor | None = None
    """Added to values after their scale: shaped like `scales`, float32, contiguous. It comes without zero points, table
    and `per_127`. The product of a code and its scale is exact."""

    @property
    def packed(self) -> bool:
        """Whether codes have four bits."""
        return self.codes.dtype is torch.int32

    @property
    def outs(self) -> int:
        """Output features."""
        return len(self.codes)

    @property
    def ins(self) -> int:
        """Input features."""
        return self.codes.shape[1] * (IN_WORD if self.packed else 1)

    def __post_init__(self) -> None:
        """Check shapes and types.

        Raises:
            ValueError: one is not as above.
        """
        given = (self.codes, self.scales, self.zeros, self.table, self.offsets)
        tensors = [each for each in given if each is not None]
        if self.codes.dtype not in (torch.int8, torch.int32) or self.codes.dim() != 2 or self.group < 1:
            raise ValueError("codes are not int8 [out, in] or int32 [out, in / 8], or a group has no inputs")
        groups = -(-self.ins // self.group)
        if groups > 1 and self.group % LEAST_GROUP:
            raise ValueError(f"a group has neither all inputs nor a multiple of {LEAST_GROUP}, but {self.group}")
        shapes = {tuple(each.shape) for each in (self.scales, self.zeros, self.offsets) if each is not None}
        if shapes != {(groups, self.outs)} or (self.table is not None and self.table.shape != (16,)):
            raise ValueError(
                f"scales, zero points or offsets are not [{groups}, {self.outs}], or a table has not 16 numbers"
            )
        if {each.dtype for each in tensors[1:]} != {torch.float32} or not all(each.is_contiguous() for each in tensors):
            raise ValueError("scales, zero points, offsets or table are not float32, or something is not contiguous")
        has_zeros, has_table = self.zeros is not None or self.shift != 0, self.table is not None
        if (has_zeros and has_table) or ((has_zeros or has_table) and not self.packed):
            raise ValueError("codes of 8 bits have zero points or a table, or a table comes with zero points")
        if self.offsets is not None and (has_zeros or has_table or self.per_127):
            raise ValueError("offsets come with zero points, a table or a division by 127")
