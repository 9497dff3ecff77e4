"""The compiled CPU kernels (`cpu.c`), called through ctypes. float32 only; where they were not built, `available` is False."""

import ctypes
import importlib.util

import torch

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class AttentionCall(ctypes.Structure):
    """`struct attention` of cpu.c."""

    _fields_ = (
        ("out", _POINTER),
        ("q", _POINTER),
        ("q_head_stride", _LONG),
        ("q_token_stride", _LONG),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("tables", _POINTER),
        ("width", _LONG),
        ("owners", _POINTER),
        ("positions", _POINTER),
        ("tokens", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("blocks", _LONG),
        ("dim", _LONG),
        ("window", _LONG),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
    )


def _load() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("lockstep_engine.kernels._cpu")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)  # after torch, whose OpenMP runtime it uses
    library.lockstep_attention.argtypes = (ctypes.POINTER(AttentionCall), _POINTER, _LONG, _INT)
    library.lockstep_attention.restype = None
    library.lockstep_store.argtypes = (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _INT, _LONG, _INT)
    library.lockstep_store.restype = None
    library.lockstep_rms_norm.argtypes = (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT)
    library.lockstep_rms_norm.restype = None
    return library


_library = _load()


def available(x: torch.Tensor) -> bool:
    """Whether the kernels can work on tensors like this one."""
    return _library is not None and x.dtype is torch.float32 and x.device.type == "cpu"


def attention(call: AttentionCall, scratch: torch.Tensor, threads: int) -> None:
    """Attention of one layer. scratch: [threads, longest context + 32] floats."""
    assert _library is not None
    _library.lockstep_attention(ctypes.byref(call), scratch.data_ptr(), scratch.shape[1], threads)


def store(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy x [kv heads, tokens, dim] into cache [kv heads, slots, dim] at `slots` [tokens]."""
    assert _library is not None
    heads, tokens, dim = x.shape
    head_stride, token_stride, _ = x.stride()
    _library.lockstep_store(
        cache.data_ptr(), x.data_ptr(), head_stride, token_stride, slots.data_ptr(), tokens, heads, cache.shape[1], dim
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width] divided by its root mean square, times weight [width]. x is contiguous."""
    assert _library is not None
    out = torch.empty_like(x)
    width = x.shape[-1]
    _library.lockstep_rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, eps)
    return out
