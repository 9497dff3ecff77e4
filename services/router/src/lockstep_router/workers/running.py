"""The attempts that run on one worker, and what the worker's frames say to each."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from lockstep_api.v1 import worker_pb2

from lockstep_router import metrics
from lockstep_router.lanes import Lane, push
from lockstep_router.workers.connection import ProtocolError
from lockstep_router.workers.losses import Loss


@dataclass(frozen=True)
class WorkerProgress:
    """The last signs of a worker's progress, for the deadlines of its attempts."""

    stepped_at: float
    """When it last finished a step of any stream, in the awake clock's time."""
    step_deadline_s: float
    """Deadline after which the worker treats the current step as hung; 0: no step is running."""
    queued: int
    """Streams in the worker's queue."""


@dataclass(frozen=True)
class Deadlines:
    """Time limits of all attempts, in seconds."""

    first_token_s: float
    inter_token_s: float
    next_wait_s: float
    """Longest wait in the worker's queue after the stream was preempted."""

    @cached_property
    def shortest_s(self) -> float:
        """A stream whose last token, or whose start, is no longer ago has kept all of them."""
        return min(self.first_token_s, self.inter_token_s)


class RunningAttempt(Protocol):
    """An attempt of a stream on this worker, as the link sees it."""

    @property
    def stream_id(self) -> str: ...  # noqa: D102
    @property
    def number(self) -> int: ...  # noqa: D102

    handle: int
    """Names it in columns of tokens, among those of its worker."""

    def on_tokens(self, update: worker_pb2.StreamTokens, now: float) -> None:
        """Take the worker's next tokens."""

    def on_phase(self, change: worker_pb2.StreamPhaseChange, now: float) -> None:
        """Note that the worker runs the stream or lets it wait."""

    def on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        """Note that the worker does not run the stream."""

    def lose(self, reason: Loss) -> None:
        """End the attempt: its worker is lost."""

    @property
    def is_running(self) -> bool:
        """Whether the worker computes it, as far as the worker has said."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, though its stream may not have noticed yet."""

    def check(self, now: float, worker: WorkerProgress) -> None:
        """End the attempt if the worker is too late."""


class RunningAttempts:
    """The attempts of one worker."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        """Those that are open; by the handle of the attempt."""
        self._by_stream: dict[str, RunningAttempt] = {}
        self._by_handle: dict[int, RunningAttempt] = {}
        self._handles = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_stream)

    def __iter__(self) -> Iterator[RunningAttempt]:
        return iter(list(self._by_stream.values()))

    def add(self, attempt: RunningAttempt) -> None:
        """Add an attempt and give it a handle."""
        attempt.handle = next(self._handles)
        self._by_stream[attempt.stream_id] = self._by_handle[attempt.handle] = attempt

    def remove(self, attempt: RunningAttempt) -> bool:
        """Forget an attempt; False if it was forgotten before."""
        if (lane := self.lanes.get(attempt.handle)) is not None:
            lane.close()
        if self._by_handle.pop(attempt.handle, None) is None:
            return False
        if self._by_stream.get(attempt.stream_id) is attempt:
            del self._by_stream[attempt.stream_id]
        return True

    def on_tokens(self, tokens: worker_pb2.Tokens, now: float, loop_time: float) -> None:
        """Take the tokens of a step.

        Args:
            tokens: the worker's message.
            now: the awake clock's time.
            loop_time: the event loop's.

        Raises:
            ProtocolError: columns differ in length.
        """
        handles, positions, ids = tokens.handles, tokens.positions, tokens.ids
        if not len(handles) == len(positions) == len(ids):
            raise ProtocolError("columns of tokens differ in length")
        for handle, position, token_id in push(handles, positions, ids, self.lanes, loop_time):
            attempt = self._by_handle.get(handle)
            if attempt is None:
                self._drop()
            else:
                update = worker_pb2.StreamTokens(attempt=attempt.number, position=position, ids=(token_id,))
                attempt.on_tokens(update, now)
        for update in tokens.streams:
            attempt = self._by_stream.get(update.stream_id)
            if attempt is None:
                self._drop()
            else:
                attempt.on_tokens(update, now)

    def on_phase(self, change: worker_pb2.StreamPhaseChange, now: float) -> None:
        """Take news of one stream; `now` is the awake clock's time."""
        if (attempt := self._by_stream.get(change.stream_id)) is not None:
            attempt.on_phase(change, now)

    def on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        """Take the end of an attempt."""
        attempt = self._by_stream.get(rejected.stream_id)
        if attempt is None:
            self._drop()
        else:
            attempt.on_rejected(rejected)

    @staticmethod
    def _drop() -> None:
        # Normal after a cancel: the worker had already sent it.
        metrics.DROPPED_FRAMES.labels("late").inc()
