"""One fault on a cluster under load: its victims, its script, and the times at which it was noticed and over."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep_tools.chaos.experiments import Breaks, Experiment, Victim
from lockstep_tools.chaos.kubectl import run_script
from lockstep_tools.chaos.load_pod import LoadPod
from lockstep_tools.chaos.release import ROUTER, WORKER, Pod, Release, of
from lockstep_tools.failure import CommandError
from lockstep_tools.load.history import History

_SCRIPT_S = 420.0
_RECOVERY_S = 240.0
_POLL_S = 1.0
_FAULT = re.compile(r"^fault ([0-9.]+)$", re.MULTILINE)
_BURST = re.compile(r"^burst (.*)$", re.MULTILINE)
_NOTICED = ("stream leaves worker", "worker is silent")
"""The messages that a router logs when a worker's streams have to move."""
_NOTHING_TO_NOTICE = (Victim.NOBODY, Victim.ROUTER, Victim.ALL_ROUTERS, Victim.STATE, Victim.REDIS)
_DYING_S = 3.0
"""The longest time for which a killed router takes requests, if no stream shows when it died."""
_NOTICE_S = 1.0
"""The longest time between the first and the last client that notices a dead router."""


@dataclass(frozen=True)
class Victims:
    """What a trial disturbs: ids, which are names of pods. Empty if it disturbs all or none."""

    workers: Sequence[str] = ()
    routers: Sequence[str] = ()
    node: str = ""


@dataclass
class Trial:
    """A fault that was caused, and its effects."""

    experiment: Experiment
    victims: Victims
    fault_s: float
    """The time of the fault, on the wall clock like all times here."""
    recovered_s: float = 0.0
    detected_s: float | None = None
    """When a router first sent a stream elsewhere."""
    reported: bool = False
    """After the fault a router has reported another state of its workers than before."""
    burst: Mapping[str, Any] | None = None
    """The report of the burst's clients, for an overload."""
    histories: list[History] = field(default_factory=list)
    """The streams that ended between this fault and the next one."""

    def excuse(self, history: History) -> str | None:
        """Why a stream was allowed to fail, if it was."""
        if self.experiment.refuses and history.status in (429, 503) and history.retry_after:
            return f"refused with {history.status} and Retry-After"
        if self.experiment.breaks is Breaks.NONE or not self.fault_s <= (history.ended_s or 0.0):
            return None
        if history.router in self.victims.routers:
            return (
                "its router was killed" if self.experiment.breaks is Breaks.OF_THE_ROUTER else "its router was cut off"
            )
        return self._excuse_unanswered(history)

    def _excuse_unanswered(self, history: History) -> str | None:
        """The excuse of a request without an answer, whose router is not known."""
        if history.status is not None:
            return None
        if self.experiment.breaks is Breaks.OF_THE_ROUTER and not history.connect_failures:
            return "its router was killed before it answered" if history.started_s < self._death_s() else None
        if self.experiment.breaks is Breaks.OF_THE_NODE and history.started_s < self.recovered_s:
            # Until Kubernetes regards the node as lost, its Service still sends connections there.
            return "connected to a router that was cut off"
        return None

    def _death_s(self) -> float:
        """Until when requests may have gone to the killed router: its first broken stream shows when it died."""
        broken = [each.ended_s or 0.0 for each in self.histories if each.error and each.router in self.victims.routers]
        return min(broken) + _NOTICE_S if broken else self.fault_s + _DYING_S

    def disturbed(self) -> list[History]:
        """The streams that ran during the trial and whose router was not a victim."""
        return [
            history
            for history in self.histories
            if history.error is None
            and history.started_s <= self.recovered_s
            and (history.ended_s or 0.0) >= self.fault_s
            and (self.experiment.breaks is Breaks.NONE or history.router not in self.victims.routers)
        ]

    def silences_s(self) -> list[float]:
        """The longest silence of each of these streams, between the fault and the recovery."""
        return [history.longest_gap_s(self.fault_s, self.recovered_s) for history in self.disturbed()]

    def first_tokens_s(self) -> list[float]:
        """The time to the first token of each stream that began meanwhile."""
        return [
            history.first_token_s
            for history in self.disturbed()
            if history.started_s > self.fault_s and history.first_token_s is not None
        ]


def run_trial(
    experiment: Experiment,
    release: Release,
    load: LoadPod,
    scripts: Path,
    *,
    number: int,
    load_node: str,
    environment: Mapping[str, str],
) -> Trial:
    """Cause the fault, and wait until all is ready again and no stream from before the recovery is running.

    Args:
        experiment: what to do.
        release: what it is done to; all of it is ready.
        load: the load that runs meanwhile.
        scripts: the directory of the experiments.
        number: the trial's number; victims take turns.
        load_node: the node that must not be touched.
        environment: variables of the script, in addition to the victims.

    Raises:
        CommandError: the script failed, or the release did not recover.
    """
    pods = release.ready_pods()
    victims = choose(experiment, pods, number, load_node)
    lives = load.lives
    trial = Trial(experiment, victims, fault_s=time.time())
    output = run_script(
        scripts / experiment.name / "run.sh", {**environment, **_victims_environment(victims)}, _SCRIPT_S
    )
    moments = _FAULT.findall(output)
    trial.fault_s = float(moments[-1]) if moments else trial.fault_s
    burst = _BURST.search(output)
    trial.burst = burst_report(burst[1]) if burst else None
    renewed = victims.workers or [pod.name for pod in of(pods, WORKER)] if experiment.renews else []
    _await_recovery(trial, release, load, {worker: lives.get(worker, (0, 0)) for worker in renewed})
    load.wait_round(trial.recovered_s)
    trial.detected_s = _detection(release, trial)
    return trial


def burst_report(line: str) -> Mapping[str, Any] | None:
    """The report of the burst's clients; None if they ended without one, as a pod that was killed for its memory."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def choose(experiment: Experiment, pods: Sequence[Pod], number: int, load_node: str) -> Victims:
    """The trial's victims: they take turns, and the node of the load is never one.

    Raises:
        CommandError: every possible victim is on the load's node, or no worker or router would be left.
    """
    workers, routers = of(pods, WORKER), of(pods, ROUTER)
    match experiment.victim:
        case Victim.WORKER:
            return Victims(workers=[workers[number % len(workers)].name])
        case Victim.ROUTER:
            return Victims(routers=[routers[number % len(routers)].name])
        case Victim.LINK:
            worker, router = workers[number % len(workers)], routers[number // len(workers) % len(routers)]
            return Victims(workers=[worker.name], routers=[router.name])
        case Victim.NODE:
            return _on_node(_node_to_disturb(pods, load_node), pods)
        case _:
            return Victims()


def _node_to_disturb(pods: Sequence[Pod], load_node: str) -> str:
    """A node with a worker, and with a worker and a router elsewhere."""
    workers, routers = of(pods, WORKER), of(pods, ROUTER)
    for node in sorted({pod.node for pod in workers} - {load_node}):
        if any(pod.node != node for pod in workers) and any(pod.node != node for pod in routers):
            return node
    raise CommandError("no node can be disturbed: there has to be a worker and a router on another one, and the load")


def _on_node(node: str, pods: Sequence[Pod]) -> Victims:
    here = [pod for pod in pods if pod.node == node]
    return Victims([pod.name for pod in of(here, WORKER)], [pod.name for pod in of(here, ROUTER)], node)


def _victims_environment(victims: Victims) -> dict[str, str]:
    found = {"NODE": victims.node}
    if victims.workers:
        found["WORKER"] = victims.workers[0]
    if victims.routers:
        found["ROUTER"] = victims.routers[0]
    return {name: value for name, value in found.items() if value}


def _await_recovery(trial: Trial, release: Release, load: LoadPod, before: Mapping[str, tuple[int, int]]) -> None:
    """Wait until every pod is ready and every router reports every worker ready, those in `before` in a later life."""
    deadline_s = time.monotonic() + _RECOVERY_S
    while True:
        ready_s = _all_ready_since(release, load)
        lives = load.lives
        have_new_lives = all(lives.get(worker, (0, 0)) > life for worker, life in before.items())
        if ready_s is not None and have_new_lives and release.is_settled():
            # A fault that routers do not notice leaves their last reports older than the fault.
            trial.reported = ready_s > trial.fault_s
            trial.recovered_s = ready_s if trial.reported else time.time()
            return
        if time.monotonic() > deadline_s:
            raise CommandError(f"{trial.experiment.name}: not recovered after {_RECOVERY_S:g} s")
        time.sleep(_POLL_S)


def _all_ready_since(release: Release, load: LoadPod) -> float | None:
    """The time since which every router reports every worker ready; None if one does not."""
    latest = load.latest()
    routers = [pod.name for pod in of(release.pods(), ROUTER)]
    seen = [latest[router] for router in routers if router in latest]
    if not seen or len(seen) < len(routers) or not all(each.all_ready for each in seen):
        return None
    return max(each.at_s for each in seen)


def _detection(release: Release, trial: Trial) -> float | None:
    """When a router first moved a stream away from a victim, by the logs of the routers that still exist."""
    if trial.experiment.victim in _NOTHING_TO_NOTICE:
        return None
    victims = set(trial.victims.workers)
    moments = [
        at_s
        for router in of(release.pods(), ROUTER)
        for line in release.logs_since(router, "router", trial.fault_s)
        if (at_s := noticed_s(line, victims)) is not None and trial.fault_s <= at_s <= trial.recovered_s
    ]
    return min(moments, default=None)


def noticed_s(line: str, victims: set[str]) -> float | None:
    """The time of a log line that says that a stream leaves a victim (any worker if empty), else None."""
    try:
        entry = json.loads(line)
        if entry["message"] not in _NOTICED or (victims and entry["worker"] not in victims):
            return None
        return datetime.fromisoformat(entry["time"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return None
