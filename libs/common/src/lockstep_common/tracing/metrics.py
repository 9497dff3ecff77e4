"""Metrics of the traces themselves: what is kept, and what is lost."""

from prometheus_client import Counter

from lockstep_common.tallies import Tallies
from lockstep_common.telemetry import REGISTRY

TRACES = Tallies(
    "lockstep_traces",
    "Traces that ended in this process, by why they were kept (ratio, parent, error, slow, failed_over), or dropped; "
    "a client that resumes a running stream counts with its stream",
    ["decision"],
    registry=REGISTRY,
)
SPANS = Counter(
    "lockstep_trace_spans_total",
    "Spans of kept traces: exported, or lost because the queue was full (full) or the exporter failed (failed); "
    "and spans of any trace that were not recorded because of a limit (limit)",
    ["outcome"],
    registry=REGISTRY,
)
