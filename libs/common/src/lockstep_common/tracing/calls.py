"""Spans of calls between services over gRPC: what the caller sends, what the callee makes of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import names
from lockstep_common.tracing.spans import CURRENT, Kept, Kind, Span, Tracing

_SYSTEM = "grpc"
_DEFECTS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Statuses after which the callee keeps its trace."""

Metadata = tuple[tuple[str, str], ...]


@contextmanager
def calling(method: str) -> Iterator[Metadata]:
    """A call for the task's span; yields the metadata that it sends, which is empty without one.

    Args:
        method: `Service.Method`.
    """
    parent = CURRENT.get()
    if parent is None:
        yield ()
        return
    span = parent.trace.begin(method, parent, Kind.CLIENT)
    _describe(span, method)
    context, error = span.context, ""
    metadata: Metadata = (("traceparent", context.traceparent),)
    try:
        yield (*metadata, ("tracestate", context.state)) if context.state else metadata
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
    _describe(span, method)
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


def _describe(span: Span, method: str) -> None:
    span.attributes = {names.RPC_SYSTEM: _SYSTEM, names.RPC_METHOD: method}
