"""GGUF files: what is written can be read, by us and as others write them; what cannot be written is refused."""

import json
import math
import random
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from lockstep_common.errors import LockstepError
from lockstep_engine import Engine, EngineConfig, SamplingParams
from lockstep_engine.model_config import inspect_model
from lockstep_tools.cli import main
from lockstep_tools.model import gguf_files
from lockstep_tools.model.gguf_rope import carry_scaling
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).parents[2] / "models/reference"
TEXT = "It was 7 o'clock; the Queen's  \"croquet\" went on,\n\tand on: naïve 象."
TOKENS = 320
"""Of the reference model's 4,096, which are read one by one, often: all bytes, and some that are merged of them."""
SHAPE = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=128),
}


def write_checkpoint(folder, config):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms are all the same at first
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    shutil.copy(REFERENCE / "tokenizer_config.json", folder)
    tokenizer = json.loads((REFERENCE / "tokenizer.json").read_text())
    rules = tokenizer["model"]
    rules["vocab"] = {name: id_ for name, id_ in rules["vocab"].items() if id_ < TOKENS}
    rules["merges"] = [each for each in rules["merges"] if "".join(each) in rules["vocab"]]
    assert rules["merges"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    def make(name, **changes):
        folder = write_checkpoint(tmp_path / "given", CONFIGS[name])
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return make


def convert(*arguments):
    return main(["convert", *map(str, arguments)])


@torch.inference_mode()
def logits(folder):
    ids = torch.tensor([random.Random(1).choices(range(TOKENS), k=40)])
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_gives_the_checkpoint_back(name, checkpoint, tmp_path):
    folder, file, back = checkpoint(name), tmp_path / "m.gguf", tmp_path / "back"
    assert convert(folder, file, "--dtype", "float32") == 0
    assert convert(file, back, "--dtype", "float32") == 0
    assert torch.equal(logits(back), logits(folder))
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, back))
    for key in ("num_key_value_heads", "rope_parameters", "tie_word_embeddings", "max_position_embeddings"):
        assert after[key] == before[key], key
    for key in ("tokenizer.json", "tokenizer_config.json"):
        old, new = (json.loads((each / key).read_text()) for each in (folder, back))
        assert old.items() >= {each: value for each, value in new.items() if each != "add_bos_token"}.items()
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in back.iterdir())


def test_weights_of_other_sizes_are_refused(tmp_path, capsys):
    """The width of Qwen3's heads is in the file, but `transformers` takes it to be 128."""
    folder = write_checkpoint(tmp_path / "given", Qwen3Config(**SHAPE, head_dim=24))
    assert convert(folder, tmp_path / "m.gguf") == 0
    assert convert(tmp_path / "m.gguf", tmp_path / "back") == 2
    assert "its weights are not those of the model that its fields describe" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_missing_weights_are_refused(checkpoint, tmp_path, capsys):
    assert convert(checkpoint("llama"), tmp_path / "full.gguf") == 0
    rewrite(tmp_path / "full.gguf", tmp_path / "m.gguf", without_tensor="blk.1.ffn_up.weight")
    assert convert(tmp_path / "m.gguf", tmp_path / "back") == 2
    assert "lacks weights of a LlamaForCausalLM, such as model.layers.1.mlp.up_proj" in " ".join(
        capsys.readouterr().err.split()
    )


def rewrite(source, target, *, without_tensor="", without_fields=(), fields=(), tensors=(), blocks=None):
    """Write a GGUF file again, without a tensor or fields, and with other ones. `blocks`: types and their random bytes
    by the names of matrices.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name not in ("general.architecture", *without_fields) and not name.startswith("GGUF."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for tensor in reader.tensors:
        if tensor.name in (blocks or {}):
            kind, data = blocks[tensor.name]
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        elif tensor.name != without_tensor:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    kinds = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}
    for name, value in dict(fields).items():
        writer.add_key_value(name, value, kinds[type(value)])
    for name, value in dict(tensors).items():
        writer.add_tensor(name, np.array(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def divisors(factor, *, base=10000.0, dim=16):
    """Those of Llama 3, as llama.cpp's converter writes them."""
    written = []
    for exponent in range(0, dim, 2):
        turns = 8192 / (2 * math.pi * base ** (exponent / dim))  # in the original context
        smooth = min(max((turns - 1) / (4 - 1), 0), 1)
        written.append(1 / ((1 - smooth) / factor + smooth))
    return written


def llama3(factor):
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
        "original_max_position_embeddings": 8192
    }


@pytest.mark.parametrize(
    ("fields", "tensors", "rope", "context"),
    [
        ({}, {"rope_freqs.weight": divisors(8)}, llama3(8.0), 16384),
        ({}, {"rope_freqs.weight": divisors(32)}, llama3(32.0), 16384),
        ({}, {"rope_freqs.weight": [1.0] * 8}, {"rope_type": "default"}, 16384),
        ({"scaling.type": "linear", "scaling.factor": 8.0}, {}, {"rope_type": "linear", "factor": 8.0}, 131072),
        ({"scale_linear": 8.0}, {}, {"rope_type": "linear", "factor": 8.0}, 131072),
        (
            {"scaling.type": "linear", "scaling.factor": 4.0, "scaling.original_context_length": 4096},
            {},
            {"rope_type": "linear", "factor": 4.0},
            16384,
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 8192},
            {},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
            32768,
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.yarn_beta_fast": 16.0, "scaling.attn_factor": 1.0},
            {},
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "original_max_position_embeddings": 16384},
            32768,
        ),
        ({"scaling.type": "none", "scaling.original_context_length": 4096}, {}, {"rope_type": "default"}, 16384),
    ],
    ids=[
        "llama 3.1",
        "llama 3.2",
        "divisors of 1",
        "linear",
        "older linear",
        "linear in 4096",
        "yarn",
        "yarn 2",
        "none",
    ],
)
def test_the_rotary_scaling_of_other_writers_is_kept(fields, tensors, rope, context, checkpoint, tmp_path):
    folder, back = checkpoint("llama", rope_parameters=ROPE, max_position_embeddings=16384), tmp_path / "back"
    assert convert(folder, tmp_path / "ours.gguf", "--dtype", "float32") == 0
    named = {f"llama.rope.{name}": value for name, value in fields.items()}
    rewrite(tmp_path / "ours.gguf", tmp_path / "m.gguf", fields=named, tensors=tensors)
    assert convert(tmp_path / "m.gguf", back, "--dtype", "float32") == 0
    assert inspect_model(EngineConfig(model=str(back))).context_length == context
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": ROPE | rope}))
    expected, given = rotary(folder), rotary(back)
    assert torch.equal(given.inv_freq, expected.inv_freq)
    assert given.attention_scaling == expected.attention_scaling
    assert torch.equal(logits(back), logits(folder))


def rotary(folder):
    return AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb


@pytest.mark.parametrize(
    ("fields", "tensors", "words"),
    [
        ({}, {"rope_freqs.weight": divisors(16)}, "rope_freqs.weight is neither Llama 3.1's nor 3.2's"),
        ({}, {"rope_freqs.weight": [2.0] * 4}, "rope_freqs.weight is neither"),
        ({}, {"rope_factors_long.weight": [2.0] * 8}, "LongRoPE, in the tensor rope_factors_long.weight"),
        ({}, {"rope_factors_short.weight": [2.0] * 8}, "LongRoPE, in the tensor rope_factors_short.weight"),
        ({"type": "longrope"}, {}, "llama.rope.scaling.type is longrope"),
        ({"type": "yarn", "factor": 2.0, "yarn_log_multiplier": 0.5}, {}, "yarn_log_multiplier is 0.5"),
        ({"attn_factor": 1.5}, {}, "llama.rope.scaling.attn_factor is 1.5"),
        ({"alpha": 1000.0}, {}, "llama.rope.scaling.alpha is 1000.0"),
        ({"factor": 2.0}, {"rope_freqs.weight": divisors(8)}, "fields and the tensor rope_freqs.weight"),
    ],
)
def test_a_rotary_scaling_that_would_be_lost_is_refused(fields, tensors, words, checkpoint, tmp_path, capsys):
    assert convert(checkpoint("llama", rope_parameters=ROPE), tmp_path / "ours.gguf") == 0
    named = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
    rewrite(tmp_path / "ours.gguf", tmp_path / "m.gguf", fields=named, tensors=tensors)
    assert convert(tmp_path / "m.gguf", tmp_path / "back") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "its rotary scaling cannot be carried over" in said
    assert words in said
    assert not (tmp_path / "back").exists()


def write_scaling(path, architecture):
    """A file that has a linear scaling and no model."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("m")
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def carried(path, config):
    write_scaling(path, config.model_type)
    carry_scaling(path, gguf.GGUFReader(path), config)
    return config


def test_layers_with_a_window_are_not_scaled(tmp_path):
    """Gemma 3: so do llama.cpp and `transformers`."""
    rope = carried(tmp_path / "m.gguf", Gemma3TextConfig(num_hidden_layers=6)).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_a_scaling_that_the_architecture_does_not_have_is_refused(tmp_path):
    with pytest.raises(LockstepError, match=r"rotary scaling \(linear\) cannot be carried over to phi3"):
        carried(tmp_path / "m.gguf", Phi3Config())
    with pytest.raises(LockstepError, match=r"rotary scaling \(linear\) cannot be carried over to gpt2"):
        carried(tmp_path / "m.gguf", GPT2Config())


@pytest.mark.parametrize(
    ("kind", "most"), [("float16", 2**-11), ("bfloat16", 2**-8), ("q8_0", 1 / 127), ("q4_0", 0.126)]
)
def test_narrow_weights_are_near_the_ones_they_stand_for(kind, most, checkpoint, tmp_path):
    folder, file, back = checkpoint("llama"), tmp_path / "m.gguf", tmp_path / "back"
    assert convert(folder, file, "--dtype", kind) == 0
    assert convert(file, back, "--dtype", "float32", "--float") == 0
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    given, read = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert given.keys() == read.keys()
    for name, value in given.items():
        if value.ndim == 1:
            assert torch.equal(value, read[name])
            continue
        blocks, near = value.reshape(-1, 32), read[name].reshape(-1, 32)
        bound = blocks.abs().amax(1, keepdim=True) if kind.startswith("q") else blocks.abs()
        assert ((blocks - near).abs() <= most * bound + 2**-25).all()  # half the least float16
        assert not torch.equal(blocks, near)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_rows_that_are_no_whole_blocks_are_in_16_bits(kind, tmp_path):
    folder = write_checkpoint(tmp_path / "given", LlamaConfig(**{**SHAPE, "intermediate_size": 88}))
    file = tmp_path / "m.gguf"
    assert convert(folder, file, "--dtype", kind) == 0
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == kind.upper()


@pytest.mark.slow
def test_it_is_served_as_before(tmp_path):
    file, back = tmp_path / "m.gguf", tmp_path / "back"
    assert convert(REFERENCE, file) == 0
    assert convert(file, back) == 0
    texts = []
    for folder in (REFERENCE, back):
        with Engine(str(folder)) as engine:
            texts.append("".join(engine.stream("It was a dark night", SamplingParams(max_tokens=40, temperature=0))))
    assert texts[0] == texts[1]


def test_a_file_of_another_writer_gives_its_tokenizer(tmp_path):
    file, back = tmp_path / "m.gguf", tmp_path / "back"
    assert convert(REFERENCE, tmp_path / "ours.gguf") == 0
    rewrite(tmp_path / "ours.gguf", file, without_fields=[gguf.Keys.Tokenizer.HF_JSON])
    assert gguf.Keys.Tokenizer.HF_JSON not in gguf.GGUFReader(file).fields
    assert convert(file, back) == 0
    ours, theirs = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (REFERENCE, back))
    assert theirs.encode(TEXT).ids == ours.encode(TEXT).ids
    assert theirs.decode(ours.encode(TEXT).ids) == TEXT


ENDS = [5, 7, 2, 9]


def test_all_ids_that_end_an_answer_come_back(checkpoint, tmp_path):
    folder, file, back = checkpoint("llama", eos_token_id=ENDS[0]), tmp_path / "m.gguf", tmp_path / "back"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(ENDS[1])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": token}))
    assert convert(folder, file) == 0
    fields = gguf.GGUFReader(file).fields
    assert fields[gguf.Keys.Tokenizer.EOS_ID].contents() == ENDS[1], "as in tokenizer_config.json"
    assert fields[gguf.Keys.Tokenizer.EOT_ID].contents() == ENDS[0]
    assert convert(file, back) == 0
    assert inspect_model(EngineConfig(model=str(back))).eos_ids == tuple(ENDS)
    assert json.loads((back / "tokenizer_config.json").read_text())["eos_token"] == token


def test_other_writers_end_ids_are_read(checkpoint, tmp_path):
    folder, file, back = checkpoint("llama"), tmp_path / "m.gguf", tmp_path / "back"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": TOKENS - 1, "content": "<|eom_id|>"})
    tokenizer["model"]["vocab"] = {name: id_ for name, id_ in tokenizer["model"]["vocab"].items() if id_ != TOKENS - 1}
    tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, TOKENS - 1, 2]}))
    assert convert(folder, tmp_path / "ours.gguf") == 0
    rewrite(tmp_path / "ours.gguf", file, without_fields=["lockstep.eos_token_ids"])
    fields = gguf.GGUFReader(file).fields
    assert (fields[gguf.Keys.Tokenizer.EOT_ID].contents(), fields[gguf.Keys.Tokenizer.EOM_ID].contents()) == (
        2,
        TOKENS - 1,
    )
    assert convert(file, back) == 0
    assert inspect_model(EngineConfig(model=str(back))).eos_ids == (1, 2, TOKENS - 1)


@pytest.mark.parametrize(
    ("file", "setting", "expected"),
    [
        ("from the file", "from the settings", "from the file"),
        (
            None,
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
            [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
        ),
        (None, [{"name": "tool_use", "template": "t"}], [{"name": "tool_use", "template": "t"}]),
        (None, ["odd"], None),
    ],
)
def test_the_chat_templates_that_are_served_come_back(file, setting, expected, checkpoint, tmp_path):
    folder, back = checkpoint("llama"), tmp_path / "back"
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": setting}))
    assert convert(folder, tmp_path / "m.gguf") == 0
    assert convert(tmp_path / "m.gguf", back) == 0
    assert json.loads((back / "tokenizer_config.json").read_text()).get("chat_template") == expected


def test_the_file_names_how_words_are_split():
    for regex, name in gguf_files.WORD_SPLITS.items():
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        whole = {"type": "Sequence", "pretokenizers": [split, level]}
        assert gguf_files.name_of_split(Path("m"), whole) == name
        split["pattern"]["Regex"] = ".+"
        with pytest.raises(LockstepError, match="no known name"):
            gguf_files.name_of_split(Path("m"), whole)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "rope_type llama3 is not"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type linear is not"),
        ({"sliding_window": 64}, "a sliding window is not written"),
        ({"attention_bias": True}, "biases of attention's output"),
        ({"mlp_bias": True}, "biases in its MLP"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}},
            "it is quantized (awq); GGUF files are written from float checkpoints",
        ),
        ({"model_type": "olmo2"}, "olmo2 is not among what is written: llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_is_not_written_is_refused(changes, sentence, checkpoint, tmp_path, capsys):
    folder = checkpoint("llama", **changes)
    assert convert(folder, tmp_path / "m.gguf") == 2
    assert sentence in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["given"]


def test_a_tokenizer_of_another_kind_is_refused(checkpoint, tmp_path, capsys):
    folder = checkpoint("llama")
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"pre_tokenizer": {"type": "Metaspace"}}))
    assert convert(folder, tmp_path / "m.gguf") == 2
    assert "only byte-level BPE tokenizers" in capsys.readouterr().err


def test_an_architecture_that_cannot_be_read_is_refused(tmp_path, capsys):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert convert(tmp_path / "m.gguf", tmp_path / "out") == 2
    assert "architecture rwkv7 is not supported" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_fields_that_transformers_cannot_read_are_refused(tmp_path, capsys):
    write_scaling(tmp_path / "m.gguf", "gpt-oss")
    assert convert(tmp_path / "m.gguf", tmp_path / "out") == 2
    assert "cannot read its fields" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_written_is_said(checkpoint, capsys):
    assert convert(checkpoint("llama"), "/proc/made.gguf") == 2
    assert "\nlockstep: /proc/made.gguf cannot be written: " in f"\n{capsys.readouterr().err}"


def test_what_is_no_gguf_file_is_refused(tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(b"no such thing" * 10)
    assert convert(tmp_path / "m.gguf", tmp_path / "out") == 2
    assert "cannot be read as a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a.gguf", "b.gguf"), "one of SOURCE and TARGET has to end in .gguf"),
        (("a", "b"), "one of SOURCE and TARGET has to end in .gguf"),
        (("a.gguf", "b"), "a.gguf does not exist"),
        ((str(REFERENCE), "there.gguf"), "there.gguf exists already"),
        (("there.gguf", "b", "--dtype", "q8_0"), "a directory holds float32, float16, bfloat16"),
        ((str(REFERENCE), "nowhere/m.gguf"), "nowhere is not a directory"),
        ((str(REFERENCE), "m.gguf", "--float"), "--float is for a directory"),
    ],
)
def test_mistakes_are_reported_at_once(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.gguf").touch()
    assert convert(*arguments) == 2
    assert sentence in capsys.readouterr().err
