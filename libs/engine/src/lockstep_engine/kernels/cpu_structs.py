"""The structures of the compiled CPU kernels (`cpu.c`), as ctypes passes them."""

import ctypes

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


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
        ("kind", _LONG),
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
        ("hot_blocks_before", _LONG),
        ("owners", _POINTER),
        ("positions", _POINTER),
        ("bias", _POINTER),
        ("sinks", _POINTER),
        ("bias_width", _LONG),
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
        ("positions", _POINTER),
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
        ("tiles", _POINTER),
        ("scales", _POINTER),
        ("offsets", _POINTER),
        ("table", _POINTER),
        ("sums", _POINTER),
        ("rows", _LONG),
        ("inputs", _LONG),
        ("outputs", _LONG),
        ("kind", _LONG),
        ("group", _LONG),
        ("parts", _LONG),
        ("sums_size", _LONG),
    )


class ProductCall(ctypes.Structure):
    """`struct product` of cpu.c."""

    _fields_ = (
        ("out", _POINTER),
        ("x", _POINTER),
        ("weight", _POINTER),
        ("batch", _LONG),
        ("rows", _LONG),
        ("inputs", _LONG),
        ("outputs", _LONG),
        ("batch_stride", _LONG),
        ("output_stride", _LONG),
        ("input_stride", _LONG),
        ("kind", _LONG),
    )


class PlainLayerCall(ctypes.Structure):
    """`struct plain_layer` of cpu.c."""

    _fields_ = (
        ("qkv", _POINTER),
        ("out", _POINTER),
        ("gate_up", _POINTER),
        ("down", _POINTER),
        ("rotation", _POINTER),
        ("first_norm", _POINTER),
        ("second_norm", _POINTER),
        ("number", _LONG),
        ("window", _LONG),
        ("first_eps", _FLOAT),
        ("second_eps", _FLOAT),
        ("scale", _FLOAT),
    )


class PlainStepCall(ctypes.Structure):
    """`struct plain_step` of cpu.c."""

    _fields_ = (
        ("x", _POINTER),
        ("result", _POINTER),
        ("normed", _POINTER),
        ("wide", _POINTER),
        ("inner", _POINTER),
        ("tiles", _POINTER),
        ("sums", _POINTER),
        ("delta", _POINTER),
        ("cosine", _POINTER),
        ("sine", _POINTER),
        ("positions", _POINTER),
        ("cells", _POINTER),
        ("attention", _POINTER),
        ("caches", _POINTER),
        ("scratch", _POINTER),
        ("rows", _LONG),
        ("hidden", _LONG),
        ("sums_size", _LONG),
        ("scratch_size", _LONG),
    )


class PlainEndsCall(ctypes.Structure):
    """`struct plain_ends` of cpu.c."""

    _fields_ = (
        ("embedding", _POINTER),
        ("ids", _POINTER),
        ("wanted", _POINTER),
        ("norm", _POINTER),
        ("head", _POINTER),
        ("last", _POINTER),
        ("logits", _POINTER),
        ("kind", _LONG),
        ("count", _LONG),
        ("eps", _FLOAT),
    )
