"""`lockstep bench state`: the arithmetic of break-even, and what the command prints."""

import json

import pytest
from lockstep_engine.config import HotWindow
from lockstep_tools.state_bench.figures import (
    BLOCK_TOKENS,
    CALLS,
    QUOTED_MODELS,
    QUOTED_NETWORKS,
    WINDOW,
    Model,
    Network,
    break_even_tokens,
    needed_bytes_per_s,
    table,
)
from lockstep_worker.kv_store.gate import choose


def test_no_length_pays_below_the_bandwidth_that_the_model_needs():
    model = Model("m", 128 << 10, 10_000)
    assert needed_bytes_per_s(model) == 128 * 1024 * 10_000
    assert break_even_tokens(model, Network("n", needed_bytes_per_s(model), 0.0)) is None
    assert break_even_tokens(model, Network("n", needed_bytes_per_s(model) * 1.3, 0.0)) == 16


def test_latency_makes_longer_prefixes_necessary():
    model = Model("m", 128 << 10, 10_000)
    fast, far = (Network("n", 10e9, latency_s) for latency_s in (0.0001, 0.05))
    assert break_even_tokens(model, fast) < break_even_tokens(model, far)


def gate_takes(model, network, window, blocks):
    """Whether an idle worker's gate takes any of a prefix of so many blocks, asked as the engine asks it."""
    block_bytes, hot = BLOCK_TOKENS * model.kv_bytes_per_token, 0 if window is None else window.sink + window.size
    is_cold = blocks > hot and window is not None
    wanted, ahead = (blocks - hot, hot) if is_cold else (blocks, 0)
    link = network.link.of_fetch(CALLS, hot * block_bytes if is_cold else 0)

    def recompute_s(count):
        return (count + ahead) * BLOCK_TOKENS / model.prefill_tokens_per_s if count else 0.0

    return choose(wanted, block_bytes // 2 if is_cold else block_bytes, link, recompute_s).blocks > 0


@pytest.mark.parametrize("window", [None, WINDOW, HotWindow(1, 1), HotWindow(0, 0)])
def test_it_is_the_shortest_prefix_that_the_gate_takes(window):
    found = set()
    for model in (*QUOTED_MODELS, Model("small", 1 << 10, 900), Model("slow", 64 << 10, 500)):
        for network in (*QUOTED_NETWORKS, Network("far", 1e9, 0.1), Network("here", 1.3e8, 0.002)):
            first = next((n for n in range(1, 1500) if gate_takes(model, network, window, n)), None)
            reported = break_even_tokens(model, network, window)
            assert reported == (None if first is None else BLOCK_TOKENS * first), (model.name, network.name)
            found.add(reported)
    assert None in found
    assert len(found) > 5, "of lengths of many kinds"


def test_a_hot_window_makes_longer_prefixes_necessary():
    """Its blocks come after the others, in two more calls."""
    model, network = Model("m", 64 << 10, 500), Network("far", 1e9, 0.1)
    eager, lazy = HotWindow(0, 0), WINDOW
    assert break_even_tokens(model, network, eager) < break_even_tokens(model, network, lazy)


def test_the_table_of_quoted_figures():
    """One Redis is too slow for all but large models on one GPU; host memory pays for all."""
    rows = {row[0]: row[1:] for row in table(QUOTED_MODELS, QUOTED_NETWORKS)}
    assert rows["Llama-3-8B, 1 H100"][1] == "never / never"
    assert rows["Llama-3-70B, 4 H100"][1] == "never / never"
    assert "never" not in rows["Llama-3-70B, 1 H100 (compute only)"][1]
    assert all("never" not in row[2] for row in rows.values())


@pytest.mark.parametrize("form", ["table", "json", "json first"])
def test_the_command_measures_what_is_here(lockstep, form):
    options = ("--blocks", "3", "--rounds", "1", "--prefill", "1000")
    words = {"table": ["state"], "json": ["state", "--json"], "json first": ["--json", "state"]}[form]
    result = lockstep("bench", *words, *options)
    assert (result.returncode, result.stderr) == (0, "")
    if form != "table":
        report = json.loads(result.stdout)
        assert report["backends"][0]["backend"] == "memory"
        assert all(each["get_bytes_per_s"] > 0 for each in report["backends"])
        assert report["model"]["kv_bytes_per_token"] > 0
        assert set(report["break_even_tokens"]) == {each["backend"] for each in report["backends"]}
    else:
        for words in ("round trip", "Break-even of the model at hand", "Llama-3-70B", "LMCache/LMCache"):
            assert words in result.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model-directory", "/nowhere"), "no such directory"),
        (("--tp", "3"), "4 attention heads cannot be split over tp = 3"),
    ],
)
def test_a_bad_model_is_refused_before_anything_is_measured(lockstep, options, sentence):
    result = lockstep("bench", "state", "--target", "127.0.0.1:1", *options)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert sentence in result.stderr
