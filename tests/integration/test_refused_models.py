"""Models that cannot be served end `lockstep serve` with one sentence and exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import left_since, traces
from serving import run, sentence
from system import REFERENCE
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

pytestmark = pytest.mark.usefixtures("private_tmp")

Change = Callable[[Path], object]


def set_config(**values: object) -> Change:
    """Changes fields of config.json; None removes one."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text()) | values
        kept = {key: value for key, value in config.items() if value is not None}
        (model / "config.json").write_text(json.dumps(kept))

    return change


def cut(name: str, size: int) -> Change:
    """Leaves the beginning of a file."""

    def change(model: Path) -> None:
        content = (model / name).read_bytes()[:size]
        (model / name).write_bytes(content)

    return change


def remove(name: str) -> Change:
    return lambda model: (model / name).unlink()


BROKEN: dict[str, tuple[Change, str]] = {
    "no config": (remove("config.json"), "config.json is missing"),
    "config is cut": (cut("config.json", 100), "config.json cannot be read"),
    "config is no object": (lambda model: (model / "config.json").write_text("[]"), "not a JSON object"),
    "no weights": (remove("model.safetensors"), "no *.safetensors file"),
    "weights are cut": (cut("model.safetensors", 1_000_000), "model.safetensors is cut short"),
    "weights' header is cut": (cut("model.safetensors", 100), "model.safetensors is not a complete safetensors file"),
    "weights are empty": (cut("model.safetensors", 0), "model.safetensors is not a complete safetensors file"),
    "no generator": (set_config(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
    "no architecture": (set_config(architectures=None), "only …ForCausalLM generates text"),
    "no vocabulary": (set_config(vocab_size=None), "vocab_size"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json"),
    "unknown architecture": (set_config(architectures=["NopeForCausalLM"], model_type="nope"), "nope"),
}
FAST = {"no config", "weights are cut", "no generator", "no tokenizer"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the reference model."""
    return Path(shutil.copytree(REFERENCE, tmp_path / "model"))


def refused(*arguments: str) -> str:
    """The sentence with which `lockstep serve` refuses."""
    before = traces()
    code, out, notes = run("serve", *arguments, "--port", "0", "--device", "cpu", within_s=60)
    assert code == 2, notes
    assert out == ""
    assert left_since(before) == []
    return sentence(notes)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in BROKEN]
)
def test_a_broken_directory(model: Path, name: str) -> None:
    change, expected = BROKEN[name]
    change(model)
    message = refused(str(model))
    assert expected in message
    assert str(model) in message


def test_a_missing_directory(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "nothing")) == f"lockstep: model {tmp_path / 'nothing'}: no such directory"


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "config.json is missing" in refused(str(tmp_path))


def test_a_file_is_no_directory(model: Path) -> None:
    assert "no such directory" in refused(str(model / "config.json"))


def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=1)).save_pretrained(tmp_path)
    message = refused(str(tmp_path))
    assert "MambaForCausalLM has layers that keep a recurrent state" in message


@pytest.mark.slow
def test_a_checkpoint_that_lacks_a_tensor(tmp_path: Path) -> None:
    """Only the ranks can find this."""
    config = GPT2Config(vocab_size=4096, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    model.config.n_layer = 2
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REFERENCE / name, tmp_path / name)
    assert "the checkpoint has no tensor transformer.h.1." in refused(str(tmp_path))


@pytest.mark.parametrize("tp", ["3", "8"])
def test_a_split_that_does_not_divide_the_heads(tp: str) -> None:
    message = refused(str(REFERENCE), "--tp", tp)
    assert f"4 attention heads cannot be split over tp = {tp}" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tp", "0"), ("--workers", "none"), ("--port", "70000"), ("--device", "tpu"), ("--unknown", "1")],
)
def test_options_that_cannot_be_used_are_named(flag: str, value: str) -> None:
    code, _, notes = run("serve", flag, value)
    assert code == 2
    assert flag in notes.splitlines()[-1]
