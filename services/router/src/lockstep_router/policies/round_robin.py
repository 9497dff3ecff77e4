"""`round_robin`: the workers in turn."""

from collections import OrderedDict
from collections.abc import Sequence

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts

_MAX_WORKERS = 4096
"""Workers that are remembered; those of long ago are forgotten first."""


class RoundRobin(Policy):
    """The worker whose last stream from this router is longest ago.

    With a fixed set of workers that is round robin. When workers come and go, or a stream may not use some of them, no
    worker is skipped.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[str, int] = OrderedDict()  # worker id -> number of its last stream, the oldest first
        self._number = 0

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:  # noqa: ARG002
        """The worker that has had no stream for longest."""
        return min((worker.worker_id for worker in workers), key=lambda each: (self._sent.get(each, 0), each))

    def note_sent(self, request: RequestFacts, worker: WorkerFacts) -> None:  # noqa: ARG002
        """Put the worker at the end of the line."""
        self._number += 1
        self._sent[worker.worker_id] = self._number
        self._sent.move_to_end(worker.worker_id)
        if len(self._sent) > _MAX_WORKERS:
            self._sent.popitem(last=False)
