"""A part of a weight as a format stores it, and its values: code minus zero point, times the scale of its group.

Values are computed in float32, where each of these products is exact or rounded once, and rounded to the model's dtype
when they are copied there. Libraries that multiply in the dtype of the scales have the same bits in that dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class StoredWeight(Protocol):
    """A quantized tensor of a checkpoint."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the values, [out, in] for a linear's weight, however they are stored."""
        ...

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        """The values from `start` up to `end` along one dimension, all of the others; float32."""
        ...


@dataclass(frozen=True)
class Coded:
    """Rows and columns of a quantized matrix."""

    codes: torch.Tensor
    """[rows, columns], integers or e4m3."""
    scales: torch.Tensor
    """[rows or 1, groups], float32."""
    zeros: torch.Tensor | None = None
    """Codes of the value 0, shaped like `scales`; None: 0 everywhere."""
    groups: torch.Tensor | None = None
    """[columns], the group of each; None: there is one group."""

    def values(self) -> torch.Tensor:
        """[rows, columns], float32."""
        wide = self.codes.float()
        if self.zeros is not None:
            wide -= self._of_columns(self.zeros.float())
        return wide.mul_(self._of_columns(self.scales))

    def integers(self, form: "CodeForm") -> tuple[torch.Tensor, torch.Tensor]:
        """Codes less zero points as int8 [rows, columns], and scales [rows, groups] of these columns.

        Args:
            form: the matrix's; the first column begins a group.
        """
        rows, columns = self.codes.shape
        codes = self.codes
        if self.zeros is not None:
            codes = codes.to(torch.int16) - self._of_columns(self.zeros.to(torch.int16))
        scales = self.scales
        if self.groups is not None:
            scales = scales[:, self.groups[torch.arange(0, columns, form.group or columns)]]
        return codes.to(torch.int8), scales.expand(rows, -1)

    def _of_columns(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if self.groups is None else numbers[:, self.groups]


@dataclass(frozen=True)
class CodeForm:
    """How int8 codes become values, where kernels compute with them: times the scale of their group of inputs."""

    group: int | None
    """Neighbouring inputs that share a scale; None: all inputs do."""
    per_127: bool = False
    """Values are multiplied by 1 / 127 after that (bitsandbytes)."""

    def groups(self, inputs: int) -> int:
        """Number of scales of a row."""
        return 1 if self.group is None else -(-inputs // self.group)


class CodedMatrix(ABC):
    """A weight [out, in] whose parts are read as `Coded`."""

    shape: tuple[int, int]
    code_form: CodeForm | None = None
    """Set where codes less zero points fit int8, and inputs that share a scale are neighbours."""

    @abstractmethod
    def coded(self, rows: slice, columns: slice) -> Coded:
        """The codes of some rows (outputs) and columns (inputs), both with start and stop."""

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        """See `StoredWeight.read`."""
        part, rows, columns = slice(start, end), slice(0, self.shape[0]), slice(0, self.shape[1])
        return self.coded(part, columns).values() if dim == 0 else self.coded(rows, part).values()


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The unsigned integers that words hold, the first in the lowest bits: `dim` grows by the number in a word. uint8.

    Args:
        words: int32 or uint8.
        bits: bits of each integer; divides the bits of a word.
        dim: the packed dimension.
    """
    count = words.element_size() * 8 // bits
    mask = 2**bits - 1
    fields = [((words >> (bits * number)) & mask).to(torch.uint8) for number in range(count)]
    return torch.stack(fields, dim + 1).flatten(dim, dim + 1)


def words_of(part: slice, count: int) -> tuple[slice, slice]:
    """The words that hold a range of integers, `count` in a word, and the range within what they hold."""
    first = part.start // count
    return slice(first, -(-part.stop // count)), slice(part.start - first * count, part.stop - first * count)
