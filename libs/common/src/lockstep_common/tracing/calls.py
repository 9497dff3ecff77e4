"""Spans of calls between services over gRPC: what the caller sends, what the callee makes of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import names
from lockstep_common.tracing.spans import CURRENT, Attributes, Kept, Kind, Span, Tracing

_SYSTEM = "grpc"
_DEFECTS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Statuses after which the callee keeps its trace."""

Metadata = tuple[tuple[str, str], ...]


@contextmanager
def calling(method: str) -> Iterator[Metadata]:
    """A call for the task's span; yields the metadata that it sends, which is empty without one, and while it is open
    which trace the span belongs to: the callee's spans could not move with it.

    Args:
        method: `Service.Method`.
    """
    with _child(method, _attributes(method)) as span:
        if span is None or not span.trace.is_settled:
            yield ()
            return
        context = span.context
        metadata: Metadata = (("traceparent", context.traceparent),)
        yield (*metadata, ("tracestate", context.state)) if context.state else metadata


@contextmanager
def calling_store(name: str, system: str) -> Iterator[None]:
    """A use of a database for the task's span. What it is used for is the name; nothing is sent of the trace.

    Args:
        name: of the span.
        system: kind of the database, as OpenTelemetry names it.
    """
    with _child(name, {names.DB_SYSTEM: system}):
        yield


@contextmanager
def _child(name: str, attributes: Attributes) -> Iterator[Span | None]:
    """The span of what the task's span calls; None: it has none."""
    parent = CURRENT.get()
    if parent is None:
        yield None
        return
    span, error = parent.trace.begin(name, parent, Kind.CLIENT), ""
    span.attributes = attributes
    try:
        yield span
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        parent.trace.end(span, error)


def begin_called(tracing: Tracing, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> None:
    """Begin the span of a call that has come, for the task that serves it. Calls without a context have none."""
    given = {
        name: value for name, value in metadata if name in ("traceparent", "tracestate") and isinstance(value, str)
    }
    context = TraceContext.parse(given.get("traceparent", ""), given.get("tracestate", ""))
    if context is None:
        CURRENT.set(None)
        return
    span = tracing.trace(context).begin(method, kind=Kind.SERVER)
    span.attributes = _attributes(method)
    CURRENT.set(span)


def end_called(status: str, seconds: float) -> None:
    """End the span of the call that the task serves, if it has one, with the name of its gRPC status."""
    span = CURRENT.get()
    if span is None:
        return
    CURRENT.set(None)
    if status in _DEFECTS:
        span.trace.keep(Kept.ERROR)
    span.trace.keep_if_slow(seconds)
    span.trace.end(span, "" if status == "OK" else status)
    span.trace.release()


def _attributes(method: str) -> Attributes:
    return {names.RPC_SYSTEM: _SYSTEM, names.RPC_METHOD: method}
