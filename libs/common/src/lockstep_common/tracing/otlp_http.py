"""Exports spans by OTLP over HTTP, with the client of OpenTelemetry's SDK."""

from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from lockstep_common.tracing.options import TraceOptions


class HttpExporter(OTLPSpanExporter):
    """Takes spans that are encoded, and sends what `message` makes of them."""

    def __init__(self, options: TraceOptions, message: Callable[[Sequence[bytes]], bytes]) -> None:
        super().__init__(endpoint=options.http_endpoint, timeout=options.timeout_s)
        self._message = message

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Export spans; no longer than the timeout, with all retries."""
        is_done = not self._shutdown and self._client.export(self._message(spans)).success
        return SpanExportResult.SUCCESS if is_done else SpanExportResult.FAILURE
