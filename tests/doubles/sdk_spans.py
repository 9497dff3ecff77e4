"""Spans in the form of OpenTelemetry's SDK, whose encoder says what a message has to be."""

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import Span, names
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from span_attributes import all_attributes

_SCOPE = InstrumentationScope("lockstep", schema_url=names.SCHEMA_URL)
_KINDS = {kind.value: kind for kind in SpanKind}


def to_readable(span: Span, resource: Resource) -> ReadableSpan:
    """A span in the form of the SDK."""
    own = span.context
    parent = None
    if span.parent_id:
        parent = _context(
            TraceContext(own.trace_id, span.parent_id, own.is_sampled, own.state), is_remote=span.has_remote_parent
        )
    return ReadableSpan(
        span.name,
        _context(own, is_remote=False),
        parent,
        resource,
        all_attributes(span),
        [Event(name, attributes, at_ns) for name, at_ns, attributes in span.events],
        [Link(_context(linked, is_remote=True)) for linked in span.links],
        _KINDS[span.kind],
        status=Status(StatusCode.ERROR) if span.error else Status(),
        start_time=span.begin_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    flags = TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(flags), state)
