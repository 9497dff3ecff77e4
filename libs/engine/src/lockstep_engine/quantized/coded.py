"""A part of a weight as a format stores it, and its values: code minus zero point, times the scale of its group, plus
the group's offset.

Values are computed in float32, where each of these products is exact or rounded once, and rounded to the model's dtype
when they are copied there. Formats with offsets have exact products, so that a sum is rounded once, too. Libraries that
multiply in the dtype of the scales have the same bits in that dtype.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
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
    """Codes of the value 0, shaped like `scales` or [1, 1]; None: 0 everywhere."""
    groups: torch.Tensor | None = None
    """[columns], the group of each; None: there is one group."""
    table: torch.Tensor | None = None
    """[16], float32: the numbers that codes stand for; None: themselves."""
    offsets: torch.Tensor | None = None
    """Shaped like `scales`, float32; None: -0.0 everywhere, which changes no value."""

    def values(self) -> torch.Tensor:
        """[rows, columns], float32."""
        wide = self.codes.float() if self.table is None else self.table[self.codes.long()]
        if self.zeros is not None:
            wide -= self._of_columns(self.zeros.float())
        wide.mul_(self._of_columns(self.scales))
        return wide if self.offsets is None else wide.add_(self._of_columns(self.offsets))

    def kept(self, form: "CodeForm") -> "KeptCodes":
        """What stays in memory of these columns, the first of which begins a group.

        Args:
            form: the matrix's, or the wider one in place of it.
        """
        rows, columns = self.codes.shape
        firsts = None if self.groups is None else self.groups[torch.arange(0, columns, form.group or columns)]
        scales = (self.scales if firsts is None else self.scales[:, firsts]).expand(rows, -1)
        offsets = None
        if form.offsets:
            offsets = scales.new_full((1, 1), -0.0) if self.offsets is None else self.offsets
            offsets = (offsets if firsts is None or offsets.shape[1] == 1 else offsets[:, firsts]).expand_as(scales)
        if form.table is not None:
            zeros = scales.new_zeros(1, 1) if self.zeros is None else self.zeros.float()
            zeros = zeros if firsts is None or zeros.shape[1] == 1 else zeros[:, firsts]
            return KeptCodes(self.codes.to(torch.uint8), scales, zeros.expand_as(scales), offsets)
        codes = self.codes
        if self.zeros is not None:
            codes = codes.to(torch.int16) - self._of_columns(self.zeros.to(torch.int16))
        return KeptCodes(codes.to(torch.int8), scales, None, offsets)

    def _of_columns(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if self.groups is None or numbers.shape[1] == 1 else numbers[:, self.groups]


@dataclass(frozen=True)
class KeptCodes:
    """Codes that stay in memory, see `CodeForm`."""

    codes: torch.Tensor
    """[rows, columns]: int8, or uint8 where there is a table."""
    scales: torch.Tensor
    """[rows, groups], float32."""
    zeros: torch.Tensor | None = None
    """Shaped like `scales`, float32; only with a table."""
    offsets: torch.Tensor | None = None
    """Shaped like `scales`, float32; only where the form has them, and then there are no zero points but 0."""


IN_WORD = 8
"""Codes of four bits in a word, those of neighbouring inputs, the first in the lowest bits; also in cpu.c."""
INTEGERS = tuple(map(float, range(16)))
"""The table of codes of four bits that are integers."""
_LEAST_SHARED_GROUP = 16
"""Fewest inputs that share a scale in `shared_form`: with half as many, scales and offsets take as much as codes."""


@dataclass(frozen=True)
class CodeForm:
    """How codes become values, where kernels compute with them: times the scale of their group of inputs, plus its
    offset.
    """

    group: int | None
    """Neighbouring inputs that share a scale; None: all inputs do."""
    per_127: bool = False
    """Values are multiplied by 1 / 127 after that (bitsandbytes)."""
    table: tuple[float, ...] | None = None
    """The numbers that codes of four bits stand for, less the zero point of their group; None: codes less their zero
    points are int8."""
    integers: bool = False
    """The scheme quantizes inputs to 8 bits, too, each token's by its largest magnitude, and multiplies integers; all
    inputs of a row share a scale."""
    offsets: bool = False
    """Each group has an offset, and codes have no zero points. Products of codes and scales are exact, so that kernels
    may round them or not before the offset is added."""

    @property
    def bits(self) -> int:
        """Those of a packed code."""
        return 8 if self.table is None else 4

    def groups(self, inputs: int) -> int:
        """Number of scales of a row."""
        return 1 if self.group is None else -(-inputs // self.group)

    def fitting(self, inputs: int, unit: int) -> "CodeForm | None":
        """This form, or the wider one where `unit` codes share a word and groups or inputs are no multiples of it;
        None if there is no wider one.
        """
        if self.table is None or (inputs % unit == 0 and (self.group or 0) % unit == 0):
            return self
        return replace(self, table=None) if self.table == INTEGERS else None


def shared_form(forms: Collection[CodeForm]) -> CodeForm | None:
    """The form of 8 bits that holds the codes of matrices of several forms, with their values; None: there is none.
    Groups are the largest that divide all of theirs.
    """
    groups = [form.group for form in forms if form.group is not None]
    integers = all(form.table in (None, INTEGERS) and not form.per_127 and not form.integers for form in forms)
    group = math.gcd(*groups)
    if len(groups) < len(forms) or not integers or group < _LEAST_SHARED_GROUP:
        return None
    return CodeForm(group, offsets=any(form.offsets for form in forms))


class CodedMatrix(ABC):
    """A weight [out, in] whose parts are read as `Coded`."""

    shape: tuple[int, ...]
    code_form: CodeForm | None = None
    """Set where codes less zero points fit int8 or have four bits, and inputs that share a scale are neighbours."""

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


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes of four bits [out, in], uint8, as words [out, in / IN_WORD], int32."""
    fields = codes.contiguous().view(len(codes), -1, IN_WORD // 2, 2)
    words: torch.Tensor = (fields[..., 0] | fields[..., 1] << 4).view(torch.int32)
    return words.squeeze(-1)


def words_of(part: slice, count: int) -> tuple[slice, slice]:
    """The words that hold a range of integers, `count` in a word, and the range within what they hold."""
    first = part.start // count
    return slice(first, -(-part.stop // count)), slice(part.start - first * count, part.stop - first * count)
