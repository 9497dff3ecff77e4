"""Spans of the commands that redis-py sends, by OpenTelemetry's instrumentation of it.

Of what the instrumentation notes only the names of commands and the kind of the database are kept: no key, no value.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep_common.tracing import names
from lockstep_common.tracing.spans import CURRENT, Kind
from opentelemetry.instrumentation.redis import RedisInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import StatusCode

_MAX_NAME_CHARS = 64


@contextmanager
def traced_redis() -> Iterator[None]:
    """Make spans of all commands of this process that are sent for a traced call."""
    provider = TracerProvider(sampler=_ForTracedCalls(), shutdown_on_exit=False)
    provider.add_span_processor(_IntoTheTrace())
    instrumentor = RedisInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    try:
        yield
    finally:
        instrumentor.uninstrument()


class _ForTracedCalls(Sampler):
    """Drops what is not done for a traced call: probes, and the work of the process for itself."""

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        return SamplingResult(Decision.DROP if CURRENT.get() is None else Decision.RECORD_ONLY)

    def get_description(self) -> str:
        return "ForTracedCalls"


class _IntoTheTrace(SpanProcessor):
    """Adds the SDK's spans to the trace of the call."""

    def on_end(self, span: ReadableSpan) -> None:
        parent = CURRENT.get()
        if parent is None or span.start_time is None:
            return
        trace = parent.trace
        own = trace.begin(f"redis {span.name}"[:_MAX_NAME_CHARS], parent, Kind.CLIENT)
        own.begin_ns = min(max(span.start_time, parent.begin_ns), own.begin_ns)
        own.attributes = {names.DB_SYSTEM: "redis"}
        trace.end(own, "REDIS_ERROR" if span.status.status_code is StatusCode.ERROR else "")
