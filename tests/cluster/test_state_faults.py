"""Faults of the state server and of its Redis, and a router that dies, under eight clients that resume.

The faults of the state server are not noticed: no stream fails, none is silent. Limits as in `test_experiments.py`.
"""

from collections.abc import Iterator

import pytest
import state_release
from helm import SMALL_QUEUES, Installation, install
from kube import Namespaces, Report
from lockstep_tools.chaos.experiments import EXPERIMENTS
from lockstep_tools.chaos.laboratory import Laboratory
from lockstep_tools.chaos.outcome import Outcome
from machine import wait_for

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not state_release.IMAGE, reason="LOCKSTEP_REDIS_IMAGE not set"),
]

SLACK = 3.0
_MENDED_S = 60.0


@pytest.fixture(scope="module")
def laboratory(namespaces: Namespaces, registry: str) -> Iterator[tuple[Laboratory, Installation]]:
    """On a release with two state servers and the bundled Redis; the load's clients resume."""
    values = SMALL_QUEUES | state_release.on_redis(registry)
    with (
        install(namespaces.new("state-faults"), registry, values) as installation,
        Laboratory(installation.release, slack=SLACK, resume=True, say=print) as running,
    ):
        yield running, installation
    assert running.problems == []


@pytest.mark.parametrize("name", [*(name for name, each in EXPERIMENTS.items() if each.component), "router-kill"])
def test_streams_do_not_notice(
    name: str, laboratory: tuple[Laboratory, Installation], report: Report, pytestconfig: pytest.Config
) -> None:
    running, installation = laboratory
    installation.await_whole()
    outcome = running.run(EXPERIMENTS[name], pytestconfig.getoption("times"))
    report.setdefault("state_experiments", []).append(outcome.as_json())
    assert outcome.comparison.holds, explain(outcome)
    assert outcome.comparison.excused.total() == 0
    assert outcome.problems == []
    assert outcome.in_time, explain(outcome)
    wait_for(lambda: is_mended(installation), "the store is used again", _MENDED_S, every_s=1.0)


def is_mended(installation: Installation) -> bool:
    """No breaker is open, and streams are mirrored again."""
    written = state_release.metric(installation, "lockstep_state_writes_total", {"outcome": "OK"})
    closed = state_release.metric(installation, "lockstep_state_breaker_open") == 0
    return closed and state_release.metric(installation, "lockstep_state_writes_total", {"outcome": "OK"}) > written


def explain(outcome: Outcome) -> str:
    return "\n".join([str(outcome.silence_ms), *outcome.comparison.problems[:10]])
