"""What a policy knows about a stream and about the workers, and the interface of a policy."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestFacts:
    """A stream, as far as the choice of its worker depends on it."""

    session: str
    """The identity whose streams should stay together."""
    stream_id: str = ""
    """Different for each stream. Policies without affinity break ties by it."""
    tenant: str = ""
    """Workers reuse KV blocks for the same tenant only."""
    prompt_ids: Sequence[int] = ()


@dataclass(frozen=True)
class WorkerFacts:
    """A worker that could run the stream, as this router knows it now."""

    worker_id: str
    life: tuple[str, int, int] = ("", 0, 0)
    """Target, incarnation and epoch. Whatever was cached in another life is gone."""
    queued: int = 0
    """Requests in its queue, of all routers, as it last reported."""
    running: int = 0
    """Requests in its batch, likewise."""
    sent: int = 0
    """Streams sent to it by this router since that report. They may run or wait."""
    queue_wait_s: float = 0.0
    """Estimated wait of one more request in its queue."""
    capacity: int = 0
    """Its KV blocks, free or not; 0 if it has not reported them."""
    is_suspected: bool = False
    """Whether it may have died or hang: its heartbeats or its current step are late. Like `is_ejected` and `is_slow`,
    true of an offered worker only if there is no better one."""
    is_ejected: bool = False
    """Whether it has failed streams that other workers completed."""
    is_slow: bool = False
    """Whether it takes several times as long as the other workers of its model."""

    @property
    def requests(self) -> int:
        """Requests on the worker, as far as known."""
        return self.queued + self.running + self.sent


class Policy(ABC):
    """A way to choose workers. There is one object for each model."""

    @abstractmethod
    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The id of the worker for a stream.

        It changes no state: a stream that waits is asked about several times.

        Args:
            request: the stream.
            workers: those that may run it, at least one, in any order; all of one version of the model.
        """

    def note_sent(self, request: RequestFacts, worker: WorkerFacts) -> None:  # noqa: B027 - most policies have no state
        """Note that a stream was sent to a worker, which need not be the one that `choose` named."""
