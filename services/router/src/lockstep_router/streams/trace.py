"""The spans `route` and `attempt` of one stream: where it went, why, and how each attempt ended.

The stream calls this at each of its moves, a few times in its life and never for a token after the first.
"""

import time
from functools import lru_cache

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.tracing import Kept, Kind, Shared, Span, names

from lockstep_router.settings import RouterSettings
from lockstep_router.streams.attempt import Finished, Outcome, WaitedTooLong
from lockstep_router.streams.journal import Journal
from lockstep_router.traces import MAX_SHARED, RequestTrace
from lockstep_router.workers import Link, Workers
from lockstep_router.workers.losses import Loss

_FINISHES: dict[int, str] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}
_CLIENTS_OWN = frozenset({ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED})
"""Ends that the client has chosen. By OpenTelemetry's conventions they are no errors of the service, except that a
server's span of an HTTP status 5xx is one: see the span `request`.
"""


class StreamTrace:
    """What a stream reports of itself; this class is for streams without a trace, and does nothing."""

    @property
    def kept_id(self) -> int:
        """The id of its trace if that is kept; else 0."""
        return 0

    def begin(self) -> None:
        """The stream begins to run."""

    def seek(self) -> None:
        """It looks for a worker."""

    def choose(self, link: Link, workers: Workers, settings: RouterSettings) -> None:
        """It goes to this worker: an attempt begins, whose Submit is not made yet."""

    def note_first_token(self, seconds: float) -> None:
        """Its first token has come, so long after the request's arrival."""

    def note_start(self) -> None:
        """Its worker runs it: for the first time in this attempt, or again."""

    def note_gap(self, seconds: float) -> None:
        """The first token after one or several moves has come, so long after the one before."""

    def note_attempt_token(self) -> None:
        """The first token of the attempt has come. `note_first_token` and `note_gap` are called before."""

    def leave(self, outcome: Outcome) -> None:
        """The attempt has ended."""

    def end(self, error: BaseException | None) -> None:
        """The stream has ended, with an error or a cancellation or neither."""


class _Recorded(StreamTrace):
    """The spans of a stream that has a trace.

    Args:
        journal: the stream's. The context of each attempt is put into it.
        request: what the stream belongs to.
    """

    def __init__(self, journal: Journal, request: RequestTrace) -> None:
        self._journal = journal
        self._request = request
        self._trace = request.trace
        self._route: Span | None = None
        """Lasts from the search for a worker to the end of the attempt there."""
        self._attempt: Span | None = None
        self._last: Span | None = None
        """The attempt before."""
        self._emitted = 0
        self._began_at = time.monotonic()

    @property
    def kept_id(self) -> int:
        return self._trace.kept_id

    def begin(self) -> None:
        self._trace.hold()

    def seek(self) -> None:
        self._route = route = self._trace.begin("route", self._request.root)
        route.attributes[names.STREAM] = self._journal.stream_id

    def choose(self, link: Link, workers: Workers, settings: RouterSettings) -> None:
        route, journal = self._route, self._journal
        assert route is not None
        self._describe(route, link, workers, settings)
        self._emitted = len(journal.emitted_ids)
        self._attempt = attempt = self._trace.begin("attempt", route, Kind.CLIENT)
        attempt.attributes[names.STREAM] = journal.stream_id
        attempt.shared = (_attempt(journal.attempt + 1, link.worker_id, link.epoch, self._emitted),)
        if self._last is not None:
            attempt.link(self._last.context)
        journal.traceparent, journal.tracestate = attempt.traceparent, attempt.trace.state

    def _describe(self, route: Span, link: Link, workers: Workers, settings: RouterSettings) -> None:
        """Note the choice and what it was made by."""
        journal, facts = self._journal, link.facts
        ready = workers.ready(journal.model, journal.digest, grammars=journal.has_grammar)
        if len(ready) <= 1:
            reason = "only_candidate"
        elif journal.fingerprint is not None and journal.can_continue_exactly(
            journal.numerics(link.fingerprint, link.grammar_engine)
        ):
            reason = "continues_exactly"
        else:
            reason = "policy"
        route.shared = (_choice(len(ready), settings.policy_of(journal.model), reason, link.worker_id),)
        route.attributes |= {
            names.WORKER_QUEUED: facts.queued,
            names.WORKER_RUNNING: facts.running,
            names.WORKER_WAIT_S: facts.queue_wait_s,
        }
        route.event("chosen")

    def note_first_token(self, seconds: float) -> None:
        self._request.note_first_token(seconds)
        if self._attempt is not None:
            self._attempt.event("first_token")

    def leave(self, outcome: Outcome) -> None:
        if isinstance(outcome, Finished):
            if outcome.reason in _FINISHES:
                self._request.finish_reasons.append(_FINISHES[outcome.reason])
            self._close("finished", "")
        elif isinstance(outcome, LockstepError):
            self._fail("failed", outcome)
        elif isinstance(outcome, WaitedTooLong):
            self._close("waited_too_long", "waited_too_long")
        elif outcome.reason is Loss.SLOW_CLIENT:
            self._trace.keep(Kept.SLOW)
            self._close(outcome.reason.value, "")
        else:
            self._trace.keep(Kept.FAILED_OVER)
            self._close("lost", outcome.reason.value)

    def end(self, error: BaseException | None) -> None:
        if isinstance(error, LockstepError):
            if error.meaning.http_status >= 500 and error.code not in _CLIENTS_OWN:
                self._trace.keep(Kept.ERROR)
            self._fail("cancelled", error)
        else:
            self._close("cancelled", "")
        self._trace.keep_if_slow(time.monotonic() - self._began_at)
        self._trace.release()

    def _fail(self, outcome: str, error: LockstepError) -> None:
        """End the spans that are open, with this outcome unless the client has chosen the end."""
        if error.code in _CLIENTS_OWN:
            self._close(str(error.code), "")
        else:
            self._close(outcome, str(error.code))

    def _close(self, outcome: str, error: str) -> None:
        """End the spans that are open."""
        attempt, route, self._attempt, self._route = self._attempt, self._route, None, None
        if attempt is not None:
            attempt.attributes[names.OUTCOME] = outcome
            attempt.attributes[names.TOKENS] = len(self._journal.emitted_ids) - self._emitted
            self._last = attempt
            self._trace.end(attempt, error)
        if route is not None:
            # That an attempt failed is no error of the route.
            self._trace.end(route, "" if attempt is not None else error)


@lru_cache(MAX_SHARED)
def _choice(candidates: int, policy: str, reason: str, worker: str) -> Shared:
    """What was chosen, and why."""
    return Shared({names.CANDIDATES: candidates, names.POLICY: policy, names.REASON: reason, names.WORKER: worker})


@lru_cache(MAX_SHARED)
def _attempt(number: int, worker: str, epoch: int, emitted: int) -> Shared:
    """Where an attempt goes on, and where it is in the stream."""
    return Shared({names.ATTEMPT: number, names.WORKER: worker, names.EPOCH: epoch, names.EMITTED_BEFORE: emitted})


_NO_TRACE = StreamTrace()


def trace_of(journal: Journal) -> StreamTrace:
    """What the stream with this journal reports to."""
    return _NO_TRACE if journal.trace is None else _Recorded(journal, journal.trace)
