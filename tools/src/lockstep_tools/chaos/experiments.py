"""The experiments by name: what each disturbs, the limits of what its clients may see, and where its script is.

The scripts under k8s/chaos cause the faults, with kubectl alone; this module says what is expected of them.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lockstep_tools.chaos.release import REDIS, STATE
from lockstep_tools.failure import UNUSABLE, CommandError

_SCRIPTS = Path("k8s/chaos")


class Victim(StrEnum):
    """What a script disturbs."""

    WORKER = "a worker"
    NODE = "a worker's node"
    LINK = "a worker and a router"
    ROUTER = "a router"
    STATE = "the state server"
    REDIS = "the bundled Redis"
    ALL_WORKERS = "all workers"
    ALL_ROUTERS = "all routers"
    ALL = "everything"
    NOBODY = "nobody"


class Breaks(StrEnum):
    """Which streams may break off."""

    NONE = "none"
    OF_THE_ROUTER = "those of the killed router"
    OF_THE_NODE = "those of routers on the cut node"


@dataclass(frozen=True)
class Experiment:
    """A fault, and the limits of its effects."""

    name: str
    summary: str
    victim: Victim
    limit_s: float
    """The longest silence that a stream may have, without the time of its prompt."""
    renews: bool = False
    """The worker begins a new life: another incarnation or epoch."""
    breaks: Breaks = Breaks.NONE
    severs: bool = False
    """A router does not hear a worker for so long that it has to notice."""
    refuses: bool = False
    """Requests may be refused with 429 or 503 and a Retry-After."""
    needs: str = "kubectl"
    component: str = ""
    """The component that the release has to have, besides routers and workers."""


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("rank-kill", "a rank is killed in its pod", Victim.WORKER, 1.0, renews=True),
        Experiment("rank-stop", "a rank is stopped and hangs", Victim.WORKER, 8.0, renews=True),
        Experiment("pod-delete", "a worker's pod is deleted, with grace", Victim.WORKER, 1.0, renews=True),
        Experiment("pod-kill", "a worker's pod is deleted without grace", Victim.WORKER, 1.0, renews=True),
        Experiment("link-cut", "packets between a router and a worker are dropped", Victim.LINK, 4.0, severs=True),
        Experiment(
            "node-cut",
            "a worker's node is cut off and rejoins",
            Victim.NODE,
            4.0,
            breaks=Breaks.OF_THE_NODE,
            severs=True,
        ),
        Experiment("node-drain", "a worker's node is drained and taken back", Victim.NODE, 1.0, renews=True),
        Experiment("worker-rollout", "every worker is replaced, one at a time", Victim.ALL_WORKERS, 1.0, renews=True),
        Experiment("router-rollout", "every router is replaced", Victim.ALL_ROUTERS, 1.0),
        Experiment("router-kill", "a router is deleted without grace", Victim.ROUTER, 1.0, breaks=Breaks.OF_THE_ROUTER),
        Experiment("state-kill", "a state server is deleted without grace", Victim.STATE, 1.0, component=STATE),
        Experiment("redis-kill", "the bundled Redis is deleted without grace", Victim.REDIS, 1.0, component=REDIS),
        Experiment("redis-stop", "the bundled Redis is stopped and continues", Victim.REDIS, 1.0, component=REDIS),
        Experiment("redis-full", "Redis has reached its maxmemory", Victim.REDIS, 1.0, component=REDIS),
        Experiment("fill-queue", "more streams than may run and wait", Victim.NOBODY, 5.0, refuses=True),
        Experiment("upgrade", "helm upgrade, and helm rollback", Victim.ALL, 1.0, renews=True, needs="kubectl, helm"),
    )
}


def scripts() -> Path:
    """The directory of the experiments' scripts.

    Raises:
        CommandError: it does not exist here.
    """
    for root in (Path.cwd(), Path(__file__).resolve().parents[4]):
        if (root / _SCRIPTS / "lib.sh").is_file():
            return root / _SCRIPTS
    raise CommandError(f"there is no {_SCRIPTS} here: run this in Lockstep's repository", UNUSABLE)


def named(name: str) -> Experiment:
    """The experiment of this name.

    Raises:
        CommandError: there is none.
    """
    if name not in EXPERIMENTS:
        raise CommandError(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}", UNUSABLE)
    return EXPERIMENTS[name]
