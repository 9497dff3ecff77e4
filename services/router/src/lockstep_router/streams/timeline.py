"""Writes one stream into the router's history, at the places where the stream reports its steps.

It stands before the stream's trace and passes everything on to it.
"""

from collections.abc import Callable

from lockstep_common.errors import LockstepError

from lockstep_router.history import MAX_ATTEMPTS, AttemptRecord, History, Move, StreamRecord
from lockstep_router.settings import RouterSettings
from lockstep_router.streams.attempt import Finished, Outcome, WaitedTooLong
from lockstep_router.streams.journal import Journal
from lockstep_router.streams.trace import StreamTrace
from lockstep_router.workers import Link, Workers
from lockstep_router.workers.losses import Loss


class _Timeline(StreamTrace):
    """The record of one stream.

    Args:
        journal: the stream's.
        history: the router's.
        trace: gets everything too.
        arrived_at: when the request arrived, in the event loop's time.
        now: that time.
    """

    def __init__(
        self, journal: Journal, history: History, trace: StreamTrace, arrived_at: float, now: Callable[[], float]
    ) -> None:
        self._journal = journal
        self._history = history
        self._trace = trace
        self._now = now
        self._attempt: AttemptRecord | None = None
        self._move: Move | None = None
        self._emitted = 0
        self._outcome = ""
        self._record = StreamRecord(
            history.next_number(),
            journal.stream_id,
            journal.run_id,
            journal.tenant,
            journal.model,
            arrived_at,
            len(journal.prompt_ids),
            journal.max_tokens,
            emitted=journal.emitted_ids,
        )

    @property
    def kept_id(self) -> int:
        return self._trace.kept_id

    def begin(self) -> None:
        self._history.begin(self._record, self._journal.session)
        self._trace.begin()

    def seek(self) -> None:
        self._trace.seek()

    def choose(self, link: Link, workers: Workers, settings: RouterSettings) -> None:
        self._emitted = len(self._journal.emitted_ids)
        self._attempt = attempt = AttemptRecord(link.worker_id, link.epoch, self._journal.attempt + 1, self._now())
        attempts = self._record.attempts
        if len(attempts) < MAX_ATTEMPTS:
            attempts.append(attempt)
        else:
            attempts[-1] = attempt  # the first ones and the newest
            self._record.attempts_left_out += 1
        if self._move is not None:
            self._move.to_worker = link.worker_id
        self._trace.choose(link, workers, settings)

    def note_start(self) -> None:
        if self._attempt is not None and self._attempt.started_at is None:
            self._attempt.started_at = self._now()
        self._trace.note_start()

    def note_first_token(self, seconds: float) -> None:
        self._trace.note_first_token(seconds)

    def note_gap(self, seconds: float) -> None:
        if self._move is not None:
            self._move.gap_s = seconds
        self._trace.note_gap(seconds)

    def note_attempt_token(self) -> None:
        self._move = None
        if self._attempt is not None:
            self._attempt.first_token_at = self._now()
        self._trace.note_attempt_token()

    def leave(self, outcome: Outcome) -> None:
        if isinstance(outcome, Finished):
            self._close("finished")
            self._outcome = "finished"
        elif isinstance(outcome, LockstepError):
            self._close("failed")
        elif isinstance(outcome, WaitedTooLong):
            self._close("waited_too_long")
        else:
            if self._attempt is not None and outcome.reason is not Loss.SLOW_CLIENT:
                worker, reason = self._attempt.worker, outcome.reason.value
                self._move = self._history.move(self._record, worker, reason, self._now())
            self._close(outcome.reason.value)
        self._trace.leave(outcome)

    def end(self, error: BaseException | None) -> None:
        record = self._record
        record.ended_at = self._now()
        if isinstance(error, LockstepError):
            record.outcome = str(error.code)
        else:
            record.outcome = self._outcome or ("finished" if error is None else "cancelled")
        self._close(record.outcome)
        if self._move is not None:
            self._move.ended = record.outcome
        record.tokens_at_end, record.emitted = len(self._journal.emitted_ids), None
        self._history.end(self._journal.session)
        self._trace.end(error)

    def _close(self, outcome: str) -> None:
        """End the attempt that runs."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.ended_at, attempt.outcome = self._now(), outcome
            attempt.tokens = len(self._journal.emitted_ids) - self._emitted


def timeline_of(
    journal: Journal, history: History, trace: StreamTrace, arrived_at: float, now: Callable[[], float]
) -> StreamTrace:
    """What the stream with this journal reports to: its timeline, or the trace alone if there is no history."""
    return _Timeline(journal, history, trace, arrived_at, now) if history.is_kept else trace
