"""One attempt of a stream on one worker: which updates count, when it is too late, how it ended.

It never chooses a worker and never decides whether the stream goes on.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import LockstepError, parse_code

from lockstep_router import metrics
from lockstep_router.lanes import Lane
from lockstep_router.streams.journal import Acceptance, Journal
from lockstep_router.workers.losses import BY_CODE, Loss, Lost
from lockstep_router.workers.running import Deadlines, WorkerProgress

for _dropped in (Acceptance.STALE_ATTEMPT, Acceptance.DUPLICATE, Acceptance.GAP, Acceptance.MALFORMED):
    metrics.DROPPED_FRAMES.labels(_dropped.value)  # from 0

_STEP_MARGIN_S = 2.0
"""Time that a worker has after its own deadline for a step to report which rank hangs."""


@dataclass(frozen=True)
class Finished:
    """The stream has all its tokens."""

    reason: int = inference_pb2.FINISH_REASON_UNSPECIFIED
    """As the worker gave it."""


@dataclass(frozen=True)
class WaitedTooLong:
    """The worker lives, but it did not begin to run the stream in time."""


Outcome = Finished | WaitedTooLong | Lost | LockstepError
"""How an attempt ended: complete, never run, to be continued elsewhere, or with an error for the client."""


class Events(Protocol):
    """What an attempt reports to its stream."""

    def deliver(self, update: worker_pb2.StreamTokens) -> None:
        """Take an update that has tokens or a finish reason."""

    def note_start(self) -> None:
        """The worker begins to run the stream."""

    def note_wait(self) -> None:
        """The worker has preempted the stream."""


class Attempt:
    """Receives what a worker sends for one stream. The link calls it.

    Args:
        journal: the stream's journal.
        over: gets the outcome.
        now: the awake clock's time, in seconds.
        deadlines: time limits of all attempts.
        first_wait_s: longest wait in the worker's queue before the stream runs for the first time.
        events: called with what happens to it.
    """

    handle = 0
    """Its name in columns of tokens, once the link has given it one."""
    lane: Lane | None = None
    """Takes its tokens while it is open."""
    is_running = False
    has_run = False
    """Whether the worker has run the stream at any time."""
    _checked_tokens = 0

    def __init__(
        self,
        journal: Journal,
        over: asyncio.Future[Outcome],
        *,
        now: float,
        deadlines: Deadlines,
        first_wait_s: float,
        events: Events,
    ) -> None:
        self.stream_id = journal.stream_id
        self.number = journal.attempt
        self.over = over
        self._journal = journal
        self._deadlines = deadlines
        self._events = events
        self._first = len(journal.emitted_ids)
        self.running_since = self._progress_at = self._checked_at = self._waiting_since = now
        """`running_since`: when the worker last began to run the stream, in the awake clock's time."""
        self._may_wait_s = first_wait_s

    @property
    def tokens(self) -> int:
        """Tokens received in this attempt."""
        return len(self._journal.emitted_ids) - self._first

    @property
    def is_over(self) -> bool:
        """Whether it has ended, though its stream may not have noticed yet."""
        return self.over.done()

    def on_tokens(self, update: worker_pb2.StreamTokens, now: float) -> None:
        """Take the next tokens; drop and count what does not continue the journal."""
        self._close_lane()
        if self.over.done():
            metrics.DROPPED_FRAMES.labels("late").inc()
            return
        acceptance = self._journal.accept(update)
        if acceptance is Acceptance.ACCEPTED:
            if not self.is_running:
                self._note_running(now)
            self._take(update)
            return
        match acceptance:
            case Acceptance.STALE_ATTEMPT | Acceptance.DUPLICATE:
                metrics.DROPPED_FRAMES.labels(acceptance.value).inc()
            case Acceptance.GAP | Acceptance.MALFORMED:
                metrics.DROPPED_FRAMES.labels(acceptance.value).inc()
                self.lose(Loss(acceptance.value))

    def on_phase(self, change: worker_pb2.StreamPhaseChange, now: float) -> None:
        """Note that the worker runs the stream, goes on computing its prompt, or lets it wait."""
        if change.attempt != self.number:
            metrics.DROPPED_FRAMES.labels(Acceptance.STALE_ATTEMPT.value).inc()
        elif change.phase == worker_pb2.STREAM_PHASE_RUNNING:
            self._note_running(now)
        elif change.phase == worker_pb2.STREAM_PHASE_WAITING and self.is_running:
            self._close_lane()
            self.is_running = False
            self._progress_at = self._waiting_since = now
            self._may_wait_s = self._deadlines.next_wait_s
            self._events.note_wait()

    def _note_running(self, now: float) -> None:
        self._progress_at = now
        if not self.is_running:
            self.is_running = self.has_run = True
            self.running_since = now
            self._events.note_start()

    def _take(self, update: worker_pb2.StreamTokens) -> None:
        if self._journal.is_full and not update.finish:
            update.finish = inference_pb2.FINISH_REASON_LENGTH
        if update.finish:
            self._end(Finished(update.finish))
        self._events.deliver(update)

    def on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        """Note that the worker does not run the stream: it moves to another worker, or the client gets the error."""
        if rejected.attempt != self.number:
            metrics.DROPPED_FRAMES.labels(Acceptance.STALE_ATTEMPT.value).inc()
            return
        code = parse_code(rejected.code)
        if rejected.retryable:
            self.lose(BY_CODE.get(code, Loss.WORKER_LOST), rejected.retry_after_s)
        else:
            self._end(LockstepError(code, rejected.message, field=rejected.field or None))

    def lose(self, reason: Loss, retry_after_s: float = 0.0) -> None:
        """End the attempt; the stream continues elsewhere."""
        self._end(Lost(reason, retry_after_s))

    def check(self, now: float, worker: WorkerProgress) -> None:
        """End the attempt if it has waited too long, or lose it if its worker is too late.

        While the worker has a queue and finishes steps, a stream that it has not begun to run is limited by its longest
        wait only. A running stream has to make progress.

        Args:
            now: the awake clock's time, in seconds.
            worker: what the worker has shown of its progress.
        """
        tokens = len(self._journal.emitted_ids) - self._first
        if tokens != self._checked_tokens:
            # The clock has stood still since the last check.
            self._progress_at, self._checked_tokens = max(self._progress_at, self._checked_at), tokens
        self._checked_at = now
        if self.is_running and now - self._progress_at <= self._deadlines.shortest_s:
            return  # as almost always; what follows comes to the same
        step_s = worker.step_deadline_s + _STEP_MARGIN_S if worker.step_deadline_s else 0.0
        first_token_s = max(self._deadlines.first_token_s, step_s)
        if not self.is_running:
            waited_s = now - self._waiting_since
            if waited_s > self._may_wait_s:
                self._end(WaitedTooLong())
                return
            if worker.queued and min(waited_s, now - worker.stepped_at) <= first_token_s:
                self._progress_at = now
        idle_s = now - self._progress_at
        if idle_s > first_token_s:
            self.lose(Loss.INTER_TOKEN_DEADLINE if tokens else Loss.FIRST_TOKEN_DEADLINE)
        elif tokens and min(idle_s, now - worker.stepped_at) > max(self._deadlines.inter_token_s, step_s):
            self.lose(Loss.INTER_TOKEN_DEADLINE)

    def _close_lane(self) -> None:
        if self.lane is not None:
            self.lane.close()

    def _end(self, outcome: Outcome) -> None:
        self._close_lane()
        if not self.over.done():
            self.over.set_result(outcome)
