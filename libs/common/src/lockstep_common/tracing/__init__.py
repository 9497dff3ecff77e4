"""Traces of requests: spans, the decision which traces are kept, and their export by OTLP.

A service calls `setup_tracing` once and makes a `Trace` for each request. Without a collector there is no `Tracing`,
and OpenTelemetry's SDK is not imported, unless the setting `otlp_endpoint` or `OTEL_TRACES_EXPORTER` is `memory`: then
traces are only kept here.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from lockstep_common.errors import invalid
from lockstep_common.tracing.batch import SpanBatch
from lockstep_common.tracing.kept import KEPT_SPANS
from lockstep_common.tracing.options import Given, TraceOptions, trace_options
from lockstep_common.tracing.queue import SpanQueue
from lockstep_common.tracing.spans import CURRENT, MAX_TEXT, Attributes, Kept, Kind, Late, Shared, Span, Trace, Tracing

__all__ = [
    "CURRENT",
    "MAX_TEXT",
    "Attributes",
    "Kept",
    "Kind",
    "Late",
    "Shared",
    "Span",
    "Trace",
    "Tracing",
    "setup_tracing",
]

_VERSION = "0.1.0"


class ServiceGiven(Given, Protocol):
    """The settings of a service that names its pod."""

    @property
    def pod_name(self) -> str | None: ...
    @property
    def pod_namespace(self) -> str | None: ...


def setup_tracing(service: str, instance: str, settings: ServiceGiven) -> Tracing | None:
    """The process's traces, as the settings say; None: there are none.

    Args:
        service: router, worker or state.
        instance: the process's name among those of the service.
        settings: of the service.

    Raises:
        LockstepError: INVALID_REQUEST, a variable of OpenTelemetry has no usable value.
    """
    options = trace_options(settings)
    if options is None:
        return None
    return make_tracing(options, _resource(service, instance, settings))


def make_tracing(options: TraceOptions, resource: Mapping[str, str]) -> Tracing:
    """Traces that are exported by OTLP, if there is a collector, and whose newest spans this process keeps.

    Raises:
        LockstepError: INVALID_REQUEST, OpenTelemetry's SDK does not take the address or one of its own variables.
    """
    batch = SpanBatch(KEPT_SPANS.add)
    KEPT_SPANS.configure(resource, batch.encode)
    if not options.endpoint:
        return Tracing(ratio=options.ratio, slow_s=options.slow_s, export=batch.add, export_late=batch.add_late)
    from lockstep_common.tracing.otlp import OtlpExport  # noqa: PLC0415 - the SDK is for those who trace

    try:
        exporter = OtlpExport(options, resource)
    except (OSError, MemoryError):  # another start may help
        raise
    except Exception as error:  # the SDK reads its variables itself and raises anything; its words may quote a secret
        reason = f"cannot be used, or a variable OTEL_EXPORTER_OTLP_… beside it ({type(error).__name__})"
        raise invalid("otlp_endpoint", reason) from None
    queue = SpanQueue(exporter.export, exporter.shutdown, batch.encode, options.delay_s)
    batch.takers.append(queue.put)
    return Tracing(
        ratio=options.ratio,
        slow_s=options.slow_s,
        export=batch.add,
        export_late=batch.add_late,
        on_close=queue.close,
    )


def _resource(service: str, instance: str, settings: ServiceGiven) -> dict[str, str]:
    resource = {"service.instance.id": instance, "service.version": _VERSION}
    if "OTEL_SERVICE_NAME" not in os.environ:
        resource["service.name"] = f"lockstep-{service}"
    if settings.pod_name:
        resource["k8s.pod.name"] = settings.pod_name
    if settings.pod_namespace:
        resource["k8s.namespace.name"] = settings.pod_namespace
    return resource
