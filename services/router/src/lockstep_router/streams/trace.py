"""The spans `route` and `attempt` of one stream: where it went, why, and how each attempt ended.

The stream calls this at each of its moves, a few times in its life and never for a token after the first.
"""

import time
from functools import lru_cache

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import Attributes, Kept, Kind, Shared, Span, names

from lockstep_router.settings import RouterSettings
from lockstep_router.streams.attempt import Finished, Outcome, WaitedTooLong
from lockstep_router.streams.journal import Journal
from lockstep_router.traces import MAX_SHARED, RequestTrace
from lockstep_router.workers import Link, Workers
from lockstep_router.workers.losses import Loss
from lockstep_router.workers.reported import Reported

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


_Chosen = tuple[int, int, str, int, int, int, Reported, float, int, str, str, TraceContext | None]
"""The beginning of an attempt: when it was, of the monotonic clock, its span's id, the worker and its epoch, the number
of the attempt, the stream's tokens, the worker's load and wait, the number of candidates, the policy, why it was this
worker, and the attempt before.
"""


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
        self._sought_ns = 0
        """When its search for a worker began, of the monotonic clock; 0: it neither looks for one nor has one."""
        self._chosen: _Chosen | None = None
        """The present attempt."""
        self._first_token_ns = 0
        """When its first token came, if that was in the present attempt; else 0."""
        self._span_id = 0
        """Of the present or last attempt; 0: there is none."""
        self._began_ns = time.monotonic_ns()

    @property
    def kept_id(self) -> int:
        trace = self._trace
        return 0 if trace.kept is None else trace.trace_id

    def begin(self) -> None:
        self._trace.hold()

    def seek(self) -> None:
        self._sought_ns = time.monotonic_ns()

    def choose(self, link: Link, workers: Workers, settings: RouterSettings) -> None:
        journal = self._journal
        ready = workers.ready(journal.model, journal.digest, grammars=journal.has_grammar)
        if len(ready) <= 1:
            reason = "only_candidate"
        elif journal.fingerprint is not None and journal.can_continue_exactly(
            journal.numerics(link.fingerprint, link.grammar_engine)
        ):
            reason = "continues_exactly"
        else:
            reason = "policy"
        trace = self._trace
        before = trace.context_of(self._span_id) if self._span_id else None
        self._span_id = span_id = trace.new_id()
        journal.traceparent, journal.tracestate = trace.traceparent_of(span_id), trace.state
        self._chosen = (
            time.monotonic_ns(),
            span_id,
            link.worker_id,
            link.epoch,
            journal.attempt + 1,
            len(journal.emitted_ids),
            link.load,
            link.queue_wait_s,
            len(ready),
            settings.policy_of(journal.model),
            reason,
            before,
        )

    def note_first_token(self, seconds: float) -> None:
        self._request.note_first_token(seconds)
        self._first_token_ns = time.monotonic_ns()

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
        elif self._sought_ns:
            self._close("cancelled", "")
        trace = self._trace
        if trace.kept is None:
            trace.keep_if_slow((time.monotonic_ns() - self._began_ns) / 1e9)
        trace.release()

    def _fail(self, outcome: str, error: LockstepError) -> None:
        """End the spans that are open, with this outcome unless the client has chosen the end."""
        if error.code in _CLIENTS_OWN:
            self._close(str(error.code), "")
        else:
            self._close(outcome, str(error.code))

    def _close(self, outcome: str, error: str) -> None:
        """End the spans that are open."""
        if not self._sought_ns:
            return
        journal, chosen = self._journal, self._chosen
        times = self._sought_ns, self._first_token_ns, time.monotonic_ns()
        tokens = len(journal.emitted_ids)
        facts = self._request.root, journal.stream_id, chosen, times, outcome, error, tokens
        if chosen is None:
            self._trace.end_late((_spans, facts, 1, 0))
        else:
            self._trace.end_late((_spans, facts, 2, 2))
        self._chosen, self._sought_ns, self._first_token_ns = None, 0, 0


def _spans(
    root: Span,
    stream_id: str,
    chosen: _Chosen | None,
    times: tuple[int, int, int],
    outcome: str,
    error: str,
    tokens: int,
) -> list[Span]:
    """The spans of an attempt and of the search for its worker; of that alone if it found none.

    Args:
        root: the request's span.
        stream_id: of the stream.
        chosen: the beginning of the attempt.
        times: when the search began, when the stream's first token came, if that was in this attempt, and the end.
        outcome: of the attempt.
        error: the type of the error that ended it; empty: none.
        tokens: those of the stream at its end.
    """
    trace, (sought_ns, first_token_ns, ended_ns) = root.trace, times
    attributes: Attributes = {names.STREAM: stream_id}
    if chosen is None:
        return [trace.ended("route", root, sought_ns, ended_ns, attributes, error=error)]
    chosen_ns, span_id, worker, epoch, number, emitted, load, wait_s, candidates, policy, reason, before = chosen
    attributes[names.WORKER_QUEUED] = load.queued
    attributes[names.WORKER_RUNNING] = load.running
    attributes[names.WORKER_WAIT_S] = wait_s
    # That an attempt failed is no error of the route.
    route = trace.ended("route", root, sought_ns, ended_ns, attributes)
    route.shared = (_choice(candidates, policy, reason, worker),)
    route.events = (("chosen", trace.time_of(chosen_ns), {}),)
    attributes = {names.STREAM: stream_id, names.TOKENS: tokens - emitted}
    attempt = trace.ended("attempt", route, chosen_ns, ended_ns, attributes, Kind.CLIENT, error, span_id)
    attempt.shared = (_attempt(number, worker, epoch, emitted, outcome),)
    if before is not None:
        attempt.link(before)
    if first_token_ns:
        attempt.events = (("first_token", trace.time_of(first_token_ns), {}),)
    return [attempt, route]


@lru_cache(MAX_SHARED)
def _choice(candidates: int, policy: str, reason: str, worker: str) -> Shared:
    """What was chosen, and why."""
    return Shared({names.CANDIDATES: candidates, names.POLICY: policy, names.REASON: reason, names.WORKER: worker})


@lru_cache(MAX_SHARED)
def _attempt(number: int, worker: str, epoch: int, emitted: int, outcome: str) -> Shared:
    """Where an attempt goes on, where it is in the stream, and how it ends."""
    return Shared(
        {
            names.ATTEMPT: number,
            names.WORKER: worker,
            names.EPOCH: epoch,
            names.EMITTED_BEFORE: emitted,
            names.OUTCOME: outcome,
        }
    )


_NO_TRACE = StreamTrace()


def trace_of(journal: Journal) -> StreamTrace:
    """What the stream with this journal reports to."""
    return _NO_TRACE if journal.trace is None else _Recorded(journal, journal.trace)
