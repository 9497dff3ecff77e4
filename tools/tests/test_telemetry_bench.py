"""`tools/bench/telemetry.py` compares stretches in which tokens came."""

import pytest
from telemetry import figures_of

EMPTY = {"per_s": 0.0, "cpu_s": 0.1, "events": 0}
FULL = {"per_s": 50.0, "cpu_s": 0.1, "events": 100}


def test_a_stretch_without_tokens_is_measured_again() -> None:
    stretches = iter([EMPTY, FULL])
    assert figures_of(lambda: next(stretches)) == {"per_s": 50.0, "token_us": pytest.approx(1000.0)}


def test_tokens_that_never_come_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no token came"):
        figures_of(lambda: EMPTY)
