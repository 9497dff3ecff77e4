"""Which worker serves a session: pure functions of the session, the live workers and their loads.

Router replicas agree without talking because they compute the same thing. Rendezvous hashing (Thaler and Ravishankar,
1998): every worker gets a score for the session, the highest wins; when a worker leaves, only its own sessions move.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh64_intdigest


@dataclass(frozen=True)
class Load:
    """A worker that could take a stream, and how busy it is."""

    worker_id: str
    queued: int
    """Requests that wait there, as the worker last said."""
    running: int
    sent: int = 0
    """Streams handed to it since then: they may be running or waiting, so they only decide where others go."""


def rank(session: str, worker_ids: Iterable[str]) -> list[str]:
    """The workers in the session's order of preference."""
    return sorted(worker_ids, key=lambda worker_id: (score(session, worker_id), worker_id), reverse=True)


def score(session: str, worker_id: str) -> int:
    """The 64-bit weight of a worker for a session."""
    return xxh64_intdigest(f"{session}\0{worker_id}".encode("utf-8", "surrogatepass"))


def choose(session: str, loads: Sequence[Load], threshold: int) -> str:
    """The worker for a session's next stream.

    Args:
        session: who asks.
        loads: the workers that may be chosen, at least one.
        threshold: the session's own worker is left only when it has more than this many requests queued.

    Returns:
        The session's own worker or, when that is crowded, the least loaded one; ties go by the session's preference.
    """
    order = rank(session, (load.worker_id for load in loads))
    by_id = {load.worker_id: load for load in loads}
    if by_id[order[0]].queued <= threshold:
        return order[0]
    return min(order, key=lambda worker_id: _busyness(by_id[worker_id]))


def _busyness(load: Load) -> tuple[int, int]:
    return (load.queued + load.sent, load.running)
