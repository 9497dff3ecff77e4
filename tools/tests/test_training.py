import json
from pathlib import Path

import pytest
from lockstep_tools.cli import main
from lockstep_tools.model.training import CHAT_TEMPLATE, Phase, Shape, train_tokenizer
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / name).read_text() for name in ("LICENSE", "Makefile", "pyproject.toml"))
TINY = (
    *("--hidden", "32", "--layers", "2", "--heads", "2", "--vocab", "400", "--context", "64"),
    *("--steps", "30", "--window", "32", "--batch", "4", "--long-steps", "2", "--rate", "0.01", "--threads", "1"),
)


def test_training_lowers_the_loss_and_the_result_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "model"
    text.write_text(TEXT)
    assert main(["train", str(out), str(text), "--valid", str(text), *TINY]) == 0
    shown = capsys.readouterr()
    first, last = (float(word) for word in shown.out.split("loss from ")[1].split(" nats")[0].split(" to "))
    assert 5.5 < first < 6.5  # ln 400 = 5.99
    assert last < first - 0.5
    assert "short windows: step 30 of 30" in shown.err

    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds, and only this test needs it

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = tokenizer.encode("Licensed under the Apache License").ids
    assert tokenizer.decode(ids) == "Licensed under the Apache License"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == "torch.float16"
    reference = json.loads((ROOT / "models/reference/config.json").read_text())
    config = json.loads((out / "config.json").read_text())
    shape = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "max_position_embeddings")
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "transformers_version")
    assert {key for key in config if config[key] != reference[key]} <= {*shape, *counts}
    assert config.keys() == reference.keys()
    settings = json.loads((out / "tokenizer_config.json").read_text())
    wanted = json.loads((ROOT / "models/reference/tokenizer_config.json").read_text())
    assert settings == wanted | {"model_max_length": 64}

    assert main(["train", str(out), str(text), *TINY]) == 2
    assert "holds a model already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("out", "missing.txt"), "cannot be read"),
        (("out", "short.txt", *TINY), "too few for windows"),
        (("out", "short.txt", "--hidden", "33", "--heads", "2"), "not a multiple of twice --heads 2"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("only a few words")
    assert main(["train", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep_tools.model.training.make_model", lambda *_: pytest.fail("it trains"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert main(["train", str(text / "out"), str(text), *TINY]) == 2
    assert capsys.readouterr().err == f"lockstep: {text}/out cannot be written: Not a directory\n"


def test_defaults_have_the_shape_of_the_reference_model() -> None:
    reference = json.loads((ROOT / "models/reference/config.json").read_text())
    shape = Shape()
    assert shape.intermediate == reference["intermediate_size"]
    assert (shape.hidden, shape.layers, shape.heads, shape.vocab, shape.context) == (
        reference["hidden_size"],
        reference["num_hidden_layers"],
        reference["num_attention_heads"],
        reference["vocab_size"],
        reference["max_position_embeddings"],
    )
    assert json.loads((ROOT / "models/reference/tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_a_tokenizer_is_built_like_the_reference_models() -> None:
    reference = json.loads((ROOT / "models/reference/tokenizer.json").read_text())
    made = json.loads(train_tokenizer(TEXT, 400).to_str())
    assert {key for key in made if made[key] != reference[key]} == {"model"}
    assert {key for key in made["model"] if made["model"][key] != reference["model"][key]} == {"vocab", "merges"}
    assert len(made["model"]["vocab"]) == 400


def test_the_rate_rises_then_falls_to_nothing() -> None:
    phase = Phase("p", 100, (1024, 2047), 2048, 1.0, warmup_steps=10)
    rates = [phase.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001
    assert [phase.shape(step) for step in range(3)] == [(2, 1024), (1, 2047), (2, 1024)]
