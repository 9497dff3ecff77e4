"""GPTQ (Frantar et al. 2022, arXiv 2210.17323) as AutoGPTQ and GPTQModel store it.

    qweight  int32 [in / n, out]      n = 32 / bits integers along the inputs in a word, the first in the lowest bits
    qzeros   int32 [groups, out / n]  zero points along the outputs, packed alike
    scales   float [groups, out]
    g_idx    int32 [in]               the group of each input; without `desc_act` i // group_size

A value is (q - zero) * scale. Format `gptq` stores zero - 1 in as many bits (so that 0 is stored as all ones),
`gptq_v2` stores zero. Source: the writers' `QuantLinear.pack`.
"""

import torch

from lockstep_engine.quantized.coded import INTEGERS, Coded, CodedMatrix, CodeForm, unpack, words_of
from lockstep_engine.quantized.schemes import Gptq
from lockstep_engine.quantized.tensors import Tensors

_BYTE, _HALF_BYTE = 8, 4


class GptqMatrix(CodedMatrix):
    """The weight whose tensors begin with `stem`."""

    def __init__(self, tensors: Tensors, stem: str, layout: Gptq) -> None:
        self._tensors, self._stem, self._layout = tensors, stem, layout
        self._per_word = per_word = 32 // layout.bits
        words, outputs = tensors.matrix(f"{stem}.qweight", ("I32",))
        inputs = words * per_word
        self.shape = (outputs, inputs)
        groups = 1 if layout.group_size == -1 else -(-inputs // layout.group_size)
        tensors.expect(f"{stem}.scales", [[groups, outputs]], ("F16", "BF16", "F32"))
        tensors.expect(f"{stem}.qzeros", [[groups, -(-outputs // per_word)]], ("I32",))
        self._groups = self._read_groups(groups)
        size = inputs if groups == 1 else layout.group_size
        if layout.bits < _BYTE and torch.equal(self._groups, torch.arange(inputs) // size):
            table = INTEGERS if layout.bits <= _HALF_BYTE else None
            self.code_form = CodeForm(size if groups > 1 else None, table=table)

    def _read_groups(self, count: int) -> torch.Tensor:
        inputs = self.shape[1]
        name = f"{self._stem}.g_idx"
        if name not in self._tensors and not self._layout.permuted:
            return torch.arange(inputs) // (self._layout.group_size if count > 1 else inputs)
        self._tensors.expect(name, [[inputs]], ("I32", "I64"))
        groups = self._tensors.read(name).long()
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            raise self._tensors.refusal(f"tensor {name} names a group beyond the {count} that have scales")
        return groups

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`."""
        every = slice(None)
        words, inside = words_of(columns, self._per_word)
        codes = unpack(self._tensors.read(f"{self._stem}.qweight", words, rows), self._layout.bits, 0)[inside]
        words, inside = words_of(rows, self._per_word)
        zeros = unpack(self._tensors.read(f"{self._stem}.qzeros", every, words), self._layout.bits, 1)[:, inside]
        if self._layout.zeros_minus_one:
            zeros = (zeros + 1) & (2**self._layout.bits - 1)
        scales = self._tensors.numbers(f"{self._stem}.scales", every, rows)
        return Coded(codes.t(), scales.t(), zeros.t(), self._groups[columns])
