"""The faults of a simulation, as data: what happens, when, to whom, and for how long."""

from dataclasses import dataclass
from random import Random

WORKER_FAULTS = (
    "crash",
    "lose node",
    "lose ranks",
    "hang",
    "stop",
    "slow",
    "mischief",
    "drain",
    "wall clock",
)
PATH_FAULTS = ("cut up", "cut down", "cut both", "flap", "reset", "half-open worker", "half-open router", "delay")
ROUTER_FAULTS = ("kill router", "freeze router", "drain router", "router clock")
CLIENT_FAULTS = ("reset clients", "cut clients")
DISCOVERY_FAULTS = ("discover nothing", "discover some", "discovery fails")
STATE_FAULTS = ("state away", "state late", "state forgets")
"""Of the state server, where routers share one."""

KINDS = (*WORKER_FAULTS, *PATH_FAULTS, *ROUTER_FAULTS, *CLIENT_FAULTS, *DISCOVERY_FAULTS)


USUAL = (*KINDS, "mischief", "mischief")
"""Mischief is of many sorts, so it comes more often."""

SHARED = (*(kind for kind in USUAL if kind != "router clock"), *2 * ("kill router",), *6 * STATE_FAULTS)
"""Where routers share a state server. A router that goes on with another one's stream has to trust its clock."""

KEEPING = frozenset({*WORKER_FAULTS, *PATH_FAULTS, "kill router", "reset clients"})
"""Faults that lose no stream that the state server has."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    at: float
    kind: str
    router: int
    worker: int
    seconds: float
    lottery: float
    """Decides details."""

    def __str__(self) -> str:
        return f"{self.at:.3f} s: {self.kind} (router {self.router}, worker {self.worker}, {self.seconds:.2f} s)"


def choose_faults(
    rng: Random,
    routers: int,
    workers: int,
    window_s: float,
    count: tuple[int, int],
    kinds: tuple[str, ...],
    longest_s: float,
    *,
    spare_first: bool,
) -> tuple[Fault, ...]:
    """Faults in the order of their times.

    Args:
        rng: the source of randomness.
        routers: number of routers.
        workers: number of workers.
        window_s: faults begin in this time.
        count: fewest and most faults.
        kinds: to choose from.
        longest_s: longest time until a fault is over.
        spare_first: whether the first worker and the paths to it have none.
    """
    faults = []
    for _ in range(rng.randint(*count)):
        kind = rng.choice(kinds)
        first = 1 if spare_first and kind in (*WORKER_FAULTS, *PATH_FAULTS) else 0
        faults.append(
            Fault(
                at=0.5 + rng.random() * (window_s - 0.5),
                kind=kind,
                router=rng.randrange(routers),
                worker=rng.randrange(first, workers),
                seconds=rng.choice((rng.uniform(0.02, 0.5), rng.uniform(0.5, 4.0), rng.uniform(4.0, longest_s))),
                lottery=rng.random(),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at))
