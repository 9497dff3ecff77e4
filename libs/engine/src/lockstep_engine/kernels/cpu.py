"""The compiled CPU kernels (`cpu.c`), called through ctypes. float32 only; where they were not built, `available` is
False.
"""

import ctypes
import importlib.util

import numpy as np
import torch
from numpy.typing import NDArray

_VERSION = 6
_PANEL = 32
WIDEN = 3
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class LayerCall(ctypes.Structure):
    """`struct layer` of cpu.c."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("cold_keys", _POINTER),
        ("cold_values", _POINTER),
        ("key_scales", _POINTER),
        ("value_scales", _POINTER),
        ("kv_heads", _LONG),
        ("blocks", _LONG),
        ("cold_blocks", _LONG),
        ("dim", _LONG),
    )


class AttentionCall(ctypes.Structure):
    """`struct attention` of cpu.c."""

    _fields_ = (
        ("out", _POINTER),
        ("q", _POINTER),
        ("q_head_stride", _LONG),
        ("q_token_stride", _LONG),
        ("tables", _POINTER),
        ("hot_tables", _POINTER),
        ("moves", _POINTER),
        ("width", _LONG),
        ("move_count", _LONG),
        ("first_cold", _LONG),
        ("sink", _LONG),
        ("hot_window", _LONG),
        ("owners", _POINTER),
        ("positions", _POINTER),
        ("tokens", _LONG),
        ("heads", _LONG),
        ("window", _LONG),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
    )


class RopeCall(ctypes.Structure):
    """`struct rope` of cpu.c."""

    _fields_ = (
        ("qkv", _POINTER),
        ("cosine", _POINTER),
        ("sine", _POINTER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("tokens", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("dim", _LONG),
        ("eps", _FLOAT),
    )


class LinearCall(ctypes.Structure):
    """`struct linear` of cpu.c."""

    _fields_ = (
        ("out", _POINTER),
        ("x", _POINTER),
        ("panels", _POINTER),
        ("bias", _POINTER),
        ("rows", _LONG),
        ("inputs", _LONG),
        ("outputs", _LONG),
    )


def _load() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("lockstep_engine.kernels._cpu")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)  # after torch, whose OpenMP runtime it uses
    if ctypes.c_int.in_dll(library, "lockstep_cpu_version").value != _VERSION:
        return None
    layer = ctypes.POINTER(LayerCall)
    library.lockstep_attention.argtypes = (ctypes.POINTER(AttentionCall), layer, _POINTER, _LONG, _INT)
    library.lockstep_attention.restype = None
    library.lockstep_compress.argtypes = (layer, _POINTER, _LONG, _INT)
    library.lockstep_compress.restype = None
    library.lockstep_store.argtypes = (layer, _POINTER, _POINTER, *[_LONG] * 4, _POINTER, _LONG)
    library.lockstep_store.restype = None
    library.lockstep_add_rms_norm.argtypes = (*[_POINTER] * 4, _LONG, _LONG, _FLOAT)
    library.lockstep_add_rms_norm.restype = None
    library.lockstep_silu_mul.argtypes = (_POINTER, _POINTER, _LONG, _LONG)
    library.lockstep_silu_mul.restype = None
    library.lockstep_rope.argtypes = (ctypes.POINTER(RopeCall),)
    library.lockstep_rope.restype = None
    library.lockstep_linear.argtypes = (ctypes.POINTER(LinearCall), _INT)
    library.lockstep_linear.restype = None
    library.lockstep_rotated_attention.argtypes = (
        ctypes.POINTER(RopeCall),
        ctypes.POINTER(AttentionCall),
        layer,
        _POINTER,
        _POINTER,
        _LONG,
        _INT,
    )
    library.lockstep_rotated_attention.restype = None
    return library


_library = _load()


def available(x: torch.Tensor) -> bool:
    """Whether the kernels can work on tensors like this one."""
    return _library is not None and x.dtype is torch.float32 and x.is_cpu


def usable(head_dim: int) -> bool:
    """Whether the attention kernel was built and takes heads of this width: whole vectors, at most 16 of them."""
    return _library is not None and head_dim % 16 == 0 and head_dim <= 256


def attention_scratch(width: int, dim: int, *, widens: bool) -> int:
    """Floats that a thread needs for scores over tables of `width` blocks, and for keys and values that it widens:
    those in cold blocks, where a sequence has `WIDEN` tokens or more in the step.
    """
    return width * 16 * (1 + (2 * dim if widens else 0)) + 32


def attention(call: AttentionCall, layer: LayerCall, scratch: torch.Tensor, threads: int) -> None:
    """Attention of one layer. scratch: [threads, `attention_scratch`] floats."""
    assert _library is not None
    _library.lockstep_attention(ctypes.byref(call), ctypes.byref(layer), scratch.data_ptr(), scratch.shape[1], threads)


def compress(layer: LayerCall, moves: NDArray[np.int32], threads: int) -> None:
    """Make cold blocks of hot ones: moves [n, 2], a hot block and the cold one."""
    assert _library is not None
    _library.lockstep_compress(ctypes.byref(layer), moves.ctypes.data, len(moves), threads)


def store(layer: LayerCall, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys and values [kv heads, tokens, dim] into a layer's cache (see `KvCache`) at `slots` [tokens]."""
    assert _library is not None
    _library.lockstep_store(
        ctypes.byref(layer),
        keys.data_ptr(),
        values.data_ptr(),
        *keys.stride()[:2],
        *values.stride()[:2],
        slots.data_ptr(),
        len(slots),
    )


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """X += delta in place, then x [..., width] divided by its root mean square, times weight [width]. All
    contiguous.
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


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * inner] -> silu(first half) * second half, [rows, inner]."""
    assert _library is not None
    rows, width = gate_up.shape
    out = torch.empty(rows, width // 2)
    _library.lockstep_silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, width // 2)
    return out


def rope(call: RopeCall) -> None:
    """Normalize (if norms are given) and rotate queries and keys in place."""
    assert _library is not None
    _library.lockstep_rope(ctypes.byref(call))


def rotated_attention(
    rotation: RopeCall,
    call: AttentionCall,
    layer: LayerCall,
    slots: torch.Tensor,
    scratch: torch.Tensor,
    threads: int,
) -> None:
    """`rope`, `store` and `attention` of a layer in one call, from merged projections."""
    assert _library is not None
    _library.lockstep_rotated_attention(
        rotation, call, layer, slots.data_ptr(), scratch.data_ptr(), scratch.shape[1], threads
    )


class PackedLinear:
    """x @ weight.T + bias with the weight laid out for the kernel. A row's result does not depend on the other rows.

    Args:
        weight: [out, in], float32.
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -self.out_features % _PANEL))
        self._panels = padded.view(-1, _PANEL, inputs).transpose(1, 2).contiguous()
        self._bias = bias
        self._threads = torch.get_num_threads()
        self._call = LinearCall(
            panels=self._panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inputs=inputs,
            outputs=self.out_features,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        assert _library is not None
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], self.out_features)
        call = self._call
        call.out, call.x, call.rows = out.data_ptr(), x.data_ptr(), x.numel() // call.inputs
        _library.lockstep_linear(call, self._threads)
        return out
