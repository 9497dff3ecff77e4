"""A head that a checkpoint stores in codes: its logits are those of the head's values, with the same bits in any step.
On the CPU its codes stay in memory.
"""

import json

import packers
import pytest
import torch
from checkpoints import VOCABULARY, make
from in_process import InProcessGroup
from lockstep_common.errors import LockstepError
from lockstep_engine import Engine, EngineConfig, Request, SamplingParams
from lockstep_engine.fused_layer import FusedDecoder
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import VocabEmbedding, VocabHead
from lockstep_engine.model_config import inspect_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

HEAD, TABLE = "lm_head", "model.embed_tokens"
IDS = torch.randint(2, VOCABULARY, (40,), generator=torch.Generator().manual_seed(4)).tolist()
W8 = packers.compressed_config("int-quantized")
PACKED8 = packers.compressed_config("pack-quantized")
W4 = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=32)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "lm_head": True}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}

needs_kernels = pytest.mark.skipif(not cpu.build, reason="the kernels were not built")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rows(out, inside, seed=0):
    return packers.scaled(out, inside, shape=(out, 1), seed=seed)


def packed_rows(out, inside, seed=0):
    return packers.packed(out, inside, bits=8, group=inside, seed=seed)


def with_zeros(out, inside, seed=0):
    return packers.packed(out, inside, zeros="packed", seed=seed)


def blocks(out, inside, seed=0):
    return packers.scaled(out, inside, codes="fp8", block=(32, 32), suffix="scale_inv", dtype="f4", seed=seed)


FORMATS = {
    "int8": (W8, rows, 8),
    "int8 packed": (PACKED8, packed_rows, 8),
    "int4": (W4, packers.packed, 4),
    "int4 with zero points": (W4, with_zeros, 4),
    "gptq": (GPTQ, packers.gptq, 4),
    "bitsandbytes int8": (INT8, packers.int8_rows, 8),
    "nf4": (NF4, packers.nf4, 4),
    "fp8": (BLOCKS, blocks, None),
}
"""A configuration, how a matrix is packed, and the bits of a code in memory (None: it is widened)."""


def twin(path, folder, form, module=HEAD, **settings):
    """Copies of a checkpoint in which one module is quantized and has the same values in float; the rest is float."""
    config, pack, _ = FORMATS[form]
    tensors = load_file(path / "model.safetensors")
    own = tensors.pop(f"{module}.weight", tensors[f"{TABLE}.weight"])
    coded, values = pack(*own.shape, seed=5)
    settings = json.loads((path / "config.json").read_text()) | settings
    made = []
    for kind, content, more in (
        ("coded", {f"{module}.{part}": each for part, each in coded.items()}, {"quantization_config": config}),
        ("plain", {f"{module}.weight": values.contiguous()}, {}),
    ):
        made.append(folder / kind)
        made[-1].mkdir(parents=True)
        save_file(tensors | content, made[-1] / "model.safetensors")
        (made[-1] / "config.json").write_text(json.dumps(settings | more))
    return made


def parts(group, kind):
    return [next(each for each in model.module.modules() if isinstance(each, kind)) for model in group.models]


def logits(group):
    """Of a prompt in two chunks, then of single tokens."""
    given = [group.logits(IDS[:23], 0), group.logits(IDS[23:35], 23)]
    return torch.cat([*given, *(group.logits([IDS[at]], at) for at in range(35, 40))])


@pytest.mark.bits
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_are_those_of_the_heads_values(tmp_path, form, tp):
    coded, plain = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, form)
    group = InProcessGroup(coded, tp)
    bits = {head.code_form.bits if head.code_form else None for head in parts(group, VocabHead)}
    assert bits == {FORMATS[form][2] if cpu.build else None}
    assert torch.equal(logits(group), logits(InProcessGroup(plain, tp)))


@pytest.mark.bits
@pytest.mark.parametrize("name", ["gemma2", "cohere"])  # both tied in config.json; soft caps, scaled logits
def test_a_head_of_its_own_is_used_beside_an_embedding_that_stays(tmp_path, name):
    """As `lockstep quantize` writes a tied model, and if the configuration still says that it is tied."""
    path = make(name, tmp_path / "made")[0]
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    for tied in (False, True):
        coded, plain = twin(path, tmp_path / str(tied), "int8", tie_word_embeddings=tied)
        for tp in (1, 2):
            group = InProcessGroup(coded, tp)
            assert torch.equal(logits(group), logits(InProcessGroup(plain, tp)))
            assert {bool(head.code_form) for head in parts(group, VocabHead)} == {bool(cpu.build)}


@pytest.mark.bits
@pytest.mark.parametrize("tp", [1, 2])
def test_a_head_that_is_a_quantized_embedding_has_its_codes(tmp_path, tp):
    path = make("llama-grouped-untied", tmp_path / "made")[0]
    tensors = load_file(path / "model.safetensors")
    del tensors[f"{HEAD}.weight"]
    save_file(tensors, path / "model.safetensors")
    coded, plain = twin(path, tmp_path, "int8", TABLE, tie_word_embeddings=True)
    group = InProcessGroup(coded, tp)
    for head, embedding in zip(parts(group, VocabHead), parts(group, VocabEmbedding), strict=True):
        assert bool(head.code_form) == bool(cpu.build)
        assert embedding.weight.dtype is torch.float32
        assert embedding.weight.shape == (-(-VOCABULARY // tp), 64)
    assert torch.equal(logits(group), logits(InProcessGroup(plain, tp)))


@pytest.mark.bits
@pytest.mark.parametrize("form", ["int8", "int4 with zero points"])
@pytest.mark.parametrize("tp", [1, 2])
def test_neighbours_and_chunks_do_not_matter(tmp_path, threads, form, tp):
    coded, plain = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, form)
    for count in (1, 2):
        threads(count)
        numerics = InProcessGroup(coded, tp).measure()
        assert numerics.deterministic
        assert numerics.fingerprint == InProcessGroup(plain, tp).measure().fingerprint


def test_without_the_kernels_a_head_is_widened(tmp_path, without_kernels):
    coded, plain = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, "int8")
    group = InProcessGroup(coded, 2)
    assert {(head.code_form, head.weight.dtype) for head in parts(group, VocabHead)} == {(None, torch.float32)}
    assert torch.equal(logits(group), logits(InProcessGroup(plain, 2)))


@needs_kernels
def test_a_plain_model_reads_the_codes_in_its_one_call(tmp_path):
    coded, plain = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, "int8")
    group = InProcessGroup(coded, 1)
    model, (head,) = group.models[0], parts(group, VocabHead)
    assert isinstance(model.decoder, FusedDecoder)
    assert head.packed.nbytes == -(-VOCABULARY // 32) * 32 * (64 + 4)  # whole panels of codes, and a scale a row
    assert head.weight.numel() == 0
    assert torch.equal(group.logits(IDS, 0), InProcessGroup(plain, 1).logits(IDS, 0))


@needs_kernels
def test_rows_beyond_the_vocabulary_need_no_zero_points_of_their_own(tmp_path):
    """Padding of the last rank; offsets would be read by every product."""
    coded, _ = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, "int4")
    sizes = [head.packed.nbytes for head in parts(InProcessGroup(coded, 4), VocabHead)]
    assert len(set(sizes)) == 1


def test_damaged_scales_of_a_head_are_refused(tmp_path):
    coded, _ = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, "int8")
    tensors = load_file(coded / "model.safetensors")
    tensors[f"{HEAD}.weight_scale"][7] = torch.inf
    save_file(tensors, coded / "model.safetensors")
    with pytest.raises(LockstepError, match=r"lm_head.weight has values that are no finite numbers"):
        InProcessGroup(coded, 1)


def test_a_head_of_another_size_is_refused(tmp_path):
    coded, _ = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, "int8")
    tensors = load_file(coded / "model.safetensors")
    for part in ("weight", "weight_scale"):
        tensors[f"{HEAD}.{part}"] = tensors[f"{HEAD}.{part}"][:-1].contiguous()
    save_file(tensors, coded / "model.safetensors")
    with pytest.raises(LockstepError, match=r"lm_head.weight has shape \[330, 64\], config.json implies \[331, 64\]"):
        InProcessGroup(coded, 1)


def test_a_checkpoint_with_a_quantized_head_is_another_model(tmp_path):
    coded, plain = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, "int8")
    ours, theirs = (inspect_model(EngineConfig(model=str(path))) for path in (coded, plain))
    assert ours.digest != theirs.digest


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_stream_resumed_beside_others_equals_the_unbroken_one(tmp_path, tp):
    coded, _ = twin(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, "int8")
    words = {str(token): token for token in range(VOCABULARY)}
    Tokenizer(WordLevel(words, "0")).save(str(coded / "tokenizer.json"))
    params = SamplingParams(max_tokens=32, temperature=0.9, seed=3, ignore_eos=True)
    with Engine(coded, tp=tp, threads=1, kv_memory_bytes=2**20) as engine:
        whole = engine.generate_ids([IDS], params)[0]
        others = [Request(f"r{k}", tuple(IDS), params, emitted_ids=tuple(whole[:k])) for k in range(1, 32)]
        for k, outputs in enumerate(engine.run(others), 1):
            assert [id_ for output in outputs for id_ in output.ids] == whole[k:]
