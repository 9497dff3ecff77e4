"""Each format's values equal those of an independent packer, whole and in the slices of tensor-parallel ranks."""

import json
from itertools import pairwise

import packers
import pytest
import torch
from handmade import CONFIG
from lockstep_common.errors import LockstepError
from lockstep_engine.model_config import refuse
from lockstep_engine.quantized import read_scheme
from lockstep_engine.quantized.opening import has_weight, open_weight
from lockstep_engine.quantized.tensors import Tensors
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT, IN = 48, 96
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [32, 40]}
BITNET = {"quant_method": "bitnet"}
ct = packers.compressed_config
W4 = ct("pack-quantized", bits=4, strategy="group", group_size=32)
W4_UNEVEN = ct("pack-quantized", bits=4, strategy="group", group_size=40)
W4_ZEROS = ct("pack-quantized", bits=4, strategy="group", group_size=32, symmetric=False)
W8_PACKED = ct("pack-quantized", bits=8)

CASES = {
    "gptq": (GPTQ, packers.gptq(OUT, IN)),
    "gptq, order of activations": (GPTQ | {"desc_act": True}, packers.gptq(OUT, IN, permuted=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, packers.gptq(OUT, IN, version=2)),
    "gptq, 2 bits": (GPTQ | {"bits": 2}, packers.gptq(OUT, IN, bits=2)),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, packers.gptq(OUT, IN, bits=8)),
    "gptq, one group": (GPTQ | {"group_size": -1}, packers.gptq(OUT, IN, group=IN)),
    "gptq, last group short": (GPTQ | {"group_size": 40}, packers.gptq(OUT, IN, group=40)),
    "awq": (AWQ, packers.awq(OUT, IN)),
    "pack-quantized": (W4, packers.packed(OUT, IN)),
    "pack-quantized, last group and word short": (W4_UNEVEN, packers.packed(OUT, 90, group=40)),
    "pack-quantized, packed zeros": (W4_ZEROS, packers.packed(OUT, IN, zeros="packed")),
    "pack-quantized, plain zeros": (W4_ZEROS, packers.packed(OUT, IN, zeros="plain")),
    "pack-quantized, order of activations": (W4, packers.packed(OUT, IN, permuted=True)),
    "pack-quantized, 8 bits": (W8_PACKED, packers.packed(OUT, IN, bits=8, group=IN)),
    "int-quantized": (ct("int-quantized"), packers.scaled(OUT, IN, shape=(OUT, 1))),
    "int-quantized, one scale": (ct("int-quantized", strategy="tensor"), packers.scaled(OUT, IN, shape=(1,))),
    "int-quantized, zeros": (ct("int-quantized", symmetric=False), packers.scaled(OUT, IN, shape=(OUT, 1), zeros=True)),
    "naive-quantized": (
        ct("naive-quantized", strategy="group", group_size=32),
        packers.scaled(OUT, IN, block=(1, 32)),
    ),
    "float-quantized": (ct("float-quantized", kind="float"), packers.scaled(OUT, IN, codes="fp8", shape=(OUT, 1))),
    "float-quantized, blocks": (
        ct("float-quantized", kind="float", strategy="block", block_structure=[32, 40]),
        packers.scaled(OUT, IN, codes="fp8", block=(32, 40)),
    ),
    "fp8, one scale": (FP8, packers.scaled(OUT, IN, codes="fp8", shape=())),
    "fp8, rows": (FP8 | {"quant_method": "fbgemm_fp8"}, packers.scaled(OUT, IN, codes="fp8", shape=(OUT, 1))),
    "fp8, blocks": (
        BLOCKS,
        packers.scaled(OUT, IN, codes="fp8", block=(32, 40), suffix="scale_inv", dtype="f4"),
    ),
    "nf4": (BNB4, packers.nf4(OUT, IN, nested=False)),
    "nf4, nested": (BNB4, packers.nf4(OUT, IN)),
    "nf4, odd rows": (BNB4, packers.nf4(5, 13)),
    "int8 with SCB": (BNB8, packers.int8_rows(OUT, IN)),
    "bitnet": (BITNET, packers.ternary(OUT, IN)),
    "bitnet, autobitlinear": (BITNET | {"linear_class": "autobitlinear"}, packers.ternary(OUT, IN, divides=False)),
}


def opened(folder, config, tensors, name="layer.weight", model_type="llama"):
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "w.safetensors")
    scheme = read_scheme(CONFIG | {"quantization_config": config}, model_type, refuse)
    stored = Tensors(folder, ["w.safetensors"])
    assert has_weight(stored, name, scheme.layout)
    return open_weight(stored, name, scheme.layout)


def layer(tensors):
    return {f"layer.{name}": each for name, each in tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_that_were_packed(tmp_path, name):
    config, (tensors, values) = CASES[name]
    weight = opened(tmp_path, config, layer(tensors))
    assert tuple(weight.shape) == values.shape
    for dim in (0, 1):
        size = values.shape[dim]
        assert torch.equal(weight.read(dim, 0, size), values)
        cuts = [0, size // 2, size]  # the slices of two ranks
        parts = [weight.read(dim, start, end) for start, end in pairwise(cuts)]
        assert torch.equal(torch.cat(parts, dim), values)
        assert torch.equal(weight.read(dim, 3, 5), values.narrow(dim, 3, 2))  # within a word, a group, a byte


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_experts_in_mxfp4_are_those_that_were_packed(tmp_path, dim):
    blocks, scales, values = packers.mxfp4(4, OUT, IN)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    weight = opened(tmp_path, {"quant_method": "mxfp4"}, tensors, "experts.down_proj", "gpt_oss")
    assert torch.equal(weight.read(dim, 0, values.shape[dim]), values)
    assert torch.equal(weight.read(dim, 1, 3), values.narrow(dim, 1, 2))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs, values)


def test_bytes_of_ternary_weights_are_those_of_transformers(tmp_path):
    from transformers.integrations.bitnet import pack_weights  # noqa: PLC0415 - slow: loads torch's compiler

    tensors, values = packers.ternary(OUT, IN)
    codes = (values * 11).round()
    assert torch.equal(pack_weights(codes.clone()), tensors["weight"])


def test_a_weight_that_is_not_quantized_is_left_alone(tmp_path):
    for config in (GPTQ, W4, FP8, BNB4, BITNET):
        assert opened(tmp_path, config, {"layer.weight": torch.ones(4, 4)}) is None


def state(**fields):
    """bitsandbytes' description of a weight, as a tensor."""
    fields = {"shape": [OUT, IN], "blocksize": 64} | fields
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGED = {
    "gptq without scales": (GPTQ, packers.gptq, "scales", None, "no tensor layer.scales"),
    "gptq with fewer groups": (GPTQ, packers.gptq, "scales", torch.ones(2, OUT), r"layer.scales has shape \[2, 48\]"),
    "gptq whose order names no group": (
        GPTQ,
        packers.gptq,
        "g_idx",
        torch.full((IN,), 3, dtype=torch.int32),
        "layer.g_idx names a group beyond the 3",
    ),
    "gptq in a changed order without one": (
        GPTQ | {"desc_act": True},
        packers.gptq,
        "g_idx",
        None,
        "no tensor layer.g_idx",
    ),
    "awq without zeros": (AWQ, packers.awq, "qzeros", None, "no tensor layer.qzeros"),
    "awq in float": (AWQ, packers.awq, "qzeros", torch.ones(3, 6), "layer.qzeros is of type F32"),
    "packed without scales": (W4, packers.packed, "weight_scale", None, "no tensor layer.weight_scale"),
    "packed in other groups": (W4, packers.packed, "weight_scale", torch.ones(OUT, 5), "weight_scale has shape"),
    "packed without a shape": (W4, packers.packed, "weight_shape", None, "no tensor layer.weight_shape"),
    "packed in other bits": (
        ct("pack-quantized", bits=2, strategy="group", group_size=32),
        packers.packed,
        "",
        None,
        "holds no weight of .48, 96. in 2 bits",
    ),
    "packed without zeros": (W4_ZEROS, packers.packed, "", None, "no tensor layer.weight_zero_point"),
    "nf4 without its state": (
        BNB4,
        packers.nf4,
        "weight.quant_state.bitsandbytes__nf4",
        None,
        "quant_state.bitsandbytes__nf4, which",
    ),
    "nf4 with a broken state": (
        BNB4,
        packers.nf4,
        "weight.quant_state.bitsandbytes__nf4",
        torch.zeros(3, dtype=torch.uint8),
        "is not a description",
    ),
    "nf4 in blocks of 0": (BNB4, packers.nf4, NF4_STATE, state(blocksize=0), "is not a description"),
    "nf4 in blocks of -64": (BNB4, packers.nf4, NF4_STATE, state(blocksize=-64), "is not a description"),
    "nf4 in blocks of 64.0": (BNB4, packers.nf4, NF4_STATE, state(blocksize=64.0), "is not a description"),
    "nf4 of a shape in words": (BNB4, packers.nf4, NF4_STATE, state(shape=["48", "x"]), "is not a description"),
    "nf4 of no shape": (BNB4, packers.nf4, NF4_STATE, state(shape=7), "is not a description"),
    "nf4 whose state is deep": (
        BNB4,
        packers.nf4,
        NF4_STATE,
        torch.full((200_000,), ord("["), dtype=torch.uint8),
        "is not a description",
    ),
    "nf4 with nested blocks of 0": (
        BNB4,
        packers.nf4,
        NF4_STATE,
        state(nested_blocksize=0, nested_offset=0.1),
        "is not a description",
    ),
    "nf4 with nested scales and no size of their blocks": (
        BNB4,
        packers.nf4,
        NF4_STATE,
        state(),
        "has no nested_blocksize",
    ),
    "int8 whose layout is empty": (
        BNB8,
        packers.int8_rows,
        "weight_format",
        torch.zeros(0, dtype=torch.uint8),
        "layer.weight_format has shape",
    ),
    "packed with int32 zeros that are not packed": (
        W4_ZEROS,
        packers.packed,
        "weight_zero_point",
        torch.zeros(OUT, 3, dtype=torch.int32),
        r"weight_zero_point has shape \[48, 3\], its quantization implies \[6, 3\]",
    ),
    "packed with int8 zeros for some outputs": (
        W4_ZEROS,
        packers.packed,
        "weight_zero_point",
        torch.zeros(OUT // 8, 3, dtype=torch.int8),
        "weight_zero_point has shape",
    ),
    "bytes of no shape": (
        ct("int-quantized"),
        packers.int8_rows,
        "weight",
        torch.tensor(1, dtype=torch.int8),
        "layer.weight has shape",
    ),
    "nf4 without nested scales": (BNB4, packers.nf4, "weight.nested_absmax", None, "no tensor layer.weight.nested_abs"),
    "int8 without scales": (BNB8, packers.int8_rows, "SCB", None, "no tensor layer.SCB"),
    "int8 in another layout": (
        BNB8,
        packers.int8_rows,
        "weight_format",
        torch.tensor(1, dtype=torch.uint8),
        "other than row-major",
    ),
    "ternary without a scale": (BITNET, packers.ternary, "weight_scale", None, "no tensor layer.weight_scale"),
    "another type of codes": (GPTQ, packers.int8_rows, "SCB", None, "is of type I8"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_refused_by_the_tensors_name(tmp_path, name):
    config, pack, part, other, words = DAMAGED[name]
    tensors = pack(OUT, IN)[0]
    if other is not None:
        tensors[part] = other
    else:
        tensors.pop(part, None)
    with pytest.raises(LockstepError, match=words):
        opened(tmp_path, config, layer(tensors))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "aqlm"}, r"quantized \(aqlm\), which is not supported; supported: gptq, awq"),
        ("int4", r"quantized \(int4\)"),
        (GPTQ | {"bits": 3}, r"\(gptq\): bits 3 is not supported; supported: 2, 4, 8"),
        (GPTQ | {"bits": 4.0}, r"bits 4\.0"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (AWQ | {"group_size": 10**30}, "group_size 10{30} is not supported; supported: -1, or 1 to"),
        (FP8 | {"weight_block_size": [128, 10**30]}, "weight_block_size"),
        (
            W4 | {"config_groups": {str(n): W4["config_groups"]["group_0"] for n in range(1025)}},
            "1025 entries; at most",
        ),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "version gemv"),
        (AWQ | {"bits": 8}, "bits 8"),
        (ct("marlin-24"), "format marlin-24"),
        (ct("int-quantized", bits=4), r"config_groups, group_0, weights\): num_bits 4"),
        (ct("float-quantized", kind="float", strategy="tensor_group"), "strategy tensor_group"),
        (W4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (W4 | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (W4 | {"config_groups": {"group_0": 3}}, "group_0 is not an object"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"fmt": "e5m2"}, "fmt e5m2"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        (BNB4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage bfloat16"),
        (BITNET | {"quantization_mode": "online"}, "quantization_mode online"),
        ({"quant_method": "mxfp4"}, "mxfp4.*gpt_oss only"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(config, words):
    with pytest.raises(LockstepError, match=words):
        read_scheme({"quantization_config": config}, "llama", refuse)


def test_a_bias_in_codes_is_refused(tmp_path):
    for config in (ct("int-quantized"), BNB8, BITNET, FP8, GPTQ):
        with pytest.raises(LockstepError, match=r"layer\.bias"):
            opened(tmp_path, config, {"layer.bias": torch.ones(4, dtype=torch.int8)}, "layer.bias")


def test_activations_that_the_engine_does_not_quantize_are_remarked():
    dynamic = ct("int-quantized")
    dynamic["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    for config, expected in ((dynamic, True), (FP8, True), (BNB8, True), (W4, False), (BNB4, False)):
        scheme = read_scheme({"quantization_config": config}, "llama", refuse)
        assert ("activations computed in float" in scheme.remarks) == expected
