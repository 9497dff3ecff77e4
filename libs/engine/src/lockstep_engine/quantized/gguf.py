"""Blocks of GGUF files (github.com/ggml-org/ggml), as `lockstep convert` keeps them.

    NAME_q4_k   uint8 [out, bytes of a row]   the rows of the weight NAME in the file's blocks, each of neighbouring
                                              inputs; the name ends in the type

The order of rows is that of the model, which for queries and keys is another one than the file's. A value is
code * scale, plus an offset for q4_1, q5_1, q4_k and q5_k, in float32. d and m are float16, s, t and z integers of 6,
6 and 8 bits.

| type | inputs of a block, of a group | scale | offset | codes |
| --- | --- | --- | --- | --- |
| q8_0 | 32, 32 | d | | -128 to 127 |
| q4_0, q5_0 | 32, 32 | d | | -8 to 7, -16 to 15 |
| q4_1, q5_1 | 32, 32 | d | m | 0 to 15, 0 to 31 |
| q4_k, q5_k | 256, 32 | d * s | -(m * t) | 0 to 15, 0 to 31 |
| q6_k | 256, 16 | d * z | | -32 to 31 |

Scales have at most 18 significant bits, and offsets 17; products of codes and scales have at most 23, so that they are
exact. Source: ggml, `dequantize_row_…` in ggml-quants.c; the package `gguf` computes the same values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lockstep_engine.quantized.coded import INTEGERS, Coded, CodedMatrix, CodeForm
from lockstep_engine.quantized.schemes import Gguf
from lockstep_engine.quantized.tensors import Tensors

_WIDENED = 2**24
"""Values that are computed at once."""
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [rows, blocks, inputs of a block], scales and offsets [rows, blocks, groups of a block]."""


@dataclass(frozen=True)
class BlockType:
    """A type of blocks."""

    inputs: int
    """Of a block."""
    nbytes: int
    """Of a block."""
    group: int
    """Inputs that share a scale."""
    bits: int
    """4: codes are 0 to 15, less `zero`; 8: they fit int8."""
    split: Callable[[torch.Tensor], _Parts]
    """The parts of blocks [rows, blocks, nbytes], uint8."""
    zero: int = 0
    offsets: bool = False

    def coded(self, blocks: torch.Tensor) -> Coded:
        """What rows of blocks hold.

        Args:
            blocks: uint8 [rows, bytes], whole blocks.
        """
        codes, scales, offsets = self.split(blocks.reshape(len(blocks), -1, self.nbytes))
        columns = codes.shape[1] * self.inputs
        return Coded(
            codes.flatten(1),
            scales.flatten(1),
            torch.full((1, 1), self.zero) if self.zero else None,
            torch.arange(columns) // self.group,
            offsets=None if offsets is None else offsets.flatten(1),
        )


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[..., 2:].view(torch.int8), _float16(blocks, 0), None


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return _halves(blocks[..., 2:]), _float16(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _halves(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> _Parts:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return codes.to(torch.int8) - 16, _float16(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> _Parts:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return codes.to(torch.int8), _float16(blocks, 0), _float16(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> _Parts:
    return _halves(_parts(blocks[..., 16:], 4)).flatten(-2), *_six_bits(blocks)


def _q5_k(blocks: torch.Tensor) -> _Parts:
    fifths = [blocks[..., 16:48] >> place & 1 for place in range(8)]
    codes = _halves(_parts(blocks[..., 48:], 4)).flatten(-2) | torch.cat(fifths, -1) << 4
    return codes.to(torch.int8), *_six_bits(blocks)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    lower, upper = _parts(blocks[..., :128], 2), _parts(blocks[..., 128:192], 2)
    pairs = torch.cat([upper >> place & 3 for place in (0, 2, 4, 6)], -1)
    codes = (_halves(lower) | pairs << 4).flatten(-2).to(torch.int8) - 32
    return codes, _float16(blocks, 208) * blocks[..., 192:208].view(torch.int8).float(), None


def _float16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The number at a byte of each block, [rows, blocks, 1], float32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _parts(stored: torch.Tensor, count: int) -> torch.Tensor:
    """[..., n] as [..., count, n / count]."""
    return stored.reshape(*stored.shape[:-1], count, -1)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """The lower four bits of all bytes [..., n], then the upper ones: [..., 2 n]."""
    return torch.cat([stored & 15, stored >> 4], -1)


def _bits(stored: torch.Tensor) -> torch.Tensor:
    """The bits of bytes [..., n], the lowest first: [..., 8 n]."""
    return torch.stack([stored >> place & 1 for place in range(8)], -1).flatten(-2)


def _six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of the eight groups of a block: integers of 6 bits in 12 bytes, from the fourth byte on."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return _float16(blocks, 0) * scales.float(), -(_float16(blocks, 2) * offsets.float())


TYPES: Mapping[str, BlockType] = {
    "q8_0": BlockType(32, 34, 32, 8, _q8_0),
    "q4_0": BlockType(32, 18, 32, 4, _q4_0, zero=8),
    "q4_1": BlockType(32, 20, 32, 4, _q4_1, offsets=True),
    "q5_0": BlockType(32, 22, 32, 8, _q5_0),
    "q5_1": BlockType(32, 24, 32, 8, _q5_1, offsets=True),
    "q4_k": BlockType(256, 144, 32, 4, _q4_k, offsets=True),
    "q5_k": BlockType(256, 176, 32, 8, _q5_k, offsets=True),
    "q6_k": BlockType(256, 210, 16, 8, _q6_k),
}
"""By GGUF's name in lower case; those of `schemes.GGUF_TYPES`."""


class BlockMatrix(CodedMatrix):
    """The weight `name` in blocks of the type `kind`, a key of `TYPES`."""

    def __init__(self, tensors: Tensors, name: str, kind: str) -> None:
        self._tensors, self._stored, self._type = tensors, stored_name(name, kind), TYPES[kind]
        rows, nbytes = tensors.matrix(self._stored, ("U8",))
        if nbytes % self._type.nbytes:
            shape = [rows, nbytes]
            raise tensors.refusal(
                f"tensor {self._stored} has shape {shape}, which is no whole blocks of {self._type.nbytes} bytes"
            )
        self.shape = (rows, nbytes // self._type.nbytes * self._type.inputs)
        table = INTEGERS if self._type.bits == 4 else None
        self.code_form = CodeForm(self._type.group, table=table, offsets=self._type.offsets)

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        """See `StoredWeight.read`. Some rows are widened at a time, as embeddings have many."""
        if dim != 0:
            return super().read(dim, start, end)
        width = self.shape[1]
        values, step = torch.empty(end - start, width), max(1, _WIDENED // width)
        for first in range(start, end, step):
            rows = slice(first, min(first + step, end))
            values[rows.start - start : rows.stop - start] = self.coded(rows, slice(0, width)).values()
        return values

    def coded(self, rows: slice, columns: slice) -> Coded:
        """See `CodedMatrix.coded`."""
        own = self._type
        first, last = columns.start // own.inputs, -(-columns.stop // own.inputs)
        whole = own.coded(self._tensors.read(self._stored, rows, slice(first * own.nbytes, last * own.nbytes)))
        inside = slice(columns.start - first * own.inputs, columns.stop - first * own.inputs)
        assert whole.groups is not None
        return Coded(whole.codes[:, inside], whole.scales, whole.zeros, whole.groups[inside], offsets=whole.offsets)


def stored_name(name: str, kind: str) -> str:
    """The tensor that has the blocks of a weight."""
    return f"{name}_{kind}"


def find_type(tensors: Tensors, name: str, layout: Gguf) -> str | None:
    """The type of the blocks in which a weight is stored; None: in none."""
    return next((kind for kind in layout.types if stored_name(name, kind) in tensors), None)
