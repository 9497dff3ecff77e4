"""AWQ (Lin et al. 2023, arXiv 2306.00978) in the layout of its GEMM kernel, as AutoAWQ stores it.

    qweight  int32 [in, out / 8]      8 outputs in a word
    qzeros   int32 [groups, out / 8]  zero points, packed alike
    scales   float [groups, out]

Bits 4 i to 4 i + 3 of a word hold output ORDER[i] of its eight. A value is (q - zero) * scale; a group is `group_size`
neighbouring inputs. Source: AutoAWQ, `WQLinear_GEMM.from_linear`.
"""

import torch

from lockstep_engine.quantized.coded import INTEGERS, Coded, CodedMatrix, CodeForm, unpack, words_of
from lockstep_engine.quantized.schemes import Awq
from lockstep_engine.quantized.tensors import Tensors

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = [ORDER.index(output) for output in range(8)]


class AwqMatrix(CodedMatrix):
    """The weight whose tensors begin with `stem`."""

    def __init__(self, tensors: Tensors, stem: str, layout: Awq) -> None:
        self._tensors, self._stem = tensors, stem
        inputs, words = tensors.matrix(f"{stem}.qweight", ("I32",))
        self.shape = (words * 8, inputs)
        self._group_size = inputs if layout.group_size == -1 else layout.group_size
        groups = -(-inputs // self._group_size)
        self.code_form = CodeForm(self._group_size if groups > 1 else None, table=INTEGERS)
        tensors.expect(f"{stem}.scales", [[groups, words * 8]], ("F16", "BF16", "F32"))
        tensors.expect(f"{stem}.qzeros", [[groups, words]], ("I32",))

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`."""
        words, inside = words_of(rows, 8)
        groups, first = _groups(columns, self._group_size)
        codes = _ordered(self._tensors.read(f"{self._stem}.qweight", columns, words))[:, inside]
        zeros = _ordered(self._tensors.read(f"{self._stem}.qzeros", groups, words))[:, inside]
        scales = self._tensors.numbers(f"{self._stem}.scales", groups, rows)
        return Coded(codes.t(), scales.t(), zeros.t(), first)


def _ordered(words: torch.Tensor) -> torch.Tensor:
    """[n, words] → [n, 8 * words], in the order of the outputs."""
    fields = unpack(words, 4, 1)
    return fields.reshape(len(fields), -1, 8)[:, :, _PLACE].flatten(1)


def _groups(columns: slice, size: int) -> tuple[slice, torch.Tensor]:
    """The groups of some inputs, and for each input its group among these."""
    first = columns.start // size
    return slice(first, -(-columns.stop // size)), torch.arange(columns.start, columns.stop) // size - first
