"""One try of a stream on one worker: which frames count, when it has taken too long, how it ended."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import LockstepError, parse_code

from lockstep_router import metrics
from lockstep_router.journal import Journal, Verdict
from lockstep_router.losses import BY_CODE, Loss, Lost


@dataclass(frozen=True)
class Finished:
    """The stream has all its tokens."""


Outcome = Finished | Lost | LockstepError
"""How an attempt ended: well, to be continued elsewhere, or with an error for the client."""


class Attempt:
    """Receives what the worker says about a stream. Its calls come from the link, between two frames."""

    def __init__(
        self,
        journal: Journal,
        *,
        now: float,
        first_token_deadline_s: float,
        inter_token_deadline_s: float,
        deliver: Callable[[worker_pb2.StreamTokens], None],
    ) -> None:
        self.stream_id = journal.stream_id
        self.number = journal.attempt
        self.tokens = 0
        """Got in this attempt."""
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._journal = journal
        self._last_at = now
        self._first_token_deadline_s = first_token_deadline_s
        self._inter_token_deadline_s = inter_token_deadline_s
        self._deliver = deliver

    def on_tokens(self, frame: worker_pb2.StreamTokens, now: float) -> None:
        """Take the next tokens; drop and count what does not follow the journal."""
        if self.over.done():
            metrics.DROPPED_FRAMES.labels("late").inc()
            return
        verdict = self._journal.accept(frame)
        match verdict:
            case Verdict.ACCEPTED:
                self._take(frame, now)
            case Verdict.STALE_ATTEMPT | Verdict.DUPLICATE:
                metrics.DROPPED_FRAMES.labels(verdict.value).inc()
            case Verdict.GAP | Verdict.MALFORMED:
                metrics.DROPPED_FRAMES.labels(verdict.value).inc()
                self.lose(Loss(verdict.value))

    def _take(self, frame: worker_pb2.StreamTokens, now: float) -> None:
        self._last_at = now
        self.tokens += len(frame.ids)
        if frame.finish == inference_pb2.FINISH_REASON_CANCELLED:
            # Nobody here asked for that: a worker that gives up a stream has lost it.
            frame.finish = inference_pb2.FINISH_REASON_UNSPECIFIED
            self._deliver(frame)
            self.lose(Loss.WORKER_LOST)
            return
        if self._journal.is_full and not frame.finish:
            frame.finish = inference_pb2.FINISH_REASON_LENGTH
        if frame.finish:
            self._end(Finished())
        self._deliver(frame)

    def on_rejected(self, frame: worker_pb2.Rejected) -> None:
        """The worker will not go on: another one may, or the client gets the error."""
        if frame.attempt != self.number:
            metrics.DROPPED_FRAMES.labels(Verdict.STALE_ATTEMPT.value).inc()
            return
        code = parse_code(frame.code)
        if frame.retryable:
            self.lose(BY_CODE.get(code, Loss.WORKER_LOST), frame.retry_after_s)
        else:
            self._end(LockstepError(code, frame.message, field=frame.field or None))

    def lose(self, reason: Loss, retry_after_s: float = 0.0) -> None:
        """End the attempt; the stream goes on elsewhere."""
        self._end(Lost(reason, retry_after_s))

    def check(self, now: float, stepped_at: float) -> None:
        """Lose the attempt if its worker is too late.

        Args:
            now: awake seconds.
            stepped_at: when the worker last finished a step, for whomever. While it does, a stream without tokens is
                waiting its turn (queued, or preempted) and has the longer deadline.
        """
        idle_s = now - self._last_at
        if idle_s > self._first_token_deadline_s:
            self.lose(Loss.INTER_TOKEN_DEADLINE if self.tokens else Loss.FIRST_TOKEN_DEADLINE)
        elif self.tokens and min(idle_s, now - stepped_at) > self._inter_token_deadline_s:
            self.lose(Loss.INTER_TOKEN_DEADLINE)

    def _end(self, outcome: Outcome) -> None:
        if not self.over.done():
            self.over.set_result(outcome)
