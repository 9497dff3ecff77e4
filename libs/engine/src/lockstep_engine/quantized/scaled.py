"""Matrices stored as [out, in] bytes, each byte a weight, beside a tensor of scales: compressed-tensors' int-quantized,
float-quantized and naive-quantized, and FP8 with scales for a tensor, a row or a block.

A scale [] or [1] is for the tensor, [out, 1] or [out] for a row, [out / n, in / m] for a block, of which a group
of a row's inputs is one. A value is (code - zero) * scale, also where the tensor is called `weight_scale_inv`
(DeepSeek-V3's FP8: the inverse of the factor applied when quantizing). Sources: compressed-tensors, `dequantize`;
DeepSeek-V3, `weight_dequant`.
"""

import math
from collections.abc import Sequence

import torch

from lockstep_engine.quantized.coded import Coded, CodedMatrix, CodeForm
from lockstep_engine.quantized.schemes import CompressedGroup
from lockstep_engine.quantized.tensors import Tensors

_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")


class ScaledMatrix(CodedMatrix):
    """The weight `weight` with the scales `scale`.

    Args:
        dtype: safetensors' name of the codes' type.
        block: rows and columns that share a scale; those of a whole row or of the tensor may do so instead.
        block_only: they may not.
        zero: the name of the zero points, which are shaped like the scales; None: 0.
        group_index: the name of the inputs' groups; None: neighbouring inputs.
        integers: the scheme multiplies integers, see `CodeForm`.
    """

    def __init__(
        self,
        tensors: Tensors,
        weight: str,
        scale: str,
        dtype: str,
        *,
        block: tuple[int, int] | None = None,
        block_only: bool = False,
        zero: str | None = None,
        group_index: str | None = None,
        integers: bool = False,
    ) -> None:
        self._tensors, self._weight = tensors, weight
        self.shape = tensors.matrix(weight, (dtype,))
        self._grid = ScaleGrid(
            tensors, scale, self.shape, block=block, block_only=block_only, zero=zero, group_index=group_index
        )
        self.code_form = self._grid.code_form if dtype == "I8" and zero is None else None
        if integers and self.code_form == CodeForm(None):
            self.code_form = CodeForm(None, integers=True)

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`."""
        return self._grid.coded(self._tensors.read(self._weight, rows, columns), rows, columns)


class ScaleGrid:
    """The scales, zero points and groups of a matrix; see `ScaledMatrix` for the arguments."""

    def __init__(
        self,
        tensors: Tensors,
        scale: str,
        shape: tuple[int, int],
        *,
        block: tuple[int, int] | None = None,
        block_only: bool = False,
        zero: str | None = None,
        group_index: str | None = None,
    ) -> None:
        self._tensors, self._scale, self._zero, self._shape = tensors, scale, zero, shape
        rows, columns = shape
        stored = tensors.expect(scale, (), _SCALE_DTYPES)
        grid = tuple(stored) if len(stored) == 2 else (math.prod(stored), 1)
        by_block = block and (-(-rows // block[0]), -(-columns // block[1]))
        if grid not in ([by_block] if block_only else [by_block, (1, 1), (rows, 1)]):
            raise tensors.refusal(f"tensor {scale} has shape {stored}, which its quantization does not imply")
        self._grid = (grid[0], grid[1])
        self._row_step, self._column_step = block if block and grid == by_block else (rows // grid[0], columns)
        self._index = None if group_index is None else self._read_index(group_index)

    def _read_index(self, name: str) -> torch.Tensor | None:
        self._tensors.expect(name, [[self._shape[1]]], ("I32", "I64"))
        index = self._tensors.read(name).long()
        if bool((index == -1).all()):  # written before an order was found: there is none
            return None
        if int(index.min()) < 0 or int(index.max()) >= self._grid[1]:
            raise self._tensors.refusal(f"tensor {name} names a group beyond the {self._grid[1]} that have scales")
        return index

    def coded(self, codes: torch.Tensor, rows: slice, columns: slice, zeros: torch.Tensor | None = None) -> Coded:
        """Codes of some rows and columns, with their scales.

        Args:
            codes: [rows, columns].
            rows, columns: where they are.
            zeros: all zero points [out or 1, groups], where they are not stored plainly.
        """
        if zeros is None and self._zero is not None:
            zeros = self._tensors.read(self._zero).reshape(self._grid)
        scales = self._tensors.numbers(self._scale).reshape(self._grid)
        by_row = slice(0, 1) if self._grid[0] == 1 else torch.arange(rows.start, rows.stop) // self._row_step
        if self._grid[1] == 1:
            groups = None
        elif self._index is not None:
            groups = self._index[columns]
        else:
            groups = torch.arange(columns.start, columns.stop) // self._column_step
        return Coded(codes, scales[by_row], None if zeros is None else zeros[by_row], groups)

    @property
    def code_form(self) -> CodeForm | None:
        """The form of codes that fit int8; None: inputs that share a scale are not neighbours."""
        if self._grid[1] == 1:
            return CodeForm(None)
        return CodeForm(self._column_step) if self._index is None else None

    @property
    def grid(self) -> tuple[int, int]:
        """Number of scales along the outputs and the inputs."""
        return self._grid


def block_of(
    tensors: Tensors, scale: str, shape: tuple[int, int], groups: Sequence[CompressedGroup]
) -> tuple[int, int] | None:
    """The rows and columns that share a scale, by the one of the configuration's groups that the scales' shape fits."""
    stored = tensors.expect(scale, (), _SCALE_DTYPES)
    blocks = [each.block for each in groups if each.block is not None]
    fitting = [each for each in blocks if stored == [-(-shape[0] // each[0]), -(-shape[1] // each[1])]]
    return next(iter(fitting), None)
