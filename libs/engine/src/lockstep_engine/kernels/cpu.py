"""The compiled CPU kernels (`cpu.c`), called through ctypes. They compute in float32 and read weights and caches of 16
bits, and weights of 8-bit integers and of 4-bit codes, too. Where they were not built, `available` is False.

The environment variable LOCKSTEP_CPU_KERNELS selects a build instead of the best one for the machine: avx512vnni,
avx512, avx2 or plain; off: none. avx512vnni is avx512 with faster products of integers.
"""

import ctypes
import enum
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine import huge_pages
from lockstep_engine.kernels.cpu_structs import (
    AttentionCall,
    LayerCall,
    LinearCall,
    PlainEndsCall,
    PlainLayerCall,
    PlainStepCall,
    ProductCall,
)
from lockstep_engine.quantized.coded import pack

_VERSION = 18
_PANEL = 32
_MAX_PANELS, _MAX_ROWS = 4, 12
"""Most panels that a product takes together in any build, and most rows for which it takes several."""
BUILDS = ("avx512vnni", "avx512", "avx2", "plain")
"""Widest vector registers first; `plain` uses none. All builds give the same bits."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum kind` of cpu.c."""
_PAIRS = 4
"""Its kind of a packed bfloat16 weight."""
_INT8, _INT8_PER_127, _INT8_OFFSETS, _FOUR_BITS, _FOUR_BITS_OFFSETS, _INTEGERS = range(5, 11)
"""Its kinds of a packed weight of codes."""
_BYTES_IN_WORD = 4
"""`BYTES_IN_WORD` of cpu.c: integers that are multiplied and added together."""
_MOST_INTEGERS = 2**17
"""Most products of two integers of 8 bits whose sum surely fits 32 bits: each is at most 127 * 128."""
WIDEN = 3
"""`WIDEN` of cpu.c."""
OWN_TILES = 16384
"""`OWN_TILES` of cpu.c: floats of room for each thread of a step."""
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Function(enum.IntEnum):
    """`enum function` of cpu.c: what `apply` computes of each element."""

    SIGMOID = 0
    SILU = 1
    TANH = 2
    GELU = 3
    GELU_TANH = 4
    COSINE = 5
    SINE = 6


def _load() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("lockstep_engine.kernels._cpu")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)  # after torch, whose OpenMP runtime it uses
    if ctypes.c_int.in_dll(library, "lockstep_cpu_version").value != _VERSION:
        return None
    layer = ctypes.POINTER(LayerCall)
    signatures: dict[str, tuple[Any, ...]] = {
        "attention": (ctypes.POINTER(AttentionCall), layer, _POINTER, _LONG, _INT),
        "compress": (layer, _POINTER, _LONG, _INT),
        "store": (layer, _POINTER, _POINTER, *[_LONG] * 4, _POINTER, _LONG),
        "places": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, *[_POINTER] * 4),
        "add_rms_norm": (*[_POINTER] * 4, _LONG, _LONG, _FLOAT),
        "layer_norm": (*[_POINTER] * 4, _LONG, _LONG, _FLOAT),
        "softmax": (_POINTER, _POINTER, _LONG, _LONG),
        "sum": (_POINTER, _POINTER, _LONG, _LONG),
        "largest": (*[_POINTER] * 3, _LONG, _LONG, _INT),
        "map": (_POINTER, _POINTER, _LONG, _INT, _INT),
        "linear": (ctypes.POINTER(LinearCall), _INT),
        "product": (ctypes.POINTER(ProductCall), _POINTER, _INT),
        "plain": (
            ctypes.POINTER(PlainLayerCall),
            _LONG,
            _LONG,
            ctypes.POINTER(PlainStepCall),
            ctypes.POINTER(PlainEndsCall),
            _INT,
        ),
    }
    for name, types in signatures.items():
        function = getattr(library, f"lockstep_{name}")
        function.argtypes, function.restype = types, None
    library.lockstep_places.restype = _LONG
    library.lockstep_choose.argtypes = (ctypes.c_char_p,)
    return library


_built = _load()
_library = _built
build: str | None = None
"""The build in use, one of `BUILDS`; None: torch computes instead."""


def use(name: str) -> None:
    """Use a build from now on.

    Args:
        name: one of `BUILDS`, "auto" for the first of them that this CPU has, "off" for none.

    Raises:
        ValueError: there is no such build, or this machine does not have it.
    """
    global _library, build  # noqa: PLW0603 - there is one library in a process
    if name == "off" or (name == "auto" and _built is None):
        _library = build = None
        return
    for candidate in BUILDS if name == "auto" else (name,):
        if _built is not None and _built.lockstep_choose(candidate.encode()):
            _library, build = _built, candidate
            return
    raise ValueError(f"LOCKSTEP_CPU_KERNELS={name}: this machine has no such build; auto, off or one of {BUILDS}")


use(os.environ.get("LOCKSTEP_CPU_KERNELS") or "auto")


def available(x: torch.Tensor) -> bool:
    """Whether the kernels can work on tensors like this one: on the CPU, of 32 or 16 bits."""
    return _library is not None and x.is_cpu and x.dtype in _KINDS


def attention_scratch(width: int, dim: int, *, widens: bool) -> int:
    """Floats that a thread needs for scores over tables of `width` blocks, and for keys and values that it widens:
    those in cold blocks, where a sequence has `WIDEN` tokens or more in the step.
    """
    return width * 16 * (1 + (2 * dim if widens else 0)) + 32


def kind(dtype: torch.dtype) -> int:
    """The kernels' number for a dtype (`enum kind` of cpu.c)."""
    return _KINDS[dtype]


def attention(call: AttentionCall, layer: LayerCall, scratch: torch.Tensor, threads: int) -> None:
    """Compute the attention of one layer. scratch: [threads, `attention_scratch`] floats."""
    assert _library is not None
    _library.lockstep_attention(ctypes.byref(call), ctypes.byref(layer), scratch.data_ptr(), scratch.shape[1], threads)


def compress(layer: LayerCall, moves: NDArray[np.int32], threads: int) -> None:
    """Make cold blocks of hot ones: moves [n, 2], a hot block and the cold one."""
    assert _library is not None
    _library.lockstep_compress(ctypes.byref(layer), moves.ctypes.data, len(moves), threads)


def store(layer: LayerCall, keys: torch.Tensor, values: torch.Tensor, cells: torch.Tensor) -> None:
    """Put keys and values [kv heads, tokens, dim], in the cache's dtype, into a layer's cache (see `KvCache`) at
    `cells` [tokens].
    """
    assert _library is not None
    _library.lockstep_store(
        ctypes.byref(layer),
        keys.data_ptr(),
        values.data_ptr(),
        *keys.stride()[:2],
        *values.stride()[:2],
        cells.data_ptr(),
        len(cells),
    )


class Places:
    """Where the tokens of a step are, and of later steps whose sequences have as many tokens each.

    Args:
        lengths: [sequences], int32: tokens of each sequence in a step.
        width: blocks of a sequence in the tables.

    Attributes:
        tables: [sequences, width], int32: those of the last step.
        owners: [tokens], int32: each token's sequence.
        positions, cells: [tokens], int64.
        entered: [tokens], int64: the first of them are the blocks that the last step enters.
    """

    def __init__(self, lengths: NDArray[np.int32], width: int) -> None:
        sequences, tokens = len(lengths), int(lengths.sum())
        self._lengths = np.array(lengths, np.int32)
        self._starts = np.empty(sequences, np.int32)
        self.tables = np.empty((sequences, width), np.int32)
        self.owners = np.empty(tokens, np.int32)
        self.positions, self.cells, self.entered = torch.empty(3, tokens, dtype=torch.int64).unbind()
        self._arguments = (
            address(self._starts),
            address(self._lengths),
            sequences,
            address(self.tables),
            width,
            address(self.owners),
            self.positions.data_ptr(),
            self.cells.data_ptr(),
            self.entered.data_ptr(),
        )

    def find(self, starts: NDArray[np.int32], tables: NDArray[np.int32]) -> int:
        """Find the tokens of a step; tables [sequences, width] with the ids of hot blocks.

        Returns:
            How many blocks it enters.

        Raises:
            IndexError: a position has no place in its table.
        """
        assert _library is not None
        self._starts[:] = starts
        self.tables[:] = tables
        count: int = _library.lockstep_places(*self._arguments)
        if count < 0:
            raise IndexError("a position has no block in its table")
        return count


def address(array: NDArray[np.generic]) -> int:
    """That of an array's first element; `array.ctypes` takes longer."""
    start: int = array.__array_interface__["data"][0]
    return start


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add delta to x [..., width] in place, then divide x by its root mean square and multiply by weight [width]. All
    contiguous, float32.
    """
    assert _library is not None
    out = torch.empty_like(x)
    width = weight.shape[0]
    _library.lockstep_add_rms_norm(
        out.data_ptr(),
        x.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        x.numel() // width,
        width,
        eps,
    )
    return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / standard deviation * weight + bias over the last dimension. All contiguous, float32."""
    assert _library is not None
    out, width = torch.empty_like(x), x.shape[-1]
    parameters = [None if each is None else each.data_ptr() for each in (weight, bias)]
    _library.lockstep_layer_norm(out.data_ptr(), x.data_ptr(), *parameters, x.numel() // max(width, 1), width, eps)
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of x, contiguous, float32."""
    assert _library is not None
    out, width = torch.empty_like(x), x.shape[-1]
    _library.lockstep_softmax(out.data_ptr(), x.data_ptr(), x.numel() // max(width, 1), width)
    return out


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension of x, contiguous, float32."""
    assert _library is not None
    out, width = torch.empty(x.shape[:-1]), x.shape[-1]
    _library.lockstep_sum(out.data_ptr(), x.data_ptr(), out.numel(), width)
    return out


def apply(function: Function, x: torch.Tensor) -> torch.Tensor:
    """Apply a function to each element of x, contiguous, float32."""
    assert _library is not None
    out = torch.empty_like(x)
    _library.lockstep_map(out.data_ptr(), x.data_ptr(), x.numel(), function, torch.get_num_threads())
    return out


def largest(x: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first place of each row's largest number, as `argmax` has it, and the same with -1 where the number is not
    finite; both [rows]. x [rows, width], contiguous, float32.
    """
    assert _library is not None
    rows, width = x.shape
    found = torch.empty(2, rows, dtype=torch.int64)
    at = found.data_ptr()
    _library.lockstep_largest(at, at + 8 * rows, x.data_ptr(), rows, width, torch.get_num_threads())
    ids, usable = found.numpy()
    return ids, usable


def plain(
    layers: ctypes.Array[PlainLayerCall],
    first: int,
    end: int,
    step: PlainStepCall,
    threads: int,
    ends: PlainEndsCall | None = None,
) -> None:
    """Compute halves of plain layers, from number `first` to before `end`: 2 i is the attention of layer i, 2 i + 1 its
    gated products. With `ends` they are all layers of a model, which is computed from ids to logits.
    """
    assert _library is not None
    _library.lockstep_plain(layers, first, end, step, ends, threads)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[batch, rows, in] times [batch, in, out] -> [batch, rows, out] in float32.

    Args:
        x: contiguous, float32.
        weight: 32 or 16 bits; its rows or its columns are adjacent.
    """
    assert _library is not None
    batch, rows, inputs = x.shape
    out = torch.empty(batch, rows, weight.shape[2])
    threads = torch.get_num_threads()
    scratch = torch.empty(threads, inputs * _PANEL)
    batch_stride, input_stride, output_stride = weight.stride()
    call = ProductCall(
        out=out.data_ptr(),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        batch=batch,
        rows=rows,
        inputs=inputs,
        outputs=weight.shape[2],
        batch_stride=batch_stride,
        input_stride=input_stride,
        output_stride=output_stride,
        kind=_KINDS[weight.dtype],
    )
    _library.lockstep_product(call, scratch.data_ptr(), threads)
    return out


@dataclass(frozen=True)
class Codes:
    """How the codes of a weight [out, in] become values: a value is the code times the scale of its group, rounded to
    float32.
    """

    scales: torch.Tensor
    """[out, groups], float32."""
    group: int
    """Neighbouring inputs that share a scale; the last group may have fewer."""
    per_127: bool = False
    """Values are multiplied by 1 / 127 after that."""
    table: torch.Tensor | None = None
    """[16], float32: the numbers that codes of four bits stand for, in place of the codes. `IN_WORD` divides the group
    and the inputs of each part."""
    offsets: torch.Tensor | None = None
    """Shaped like `scales`, float32. A value is the code's number times the scale plus the offset, rounded once to
    float32. It comes without `per_127` and `integers`."""
    integers: bool = False
    """Inputs are quantized to 8 bits, too: see `takes_integers`. Only with int8 codes and one group."""


def takes_integers(inputs: int) -> bool:
    """Whether the products of so many inputs, those of a part, can be computed in integers.

    Then each row of x [rows, in] becomes integers: of a part of its inputs, the nearest ones to x * (127 / largest
    magnitude), of two equally near ones the even one. A part of a result is the exact sum of their products with the
    codes, rounded to float32, times the float32 product of (largest magnitude / 127) and the scale of the codes. The
    form is that of vLLM (csrc/quantization/w8a8/int8/scaled_quant.cu, dynamic_scaled_int8_quant_kernel), where all
    inputs are one part. If all magnitudes of a part are below 2^-100, it counts as 0; if one is not finite, results
    are not either.
    """
    return inputs % _BYTES_IN_WORD == 0 and inputs <= _MOST_INTEGERS


class PackedLinear:
    """x @ weight.T + bias, with the weight in the kernel's layout. A row's result does not depend on the other rows.

    Args:
        weight: [out, in], 32 or 16 bits, int8 codes, or uint8 codes of four bits. Sums are float32 and rounded to the
            dtype of `x` at the end.
        bias: [out] or None.
        codes: how codes become values; None: they are none.
        parts: the input features have so many equal parts, a power of two. Each is summed for itself, and the parts'
            sums are added in a balanced tree of neighbours, then the bias.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, codes: Codes | None = None, parts: int = 1
    ) -> None:
        self.out_features, inputs = weight.shape
        assert inputs % parts == 0
        assert (weight.dtype in (torch.int8, torch.uint8)) == (codes is not None)
        if codes is not None and codes.integers:
            assert takes_integers(inputs // parts)
            assert weight.dtype is torch.int8
            assert codes.scales.shape[1] == 1
            weight_words = _byte_words(weight)
        else:
            weight_words = weight if codes is None or codes.table is None else pack(weight)
        self._panels = _panels(weight_words)
        self._bias = None if bias is None else bias.float().contiguous()
        self._threads = torch.get_num_threads()
        self._scales = self._offsets = self._table = None
        if codes is not None:
            assert codes.scales.shape == (len(weight), -(-inputs // codes.group))
            self._scales = _panels(codes.scales)
            self._offsets = None if codes.offsets is None else _panels(codes.offsets)
            self._table = None if codes.table is None else codes.table.contiguous()
        self._call = LinearCall(
            panels=self._panels.data_ptr(),
            scales=_address(self._scales),
            offsets=_address(self._offsets),
            table=_address(self._table),
            bias=_address(self._bias),
            inputs=inputs,
            outputs=self.out_features,
            kind=_packed_kind(weight.dtype, codes),
            group=0 if codes is None else codes.group,
            parts=parts,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, with scales and offsets, as it is read by every product."""
        return sum(each.nbytes for each in (self._panels, self._scales, self._offsets) if each is not None)

    @property
    def call(self) -> LinearCall:
        """The weight, as the kernels know it."""
        return self._call

    def sums_size(self, rows: int) -> int:
        """Floats that a thread needs for the sums of parts."""
        panels = _MAX_PANELS if rows <= _MAX_ROWS else 1
        return (int(self._call.parts) - 1) * rows * panels * _PANEL

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = self.wide(x)
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in float32."""
        assert _library is not None
        x = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.out_features)
        call = self._call
        call.out, call.x, call.rows = out.data_ptr(), x.data_ptr(), x.numel() // call.inputs
        tiles = torch.empty(x.numel()) if call.rows > 1 or call.kind == _INTEGERS else None
        call.tiles = None if tiles is None else tiles.data_ptr()
        if call.parts > 1:
            call.sums_size = self.sums_size(call.rows)
            sums = torch.empty(self._threads * call.sums_size)
            call.sums = sums.data_ptr()
        _library.lockstep_linear(call, self._threads)
        return out


def _packed_kind(dtype: torch.dtype, codes: Codes | None) -> int:
    if codes is not None:
        if codes.table is not None:
            return _FOUR_BITS if codes.offsets is None else _FOUR_BITS_OFFSETS
        if codes.integers:
            return _INTEGERS
        if codes.offsets is not None:
            return _INT8_OFFSETS
        return _INT8_PER_127 if codes.per_127 else _INT8
    return _PAIRS if dtype is torch.bfloat16 else _KINDS[dtype]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _byte_words(codes: torch.Tensor) -> torch.Tensor:
    """Integers of eight bits [out, in], each plus 128, as int32 [out, in / _BYTES_IN_WORD], the first in the lowest
    bits.
    """
    return codes.contiguous().view(torch.uint8).bitwise_xor(128).view(torch.int32)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] in the layout of `struct linear`, padded with zeros: [panels, in, features of a panel]. No
    other copy of it is made.
    """
    outputs, inputs = weight.shape
    panels = huge_pages.empty((-(-outputs // _PANEL), inputs, _PANEL), weight.dtype)
    halves = 2 if weight.dtype is torch.bfloat16 else 1
    full, rest = divmod(outputs, _PANEL)
    _fill(panels[:full], weight[: outputs - rest], halves)
    if rest:
        last = weight.new_zeros(_PANEL, inputs)
        last[:rest] = weight[outputs - rest :]
        _fill(panels[full:], last, halves)
    return panels


def _fill(panels: torch.Tensor, weight: torch.Tensor, halves: int) -> None:
    """Feature i of the first half of a panel is followed by feature i of the second, if there are halves."""
    count, inputs, _ = panels.shape
    features = weight.view(count, halves, _PANEL // halves, inputs).permute(0, 3, 2, 1)
    panels.view(count, inputs, _PANEL // halves, halves).copy_(features)
