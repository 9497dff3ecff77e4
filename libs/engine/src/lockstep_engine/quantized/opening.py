"""Finds the stored form of a weight: the one place that knows which tensors belong to which format."""

from lockstep_engine.quantized.awq import AwqMatrix
from lockstep_engine.quantized.bitnet import TernaryMatrix
from lockstep_engine.quantized.bitsandbytes import EightBitMatrix, FourBitMatrix
from lockstep_engine.quantized.coded import StoredWeight
from lockstep_engine.quantized.gguf import BlockMatrix, find_type, stored_name
from lockstep_engine.quantized.gptq import GptqMatrix
from lockstep_engine.quantized.mxfp4 import Mxfp4Experts
from lockstep_engine.quantized.packed import PackedMatrix
from lockstep_engine.quantized.scaled import ScaledMatrix, block_of
from lockstep_engine.quantized.schemes import Awq, BitNet, BitsAndBytes, Compressed, Fp8, Gguf, Gptq, Layout, Mxfp4
from lockstep_engine.quantized.tensors import Tensors

_WEIGHT = ".weight"


def has_weight(tensors: Tensors, name: str, layout: Layout) -> bool:
    """Whether the checkpoint has a tensor, plain or quantized."""
    return name in tensors or _packed_name(tensors, name, layout) in tensors


def open_weight(tensors: Tensors, name: str, layout: Layout) -> StoredWeight | None:
    """A weight that is stored quantized; None: it is stored plain. Quantized ones are stored as [out, in], also those
    of layers that store their plain weights the other way round.

    Args:
        name: the name that it would have plain; the checkpoint has it (see `has_weight`).

    Raises:
        LockstepError: a tensor that belongs to it is missing, or has another shape or type than the format implies.
    """
    if _packed_name(tensors, name, layout) in tensors:
        return _packed(tensors, name, layout)
    if tensors.is_float(name):
        return None
    stem = name.removesuffix(_WEIGHT)
    if isinstance(layout, BitsAndBytes):
        return EightBitMatrix(tensors, stem) if layout.bits == 8 else FourBitMatrix(tensors, name)
    if isinstance(layout, BitNet):
        return TernaryMatrix(tensors, stem, layout)
    if isinstance(layout, Fp8):
        inverse = f"{name}_scale_inv"
        scale = inverse if layout.block or inverse in tensors else f"{name}_scale"
        return ScaledMatrix(tensors, name, scale, "F8_E4M3", block=layout.block, block_only=layout.block is not None)
    if isinstance(layout, Compressed):
        return _bytes(tensors, stem, layout)
    raise tensors.refusal(f"tensor {name} is of type {tensors.dtype(name)}, which its quantization does not explain")


def _packed_name(tensors: Tensors, name: str, layout: Layout) -> str:
    """The tensor that takes the place of the plain one, in formats that call it otherwise."""
    stem = name.removesuffix(_WEIGHT)
    if isinstance(layout, Mxfp4):
        return f"{name}_blocks"
    if name == stem:
        return ""
    if isinstance(layout, Gguf):
        kind = find_type(tensors, name, layout)
        return "" if kind is None else stored_name(name, kind)
    if isinstance(layout, Gptq | Awq):
        return f"{stem}.qweight"
    return f"{name}_packed" if isinstance(layout, Compressed) else ""


def _packed(tensors: Tensors, name: str, layout: Layout) -> StoredWeight:
    stem = name.removesuffix(_WEIGHT)
    if isinstance(layout, Gptq):
        return GptqMatrix(tensors, stem, layout)
    if isinstance(layout, Awq):
        return AwqMatrix(tensors, stem, layout)
    if isinstance(layout, Compressed):
        return PackedMatrix(tensors, stem, [each for each in layout.groups if each.format == "pack-quantized"])
    if isinstance(layout, Gguf) and (kind := find_type(tensors, name, layout)) is not None:
        return BlockMatrix(tensors, name, kind)
    return Mxfp4Experts(tensors, name)


def _bytes(tensors: Tensors, stem: str, layout: Compressed) -> StoredWeight:
    name = f"{stem}{_WEIGHT}"
    shape = tensors.matrix(name, ())
    dtype = tensors.dtype(name)
    kind = {"I8": "int", "F8_E4M3": "float"}.get(dtype)
    groups = [each for each in layout.groups if each.type == kind and each.format != "pack-quantized"]
    if not groups:
        raise tensors.refusal(f"tensor {name} is of type {dtype}, which no group of its quantization explains")
    zero, index = f"{name}_zero_point", f"{name}_g_idx"
    asymmetric = zero in tensors or not any(each.symmetric for each in groups)
    matrix = ScaledMatrix(
        tensors,
        name,
        f"{name}_scale",
        dtype,
        block=block_of(tensors, f"{name}_scale", shape, groups),
        zero=zero if asymmetric else None,
        group_index=index if index in tensors else None,
        integers=all(each.integers for each in groups),  # targets are not read: which of several it is stays unknown
    )
    if asymmetric:
        tensors.expect(zero, [tensors.shape(f"{name}_scale")], ("I8",))
    return matrix
