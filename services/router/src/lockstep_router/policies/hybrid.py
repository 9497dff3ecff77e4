"""`hybrid`: a session stays on its preferred worker unless that has more than its share of the load.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016, arXiv:1608.01350), over the order of
rendezvous hashing instead of a ring.
"""

import math
from collections.abc import Sequence

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.rendezvous import rank

_FEW = 4
"""A worker with fewer requests than this is within every bound. Otherwise the second of two requests on idle workers
would leave its session's worker, though a batch of two takes about as long as one."""


class Hybrid(Policy):
    """Rendezvous hashing with a bound for the load and a limit for the queue."""

    def __init__(self, load_bound: float, queue_threshold: int) -> None:
        self._load_bound = load_bound
        """No worker gets more than this times the average number of requests, rounded up, or 4 if that is more."""
        self._queue_threshold = queue_threshold

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The first worker, in the session's order of preference, that is within the bound and whose queue is short.

        If no queue is short, the first one within the bound.
        """
        within = within_bound(workers, self._load_bound)
        short = [worker for worker in within if worker.queued <= self._queue_threshold]
        return rank(request.session, (worker.worker_id for worker in short or within))[0]


def within_bound(workers: Sequence[WorkerFacts], load_bound: float) -> list[WorkerFacts]:
    """The workers that may get one more request.

    Then none has more than `load_bound` times the average, rounded up, or 4 if that is more. There is always one, since
    `load_bound` is above 1.
    """
    requests = 1 + sum(worker.requests for worker in workers)
    most = max(_FEW, math.ceil(load_bound * requests / len(workers)))
    return [worker for worker in workers if worker.requests < most]
