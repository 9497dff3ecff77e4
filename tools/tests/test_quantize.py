"""`lockstep quantize`: what it writes, the engine computes; calibrated 4 bits beat rounding; nothing half done."""

import json
import random
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from lockstep_common.errors import LockstepError
from lockstep_engine import EngineConfig
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import multiplies_integers
from lockstep_engine.model_config import inspect_model
from lockstep_engine.weights import Checkpoint
from lockstep_tools.cli import main
from lockstep_tools.quantization import automatic, files, production, rounding
from lockstep_tools.quantization.gptq import to_int4_by_hessian
from lockstep_tools.quantization.layers import LayeredModel
from lockstep_tools.quantization.production import Recipe, produce
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "libs/engine/tests"))
from checkpoints import VOCABULARY, make
from in_process import InProcessGroup

REFERENCE = Path(__file__).parents[2] / "models/reference"
WINDOWS = torch.randint(2, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(3))


def model_of(path):
    return LayeredModel(inspect_model(EngineConfig(model=str(path))))


def directory(path):
    path.mkdir()
    return path


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "qwen3_moe", "falcon-new", "gemma2"])
def test_a_layer_at_a_time_gives_what_transformers_gives(tmp_path, name):
    path, reference = make(name, tmp_path)
    with torch.inference_mode():
        expected = reference(WINDOWS, labels=WINDOWS).loss.exp()
    assert model_of(path).perplexity(WINDOWS) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "setting"), [("cohere", "logit_scale"), ("hyperclovax", "logits_scaling"), ("granite", "logits_scaling")]
)
def test_logits_are_scaled_as_transformers_scales_them(tmp_path, name, setting):
    path, _ = make(name, tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {setting: 4.0}))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(WINDOWS, labels=WINDOWS).loss.exp()
    assert model_of(path).perplexity(WINDOWS) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("scheme", production.SCHEMES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_is_written_reads_back_as_it_was_rounded(tmp_path, name, scheme):
    path, _ = make(name, tmp_path)
    model = model_of(path)
    made = produce(model, directory(tmp_path / "made"), Recipe(scheme, group_size=32), WINDOWS)
    quantized = Checkpoint(inspect_model(EngineConfig(model=str(made.folder))))
    assert len(made.styles) > 10
    assert not any("embed" in module or "lm_head" in module or module.endswith(".gate") for module in made.styles)
    with model.loaded(0), torch.inference_mode():
        for unit in model.units(0):
            own = unit.value.clone()
            with model.loaded(0, quantized):
                read = {each.stored: each.value.clone() for each in model.units(0)}[unit.stored]
            if scheme in ("int8", "w8a8", "fp8"):
                rounded = production.round_unit(
                    unit.__class__(unit.stored, unit.parameter, own, unit.inputs), Recipe(scheme), None, torch.float16
                )
                assert torch.equal(rounded.values(), read)
            assert (own - read).norm() / own.norm() < {"int8": 0.01, "w8a8": 0.01, "fp8": 0.04}.get(scheme, 0.7)
            break


def continued(path, ids, count):
    """Greedy tokens after a prompt, and all logits that they were chosen by."""
    group, ids, given = InProcessGroup(path, 1), list(ids), []
    for _ in range(count):
        begin = len(ids) - 1 if given else 0
        given.append(group.logits(ids[begin:], begin)[-1])
        ids.append(int(given[-1].argmax()))
    return ids, torch.stack(given)


@pytest.mark.skipif(not cpu.build, reason="the kernels were not built")
@pytest.mark.parametrize("scheme", ["int8", "gptq", "awq"])
def test_integers_that_stay_in_memory_give_the_tokens_of_widened_ones(tmp_path, monkeypatch, scheme):
    path, _ = make("llama", tmp_path)
    made = produce(model_of(path), directory(tmp_path / "made"), Recipe(scheme, group_size=32), WINDOWS).folder
    prompt, build = WINDOWS[0, :16].tolist(), cpu.build
    tokens, logits = continued(made, prompt, 8)
    try:
        cpu.use("off")
        assert continued(made, prompt, 8)[0] == tokens
    finally:
        cpu.use(build)
    widened = []
    monkeypatch.setattr(Checkpoint, "code_form", lambda *_: widened.append(None))
    assert torch.equal(continued(made, prompt, 8)[1], logits)
    assert len(widened) > 4


@pytest.mark.skipif(not cpu.build, reason="the kernels were not built")
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_w8a8_is_computed_in_integers_close_to_its_values(tmp_path, name):
    path, _ = make(name, tmp_path)
    made, same = (
        produce(model_of(path), directory(tmp_path / scheme), Recipe(scheme), WINDOWS).folder
        for scheme in ("w8a8", "int8")
    )
    integers, widened = (InProcessGroup(each, 1) for each in (made, same))
    assert multiplies_integers(integers.models[0].module)
    assert not multiplies_integers(widened.models[0].module)
    ids = WINDOWS[0, :40].tolist()
    ours, theirs = integers.logits(ids, 0), widened.logits(ids, 0)
    assert 0 < (ours - theirs).norm() / theirs.norm() < 0.02


def written(folder):
    """Tensors and settings of a checkpoint."""
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "fp8", "gptq"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "phi"])  # its own, tied, of an old name, with a bias
def test_a_head_is_written_in_8_bits_beside_the_embedding(tmp_path, name, scheme):
    path, _ = make(name, tmp_path)
    model = model_of(path)
    made = produce(model, directory(tmp_path / "made"), Recipe(scheme, 32, head="int8"), WINDOWS)
    head = model.head()
    rounded = rounding.to_int8(head.value)
    tensors, settings = written(made.folder)
    assert torch.equal(tensors[f"{head.module}.weight_packed"], files.pack(rounded.codes, 8))
    assert torch.equal(tensors[f"{head.module}.weight_scale"], rounded.scales)
    assert f"{head.module}.weight" not in tensors
    before, _ = written(path)
    plain = [each for each in before if "embed" in each or each.endswith("bias")]
    assert all(torch.equal(tensors[each], before[each]) for each in plain if each != head.stored)
    assert settings["tie_word_embeddings"] is False
    groups = settings["quantization_config"]["config_groups"].values()
    (group,) = (each for each in groups if f"re:{head.module}$" in each["targets"])
    assert (group["weights"]["num_bits"], group["weights"]["type"], group["weights"]["strategy"]) == (
        8,
        "int",
        "channel",
    )
    assert (group["input_activations"], group["format"]) == (None, "pack-quantized")
    assert not {"lm_head", head.module} & set(settings["quantization_config"]["ignore"])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_engine_computes_the_head_that_was_written(tmp_path, name):
    """In 4 bits next to it; the logits are those of a float head with the same values."""
    path, _ = make(name, tmp_path)
    model = model_of(path)
    kinds = {
        kind: produce(model, directory(tmp_path / kind), Recipe("rtn4", 32, head=kind)).folder
        for kind in ("none", "int8")
    }
    assert len({inspect_model(EngineConfig(model=str(each))).digest for each in kinds.values()}) == 2
    tensors, settings = written(kinds["none"])
    values = rounding.to_int8(model.head().value).values()
    save_file(tensors | {"lm_head.weight": values}, kinds["none"] / "model.safetensors")
    (kinds["none"] / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    prompt = WINDOWS[0, :16].tolist()
    tokens, logits = continued(kinds["int8"], prompt, 8)
    expected = continued(kinds["none"], prompt, 8)
    assert tokens == expected[0]
    assert torch.equal(logits, expected[1])
    whole = InProcessGroup(kinds["int8"], 1).logits(tokens, 0)
    assert torch.equal(whole[15 : 15 + len(logits)], logits)
    halves = [InProcessGroup(each, 2).logits(tokens, 0) for each in kinds.values()]
    assert torch.equal(*halves)


def test_the_perplexity_of_a_written_head_is_measured_with_it(tmp_path):
    path, _ = make("gemma2", tmp_path)
    model = model_of(path)
    made = produce(model, directory(tmp_path / "made"), Recipe("int8", head="int8"))
    quantized = Checkpoint(inspect_model(EngineConfig(model=str(made.folder))))
    measured = model.perplexity(WINDOWS, [quantized] * len(model.layers), quantized)
    assert measured == model_of(made.folder).perplexity(WINDOWS)
    assert measured != model.perplexity(WINDOWS, [quantized] * len(model.layers))


def test_a_head_that_differs_from_the_embedding_is_used_whatever_the_configuration_says(tmp_path):
    path, _ = make("gemma2", tmp_path)
    tensors, _ = written(path)
    other = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    tied = model_of(path).head()
    assert torch.equal(tied.value, tensors["model.embed_tokens.weight"].float())
    save_file(tensors | {"lm_head.weight": other}, path / "model.safetensors")
    model = model_of(path)
    assert torch.equal(model.head().value, other.float())
    assert torch.equal(model.model.get_input_embeddings().weight, tensors["model.embed_tokens.weight"].float())


def test_rows_of_many_packs_are_those_of_one():
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(100, 1).t().reshape(-1, 2)
    words = files.pack(codes, 8)
    assert len(codes) == len(words) > 8192
    expected = sum((int(code) + 128) << (8 * place) for place, code in enumerate(codes[-1]))
    assert words[-1].tolist() == [expected]
    assert torch.equal(words[-3:], files.pack(codes[-3:], 8))


def test_packed_words_are_those_of_the_format():
    codes = torch.tensor([[-8, 7, 0, 1, -1, 2, -2, 3, 5]], dtype=torch.int8)
    words = files.pack(codes, 4)
    nibbles = [0, 15, 8, 9, 7, 10, 6, 11]
    first = sum(nibble << (4 * place) for place, nibble in enumerate(nibbles))
    assert [word % 2**32 for word in words[0].tolist()] == [first, 13]


def test_gptq_keeps_the_outputs_better_than_rounding():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    weight = torch.randn(32, 64, generator=generator)
    error = {}
    for order in (True, False):
        ours = to_int4_by_hessian(weight, inputs.t() @ inputs, 32, torch.float16, by_activation=order)
        error[order] = float((inputs @ (ours.values() - weight).t()).norm())
    nearest = rounding.to_int4(weight, 32, torch.float16)
    plain = float((inputs @ (nearest.values() - weight).t()).norm())
    assert max(error.values()) < 0.8 * plain
    nothing = to_int4_by_hessian(weight, torch.zeros(64, 64), 32, torch.float16)
    assert torch.equal(nothing.codes, nearest.codes)


def test_a_head_over_the_budget_is_named_before_any_layer_is_tried(tmp_path):
    path, _ = make("llama", tmp_path)
    folder, scratch, notes = directory(tmp_path / "made"), directory(tmp_path / "scratch"), []
    recipe = Recipe("gptq", 32, head="int8")
    with pytest.raises(LockstepError, match=r"head int8 alone changes the perplexity by .*; the budget is -50"):
        automatic.choose(model_of(path), folder, scratch, recipe, WINDOWS, WINDOWS, -0.5, notes.append)
    assert notes == ["all layers in gptq", "all layers in int8"]


def test_the_automatic_choice_mixes_layers_within_the_budget(tmp_path):
    path, _ = make("llama", tmp_path)
    model = model_of(path)
    base = model.perplexity(WINDOWS)
    chosen = {}
    for budget in (1.0, 1e-9):
        folder, scratch = directory(tmp_path / f"made{budget}"), directory(tmp_path / f"scratch{budget}")
        choice = automatic.choose(model, folder, scratch, Recipe("gptq", 32), WINDOWS, WINDOWS, budget)
        chosen[budget] = choice.levels
        assert choice.perplexity <= base * (1 + budget)
    assert chosen[1.0] == ("gptq",) * 3

    candidates = {}
    for scheme in ("gptq", "int8"):
        candidates[scheme] = produce(model, directory(tmp_path / scheme), Recipe(scheme, 32), WINDOWS)
    mixed = automatic.merge(model, directory(tmp_path / "mixed"), candidates, ["int8", "gptq", "float"])
    settings = json.loads((mixed.folder / "config.json").read_text())["quantization_config"]
    assert sorted(group["weights"]["num_bits"] for group in settings["config_groups"].values()) == [4, 8]
    sources = [Checkpoint(inspect_model(EngineConfig(model=str(each.folder)))) for each in candidates.values()]
    whole = Checkpoint(inspect_model(EngineConfig(model=str(mixed.folder))))
    expected = model.perplexity(WINDOWS, [sources[1], sources[0], None])
    assert model.perplexity(WINDOWS, [whole] * 3) == expected


def test_the_automatic_choice_counts_what_a_quantized_head_costs(tmp_path):
    path, _ = make("gemma2", tmp_path)
    model = model_of(path)
    base = model.perplexity(WINDOWS)
    folder, scratch = directory(tmp_path / "made"), directory(tmp_path / "scratch")
    choice = automatic.choose(model, folder, scratch, Recipe("gptq", 32, head="int8"), WINDOWS, WINDOWS, 1.0)
    assert choice.float_perplexity == base
    assert choice.perplexity == model_of(folder).perplexity(WINDOWS)
    tensors, settings = written(folder)
    assert "lm_head.weight_packed" in tensors
    assert "model.embed_tokens.weight" in tensors
    assert settings["tie_word_embeddings"] is False


def quantize(*arguments):
    return main(["quantize", *map(str, arguments)])


def test_the_command_writes_a_directory_that_is_served(tmp_path, capsys):
    tmp_path = tmp_path / "[s]"  # no markup for the terminal
    tmp_path.mkdir()
    path, _ = make("llama", tmp_path)
    for file in REFERENCE.glob("tokenizer*"):
        shutil.copy(file, path)
    (path / "1_Pooling").mkdir()
    pooling = {"1_Pooling/config.json": '{"pooling_mode_lasttoken": true}', "modules.json": "[]"}
    for name, content in pooling.items():
        (path / name).write_text(content)
    assert quantize(path, "--scheme", "int8", "--out", tmp_path / "small") == 0
    assert {name: (tmp_path / "small" / name).read_text() for name in pooling} == pooling
    said = capsys.readouterr().err
    assert "MiB" in said
    assert "/[s]/small: " in said.replace("\n", "")
    assert inspect_model(EngineConfig(model=str(tmp_path / "small"))).quantization.method == "compressed-tensors"
    assert (tmp_path / "small/tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob(".quantize-*"))
    tensors = load_file(tmp_path / "small/model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight_packed"].dtype is torch.int32

    assert quantize(path, "--scheme", "int8", "--head", "int8", "--out", tmp_path / "smaller") == 0
    assert ": int8, head int8; " in capsys.readouterr().err.replace("\n", " ")
    heads = [load_file(tmp_path / each / "model.safetensors").keys() for each in ("small", "smaller")]
    assert ["lm_head.weight" in each for each in heads] == [True, False]

    before = sorted(tmp_path.iterdir())
    assert quantize(path, "--scheme", "int8", "--out", tmp_path / "small") == 2
    assert "exists already" in capsys.readouterr().err
    assert quantize(tmp_path / "small", "--scheme", "int8", "--out", tmp_path / "again") == 2
    assert "quantized already (compressed-tensors)" in capsys.readouterr().err
    for scheme in ("gptq", "awq"):
        assert quantize(path, "--scheme", scheme, "--out", tmp_path / "other") == 2
        assert f"--calibration is needed for {scheme}" in capsys.readouterr().err
    words = random.Random(0).choices(["some", "words"], k=20)
    (tmp_path / "text").write_text(" ".join(words))
    assert quantize(path, "--auto", "--calibration", tmp_path / "text", "--out", tmp_path / "other") == 2
    assert "fewer than 4 windows of 512" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "text"]


def test_a_full_disk_is_said_in_a_sentence_and_leaves_nothing(tmp_path, capsys):
    path, _ = make("llama", tmp_path)
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # bytes of a file; Python ignores the signal
    try:
        code = quantize(path, "--scheme", "int8", "--out", tmp_path / "small")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert "small cannot be written" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_to_nothing_is_in_the_way_before_the_work(tmp_path, capsys):
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    assert quantize(tmp_path, "--scheme", "int8", "--out", tmp_path / "out") == 2
    assert "exists already" in capsys.readouterr().err


def test_the_output_may_have_the_name_of_a_scheme(tmp_path):
    path, _ = make("llama", tmp_path)
    tokenizer = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (tmp_path / "text").write_text(" ".join(map(str, range(2, 82))))
    words = ("--auto", "--budget", "100%", "--samples", 2, "--length", 16, "--calibration", tmp_path / "text")
    assert quantize(path, *words, "--group-size", 32, "--out", tmp_path / "int8") == 0
    assert inspect_model(EngineConfig(model=str(tmp_path / "int8"))).quantization.method == "compressed-tensors"
    assert not list(tmp_path.glob(".quantize-*"))


def test_a_tokenizer_that_truncates_does_not_shorten_the_calibration(tmp_path, capsys):
    path, _ = make("llama", tmp_path)
    tokenizer = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path / "tokenizer.json"))
    (tmp_path / "text").write_text(" ".join(map(str, range(2, 42))))
    words = ("--scheme", "gptq", "--length", 16, "--calibration", tmp_path / "text", "--out", tmp_path / "out")
    assert quantize(path, *words) == 2
    assert "has 40 tokens, fewer than 4 windows of 16" in capsys.readouterr().err


def test_a_scheme_that_is_not_produced_is_refused_with_those_that_are(tmp_path, capsys):
    with pytest.raises(SystemExit):
        quantize(tmp_path, "--scheme", "int3", "--out", tmp_path / "out")
    assert "unknown scheme 'int3'; schemes: int8, w8a8" in capsys.readouterr().err
