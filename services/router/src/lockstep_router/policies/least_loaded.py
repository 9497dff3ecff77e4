"""`least_loaded`: the better one of two workers, by their estimated wait.

Power of two choices (Mitzenmacher, 2001): almost as even as the best of all workers, and several routers with reports
of the same age do not all send to the same worker.
"""

from collections.abc import Sequence

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.rendezvous import rank


class LeastLoaded(Policy):
    """The two workers are the first ones in the order of a hash of the stream's id."""

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The one with the shorter estimated wait; of equal waits, the one with fewer requests."""
        by_id = {worker.worker_id: worker for worker in workers}
        pair = rank(request.stream_id, by_id)[:2]
        return min(pair, key=lambda worker_id: (by_id[worker_id].queue_wait_s, by_id[worker_id].requests))
