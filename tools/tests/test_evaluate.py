"""Accuracy figures: their arithmetic on known models, and whole runs on the reference model."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lockstep_engine import PromptLogprobs
from lockstep_tools.cli import main
from lockstep_tools.model.accuracy import Haystack, divergence, measure, recall, windows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "LICENSE").read_text()[:3000]


class Copier:
    """Predicts, with some probability, the token that followed the last few tokens before."""

    def __init__(self, vocabulary: int, belief: float = 0.9, order: int = 2) -> None:
        self._vocabulary = vocabulary
        self._belief = belief
        self._order = order
        self.longest = 0

    def score(self, prompt: Sequence[int], *, vocabulary: bool = False) -> PromptLogprobs:
        self.longest = max(self.longest, len(prompt))
        rest = 1 - self._belief
        rows = np.full((len(prompt) - 1, self._vocabulary), math.log(1 / self._vocabulary), np.float32)
        seen: dict[tuple[int, ...], int] = {}
        for row in range(self._order - 1, len(prompt) - 1):
            last = tuple(prompt[row - self._order + 1 : row + 1])
            if last in seen:
                rows[row] = math.log(rest / (self._vocabulary - 1))
                rows[row, seen[last]] = math.log(self._belief)
            seen[last] = prompt[row + 1]
        chosen = rows[np.arange(len(rows)), list(prompt[1:])]
        ranks = (rows > chosen[:, None]).sum(axis=1).astype(np.int32) + 1
        return PromptLogprobs(1, chosen, ranks, rows if vocabulary else None)


@given(tokens=st.integers(0, 300), size=st.integers(1, 80), stride=st.integers(1, 80))
def test_each_token_but_the_first_is_scored_once_with_the_context_it_may_have(tokens, size, stride):
    stride = min(stride, size)
    scored = []
    for n, window in enumerate(windows(tokens, size, stride)):
        assert 0 <= window.begin < window.end - window.scored
        for position in range(window.end - window.scored, window.end):
            scored.append(position)
            before = position - window.begin
            assert 1 <= before <= size
            assert before >= min(position, size - stride + 1) or n == 0
    assert scored == list(range(1, tokens))


def test_divergence_is_that_of_the_definition():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.log_softmax(torch.randn(300, 70, generator=generator) * 3, dim=-1) for _ in range(2))
    wanted = torch.nn.functional.kl_div(q.double(), p.double(), log_target=True, reduction="none").sum(dim=-1)
    assert np.allclose(divergence(p.numpy(), q.numpy()), wanted.numpy(), atol=1e-6)
    assert divergence(p.numpy(), p.numpy()).max() == 0
    impossible = np.array([[0.0, -np.inf]], np.float32)
    assert divergence(impossible, np.log(np.array([[0.5, 0.5]], np.float32)))[0] == pytest.approx(math.log(2))
    assert divergence(impossible, impossible)[0] == 0


def test_figures_of_a_known_model():
    ids = [3, 4, 5, 6] * 5
    ours, theirs, apart = measure(Copier(10), ids, windows(20, 19, 19), Copier(10, belief=0.5))
    # The first cycle and the pair that closes it are not predicted; all later tokens are, correctly.
    known = 19 - 5
    assert ours.tokens == 19
    assert ours.nats == pytest.approx(5 * math.log(10) - known * math.log(0.9), rel=1e-6)
    assert ours.value == pytest.approx(math.exp(ours.nats / 19))
    assert ours.first_choices == 19
    assert theirs is not None
    assert theirs.nats == pytest.approx(5 * math.log(10) - known * math.log(0.5), rel=1e-6)
    assert apart is not None
    one = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    figures = apart.summary()
    assert figures["max"] == pytest.approx(one, rel=1e-5)
    assert figures["mean"] == pytest.approx(one * known / 19, rel=1e-5)
    assert figures["same_first_choice"] == 1
    assert figures["by_context"] == [{"context_below": 128, "positions": 19, "mean": figures["mean"]}]


def test_needles_are_where_they_are_said_to_be_and_recalled_by_a_model_that_copies():
    ids = list(range(100, 1100))
    hay = Haystack(lambda string: [ord(letter) for letter in string.replace(" ", "")], ids, seed=4)
    first = hay.needle(400, 0.25)
    assert len(first.prompt) == len(first.control) == 400
    needle = first.prompt[-len("Thepasskeyis") - 24 :]
    place = [n for n in range(400) if first.prompt[n : n + len(needle)] == needle]
    assert place == [round(0.25 * (400 - 2 * len(needle))), 400 - len(needle)]
    assert [n for n in range(400) if first.control[n : n + len(needle)] == needle] == [400 - len(needle)]
    assert first.answer == len(needle) // 3

    copier = Copier(2000, order=4)
    found = recall(copier, hay, 300, 0.5, trials=5)
    assert copier.longest == 300
    assert found.row() == {
        "context": 300,
        "depth": 0.5,
        "trials": 5,
        "recalled": 1.0,
        "tokens_right": 1.0,
        "probability": pytest.approx(0.9, rel=1e-4),
        "gain_nats": pytest.approx(math.log(0.9 * 2000), abs=2),
    }
    with pytest.raises(ValueError, match="no needle fits into 60 tokens"):
        hay.needle(60, 0)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("tp", ["1", "2"])
def test_perplexity_is_that_of_transformers(model, tp, tmp_path, capsys):
    from lockstep_tools.model.training import perplexity  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = Tokenizer.from_file(f"{model}/tokenizer.json").encode(TEXT).ids[:1051]
    flags = ("--text", str(text), "--tp", tp, "--threads", "1", "--kv-compression", "none", "--window", "150")
    given = report(capsys, "perplexity", model, *flags, "--tokens", "1051")
    assert given["tokens"] == 1050
    assert given["perplexity"] == pytest.approx(perplexity(reference, ids, 150), rel=1e-4)


def test_a_run_is_compared_with_another_compression(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    flags = ("--text", str(text), "--tokens", "400", "--window", "200", "--stride", "100", "--threads", "1")
    same = report(capsys, "perplexity", model, *flags, "--kv-compression", "none", "--against", "none")["against"]
    assert (same["kl"]["mean"], same["kl"]["max"], same["kl"]["same_first_choice"]) == (0, 0, 1)
    assert same["change"] == 0
    lazy = report(capsys, "perplexity", model, *flags, "--against", "none")
    assert lazy["kv_compression"] == "lazy"
    kl = lazy["against"]["kl"]
    assert kl["positions"] == 399
    assert 0 < kl["mean"] < kl["p99"] < kl["max"] < 0.1
    assert kl["by_context"][0]["mean"] < kl["mean"]
    assert abs(lazy["against"]["change"]) < 0.005


def test_needles_are_reported_place_by_place(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    flags = ("--text", str(text), "--threads", "1", "--contexts", "100,200", "--depths", "0,1", "--trials", "2")
    given = report(capsys, "needle", model, *flags, "--kv-compression", "none")
    assert [(each["context"], each["depth"]) for each in given["places"]] == [(100, 0), (100, 1), (200, 0), (200, 1)]
    assert all(0 <= each["recalled"] <= each["tokens_right"] <= 1 for each in given["places"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("perplexity", "MODEL", "--text", "missing.txt"), "missing.txt cannot be read: No such file or directory"),
        (("perplexity", "MODEL", "--text", "latin1.txt"), "latin1.txt is no UTF-8 text: byte 3"),
        (("perplexity", "MODEL", "--text", "one.txt", "--stride", "2000"), "2000 is more than 1024"),
        (("perplexity", "MODEL", "--text", "one.txt", "--window", "8"), "one.txt has 1 tokens, too few"),
        (
            ("perplexity", "MODEL", "--text", "one.txt", "--window", "2047"),
            "--window can be 2046 at most (given: 2047)",
        ),
        (
            ("perplexity", "MODEL", "--text", "one.txt", "--kv-layers", "1"),
            "--kv-layers and --kv-compression per_layer",
        ),
        (("needle", "MODEL", "--text", "one.txt"), "the text has 1 tokens, too few for a context of 1024"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("a")
    Path("latin1.txt").write_bytes("café".encode("latin-1"))
    given = [model if each == "MODEL" else each for each in arguments]
    if arguments[0] == "needle" or "--window" in arguments:
        given += ["--threads", "1"]
    assert main(["eval", *given]) == 2
    assert words in capsys.readouterr().err
