"""Chooses the worker for a session: pure functions of the session, the live workers and their loads.

Router replicas agree without communication because they compute the same function. Rendezvous hashing (Thaler and
Ravishankar, 1998): every worker gets a score for the session, the highest wins; when a worker leaves, only its own
sessions move.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh64_intdigest


@dataclass(frozen=True)
class Load:
    """The load of a worker that could run a stream."""

    worker_id: str
    queued: int
    """Requests in its queue, as it last reported."""
    running: int
    sent: int = 0
    """Streams sent to it since that report. They may run or wait, so they count only when workers are compared."""


def rank(session: str, worker_ids: Iterable[str]) -> list[str]:
    """The workers in the session's order of preference."""
    return sorted(worker_ids, key=lambda worker_id: (score(session, worker_id), worker_id), reverse=True)


def score(session: str, worker_id: str) -> int:
    """The 64-bit weight of a worker for a session."""
    return xxh64_intdigest(f"{session}\0{worker_id}".encode("utf-8", "surrogatepass"))


def choose(session: str, loads: Sequence[Load], threshold: int) -> str:
    """The worker for a session's next stream.

    Args:
        session: the session's identity.
        loads: the workers that may be chosen, at least one.
        threshold: the session leaves its preferred worker if that has more queued requests than this.

    Returns:
        The session's preferred worker or, if its queue is too long, the least loaded one; ties are broken by the
        session's order of preference.
    """
    order = rank(session, (load.worker_id for load in loads))
    by_id = {load.worker_id: load for load in loads}
    if by_id[order[0]].queued <= threshold:
        return order[0]
    return min(order, key=lambda worker_id: _load_order(by_id[worker_id]))


def _load_order(load: Load) -> tuple[int, int]:
    return (load.queued + load.sent, load.running)
