"""compressed-tensors' pack-quantized.

    weight_packed      int32 [out, in / n]     n = 32 // bits integers along the inputs in a word, the first lowest; the
                                               last word is filled up
    weight_scale       float [out, groups]     or [out, 1], [1]
    weight_zero_point  int32 [out / n, groups] packed along the outputs, or int8 [out, groups]; only if not symmetric
    weight_g_idx       int32 [in]              the group of each input, with activation order
    weight_shape       int   [2]               out, in

Integers are signed and stored plus 2^(bits - 1), zero points alike. A value is (q - zero) * scale. Source:
compressed-tensors, `pack_to_int32` and `dequantize`.
"""

from dataclasses import replace

import torch

from lockstep_engine.quantized.coded import INTEGERS, Coded, CodedMatrix, CodeForm, unpack, words_of
from lockstep_engine.quantized.scaled import ScaleGrid, block_of
from lockstep_engine.quantized.schemes import CompressedGroup
from lockstep_engine.quantized.tensors import Tensors

_BYTE = 8


class PackedMatrix(CodedMatrix):
    """The weight whose tensors begin with `stem`; `groups` are those of the configuration in this format."""

    def __init__(self, tensors: Tensors, stem: str, groups: list[CompressedGroup]) -> None:
        self._tensors, self._stem = tensors, stem
        stored = tensors.matrix(f"{stem}.weight_packed", ("I32",))
        tensors.expect(f"{stem}.weight_shape", [[2]], ("I64", "I32"))
        rows, columns = (int(size) for size in tensors.read(f"{stem}.weight_shape"))
        fitting = [each for each in groups if stored == (rows, -(-columns // (32 // each.bits)))]
        if not fitting:
            raise tensors.refusal(
                f"tensor {stem}.weight_packed has shape {list(stored)}, which holds no weight of {[rows, columns]} in "
                f"{' or '.join(str(each.bits) for each in groups) or 'any number of'} bits"
            )
        self._bits = fitting[0].bits
        self.shape = (rows, columns)
        zero, index, scale = f"{stem}.weight_zero_point", f"{stem}.weight_g_idx", f"{stem}.weight_scale"
        self._grid = ScaleGrid(
            tensors,
            scale,
            self.shape,
            block=block_of(tensors, scale, self.shape, fitting),
            group_index=index if index in tensors else None,
        )
        self._zero = zero if zero in tensors or not any(each.symmetric for each in fitting) else None
        if self._zero is not None:
            out, count = self._grid.grid
            is_plain = zero in tensors and tensors.dtype(zero) == "I8"
            stored_out = out if is_plain else -(-out // (32 // self._bits))
            tensors.expect(zero, [[stored_out, count]], ("I8" if is_plain else "I32",))
        self.code_form = self._kept_form()

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`."""
        words, inside = words_of(columns, 32 // self._bits)
        stored = self._tensors.read(f"{self._stem}.weight_packed", rows, words)
        codes = unpack(stored, self._bits, 1)[:, inside]
        if self._zero is None:
            return replace(self._grid.coded(codes, rows, columns), zeros=torch.full((1, 1), 2 ** (self._bits - 1)))
        return self._grid.coded(codes, rows, columns, self._zeros(self._zero))

    def _kept_form(self) -> CodeForm | None:
        """Zero points that are not packed may lie beyond the codes: then codes less zero points may not fit int8."""
        form = self._grid.code_form
        if form is None:
            return None
        if self._zero is not None:
            zeros = self._zeros(self._zero)
            if self._bits == _BYTE or int(zeros.min()) < 0 or int(zeros.max()) >= 2**self._bits:
                return None
        return form if self._bits == _BYTE else replace(form, table=INTEGERS)

    def _zeros(self, name: str) -> torch.Tensor:
        """Zero points as codes are stored: plus 2^(bits - 1)."""
        stored = self._tensors.read(name)
        if stored.dtype is torch.int8:
            plain: torch.Tensor = stored.to(torch.int16) + 2 ** (self._bits - 1)
            return plain
        return unpack(stored, self._bits, 0)[: self._grid.grid[0]]
