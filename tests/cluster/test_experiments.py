"""Each fault under eight streaming clients: nothing lost, doubled or changed, and no stream failed that need not.

`--times 5` makes each five times. Correctness is judged strictly; silences may be three times as long as their limits,
for clusters that share a small machine, and are in the report as they were.
"""

import re
from collections.abc import Iterator

import pytest
from helm import Installation
from kube import Report, events_of
from lockstep_tools.chaos.experiments import EXPERIMENTS
from lockstep_tools.chaos.laboratory import Laboratory
from lockstep_tools.chaos.outcome import Outcome
from machine import wait_for

SLACK = 3.0
BURST = 120
"""More than the short queues of these tests take."""


@pytest.fixture(scope="module")
def laboratory(served: Installation) -> Iterator[Laboratory]:
    served.await_whole()
    with pytest.MonkeyPatch.context() as patch, Laboratory(served.release, slack=SLACK, say=print) as running:
        patch.setenv("BURST", str(BURST))
        yield running
    assert running.problems == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_streams_survive(
    name: str, laboratory: Laboratory, served: Installation, report: Report, pytestconfig: pytest.Config
) -> None:
    served.await_whole()
    outcome = laboratory.run(EXPERIMENTS[name], pytestconfig.getoption("times"))
    report.setdefault("experiments", []).append(outcome.as_json())
    assert outcome.verdict.holds, explain(outcome)
    assert outcome.problems == []
    assert outcome.in_time, explain(outcome)
    assert name in ("router-rollout", "router-kill", "fill-queue") or outcome.recovery_ms is not None


def explain(outcome: Outcome) -> str:
    return "\n".join([str(outcome.silence_ms), *outcome.verdict.problems[:10]])


def test_events_explain_a_lost_rank(laboratory: Laboratory, served: Installation) -> None:
    """`kubectl describe pod` of a worker whose rank was killed tells what happened and that it is over."""
    outcome = laboratory.run(EXPERIMENTS["rank-kill"])
    (victim,) = outcome.trials[0].victims.workers

    def told() -> bool:
        return {"RankLost", "RanksReady"} <= {event["reason"] for event in events_of(served.kubectl, victim)}

    wait_for(told, "Events of the lost rank and of its return", 20.0, every_s=1.0)
    described = served.kubectl.run("describe", "pod", victim)
    assert re.search(r"Warning +RankLost .*rank \d", described), described
    assert re.search(r"Normal +RanksReady ", described), described
