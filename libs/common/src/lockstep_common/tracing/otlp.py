"""Exports spans by OTLP, with OpenTelemetry's SDK. Import it where tracing is on only: it takes memory and time.

The SDK's exporters connect, retry and read their variables. They are given spans that are bytes already: from spans of
their own kind a message would take several times as long.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lockstep_common.tracing import names
from lockstep_common.tracing.encoding import encode_message, encode_resource
from lockstep_common.tracing.options import TraceOptions
from lockstep_common.tracing.spans import Value

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_NAME = "lockstep"


class OtlpExport:
    """An exporter to a collector."""

    def __init__(self, options: TraceOptions, resource: Mapping[str, str]) -> None:
        # It warns at each try. The queue logs once that the collector is away, and once that it is back.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        message = partial(message_of, resource=encode_resource(plain(Resource.create(dict(resource)))))
        self._exporter = _exporter(options, message)

    def export(self, spans: Sequence[bytes]) -> bool:
        """Export encoded spans, no longer than the options say; whether the collector has them."""
        own: Sequence[Any] = spans  # where the SDK has its own kind
        return self._exporter.export(own) is SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Let an `export` that waits return."""
        self._exporter.shutdown()


class _GrpcExporter(GrpcExporter):
    """Takes spans that are encoded."""

    def __init__(self, options: TraceOptions, message: Callable[[Sequence[bytes]], bytes]) -> None:
        super().__init__(endpoint=options.endpoint, insecure=options.is_insecure, timeout=options.timeout_s)
        self._message = message

    def _initialize_channel_and_stub(self) -> None:
        # As the SDK does, at the start and when the collector was away, but with a stub that takes bytes.
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        assert self._channel is not None
        self._client = _BytesStub(self._channel)

    def _translate_data(self, data: Sequence[Any]) -> Any:  # bytes where the SDK has its message
        return self._message(data)


class _BytesStub:
    """The collector's service for messages that are bytes already."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export = channel.unary_unary(_METHOD)


def _exporter(options: TraceOptions, message: Callable[[Sequence[bytes]], bytes]) -> SpanExporter:
    if options.protocol == "http":
        from lockstep_common.tracing.otlp_http import HttpExporter  # noqa: PLC0415 - its client takes memory and time

        return HttpExporter(options, message)
    return _GrpcExporter(options, message)


def message_of(spans: Sequence[bytes], resource: bytes) -> bytes:
    """What a collector gets: an `ExportTraceServiceRequest`."""
    return encode_message(spans, resource, _NAME, names.SCHEMA_URL)


def plain(resource: Resource) -> dict[str, Value]:
    """The resource's attributes. Detectors that an operator has chosen may give values of further types, as text."""
    found: dict[str, Value] = {}
    for name, value in resource.attributes.items():
        if isinstance(value, str | bool | int | float):
            found[name] = value
        else:
            found[name] = [str(each) for each in value] if isinstance(value, list | tuple) else str(value)
    return found
