"""Traces whose spans are exported to a list."""

from dataclasses import dataclass

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import (
    Span,
    Tracing,
    metrics,
)

CALLER = TraceContext(0xABC << 64, 0xDEF, False, "vendor=1")


@dataclass
class Given:
    otlp_endpoint: str | None = None
    otlp_protocol: str | None = None
    trace_ratio: float | None = None
    trace_slow_s: float = 10.0
    pod_name: str | None = None
    pod_namespace: str | None = None


def tracing(ratio: float = 0.0) -> tuple[Tracing, list[Span]]:
    exported: list[Span] = []
    return Tracing(ratio=ratio, slow_s=1.0, export=exported.extend), exported


def count(outcome: str) -> float:
    return metrics.SPANS.labels(outcome)._value.get()
