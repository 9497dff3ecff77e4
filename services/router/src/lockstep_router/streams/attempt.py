"""One attempt of a stream on one worker: which updates count, when it is too late, how it ended.

It never chooses a worker and never decides whether the stream goes on.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import LockstepError, parse_code

from lockstep_router import metrics
from lockstep_router.streams.journal import Acceptance, Journal
from lockstep_router.workers.link import WorkerProgress
from lockstep_router.workers.losses import BY_CODE, Loss, Lost

_STEP_MARGIN_S = 2.0
"""Time that a worker has after its own deadline for a step to report which rank hangs."""


@dataclass(frozen=True)
class Finished:
    """The stream has all its tokens."""


@dataclass(frozen=True)
class WaitedTooLong:
    """The worker lives, but it did not begin to run the stream in time."""


Outcome = Finished | WaitedTooLong | Lost | LockstepError
"""How an attempt ended: complete, never run, to be continued elsewhere, or with an error for the client."""


@dataclass(frozen=True)
class Deadlines:
    """Time limits of an attempt, in seconds."""

    first_token_s: float
    inter_token_s: float
    first_wait_s: float
    """Longest wait in the worker's queue before the stream runs for the first time."""
    next_wait_s: float
    """Longest wait in the worker's queue after the stream was preempted."""


class Attempt:
    """Receives what a worker sends for one stream. The link calls it.

    Args:
        journal: the stream's journal.
        now: the awake clock's time, in seconds.
        deadlines: the attempt's time limits.
        deliver: called with every update that has tokens or a finish reason.
        on_start: called when the worker begins to run the stream.
        on_wait: called when the worker has preempted the stream.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        now: float,
        deadlines: Deadlines,
        deliver: Callable[[worker_pb2.StreamTokens], None],
        on_start: Callable[[], None],
        on_wait: Callable[[], None],
    ) -> None:
        self.stream_id = journal.stream_id
        self.number = journal.attempt
        self.tokens = 0
        """Tokens received in this attempt."""
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.is_running = False
        self.has_run = False
        """Whether the worker has run the stream at any time."""
        self.submitted_at = now
        self.running_since = now
        """When the worker last began to run the stream, in the awake clock's time."""
        self._journal = journal
        self._deadlines = deadlines
        self._deliver = deliver
        self._on_start = on_start
        self._on_wait = on_wait
        self._progress_at = now
        self._waiting_since = now
        self._may_wait_s = deadlines.first_wait_s

    @property
    def is_over(self) -> bool:
        """Whether it has ended, though its stream may not have noticed yet."""
        return self.over.done()

    def on_tokens(self, update: worker_pb2.StreamTokens, now: float) -> None:
        """Take the next tokens; drop and count what does not continue the journal."""
        if self.over.done():
            metrics.DROPPED_FRAMES.labels("late").inc()
            return
        acceptance = self._journal.accept(update)
        if acceptance is Acceptance.ACCEPTED:
            self._progress_at = now
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
            self.is_running = False
            self._progress_at = self._waiting_since = now
            self._may_wait_s = self._deadlines.next_wait_s
            self._on_wait()

    def _note_running(self, now: float) -> None:
        self._progress_at = now
        if not self.is_running:
            self.is_running = self.has_run = True
            self.running_since = now
            self._on_start()

    def _take(self, update: worker_pb2.StreamTokens) -> None:
        self.tokens += len(update.ids)
        if self._journal.is_full and not update.finish:
            update.finish = inference_pb2.FINISH_REASON_LENGTH
        if update.finish:
            self._end(Finished())
        self._deliver(update)

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
            self.lose(Loss.INTER_TOKEN_DEADLINE if self.tokens else Loss.FIRST_TOKEN_DEADLINE)
        elif self.tokens and min(idle_s, now - worker.stepped_at) > max(self._deadlines.inter_token_s, step_s):
            self.lose(Loss.INTER_TOKEN_DEADLINE)

    def _end(self, outcome: Outcome) -> None:
        if not self.over.done():
            self.over.set_result(outcome)
