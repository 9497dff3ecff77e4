"""Reads `quantization_config` of config.json, without torch, so that a checkpoint that cannot be loaded is refused
before anything starts. The sentence names the field and its value.

The layouts are tagged structs because a model's description travels to the ranks as a message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

Refuse = Callable[[str], Exception]
"""Makes the error for a sentence about the model."""

_LARGEST = 2**31 - 1
_MAX_GROUPS = 1024

FLOAT_ACTIVATIONS = "activations computed in float"
"""Remark on a checkpoint whose scheme also quantizes activations, which the engine does not do."""
INTEGER_ACTIVATIONS = "activations in 8 bits where the CPU kernels compute in float32, otherwise in float"
"""Remark on a checkpoint whose scheme quantizes activations in the form that the CPU kernels have, too."""


class Gptq(msgspec.Struct, frozen=True, tag=True):
    """GPTQ's integers with a scale and a zero point for each group of inputs."""

    bits: int
    group_size: int
    """Inputs of a group; -1: all."""
    permuted: bool
    """The groups are those of `g_idx` (`desc_act`)."""
    zeros_minus_one: bool
    """The first version of the format stores zero points less one."""


class Awq(msgspec.Struct, frozen=True, tag=True):
    """AWQ's 4-bit integers in the layout of its GEMM kernel."""

    group_size: int


@dataclass(frozen=True)
class CompressedGroup:
    """One of the groups of compressed-tensors: how the weights of its targets are stored."""

    format: str
    bits: int
    type: str
    """int or float."""
    symmetric: bool
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: all columns do, of a row or of the tensor."""
    integers: bool = False
    """Activations are quantized like weights of 8 bits, each token's by its largest magnitude (W8A8, dynamic)."""


class Compressed(msgspec.Struct, frozen=True, tag=True):
    """compressed-tensors, the format of llm-compressor and vLLM."""

    groups: tuple[CompressedGroup, ...]


class Fp8(msgspec.Struct, frozen=True, tag=True):
    """e4m3 codes with one scale for a tensor, a row or a block."""

    block: tuple[int, int] | None


class BitsAndBytes(msgspec.Struct, frozen=True, tag=True):
    """bitsandbytes' nf4 and fp4, or its int8."""

    bits: int


class Mxfp4(msgspec.Struct, frozen=True, tag=True):
    """e2m1 codes, 32 of which share a power of two."""


class BitNet(msgspec.Struct, frozen=True, tag=True):
    """Ternary weights, four in a byte."""

    scale_divides: bool
    """The value is the code over `weight_scale` (`bitlinear`), otherwise times it (`autobitlinear`)."""


class Gguf(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a GGUF file, whose type is in the names of the tensors."""

    types: tuple[str, ...]
    """Those of `GGUF_TYPES` that the checkpoint has."""


GGUF_METHOD = "gguf-blocks"
"""`quant_method` of checkpoints that `lockstep convert` writes; transformers' own `gguf` means a GGUF file."""
GGUF_TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
"""Types of blocks that are read; see `gguf`."""

Layout = Gptq | Awq | Compressed | Fp8 | BitsAndBytes | Mxfp4 | BitNet | Gguf


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's weights are quantized."""

    method: str
    """`quant_method` as config.json has it."""
    layout: Layout
    remarks: tuple[str, ...] = ()
    """What the engine does differently from what the checkpoint was made for; for the log."""


def read_scheme(settings: Mapping[str, Any], model_type: str, refuse: Refuse) -> Scheme | None:
    """The scheme that a configuration names; None: the weights are not quantized.

    Args:
        settings: config.json.
        model_type: a key of `architectures.ARCHITECTURES`.
        refuse: makes the error of a sentence.

    Raises:
        The error that `refuse` makes: the method is unknown, or one of its settings is not supported.
    """
    given = settings.get("quantization_config") or settings.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise refuse(f"its weights are quantized ({given}), which is not supported: quantization_config is no object")
    method = str(given.get("quant_method"))
    reader = _READERS.get(method)
    if reader is None:
        raise refuse(f"its weights are quantized ({method}), which is not supported; supported: {', '.join(_READERS)}")
    if method == "mxfp4" and model_type != "gpt_oss":
        raise refuse("its weights are quantized (mxfp4), which is supported for gpt_oss only")
    fields = _Fields(given, method, refuse)
    remarks: list[str] = []
    layout = reader(fields, remarks)
    return Scheme(method, layout, tuple(dict.fromkeys(remarks)))


class _Fields:
    """Fields of `quantization_config`, with an error that names the field."""

    def __init__(self, values: Mapping[str, Any], path: str, refuse: Refuse) -> None:
        self._values = values
        self._path = path
        self._refuse = refuse

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def refusal(self, name: str, wanted: str) -> Exception:
        value = self._values.get(name)
        return self._refuse(f"quantization_config ({self._path}): {name} {value} is not supported; supported: {wanted}")

    def entries(self, name: str, most: int) -> Mapping[str, Any]:
        value = self.get(name, {})
        self.inner(name, value)
        if len(value) > most:
            raise self._refuse(f"quantization_config ({self._path}): {name} has {len(value)} entries; at most {most}")
        entries: Mapping[str, Any] = value
        return entries

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self.get(name, default)
        if not any(type(value) is type(each) and value == each for each in allowed):  # 4.0 is no number of bits
            raise self.refusal(name, ", ".join(map(str, allowed)))
        return value

    def group_size(self, name: str = "group_size") -> int:
        value = self.get(name, -1)
        if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and not 0 < value <= _LARGEST):
            raise self.refusal(name, f"-1, or 1 to {_LARGEST}")
        return value

    def pair(self, name: str) -> tuple[int, int]:
        value = self.get(name)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(each) is int and 0 < each <= _LARGEST for each in value)
        ):
            raise self.refusal(name, f"two numbers of 1 to {_LARGEST}")
        return value[0], value[1]

    def inner(self, name: str, value: Any) -> "_Fields":
        if not isinstance(value, dict):
            raise self._refuse(f"quantization_config ({self._path}): {name} is not an object")
        return _Fields(value, f"{self._path}, {name}", self._refuse)


def _gptq(fields: _Fields, _: list[str]) -> Gptq:
    if fields.get("dynamic"):
        raise fields.refusal("dynamic", "none (one width of bits for all modules)")
    form = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    permuted = bool(fields.get("desc_act", False))
    return Gptq(fields.one_of("bits", (2, 4, 8)), fields.group_size(), permuted, form == "gptq")


def _awq(fields: _Fields, _: list[str]) -> Awq:
    fields.one_of("bits", (4,))
    fields.one_of("zero_point", (True,), default=True)
    if str(fields.get("version", fields.get("format", "gemm"))).lower() != "gemm":
        raise fields.refusal("version", "gemm")
    return Awq(fields.group_size())


_PACKED, _INT, _FLOAT, _NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
_MIXED = "mixed-precision"


def _compressed(fields: _Fields, remarks: list[str]) -> Compressed:
    formats = (_PACKED, _INT, _FLOAT, _NAIVE)
    overall = fields.one_of("format", (*formats, _MIXED, "dense"), _MIXED)
    if fields.inner("sparsity_config", fields.get("sparsity_config", {})).get("format", "dense") != "dense":
        raise fields.refusal("sparsity_config", "none, or the format dense")
    if fields.get("transform_config"):
        raise fields.refusal("transform_config", "none")
    if fields.get("kv_cache_scheme"):
        remarks.append("its scheme for the KV cache is not used")
    given = fields.entries("config_groups", _MAX_GROUPS)
    config_groups = fields.inner("config_groups", given)
    groups = []
    for name, value in given.items():
        group = config_groups.inner(name, value)
        if group.get("weights") is None:
            continue  # quantizes activations only
        weights = group.inner("weights", group.get("weights"))
        form = overall if group.get("format") is None else group.one_of("format", formats)
        kind = weights.one_of("type", ("int", "float"), "int")
        widths = (8,) if form != _PACKED else (2, 4, 8)
        bits = weights.one_of("num_bits", widths, 8)
        strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), "tensor")
        block = None
        if strategy == "group" and (size := weights.group_size()) != -1:
            block = (1, size)
        elif strategy == "block":
            block = weights.pair("block_structure")
        if form == _PACKED and kind == "float":
            raise weights.refusal("type", f"int, in the format {_PACKED}")
        symmetric = bool(weights.get("symmetric", True))
        integers = kind == "int" and form != _PACKED and symmetric and block is None and _quantizes_tokens(group)
        groups.append(CompressedGroup(form, bits, kind, symmetric, block, integers))
        remarks += _activation_remarks(group, integers=integers)
    return Compressed(tuple(groups))


def _activation_remarks(group: _Fields, *, integers: bool) -> list[str]:
    if integers:
        return [INTEGER_ACTIVATIONS]
    is_quantized = group.get("input_activations") or group.get("output_activations")
    return [FLOAT_ACTIVATIONS] if is_quantized else []


def _quantizes_tokens(group: _Fields) -> bool:
    """Whether a group's inputs are quantized to signed integers of 8 bits by token when they come, and its outputs are
    not.
    """
    if not group.get("input_activations") or group.get("output_activations"):
        return False
    inputs = group.inner("input_activations", group.get("input_activations"))
    given = {name: inputs.get(name) for name in ("num_bits", "strategy", "dynamic")}
    is_integer, is_symmetric = inputs.get("type", "int") == "int", inputs.get("symmetric", True) is True
    return given == {"num_bits": 8, "strategy": "token", "dynamic": True} and is_integer and is_symmetric


def _fp8(fields: _Fields, remarks: list[str]) -> Fp8:
    remarks.append(FLOAT_ACTIVATIONS)
    if str(fields.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise fields.refusal("fmt", "e4m3")
    return Fp8(None if fields.get("weight_block_size") is None else fields.pair("weight_block_size"))


def _bitsandbytes(fields: _Fields, remarks: list[str]) -> BitsAndBytes:
    if fields.get("load_in_4bit", False) or fields.get("_load_in_4bit", False):
        fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        fields.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
        return BitsAndBytes(4)
    if fields.get("load_in_8bit", False) or fields.get("_load_in_8bit", False):
        remarks.append(FLOAT_ACTIVATIONS)
        return BitsAndBytes(8)
    raise fields.refusal("load_in_4bit", "true, or load_in_8bit true")


def _mxfp4(_fields: _Fields, _remarks: list[str]) -> Mxfp4:
    return Mxfp4()


def _bitnet(fields: _Fields, remarks: list[str]) -> BitNet:
    linear = fields.one_of("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    fields.one_of("quantization_mode", ("offline",), "offline")
    fields.one_of("use_rms_norm", (False,), default=False)
    remarks.append(FLOAT_ACTIVATIONS)
    return BitNet(linear == "bitlinear")


def _gguf(fields: _Fields, _remarks: list[str]) -> Gguf:
    types = fields.get("types")
    if not isinstance(types, list) or not types or not all(each in GGUF_TYPES for each in types):
        raise fields.refusal("types", f"a list of {', '.join(GGUF_TYPES)}")
    return Gguf(tuple(types))


_READERS: Mapping[str, Callable[[_Fields, list[str]], Layout]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "bitnet": _bitnet,
    GGUF_METHOD: _gguf,
}
