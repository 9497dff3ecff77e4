"""Exports spans by OTLP, with OpenTelemetry's SDK. Import it where tracing is on only: it takes memory and time.

Over gRPC the SDK's exporter connects, retries and reads its variables, and the messages are made here. Over HTTP it
makes them itself, from spans of its own kind, which takes several times as long.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import names
from lockstep_common.tracing.encoding import encode
from lockstep_common.tracing.options import TraceOptions
from lockstep_common.tracing.spans import Span, Value

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_NAME = "lockstep"
_SCOPE = InstrumentationScope(_NAME, schema_url=names.SCHEMA_URL)
_KINDS = {kind.value: kind for kind in SpanKind}


class OtlpExport:
    """An exporter to a collector."""

    def __init__(self, options: TraceOptions, resource: Mapping[str, str]) -> None:
        # It warns at each try. The queue logs once that the collector is away, and once that it is back.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self.resource = Resource.create(dict(resource))
        self._exporter = _exporter(options, self.resource)

    def export(self, spans: Sequence[Span]) -> bool:
        """Export spans, no longer than the options say; whether the collector has them."""
        own: Sequence[Any] = spans
        if not isinstance(self._exporter, _GrpcExporter):
            own = [to_readable(span, self.resource) for span in spans]
        return self._exporter.export(own) is SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Let an `export` that waits return."""
        self._exporter.shutdown()


class _GrpcExporter(GrpcExporter):
    """Takes the spans as they are."""

    def __init__(self, options: TraceOptions, resource: Resource) -> None:
        super().__init__(endpoint=options.endpoint, insecure=options.is_insecure, timeout=options.timeout_s)
        self._given = resource

    def _initialize_channel_and_stub(self) -> None:
        # As the SDK does, at the start and when the collector was away, but with a stub that takes bytes.
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        assert self._channel is not None
        self._client = _BytesStub(self._channel)

    def _translate_data(self, data: Sequence[Any]) -> Any:  # bytes where the SDK has its message
        return encoded(data, self._given)


class _BytesStub:
    """The collector's service for messages that are bytes already."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export = channel.unary_unary(_METHOD)


def _exporter(options: TraceOptions, resource: Resource) -> SpanExporter:
    if options.protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter  # noqa: PLC0415

        return HttpExporter(endpoint=options.http_endpoint, timeout=options.timeout_s)
    return _GrpcExporter(options, resource)


def encoded(spans: Sequence[Span], resource: Resource) -> bytes:
    """What a collector gets: an `ExportTraceServiceRequest`."""
    return encode(spans, _plain(resource), _NAME, names.SCHEMA_URL)


def _plain(resource: Resource) -> dict[str, Value]:
    """The resource's attributes. Detectors that an operator has chosen may give values of further types, as text."""
    found: dict[str, Value] = {}
    for name, value in resource.attributes.items():
        if isinstance(value, str | bool | int | float):
            found[name] = value
        else:
            found[name] = [str(each) for each in value] if isinstance(value, list | tuple) else str(value)
    return found


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
        span.attributes,
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
