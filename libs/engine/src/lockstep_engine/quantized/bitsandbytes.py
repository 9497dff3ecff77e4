"""bitsandbytes (Dettmers et al. 2022 and 2023, arXiv 2208.07339 and 2305.14314) as `transformers` stores it.

nf4 and fp4, for a weight W:

    W                                 uint8 [n / 2, 1]  two codes in a byte, row by row, the first in the upper half
    W.quant_map                       float32 [16]      code → value
    W.absmax                          float32 [blocks], or with double quantization uint8 codes of
    W.nested_quant_map, W.nested_absmax                 float32 [256] and one for each `nested_blocksize` of `absmax`
    W.quant_state.bitsandbytes__nf4   uint8             JSON: shape, blocksize, nested_blocksize, nested_offset

A value is quant_map[code] * absmax[block]; absmax is nested_quant_map[code] * nested_absmax[block] + nested_offset.

int8 (LLM.int8): the weight int8 [out, in] and SCB float32 [out], the rows' largest magnitudes; a value is
code * SCB * (1 / 127), in float32 and in this order. Sources: `QuantState.as_dict`, `kDequantizeBlockwise`,
`int8_vectorwise_dequant`.
"""

import json
import math
from typing import Any

import torch

from lockstep_engine.quantized.coded import Coded, CodedMatrix, CodeForm, unpack
from lockstep_engine.quantized.tensors import Tensors

_STATE = "quant_state.bitsandbytes__"
_ROW_MAJOR = 0
_LARGEST = 2**31 - 1
_PER_127 = 7.874015748031496e-3  # `cpu_loops.h` has it, too


class FourBitMatrix(CodedMatrix):
    """The nf4 or fp4 weight `name`, of any number of dimensions."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self._tensors, self._name = tensors, name
        found = [kind for kind in ("nf4", "fp4") if f"{name}.{_STATE}{kind}" in tensors]
        if not found:
            raise tensors.refusal(f"the checkpoint has no tensor {name}.{_STATE}nf4, which its quantization needs")
        state = self._state(f"{name}.{_STATE}{found[0]}")
        self.shape = tuple(state["shape"])
        self._block = state["blocksize"]
        count = math.prod(self.shape)
        blocks = -(-count // self._block)
        tensors.expect(name, [[-(-count // 2), 1], [1, -(-count // 2)], [-(-count // 2)]], ("U8",))
        tensors.expect(f"{name}.quant_map", [[16]], ("F32",))
        self._nested = f"{name}.nested_absmax" in tensors or "nested_blocksize" in state
        tensors.expect(f"{name}.absmax", [[blocks]], ("U8",) if self._nested else ("F32",))
        if self._nested:
            if "nested_blocksize" not in state:
                raise tensors.refusal(f"tensor {name}.{_STATE}{found[0]} has no nested_blocksize")
            self._nested_block = state["nested_blocksize"]
            self._offset = float(state["nested_offset"])
            tensors.expect(f"{name}.nested_quant_map", [[256]], ("F32",))
            tensors.expect(f"{name}.nested_absmax", [[-(-blocks // self._nested_block)]], ("F32",))
        if len(self.shape) == 2 and self.shape[1] % self._block == 0:
            self.code_form = CodeForm(self._block, table=tuple(tensors.read(f"{name}.quant_map").tolist()))

    def _state(self, name: str) -> dict[str, Any]:
        try:
            state = json.loads(bytes(self._tensors.read(name).tolist()))
            fields = {key: state[key] for key in ("shape", "blocksize")}
            if "nested_blocksize" in state:
                fields |= {key: state[key] for key in ("nested_blocksize", "nested_offset")}
            sizes = [*fields["shape"], fields["blocksize"], fields.get("nested_blocksize", 1)]
            if not sizes[:-2] or not all(type(size) is int and 0 < size <= _LARGEST for size in sizes):
                raise ValueError(sizes)
            float(fields.get("nested_offset", 0))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise self._tensors.refusal(f"tensor {name} is not a description of a quantized weight") from None
        return fields

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`; of a weight that has a `code_form`."""
        width = self.shape[1]
        codes = self._codes(rows.start * width, rows.stop * width).view(-1, width)[:, columns]
        scales = self._largest().view(-1, width // self._block)[rows]
        groups = torch.arange(columns.start, columns.stop) // self._block
        return Coded(codes, scales, None, groups, self._tensors.read(f"{self._name}.quant_map"))

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        """See `StoredWeight.read`. A slice of columns is taken from all rows, since blocks run over rows."""
        rows, width = self.shape[0], math.prod(self.shape[1:])
        first, last = (start, end) if dim == 0 else (0, rows)
        values = self._flat(first * width, last * width).reshape(last - first, *self.shape[1:])
        return values if dim == 0 else values.narrow(dim, start, end - start)

    def _flat(self, first: int, last: int) -> torch.Tensor:
        blocks = torch.arange(first, last) // self._block
        table = self._tensors.read(f"{self._name}.quant_map")
        return table[self._codes(first, last).long()] * self._largest()[blocks]

    def _codes(self, first: int, last: int) -> torch.Tensor:
        """Those of the elements first..last, uint8."""
        stored = self._tensors.read(self._name).flatten()[first // 2 : -(-last // 2)]
        return unpack(stored, 4, 0).view(-1, 2).flip(1).flatten()[first % 2 :][: last - first]

    def _largest(self) -> torch.Tensor:
        stored = self._tensors.read(f"{self._name}.absmax")
        if not self._nested:
            return stored
        table = self._tensors.read(f"{self._name}.nested_quant_map")
        factors = self._tensors.read(f"{self._name}.nested_absmax")
        return table[stored.long()] * factors[torch.arange(len(stored)) // self._nested_block] + self._offset


class EightBitMatrix(CodedMatrix):
    """The int8 weight `stem`.weight."""

    code_form = CodeForm(None, per_127=True)

    def __init__(self, tensors: Tensors, stem: str) -> None:
        self._tensors, self._stem = tensors, stem
        self.shape = tensors.matrix(f"{stem}.weight", ("I8",))
        tensors.expect(f"{stem}.SCB", [[self.shape[0]]], ("F32", "F16", "BF16"))
        layout = f"{stem}.weight_format"
        if layout in tensors:
            tensors.expect(layout, [[], [1]], ("U8", "I32", "I64"))
        if layout in tensors and int(tensors.read(layout)) != _ROW_MAJOR:
            raise tensors.refusal(f"tensor {layout} names a layout other than row-major, which is not supported")

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`."""
        scales = self._tensors.numbers(f"{self._stem}.SCB", rows).unsqueeze(1)
        return Coded(self._tensors.read(f"{self._stem}.weight", rows, columns), scales)

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        """See `StoredWeight.read`. The library multiplies by 1 / 127 last."""
        return super().read(dim, start, end).mul_(_PER_127)
