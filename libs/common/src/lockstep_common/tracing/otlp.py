"""Exports spans by OTLP, with OpenTelemetry's SDK. Import it where tracing is on only: it takes memory and time.

The SDK's exporters connect, retry and read their variables. The messages are made here: from spans of its own kind
they would take several times as long.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lockstep_common.tracing import names
from lockstep_common.tracing.encoding import encode
from lockstep_common.tracing.options import TraceOptions
from lockstep_common.tracing.spans import Span, Value

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_NAME = "lockstep"


class OtlpExport:
    """An exporter to a collector."""

    def __init__(self, options: TraceOptions, resource: Mapping[str, str]) -> None:
        # It warns at each try. The queue logs once that the collector is away, and once that it is back.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self.resource = Resource.create(dict(resource))
        self._exporter = _exporter(options, self.resource)

    def export(self, spans: Sequence[Span]) -> bool:
        """Export spans, no longer than the options say; whether the collector has them."""
        own: Sequence[Any] = spans  # where the SDK has its own kind
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
        from lockstep_common.tracing.otlp_http import HttpExporter  # noqa: PLC0415 - its client takes memory and time

        return HttpExporter(options, partial(encoded, resource=resource))
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
