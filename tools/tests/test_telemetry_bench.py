"""`tools/bench/telemetry.py` compares stretches in which tokens came, and `worker_telemetry.py` rounds of them."""

import os

import pytest
from telemetry import figures_of
from worker_telemetry import environment, summary

EMPTY = {"per_s": 0.0, "cpu_s": 0.1, "events": 0}
FULL = {"per_s": 50.0, "cpu_s": 0.1, "events": 100}


def test_a_stretch_without_tokens_is_measured_again() -> None:
    stretches = iter([[FULL, EMPTY], [FULL, FULL]])
    assert figures_of(lambda: next(stretches)) == [{"per_s": 50.0, "token_us": pytest.approx(1000.0)}] * 2


def test_tokens_that_never_come_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no token came"):
        figures_of(lambda: [FULL, EMPTY])


def test_a_round_compares_two_stretches_of_each_side() -> None:
    """The second round is of a machine of half the speed."""
    off = [{"per_s": speed, "token_us": 100.0} for speed in (90.0, 110.0, 50.0, 50.0)]
    on = [{"per_s": speed, "token_us": 105.0} for speed in (99.0, 99.0, 48.0, 48.0)]
    speeds, times = summary({"off": off, "on": on}).splitlines()[2:]
    assert "-2.5% (-4.0% to -1.0%)" in speeds
    assert "+5.0% (+5.0% to +5.0%)" in times


def test_what_is_set_for_one_side_is_gone_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HERE", "before")
    with environment({"LOCKSTEP_HERE": "inside", "LOCKSTEP_NEW": "inside"}):
        assert (os.environ["LOCKSTEP_HERE"], os.environ["LOCKSTEP_NEW"]) == ("inside", "inside")
    assert os.environ["LOCKSTEP_HERE"] == "before"
    assert "LOCKSTEP_NEW" not in os.environ
