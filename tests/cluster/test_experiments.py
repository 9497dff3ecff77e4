"""Each fault under eight streaming clients: nothing is lost, doubled or changed; only the excused streams fail.

`--times 5` runs each five times. Correctness is checked strictly. Silences may be three times as long as their limits,
for clusters that share a small machine; the report has the measured ones. Those with a state server are in
`test_state_faults.py`.
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
"""Clients of the burst: more than the short queues of these tests hold."""


@pytest.fixture(scope="module")
def laboratory(served: Installation) -> Iterator[Laboratory]:
    served.await_whole()
    with pytest.MonkeyPatch.context() as patch, Laboratory(served.release, slack=SLACK, say=print) as running:
        patch.setenv("BURST", str(BURST))
        yield running
    assert running.problems == []


@pytest.mark.parametrize(
    "name",
    [
        # The upgrade rolls both services, forth and back; the drain of a node deletes pods with their grace period.
        pytest.param(name, marks=pytest.mark.exhaustive if "rollout" in name or name == "pod-delete" else ())
        for name, each in EXPERIMENTS.items()
        if not each.component
    ],
)
def test_streams_survive(
    name: str, laboratory: Laboratory, served: Installation, report: Report, pytestconfig: pytest.Config
) -> None:
    served.await_whole()
    outcome = laboratory.run(EXPERIMENTS[name], pytestconfig.getoption("times"))
    report.setdefault("experiments", []).append(outcome.as_json())
    assert outcome.comparison.holds, explain(outcome)
    assert outcome.problems == []
    assert outcome.in_time, explain(outcome)
    assert name in ("router-rollout", "router-kill", "fill-queue") or outcome.recovery_ms is not None
    if name == "rank-kill":
        check_events(outcome, served)


def explain(outcome: Outcome) -> str:
    return "\n".join([str(outcome.silence_ms), *outcome.comparison.problems[:10]])


def check_events(outcome: Outcome, served: Installation) -> None:
    """`kubectl describe pod` of a worker whose rank was killed shows the loss and the recovery."""
    (victim,) = outcome.trials[-1].victims.workers

    def reported() -> bool:
        return {"RankLost", "RanksReady"} <= {event["reason"] for event in events_of(served.kubectl, victim)}

    wait_for(reported, "Events of the lost rank and of its return", 20.0, every_s=1.0)
    described = served.kubectl.run("describe", "pod", victim)
    assert re.search(r"Warning +RankLost .*rank \d", described), described
    assert re.search(r"Normal +RanksReady ", described), described
