"""`sticky`: a session stays on its preferred worker unless too many requests queue there."""

from collections.abc import Sequence

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.rendezvous import rank


class Sticky(Policy):
    """Rendezvous hashing with a limit for the queue."""

    def __init__(self, queue_threshold: int) -> None:
        self._queue_threshold = queue_threshold
        """A session leaves its preferred worker if that has more queued requests than this."""

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The session's preferred worker or, if its queue is too long, the least loaded one.

        Ties are broken by the session's order of preference.
        """
        by_id = {worker.worker_id: worker for worker in workers}
        order = rank(request.session, by_id)
        if by_id[order[0]].queued <= self._queue_threshold:
            return order[0]
        return min(order, key=lambda worker_id: _load_order(by_id[worker_id]))


def _load_order(worker: WorkerFacts) -> tuple[int, int]:
    # What was sent since the report may wait too, so it counts when workers are compared.
    return (worker.queued + worker.sent, worker.running)
