"""A quantized checkpoint computes what the plain checkpoint of the same values computes, on one rank and on two."""

import json
import shutil

import packers
import pytest
import torch
from checkpoints import VOCABULARY, make
from in_process import InProcessGroup
from lockstep_common.errors import LockstepError
from lockstep_engine import Engine, EngineConfig, SamplingParams
from lockstep_engine.model_config import inspect_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

IDS = torch.randint(2, VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist()
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
W4 = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=32)
W8 = packers.compressed_config("int-quantized")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def permuted(out, inside, seed):
    return packers.gptq(out, inside, permuted=True, seed=seed)


def blocks(out, inside, seed):
    return packers.scaled(out, inside, codes="fp8", block=(32, 32), suffix="scale_inv", dtype="f4", seed=seed)


def rows(out, inside, seed):
    return packers.scaled(out, inside, shape=(out, 1), seed=seed)


@pytest.mark.parametrize(
    ("name", "config", "pack"),
    [
        ("llama", GPTQ, permuted),  # dense, q k v merged
        ("llama", NF4, packers.nf4),
        ("phi3", AWQ, packers.awq),  # fused qkv, packed MLP
        ("falcon-new", W8, rows),  # interleaved qkv
        ("qwen3_moe", W4, packers.packed),  # experts, one tensor each
        ("deepseek_v2", BLOCKS, blocks),  # latent attention and experts
        ("llama-odd-heads", INT8, packers.int8_rows),
        ("llama", {"quant_method": "bitnet"}, packers.ternary),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_are_those_of_the_plain_values(tmp_path, name, config, pack):
    coded, plain = packers.quantized_twin(make(name, tmp_path / "made")[0], tmp_path, config, pack)
    expected = InProcessGroup(plain, 1).logits(IDS, 0)
    assert torch.equal(InProcessGroup(coded, 1).logits(IDS, 0), expected)
    halves = InProcessGroup(plain, 2).logits(IDS, 0)
    assert torch.equal(InProcessGroup(coded, 2).logits(IDS, 0), halves)


def test_experts_of_gpt_oss_are_read_in_mxfp4(tmp_path):
    path, _ = make("gpt_oss", tmp_path)
    tensors = load_file(path / "model.safetensors")
    plain, coded = dict(tensors), dict(tensors)
    for seed, name in enumerate(
        each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ):
        experts, inside, out = tensors[name].shape
        block, scale, values = packers.mxfp4(experts, out, inside, seed)
        plain[name] = values
        del coded[name]
        coded |= {f"{name}_blocks": block, f"{name}_scales": scale}
    shutil.copytree(path, tmp_path / "coded")
    save_file(plain, path / "model.safetensors")
    save_file(coded, tmp_path / "coded" / "model.safetensors")
    settings = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(settings))
    for tp in (1, 2):
        expected = InProcessGroup(path, tp).logits(IDS, 0)
        assert torch.equal(InProcessGroup(tmp_path / "coded", tp).logits(IDS, 0), expected)


@pytest.mark.slow
def test_the_engine_generates_the_same_tokens_on_one_rank_and_on_two(tmp_path):
    coded, plain = packers.quantized_twin(make("llama", tmp_path / "made")[0], tmp_path, GPTQ, permuted)
    given = []
    for folder in (coded, plain):
        words = {str(token): token for token in range(VOCABULARY)}
        Tokenizer(WordLevel(words, "0")).save(str(folder / "tokenizer.json"))
    for folder, tp in ((plain, 1), (coded, 1), (coded, 2)):
        with Engine(folder, tp=tp, threads=1, kv_memory_bytes=2**20) as engine:
            given.append(engine.generate_ids([IDS], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)))
    assert given[0] == given[1] == given[2]


def test_a_quantized_checkpoint_is_another_model(tmp_path):
    coded, plain = packers.quantized_twin(make("llama", tmp_path / "made")[0], tmp_path, W8, rows)
    ours, theirs = (inspect_model(EngineConfig(model=str(path))) for path in (coded, plain))
    assert ours.digest != theirs.digest
    assert (ours.quantization.method, theirs.quantization) == ("compressed-tensors", None)


def test_a_matrix_of_another_size_is_refused(tmp_path):
    coded, _ = packers.quantized_twin(
        make("llama", tmp_path / "made")[0], tmp_path, W8, lambda out, inside, seed: rows(out, inside + 2, seed)
    )
    with pytest.raises(LockstepError, match=r"proj.weight has shape \[\d+, (66|98)\], config.json implies"):
        InProcessGroup(coded, 1)


def test_values_that_are_no_numbers_are_refused(tmp_path):
    def damaged(out, inside, seed):
        tensors, values = rows(out, inside, seed)
        tensors["weight_scale"][out // 2] = torch.inf if seed % 2 else torch.nan
        return tensors, values

    coded, _ = packers.quantized_twin(make("llama", tmp_path / "made")[0], tmp_path, W8, damaged)
    with pytest.raises(LockstepError, match=r"proj.weight has values that are no finite numbers"):
        InProcessGroup(coded, 1)


def test_codes_without_a_configuration_are_refused(tmp_path):
    coded, _ = packers.quantized_twin(make("llama", tmp_path / "made")[0], tmp_path, W8, rows)
    settings = json.loads((coded / "config.json").read_text())
    del settings["quantization_config"]
    (coded / "config.json").write_text(json.dumps(settings))
    with pytest.raises(LockstepError, match=r"is of type I8, and config.json has no quantization_config"):
        InProcessGroup(coded, 1)
