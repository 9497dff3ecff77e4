"""Spans of one request in this process, and the decision whether they are kept.

A span is a plain object until it is exported: making one takes about two microseconds, and nothing of OpenTelemetry's
SDK. Code that runs for each request notes facts and times only, and leaves a function that makes the spans of them
(`Late`). It is called for many requests in a row, and never for a trace that is dropped. Called for one request at a
time it takes five times as long: the processor's caches then hold other code.

The spans of a trace wait here until the trace is kept, because of the ratio, of the caller's decision or of what
happens to the request, or until it ends and is dropped.
"""

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from random import Random, SystemRandom
from typing import Any

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import metrics, names

MAX_SPANS = 256
"""Spans of one trace in this process. Further ones are not recorded, but counted; the first that begins always is: it
ends last, and without it the others hang in the air.
"""
MAX_EVENTS = 64
"""Events of one span."""
MAX_WAITING_SPANS = 32_768
"""Spans of all traces that are not decided on, about 1 KB each."""
_MADE_AHEAD = 32
"""Traces that are made together, so that a request only takes one."""
MAX_TEXT = 256
"""Characters of an attribute whose text has no bound of its own."""
_LOW_BITS = (1 << 64) - 1

Value = bool | int | float | str | Sequence[str]
Attributes = dict[str, Value]


class Kind(IntEnum):
    """As in OpenTelemetry's SDK."""

    INTERNAL = 0
    SERVER = 1
    CLIENT = 2


class Kept(StrEnum):
    """Why a trace is kept."""

    RATIO = "ratio"
    PARENT = "parent"
    ERROR = "error"
    SLOW = "slow"
    FAILED_OVER = "failed_over"


_DECISIONS = {None: metrics.TRACES.labels("dropped")} | {why: metrics.TRACES.labels(why.value) for why in Kept}


class Shared:
    """Attributes that many spans have alike: made once, encoded once, and never changed. The code that makes
    them keeps them by their values, of which there must be few.
    """

    __slots__ = ("attributes", "encoded")

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes
        self.encoded = b""
        """As a part of a message to the collector, once that is made."""


@dataclass(slots=True, eq=False)
class Span:
    """One piece of work. Times are nanoseconds since 1970."""

    name: str
    trace: "Trace"
    span_id: int
    parent_id: int
    """0: it begins the trace."""
    has_remote_parent: bool
    begin_ns: int
    kind: Kind = Kind.INTERNAL
    end_ns: int = 0
    attributes: Attributes = field(default_factory=dict)
    """Those that this span alone has. Its other attributes are in `shared`."""
    shared: tuple[Shared, ...] = ()
    """Attributes that other spans have too. No name is here twice or in `attributes`."""
    # Most spans have none: a list for each of them would take as long as the rest.
    events: Sequence[tuple[str, int, Attributes]] = ()
    links: Sequence[TraceContext] = ()
    error: str = ""
    """The type of the error that ended it; empty: none."""

    @property
    def context(self) -> TraceContext:
        """What names it to other services: whether the trace is kept, as far as that is known now."""
        return self.trace.context_of(self.span_id)

    @property
    def traceparent(self) -> str:
        """That of `context`, which takes longer to make."""
        return self.trace.traceparent_of(self.span_id)

    @property
    def log_fields(self) -> dict[str, str]:
        """What names it in a log line."""
        return {"trace_id": self.trace.id_hex, "span_id": self.span_id.to_bytes(8, "big").hex()}

    def event(self, name: str, attributes: Attributes | None = None, at_ns: int | None = None) -> None:
        """Note that something has happened; `at_ns` is of the monotonic clock, None: now."""
        event = name, self.trace.time_of(at_ns), attributes or {}
        if not isinstance(self.events, list):
            self.events = [event]
        elif len(self.events) < MAX_EVENTS:
            self.events.append(event)

    def link(self, context: TraceContext) -> None:
        """Refer to another span, of this trace or of another one."""
        self.links = (*self.links, context)


Late = tuple[Callable[..., list[Span]], tuple[Any, ...], int, int]
"""Spans that have ended and are not made yet: what makes them, its arguments, how many spans it returns, and how many
events these have. It is called once, in any thread. Nobody changes the arguments, nor what they refer to, from then on.
"""


class Tracing:
    """Makes traces, and hands the spans of those that are kept to `export`.

    Args:
        ratio: part of the traces that is kept whatever happens, if the caller has not decided.
        slow_s: a request that takes longer, to its first token or to its end, is kept.
        export: takes spans that have ended. It must not wait.
        export_late: takes spans that are not made yet, and makes them later; None: `export` gets them at once.
        rng: source of ids.
        on_close: ends the export; gets the longest time for it in seconds.
    """

    def __init__(
        self,
        *,
        ratio: float,
        slow_s: float,
        export: Callable[[list[Span]], None],
        export_late: Callable[[Late], None] | None = None,
        rng: Random | None = None,
        on_close: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.slow_s = slow_s
        self.waiting = 0
        """Spans of traces that are not decided on."""
        self.export = export
        """Takes spans that have ended."""
        self.export_late = export_late or (lambda late: export(late[0](*late[1])))
        """Takes spans that have ended and are not made yet."""
        self._bound = round(ratio * (1 << 64))
        self.random_bits = (rng or Random(SystemRandom().getrandbits(128))).getrandbits
        """Ids of so many bits; 0 is none."""
        self._on_close = on_close
        self._made: list[Trace] = []
        """Traces that begin here, made ahead."""

    def trace(self, parent: TraceContext | None = None) -> "Trace":
        """A trace that begins here, or goes on here after a caller's span. It is held once: see `Trace.release`."""
        if parent is not None:
            return Trace(self, parent.trace_id, parent, Kept.PARENT if parent.is_sampled else None)
        if not self._made:
            self._made += [self._make() for _ in range(_MADE_AHEAD)]
        trace = self._made.pop()
        trace.read_clocks()
        return trace

    def _make(self) -> "Trace":
        trace_id = self.random_bits(128) or 1
        # As OpenTelemetry's TraceIdRatioBased: services that use the same ratio agree.
        return Trace(self, trace_id, None, Kept.RATIO if trace_id & _LOW_BITS < self._bound else None)

    def close(self, timeout_s: float = 2.0) -> None:
        """Export what waits for it, no longer than this."""
        self._on_close(timeout_s)


class Trace:
    """The spans of one request in this process."""

    __slots__ = (
        "_decision",
        "_ended",
        "_first_id",
        "_holds",
        "_offset_ns",
        "_parent",
        "_recorded",
        "_tracing",
        "id_bytes",
        "id_hex",
        "is_settled",
        "kept",
        "state",
        "trace_id",
    )

    def __init__(self, tracing: Tracing, trace_id: int, parent: TraceContext | None, kept: Kept | None) -> None:
        self.trace_id = trace_id
        self.id_bytes = trace_id.to_bytes(16, "big")
        self.id_hex = self.id_bytes.hex()
        self.kept = kept
        """Why it is kept; None: so far it is not."""
        self.is_settled = True
        """Whether its spans stay in it: see `defer`."""
        self.state = "" if parent is None else parent.state
        self._tracing = tracing
        self._parent = parent
        self._decision: Kept | None = None
        """Why it is kept if it stays a trace of its own, while that is open."""
        self._holds = 1
        self._recorded = 0
        self._first_id = 0
        self._ended: list[Span | Late] = []
        self.read_clocks()

    def read_clocks(self) -> None:
        """Read them once, when it begins: within a trace, times follow the monotonic clock, which processes of one host
        share.
        """
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    @property
    def kept_id(self) -> int:
        """Its id if it is kept, as far as that is known now; else 0."""
        return 0 if self.kept is None else self.trace_id

    def time_of(self, monotonic_ns: int | None = None) -> int:
        """Nanoseconds since 1970; None: now."""
        return self._offset_ns + (time.monotonic_ns() if monotonic_ns is None else monotonic_ns)

    def new_id(self) -> int:
        """The id of a span that is made later."""
        return self._tracing.random_bits(64) or 1

    def context_of(self, span_id: int) -> TraceContext:
        """The context of its span with this id."""
        return TraceContext(self.trace_id, span_id, self.kept is not None, self.state)

    def traceparent_of(self, span_id: int) -> str:
        """That of `context_of`, which takes longer to make."""
        # Text of bytes: a format of an integer takes five times as long.
        return f"00-{self.id_hex}-{span_id.to_bytes(8, 'big').hex()}-{'00' if self.kept is None else '01'}"

    def begin(
        self, name: str, parent: Span | None = None, kind: Kind = Kind.INTERNAL, at_ns: int | None = None
    ) -> Span:
        """A span that begins at a time of the monotonic clock; None: now. Without a parent it is the caller's child."""
        begin_ns = self._offset_ns + (time.monotonic_ns() if at_ns is None else at_ns)
        span_id = self._tracing.random_bits(64) or 1
        self._first_id = self._first_id or span_id
        if parent is None:
            caller = self._parent
            return Span(
                name,
                self,
                span_id,
                0 if caller is None else caller.span_id,
                caller is not None,
                begin_ns,
                kind,
            )
        begin_ns = max(begin_ns, parent.begin_ns)  # a child cannot begin before its parent
        return Span(name, self, span_id, parent.span_id, False, begin_ns, kind)

    def ended(
        self,
        name: str,
        parent: Span,
        begin_ns: int,
        end_ns: int,
        attributes: Attributes,
        kind: Kind = Kind.INTERNAL,
        error: str = "",
        span_id: int | None = None,
    ) -> Span:
        """A span for `end_late`: the same one as of `begin` and `close`, in half the time. Times are of the monotonic
        clock; `span_id` is from `new_id`, None: a new one.
        """
        begin_ns = max(self._offset_ns + begin_ns, parent.begin_ns)
        end_ns = max(self._offset_ns + end_ns, begin_ns)
        if error:
            attributes[names.ERROR_TYPE] = error
        span_id = span_id or self._tracing.random_bits(64) or 1
        return Span(name, self, span_id, parent.span_id, False, begin_ns, kind, end_ns, attributes, (), (), (), error)

    def end(self, span: Span, error: str = "", at_ns: int | None = None) -> None:
        """End a span, once.

        Args:
            span: one of this trace.
            error: the type of the error that ended it, a word of a bounded set; empty: none.
            at_ns: of the monotonic clock; None: now.
        """
        self.close(span, error, at_ns)
        if self.kept is not None and self.is_settled and self._holds and self._recorded < MAX_SPANS:  # as most of them
            self._recorded += 1
            self._tracing.export([span])
        else:
            self._take(span)

    def end_late(self, late: Late) -> None:
        """End spans of this trace that are made later, by `ended`, or have begun and are given their end by `close`."""
        make, facts, spans, _ = late
        if self._holds and self._recorded + spans <= MAX_SPANS:
            if self.kept is not None and self.is_settled:
                self._recorded += spans
                self._tracing.export_late(late)
                return
            if self._tracing.waiting + spans <= MAX_WAITING_SPANS:
                self._recorded += spans
                self._tracing.waiting += spans
                self._ended.append(late)
                return
        for span in make(*facts):
            self._take(span)

    def close(self, span: Span, error: str = "", at_ns: int | None = None) -> None:
        """Give a span its end, as `end` does, but do not export it."""
        end_ns = self._offset_ns + (time.monotonic_ns() if at_ns is None else at_ns)
        span.end_ns = end_ns if end_ns > span.begin_ns else span.begin_ns
        if error:
            span.error = span.attributes[names.ERROR_TYPE] = error

    def _take(self, span: Span) -> None:
        """Export a span that has ended, or let it wait for the decision."""
        self._recorded += 1
        if not self._holds:
            return  # what ends after its request is not a part of it
        is_decided = self.kept is not None and self.is_settled
        is_beyond = self._recorded > MAX_SPANS and span.span_id != self._first_id
        if is_beyond or (not is_decided and self._tracing.waiting >= MAX_WAITING_SPANS):
            metrics.SPANS.labels("limit").inc()
        elif is_decided:
            self._tracing.export([span])
        else:
            self._ended.append(span)
            self._tracing.waiting += 1

    def keep(self, why: Kept) -> None:
        """Keep the trace; the first reason counts. Contexts that are passed on from now on say so."""
        if self.kept is None:
            self.kept = why
            if self.is_settled:
                self._flush()

    def keep_if_slow(self, seconds: float) -> None:
        """Keep the trace if this is longer than a request may take to its first token or to its end."""
        if seconds > self._tracing.slow_s:
            self.keep(Kept.SLOW)

    def defer(self) -> None:
        """Leave open which trace the spans belong to: until `join`, or `settle`, none is exported. To be called before
        its first span ends.
        """
        self.is_settled, self._decision, self.kept = False, self.kept, None

    def settle(self) -> None:
        """It stays the trace that it began as, if that was open."""
        if not self.is_settled:
            self.is_settled = True
            self.kept = self.kept or self._decision
            if self.kept is not None:
                self._flush()

    def join(self, first: Span, parent: TraceContext, running: Span | None = None) -> None:
        """Move its spans to another trace, which decides what is kept. It must be open which trace they belong to, and
        no span but `first` may be running.

        Args:
            first: of its spans, the one that all others are below. It becomes the child of `parent`, and gets a link to
                the caller's span, if there is one.
            parent: a span of the other trace.
            running: the first span of the other trace in this process, if it goes on here; None: it does not.
        """
        other = None if running is None else running.trace
        if other is None or not other._holds:
            is_kept = parent.is_sampled or (other is not None and other.kept is not None)
            other = self._tracing.trace(replace(parent, is_sampled=is_kept))
        else:
            other.hold()
        ended = [span for each in self._leave() for span in ([each] if isinstance(each, Span) else each[0](*each[1]))]
        if self._parent is not None:
            first.link(self._parent)
        first.trace, first.parent_id = other, parent.span_id
        first.has_remote_parent = running is None or running.span_id != parent.span_id
        other._first_id = other._first_id or first.span_id
        for span in ended:
            span.trace = other
            other._take(span)
        if self.kept is not None:
            other.keep(self.kept)

    @property
    def is_full(self) -> bool:
        """Whether it has as many spans as it may have."""
        return self._recorded >= MAX_SPANS

    def hold(self) -> None:
        """Another part of the request begins, and will `release` the trace."""
        self._holds += 1

    def release(self) -> None:
        """A part of the request has ended. When no part is left, a trace that is not kept is dropped."""
        self._holds -= 1
        if self._holds:
            return
        _DECISIONS[self.kept].value += 1
        if self.kept is None:
            self._leave()

    def _flush(self) -> None:
        for each in self._leave():
            if isinstance(each, Span):
                self._tracing.export([each])
            else:
                self._tracing.export_late(each)

    def _leave(self) -> list[Span | Late]:
        """What has waited for the decision, which waits no more."""
        ended, self._ended = self._ended, []
        for each in ended:
            self._tracing.waiting -= 1 if isinstance(each, Span) else each[2]
        return ended


CURRENT: ContextVar[Span | None] = ContextVar("span", default=None)
"""The span that the present task works for; calls of other services become its children. None: it has no trace."""
