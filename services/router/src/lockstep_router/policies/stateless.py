"""`stateless`: every stream goes to the least loaded worker, whatever its session."""

from collections.abc import Sequence

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.rendezvous import score


class Stateless(Policy):
    """The fewest requests. Equally loaded workers are ordered by a hash of the stream's id."""

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The worker with the fewest requests."""
        return min(
            workers,
            key=lambda worker: (worker.requests, score(request.stream_id, worker.worker_id), worker.worker_id),
        ).worker_id
