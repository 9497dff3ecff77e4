"""BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764) as `transformers` stores it.

    weight        uint8 [out / 4, in]  bits 2 i and 2 i + 1 of row r hold output r + i * out / 4, plus one
    weight_scale  float [1]

A value is code / weight_scale for `bitlinear`, code * weight_scale for `autobitlinear`, code being -1, 0 or 1. Source:
transformers, `integrations/bitnet.py`.
"""

import torch

from lockstep_engine.quantized.coded import Coded, CodedMatrix
from lockstep_engine.quantized.schemes import BitNet
from lockstep_engine.quantized.tensors import Tensors

_IN_BYTE = 4


class TernaryMatrix(CodedMatrix):
    """The weight `stem`.weight."""

    def __init__(self, tensors: Tensors, stem: str, layout: BitNet) -> None:
        self._tensors, self._stem, self._layout = tensors, stem, layout
        stored, columns = tensors.matrix(f"{stem}.weight", ("U8",))
        tensors.expect(f"{stem}.weight_scale", [[1], []], ("F32", "F16", "BF16"))
        self._stored = stored
        self.shape = (stored * _IN_BYTE, columns)

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`."""
        name = f"{self._stem}.weight"
        parts = []
        for place in range(_IN_BYTE):
            first = place * self._stored
            start, stop = max(rows.start - first, 0), min(rows.stop - first, self._stored)
            if start < stop:
                parts.append((self._tensors.read(name, slice(start, stop), columns) >> (2 * place)) & 3)
        scale = self._tensors.numbers(f"{self._stem}.weight_scale").reshape(1, 1)
        codes = torch.cat(parts).to(torch.int8) - 1
        return Coded(codes, 1 / scale if self._layout.scale_divides else scale)
