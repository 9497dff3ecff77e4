"""Rendezvous hashing (Thaler and Ravishankar, 1998): a session's order of preference among the workers.

Every worker gets a score for the session, and the highest comes first. Router replicas agree without communication
because they compute the same function. When a worker leaves, only its own sessions move.
"""

from collections.abc import Iterable

from xxhash import xxh64_intdigest


def rank(session: str, worker_ids: Iterable[str]) -> list[str]:
    """The workers in the session's order of preference."""
    return sorted(worker_ids, key=lambda worker_id: (score(session, worker_id), worker_id), reverse=True)


def score(session: str, worker_id: str) -> int:
    """The 64-bit weight of a worker for a session."""
    return xxh64_intdigest(f"{session}\0{worker_id}".encode("utf-8", "surrogatepass"))
