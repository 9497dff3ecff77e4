"""`lockstep bench state`: the arithmetic of break-even, and what the command prints."""

import json

import pytest
from lockstep_tools.state_bench.figures import (
    QUOTED_MODELS,
    QUOTED_NETWORKS,
    Model,
    Network,
    break_even_tokens,
    needed_bytes_per_s,
    table,
)


def test_no_length_pays_below_the_bandwidth_that_the_model_needs():
    model = Model("m", 128 << 10, 10_000)
    assert needed_bytes_per_s(model) == 128 * 1024 * 10_000
    assert break_even_tokens(model, Network("n", needed_bytes_per_s(model), 0.0)) is None
    assert break_even_tokens(model, Network("n", needed_bytes_per_s(model) * 1.3, 0.0)) == 16


def test_latency_makes_longer_prefixes_necessary():
    model = Model("m", 128 << 10, 10_000)
    fast, far = (Network("n", 10e9, latency_s) for latency_s in (0.0001, 0.05))
    assert break_even_tokens(model, fast) < break_even_tokens(model, far)


def test_the_table_of_quoted_figures():
    """One Redis is too slow for all but large models on one GPU; host memory pays for all."""
    rows = {row[0]: row[1:] for row in table(QUOTED_MODELS, QUOTED_NETWORKS)}
    assert rows["Llama-3-8B, 1 H100"][1] == "never / never"
    assert rows["Llama-3-70B, 4 H100"][1] == "never / never"
    assert "never" not in rows["Llama-3-70B, 1 H100 (compute only)"][1]
    assert all("never" not in row[2] for row in rows.values())


@pytest.mark.parametrize("form", ["table", "json"])
def test_the_command_measures_what_is_here(lockstep, form):
    options = ("--blocks", "3", "--rounds", "1", "--prefill", "1000")
    result = lockstep("bench", "state", *options, *(["--json"] if form == "json" else []))
    assert (result.returncode, result.stderr) == (0, "")
    if form == "json":
        report = json.loads(result.stdout)
        assert report["backends"][0]["backend"] == "memory"
        assert all(each["get_bytes_per_s"] > 0 for each in report["backends"])
        assert report["model"]["kv_bytes_per_token"] > 0
        assert set(report["break_even_tokens"]) == {each["backend"] for each in report["backends"]}
    else:
        for words in ("round trip", "Break-even of the model at hand", "Llama-3-70B", "LMCache/LMCache"):
            assert words in result.stdout
