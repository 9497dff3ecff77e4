"""Quantized weights of a GGUF file stay as they are stored: the directory has their blocks, and the engine reads the
values that a directory in float has.
"""

import json
import shutil
from collections import Counter

import gguf
import numpy as np
import pytest
import torch
from lockstep_common.errors import LockstepError
from lockstep_engine import Engine, EngineConfig, SamplingParams
from lockstep_engine.linear import Piece
from lockstep_engine.model_config import inspect_model
from lockstep_engine.weights import Checkpoint
from lockstep_tools.model import gguf_codes
from safetensors import safe_open
from safetensors.torch import load_file
from test_convert import SHAPE, TEXT, convert, rewrite, write_checkpoint
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, Qwen2Config

pytestmark = pytest.mark.slow

WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
MIXTURE = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q5_K", "token_embd": "Q8_0", "attn_output": "Q2_K"}
"""Beside Q4_K. Q2_K is none that stays."""
NUMBERS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q2_K": (80, 82)}
"""Where the float16 numbers of a block are."""


def random_blocks(tensor, kind, generator):
    """Of the shape of a tensor; values are about 0.1."""
    columns, rows = (int(size) for size in tensor.shape)
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows * columns // size, nbytes), np.uint8)
    for at in NUMBERS[kind]:
        numbers = generator.uniform(0.5, 1.5, len(blocks)) * (0.001 if kind == "Q8_0" else 0.00005)
        blocks[:, at : at + 2] = numbers.astype(np.float16)[:, None].view(np.uint8)
    return gguf.GGMLQuantizationType[kind], blocks.reshape(rows, -1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file like those of Q4_K_M, with a model whose embedding is its head or not."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            config = LlamaConfig(**WIDE) if family == "llama" else Qwen2Config(**WIDE, tie_word_embeddings=True)
            assert convert(write_checkpoint(folder / "given", config), folder / "float.gguf", "--dtype", "float32") == 0
            generator, blocks = np.random.default_rng(3), {}
            for tensor in gguf.GGUFReader(folder / "float.gguf").tensors:
                if len(tensor.shape) == 2:
                    kind = next((kind for part, kind in MIXTURE.items() if part in tensor.name), "Q4_K")
                    blocks[tensor.name] = random_blocks(tensor, kind, generator)
            rewrite(folder / "float.gguf", folder / "m.gguf", blocks=blocks)
            made[family] = folder / "m.gguf"
        return made[family]

    return make


def tensors_of(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_engine_reads_the_values_of_the_float_directory(mixed, family, tmp_path, capsys):
    file, kept, wide = mixed(family), tmp_path / "kept", tmp_path / "wide"
    assert convert(file, kept, "--dtype", "float32") == 0
    said = " ".join(capsys.readouterr().err.split())
    heads = 1 if family == "llama" else 0
    assert f"as stored: q4_k ({6 + heads}), q5_k (2), q6_k (4), q8_0 (1); widened to float32: q2_k (2)" in said
    assert convert(file, wide, "--dtype", "float32", "--float") == 0
    info = inspect_model(EngineConfig(model=str(kept)))
    assert info.quantization.layout.types == ("q4_k", "q5_k", "q6_k", "q8_0")
    checkpoint, values = Checkpoint(info), tensors_of(wide)
    for name, value in values.items():
        piece = Piece(name, 0, 0, len(value), 0, full_size=len(value))
        assert torch.equal(checkpoint.slice(piece, list(value.shape)).float(), value), name
    stored = tensors_of(kept)
    assert len(stored) == len(values)
    assert Counter(name.rpartition("weight_")[2] for name in stored if "weight_" in name) == info_kinds(heads)
    turned = stored["model.layers.1.self_attn.q_proj.weight_q4_k"]
    blocks = torch.from_numpy(np.array(tensor_of(file, "blk.1.attn_q.weight").data))
    assert torch.equal(turned, blocks) == (family != "llama")  # whose queries have another order of rows there
    assert sorted(turned.tolist()) == sorted(blocks.tolist())
    assert all(each.stat().st_mode & 0o044 == 0o044 for each in kept.iterdir())


def info_kinds(heads):
    return Counter({"q4_k": 6 + heads, "q5_k": 2, "q6_k": 4, "q8_0": 1})


def tensor_of(file, name):
    return next(each for each in gguf.GGUFReader(file).tensors if each.name == name)


def test_both_directories_answer_alike(mixed, tmp_path):
    answers = []
    for more in ((), ("--float",)):
        folder = tmp_path / f"m{len(more)}"
        assert convert(mixed("qwen2"), folder, "--dtype", "float32", *more) == 0
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2)
        with Engine(folder, threads=1, kv_memory_bytes=2**20) as engine:
            answers.append([(output.ids, output.logprobs) for output in engine.outputs([TEXT], params)[0]])
    assert answers[0] == answers[1]


def test_weights_in_16_bits_are_compared_in_16_bits(mixed, tmp_path):
    """The blocks stay exact, while a float directory is rounded to its type."""
    for dtype in ("float16", "bfloat16"):
        folder = tmp_path / dtype
        assert convert(mixed("llama"), folder, "--dtype", dtype) == 0
        info = inspect_model(EngineConfig(model=str(folder)))
        assert (info.dtype, len(info.quantization.layout.types)) == (dtype, 4)
        name = "model.layers.0.mlp.down_proj.weight"
        value = Checkpoint(info).slice(Piece(name, 0, 0, 256, 0), [256, 512])
        exact = gguf.dequantize(tensor_of(mixed("llama"), "blk.0.ffn_down.weight").data, gguf.GGMLQuantizationType.Q6_K)
        assert torch.equal(value, torch.from_numpy(exact))


def test_blocks_are_divided_over_files(mixed, tmp_path):
    file = mixed("qwen2")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float16, quantization_config=GgufConfig(dequantize=True)
    )
    found = gguf_codes.find(file, gguf.GGUFReader(file), model)
    gguf_codes.save(found, model, tmp_path, file_bytes=100_000)
    files = sorted(each.name for each in tmp_path.glob("blocks-*"))
    assert files[0] == f"blocks-00001-of-{len(files):05}.safetensors"
    assert len(files) > 3
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for name, place in places.items():
        with safe_open(tmp_path / place, framework="pt") as stored:
            assert name in stored.keys()  # noqa: SIM118 - it is no dict
    assert len(inspect_model(EngineConfig(model=str(tmp_path))).weight_files) == len(files) + 1


def test_scales_that_are_no_numbers_are_refused_by_the_tensors_name(mixed, tmp_path, capsys):
    name = "blk.1.ffn_up.weight"
    tensor = tensor_of(mixed("llama"), name)
    data = np.array(tensor.data)
    data[7, 2:4] = np.array([np.inf], np.float16).view(np.uint8)
    rewrite(mixed("llama"), tmp_path / "m.gguf", blocks={name: (tensor.tensor_type, data)})
    assert convert(tmp_path / "m.gguf", tmp_path / "back") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"tensor {name} has values that are no finite numbers" in said
    assert not (tmp_path / "back").exists()


def test_a_file_that_is_cut_short_is_refused(mixed, tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(mixed("llama").read_bytes()[:-1000])
    assert convert(tmp_path / "m.gguf", tmp_path / "back") == 2
    assert "cannot be read as a GGUF file" in " ".join(capsys.readouterr().err.split())


def test_a_directory_of_blocks_is_not_written_as_a_file(mixed, tmp_path, capsys):
    assert convert(mixed("llama"), tmp_path / "kept") == 0
    capsys.readouterr()
    assert convert(tmp_path / "kept", tmp_path / "again.gguf") == 2
    assert "it is quantized (gguf-blocks); GGUF files are written from float" in " ".join(
        capsys.readouterr().err.split()
    )


def test_an_unknown_type_of_the_configuration_is_refused(mixed, tmp_path):
    kept = tmp_path / "kept"
    assert convert(mixed("llama"), kept) == 0
    config = json.loads((kept / "config.json").read_text())
    config["quantization_config"]["types"].append("iq1_s")
    (kept / "config.json").write_text(json.dumps(config))
    with pytest.raises(LockstepError, match="iq1_s"):
        inspect_model(EngineConfig(model=str(kept)))
    shutil.rmtree(kept)
