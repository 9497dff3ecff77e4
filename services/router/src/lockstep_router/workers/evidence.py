"""What is known of a worker's death: which of the router's streams ran there, and whether others did.

It knows the streams of one connection and judges none of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from lockstep_api.v1 import worker_pb2


class Sent(Protocol):
    """An attempt on the worker."""

    @property
    def stream_id(self) -> str: ...  # noqa: D102
    @property
    def is_running(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Death:
    """The suspects of one death."""

    stream_ids: tuple[str, ...]
    is_certain: bool
    """Whether they were on the worker when it died. Otherwise it may have been dead before it got them."""
    has_others: bool
    """Whether streams of other routers may be the cause just as well."""
    is_explained: bool
    """Whether a stream of another router was on trial there, and none of this router's: these are no suspects."""


class Evidence:
    """The attempts that were sent on one connection."""

    def __init__(self) -> None:
        self._sent = 0
        self._numbers: dict[str, int] = {}
        """Of the Submit of each attempt on the worker, counted from 1."""
        self._suspicions: dict[str, worker_pb2.Suspicion] = {}
        """Of those with any, as their Submit said to the worker."""

    def begin(self) -> None:
        """Note a new connection."""
        self._sent = 0
        self._numbers.clear()
        self._suspicions.clear()

    def note_sent(self, stream_id: str, suspicion: worker_pb2.Suspicion) -> None:
        """Note that a Submit was put in line."""
        self._sent += 1
        self._numbers[stream_id] = self._sent
        self._suspicions.pop(stream_id, None)
        if suspicion:
            self._suspicions[stream_id] = suspicion

    def unseen(self, status: worker_pb2.Status) -> int:
        """Submits that the worker did not have yet when it sent its status: those that crossed it, or wait for it.

        0 for a worker that does not say what it has got.
        """
        return max(0, self._sent - status.received) if status.HasField("received") else 0

    def note_over(self, stream_id: str) -> None:
        """Note that an attempt has ended."""
        self._numbers.pop(stream_id, None)
        self._suspicions.pop(stream_id, None)

    def _has_got(self, stream_id: str, status: worker_pb2.Status) -> bool:
        number = self._numbers.get(stream_id)
        return number is not None and number <= status.received

    def of_death(self, attempts: Iterable[Sent], status: worker_pb2.Status, *, running_of_others: bool) -> Death:
        """The suspects of a death.

        The worker reports the streams that its ranks ran when they were lost. If it could not, those are suspects that
        are known to run; or else those that it has got, since it may die before it reports what it runs; or else all.

        Args:
            attempts: those that were on the worker.
            status: the worker's last one.
            running_of_others: whether the worker ran streams of other routers when it was last heard.
        """
        attempts = list(attempts)
        running = [attempt.stream_id for attempt in attempts if attempt.is_running]
        if status.HasField("lost") and status.lost.streams >= len(running):
            own = [self._suspicions[each] for each in running if each in self._suspicions]
            own_trials = own.count(worker_pb2.SUSPICION_ON_TRIAL)
            if status.lost.on_trial and not own_trials:
                return Death((), is_certain=True, has_others=True, is_explained=True)
            # Like the router's own streams, those of others that are new to deaths do not clear the one on trial.
            has_others = status.lost.suspected > len(own) if own_trials else status.lost.streams > len(running)
            return Death(tuple(running), is_certain=True, has_others=has_others, is_explained=False)
        received = [each for each in (attempt.stream_id for attempt in attempts) if self._has_got(each, status)]
        suspects = running or received or [attempt.stream_id for attempt in attempts]
        return Death(tuple(suspects), bool(running or received), running_of_others, is_explained=False)
