"""`weighted`: like `sticky`, but a worker's share of the sessions is in proportion to its capacity.

The capacity is the number of KV blocks that the worker reports. Workers of one model version have equal blocks, so that
the numbers can be compared.
"""

import math
from collections.abc import Sequence

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.rendezvous import score

_BITS = 52
"""Bits of a hash that are used: (2^52 - 1/2) / 2^52 is the largest such float below 1."""


class Weighted(Policy):
    """Weighted rendezvous hashing with a limit for the queue."""

    def __init__(self, queue_threshold: int) -> None:
        self._queue_threshold = queue_threshold

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The session's preferred worker or, if its queue is too long, the one with the least load per capacity."""
        order = sorted(
            workers,
            key=lambda worker: (weighted_score(request.session, worker), worker.worker_id),
            reverse=True,
        )
        if order[0].queued <= self._queue_threshold:
            return order[0].worker_id
        return min(order, key=_load_order).worker_id


def weighted_score(session: str, worker: WorkerFacts) -> float:
    """The weight of a worker for a session: -w / ln(u) for the capacity w and a hash u, evenly spread in (0, 1).

    The worker with the highest score is one of capacity w with probability w over the sum of all capacities (weighted
    rendezvous hashing: Schindelhauer and Schomaker, 2005; this form: Resch, 2015). If one worker's capacity changes,
    only sessions from it or to it move.
    """
    u = ((score(session, worker.worker_id) >> (64 - _BITS)) + 0.5) / 2**_BITS
    return -_weight(worker) / math.log(u)


def _weight(worker: WorkerFacts) -> int:
    return max(worker.capacity, 1)


def _load_order(worker: WorkerFacts) -> tuple[float, float]:
    return ((worker.queued + worker.sent) / _weight(worker), worker.running / _weight(worker))
