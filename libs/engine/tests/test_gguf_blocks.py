"""Blocks of GGUF files: the values of each type are those of the package `gguf`, bit for bit, and a model of blocks has
the logits of the model of these values.
"""

import json
import shutil
from functools import partial

import gguf
import packers
import pytest
import torch
from in_process import InProcessGroup
from lockstep_common.errors import LockstepError
from lockstep_engine.gpu_codes import coded_weights
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import ColumnLinear, RowLinear, VocabHead
from lockstep_engine.model_config import refuse
from lockstep_engine.quantized import read_scheme
from lockstep_engine.quantized.coded import INTEGERS, CodeForm, shared_form
from lockstep_engine.quantized.gguf import TYPES
from lockstep_engine.quantized.opening import has_weight, open_weight
from lockstep_engine.quantized.schemes import GGUF_TYPES
from lockstep_engine.quantized.tensors import Tensors
from safetensors.torch import load_file, save_file
from test_gpu_codes import Part, loaded, values
from transformers import AutoModelForCausalLM, LlamaConfig

CONFIG = {"quant_method": "gguf-blocks", "types": list(GGUF_TYPES)}
IDS = [(7 * index) % 331 for index in range(30)]
Q4_K_M = {"v_proj": "q6_k", "down_proj": "q6_k", "": "q4_k"}
Q5_K_M = {"v_proj": "q6_k", "down_proj": "q6_k", "": "q5_k"}
MIXTURES = {"Q4_K_M": Q4_K_M, "Q5_K_M": Q5_K_M} | {kind: {"": kind} for kind in GGUF_TYPES}
"""The type of a matrix, by a part of its name."""


def opened(folder, tensors, config=CONFIG):
    save_file({f"layer.{name}": each for name, each in tensors.items()}, folder / "m.safetensors")
    layout = read_scheme({"quantization_config": config}, "llama", refuse).layout
    stored = Tensors(folder, ["m.safetensors"])
    assert has_weight(stored, "layer.weight", layout)
    return open_weight(stored, "layer.weight", layout)


def same_bits(one, other):
    """Also of zeros, which have signs."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("kind", GGUF_TYPES)
@pytest.mark.parametrize(
    "floats",
    [None, [6.0e-8, -6.0e-8, 65504.0, -65504.0, 0.0, -0.0, 1 / 3, 1.0]],
    ids=["usual", "extremes"],  # the least and the largest float16
)
def test_values_are_those_of_the_package(tmp_path, kind, floats):
    tensors, expected = packers.gguf_blocks(kind, 40, 1024, floats=floats)
    weight = opened(tmp_path, tensors)
    assert tuple(weight.shape) == (40, 1024)
    assert same_bits(weight.read(0, 0, 40), expected)
    assert same_bits(weight.read(0, 7, 9), expected[7:9])
    for start, end in ((0, 1024), (32, 64), (224, 800), (5, 300)):
        assert same_bits(weight.read(1, start, end), expected[:, start:end].contiguous())


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_products_of_codes_and_scales_are_exact(kind):
    """So that it does not matter to bits whether one is rounded before an offset is added."""
    tensors, _ = packers.gguf_blocks(kind, 8, 512, floats=[1 / 3, 6.0e-8, 65504.0])
    coded = TYPES[kind].coded(tensors[f"weight_{kind}"])
    numbers = coded.codes.double() - (0 if coded.zeros is None else coded.zeros)
    exact = numbers * coded.scales[:, coded.groups].double()
    assert torch.equal(exact.float().double(), exact)
    assert coded.codes.unique().numel() == min(256, {"q4": 16, "q5": 32, "q6": 64, "q8": 256}[kind[:2]])


def test_the_readers_know_the_types_that_configurations_may_name():
    assert tuple(TYPES) == GGUF_TYPES
    for kind, type_ in TYPES.items():
        assert (type_.inputs, type_.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]


def test_blocks_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(LockstepError, match=r"layer.weight_q4_k has shape \[8, 287\], which is no whole blocks of 144"):
        opened(tmp_path, {"weight_q4_k": torch.zeros(8, 287, dtype=torch.uint8)})


def test_blocks_of_another_type_are_refused(tmp_path):
    with pytest.raises(LockstepError, match=r"layer.weight_q8_0 is of type F32"):
        opened(tmp_path, {"weight_q8_0": torch.zeros(8, 34)})


@pytest.mark.parametrize("types", [None, [], "q8_0", ["q8_0", "iq2_xs"], [["q8_0"]]])
def test_unknown_types_are_refused_by_the_field(types):
    with pytest.raises(LockstepError, match=r"\(gguf-blocks\): types .* is not supported; supported: a list of q8_0"):
        read_scheme({"quantization_config": CONFIG | {"types": types}}, "llama", refuse)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of rows that are whole blocks for two ranks: of blocks, and of their values in float32."""
    folder = tmp_path_factory.mktemp("made")
    shape = {"vocab_size": 331, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder / "given")
    done = {}

    def make(name, *, tied=False):
        if (name, tied) not in done:
            done[name, tied] = write(folder / "given", folder / f"{name}-{tied}", MIXTURES[name], tied=tied)
        return done[name, tied]

    return make


def write(given, folder, mixture, *, tied):
    coded, plain = {}, {}
    for seed, (name, value) in enumerate(load_file(given / "model.safetensors").items()):
        if value.dim() == 1 or (not tied and "embed" in name):
            coded[name] = plain[name] = value
        elif not tied or "lm_head" not in name:
            kind = next(kind for part, kind in mixture.items() if part in name)
            blocks, plain[name] = packers.gguf_blocks(kind, *value.shape, seed=seed)
            coded |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in blocks.items()}
    settings = json.loads((given / "config.json").read_text()) | {"tie_word_embeddings": tied}
    for kind, tensors, more in (("coded", coded, {"quantization_config": CONFIG}), ("plain", plain, {})):
        shutil.copytree(given, folder / kind, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(settings | more))
    return folder / "coded", folder / "plain"


def logits(path, tp, **more):
    group = InProcessGroup(path, tp, **more)
    return torch.cat([group.logits(IDS[:20], 0), *(group.logits([IDS[at]], at) for at in range(20, 30))]), group


def forms(model):
    kinds = ColumnLinear | RowLinear | VocabHead
    return {
        (form.bits, form.group, form.offsets) if (form := each.code_form) else None
        for each in model.modules()
        if isinstance(each, kinds)
    }


KEPT = {
    "Q4_K_M": {(4, 32, True), (8, 16, True), (8, 16, False)},  # q k v in 8 bits, with offsets
    "Q5_K_M": {(8, 32, True), (8, 16, True), (8, 16, False)},
    **{kind: {(TYPES[kind].bits, TYPES[kind].group, TYPES[kind].offsets)} for kind in GGUF_TYPES},
}


@pytest.mark.bits
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_those_of_the_values(made, name):
    coded, plain = made(name)
    for tp in (1, 2):
        ours, group = logits(coded, tp)
        assert torch.equal(ours, logits(plain, tp)[0])
        if cpu.build:
            assert forms(group.models[0].module) == KEPT[name]


@pytest.mark.bits
@pytest.mark.parametrize("name", ["q8_0", "Q4_K_M"])
def test_a_head_that_is_the_embedding_keeps_codes(made, name):
    coded, plain = made(name, tied=True)
    ours, group = logits(coded, 1)
    assert torch.equal(ours, logits(plain, 1)[0])
    head = next(each for each in group.models[0].module.modules() if isinstance(each, VocabHead))
    assert (head.code_form is not None) == bool(cpu.build)


@pytest.mark.bits
def test_virtual_shards_may_begin_inside_a_block(made):
    coded, plain = made("Q4_K_M")
    assert torch.equal(logits(coded, 1, shards=4)[0], logits(plain, 1, shards=4)[0])


def test_damaged_scales_are_refused_by_the_tensors_name(made, tmp_path):
    coded, _ = made("q4_k")
    folder = shutil.copytree(coded, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    blocks = tensors["model.layers.0.mlp.up_proj.weight_q4_k"]
    blocks[3, 2:4] = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LockstepError, match=r"mlp.up_proj.weight has values that are no finite numbers"):
        InProcessGroup(folder, 1)


@pytest.mark.parametrize("name", ["Q4_K_M", "q4_0", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("without_kernels")
def test_each_rank_of_a_gpu_keeps_its_part(made, name, dtype):
    coded, plain = made(name)
    for group in (Part(0, 1), Part(0, 2), Part(1, 2)):
        kept, wide = (loaded(path, group=group, dtype=dtype)[0] for path in (coded, plain))
        assert forms(kept.module) == KEPT[name]
        assert len(coded_weights(kept.module)) == 5
        for ours, theirs in zip(*(find(each, ColumnLinear | RowLinear) for each in (kept, wide)), strict=True):
            assert torch.equal(values(ours).to(dtype), theirs.weight)


def find(model, kinds):
    return [each for each in model.module.modules() if isinstance(each, kinds)]


def test_other_formats_share_the_form_of_8_bits_too(tmp_path):
    """Groups of two sizes and zero points in one merged projection."""
    four = partial(CodeForm, table=INTEGERS)
    assert shared_form([four(128), CodeForm(96)]) == CodeForm(32)
    assert shared_form([four(32, offsets=True), CodeForm(16)]) == CodeForm(16, offsets=True)
    nf4 = CodeForm(64, table=tuple(map(float, range(1, 17))))
    for others in (
        [CodeForm(None)],
        [CodeForm(24)],
        [nf4],
        [CodeForm(64, per_127=True)],
        [CodeForm(64, integers=True)],
    ):
        assert shared_form([CodeForm(64), *others]) is None
