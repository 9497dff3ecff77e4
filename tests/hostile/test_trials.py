"""What ends badly is an outcome of a trial, and stands in the benchmark's table."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lockstep_tools.hostile.observer import Observer
from target import ROOT, Target
from trial import Scene, attack

sys.path.append(str(Path(ROOT) / "tools/bench"))

from hostile import reasons, row, summary

_LATER_S = 0.3
FIGURES = {
    "silence_s": 0.1,
    "healthz_p99_s": 0.02,
    "first_token_s": 0.1,
    "memory_peak_bytes": 1 << 20,
    "memory_left_bytes": 0,
    "vanished_s": 0.0,
    "failures": [],
}


@pytest.fixture
def own_scene() -> Iterator[Scene]:
    with Target() as target, Observer(target.address, streams=1) as observer:
        yield Scene(target, observer)


def test_router_that_ends_is_an_outcome(own_scene: Scene) -> None:
    ending = threading.Timer(_LATER_S, os.kill, (own_scene.target.router_pid, signal.SIGKILL))
    ending.start()
    outcome = attack(own_scene.target, own_scene.observer, "pipelining", 3 * _LATER_S)
    ending.join()
    assert outcome.failed == "the router has ended"
    assert outcome.failures


def test_attack_that_reaches_nothing_is_an_outcome(own_scene: Scene) -> None:
    own_scene.target.address = ("127.0.0.1", 1)
    outcome = attack(own_scene.target, own_scene.observer, "pipelining", _LATER_S)
    assert outcome.failed == "no connection to 127.0.0.1:1 could be made"


def test_table_says_what_failed_and_what_succeeded() -> None:
    held = {"failed": "", "attack": FIGURES}
    late = {"failed": "", "attack": FIGURES | {"silence_s": 2.0, "failures": ["a"]}}
    gone = {"failed": "the router has ended", "attack": FIGURES}
    lost = {"failed": "the trial could not be made: late"}
    assert row("a", [late, held]) == [
        "a",
        "2.0 → 0.1",
        "20 → 20",
        "0.1 → 0.1",
        "1 → 1",
        "0 → 0",
        "0.0 → 0.0",
        "1 → 0",
    ]
    assert row("a", [None, gone])[1::6] == ["- → 0.1", "no such door → 0; the router has ended"]
    assert row("a", [lost])[1::6] == ["-", "the trial could not be made: late"]
    found = {name: reasons(each) for name, each in {"held": held, "late": late, "gone": gone, "lost": lost}.items()}
    assert found == {"held": [], "late": ["silence_s", "failures"], "gone": ["failed"], "lost": ["failed"]}
    assert summary({"before": {"a": ["failed"]}, "after": {}}, {"before": 2, "after": 3}).splitlines()[2:] == [
        "Before, 1 of 2 attacks have succeeded: a.",
        "",
        "After, 0 of 3 attacks have succeeded.",
    ]
