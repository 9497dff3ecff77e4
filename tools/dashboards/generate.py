"""`python tools/dashboards/generate.py [--check]`: writes the chart's dashboards.

They are in `charts/lockstep/dashboards`; then `make manifests` copies them to `k8s/observability`. It needs the package
grafana-foundation-sdk; nothing else does.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

FOLDER = Path(__file__).resolve().parents[2] / "charts/lockstep/dashboards"

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_OF = 'namespace="$namespace",release="$release"'
_OF_MODEL = _OF + ',model=~"$model"'
_WITH_EXEMPLARS = re.compile(
    r"lockstep_router_(time_to_first_token|inter_token_latency|request_duration|failover_gap)_seconds_bucket"
    r"|lockstep_worker_(queue|prefill|decode)_seconds_bucket"
)
"""Histograms whose examples have the id of a trace."""
_WIDTH, _HEIGHT = 8, 7
_COLUMNS = 24
_NUMBERS_OF_A_ROW, _NUMBERS_HEIGHT = 4, 4
"""From so many numbers on, they are one flat row above the graphs."""


@dataclass(frozen=True)
class Chart:
    """One panel: queries, each with the legend of its series."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    alert: str = ""
    """The alert whose runbook explains it."""
    is_number: bool = False
    """Show the value of now instead of a graph."""
    is_stacked: bool = False
    """Show the sum of the series too."""
    description: str = ""


def of(metric: str) -> str:
    """A metric of the release."""
    return f"{metric}{{{_OF}}}"


def of_model(metric: str) -> str:
    """A worker's metric, of the chosen models."""
    return f"{metric}{{{_OF_MODEL}}}"


def rate(selected: str, by: str = "") -> str:
    """The rate of a counter, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({selected}[$__rate_interval]))"


def increase(selected: str, by: str = "") -> str:
    """The increase of a counter in an interval of the graph, summed."""
    return f"sum{f' by ({by})' if by else ''} (increase({selected}[$__rate_interval]))"


def percentiles(metric: str, *, is_workers: bool = False) -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile of a histogram."""
    return _two_percentiles((of_model if is_workers else of)(f"{metric}_bucket"))


def _two_percentiles(selected: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({part}, {rate(selected, 'le')})", legend)
        for part, legend in (("0.5", "half"), ("0.99", "99 %"))
    )


_ANSWERED = f'lockstep_router_requests_total{{{_OF},endpoint=~"/v1/.*"}}'

_MOVED = f'lockstep_router_failovers_total{{{_OF},reason!~"overloaded|slow_client"}}'
"""Without streams that a worker refused because it was full, and those that wait for a slow client: they have not lost
their worker."""

_DURATION = (
    f"lockstep_router_request_duration_seconds_bucket{{{_OF},"
    'endpoint=~"/v1/(chat/completions|completions|responses|embeddings)"}'
)
"""Of requests to the model: a WebSocket's duration is that of its connection, and probes and polls are short."""

READY = Chart(
    "Ready workers",
    "short",
    [(f"sum({of('lockstep_worker_ready')}) or vector(0)", "")],
    "LockstepModelDown",
    is_number=True,
)

OVERVIEW = (
    Chart(
        "Available, 3 days",
        "percentunit",
        [(f"1 - {of('lockstep:request_errors:ratio_rate3d')}", "")],
        "LockstepErrorBudgetBurnsSlowly",
        is_number=True,
    ),
    Chart(
        "Budget of errors: times the allowed rate, 1 h",
        "short",
        [(f"{of('lockstep:request_errors:ratio_rate1h')} / 0.001", "")],
        "LockstepErrorBudgetBurnsFast",
        is_number=True,
    ),
    READY,
    Chart(
        "Failing requests",
        "percentunit",
        [
            (of("lockstep:request_errors:ratio_rate5m"), "5 min"),
            (of("lockstep:request_errors:ratio_rate1h"), "1 h"),
            (of("lockstep:request_errors:ratio_rate6h"), "6 h"),
        ],
        "LockstepErrors",
    ),
    Chart(
        "Time to first token", "s", percentiles("lockstep_router_time_to_first_token_seconds"), "LockstepSlowFirstToken"
    ),
    Chart("Between two tokens", "s", percentiles("lockstep_router_inter_token_latency_seconds")),
    Chart("Requests by status", "reqps", [(rate(_ANSWERED, "code"), "{{code}}")], "LockstepErrors"),
    Chart(
        "Tokens",
        "short",
        [
            (rate(of("lockstep_router_prompt_tokens_total")), "in"),
            (rate(of("lockstep_router_generated_tokens_total")), "out"),
        ],
        description="Tokens a second",
    ),
    Chart("Request duration", "s", _two_percentiles(_DURATION)),
)

RANKS: tuple[Chart, ...] = (
    Chart(
        "Computing, of each rank's step",
        "s",
        [(of_model("lockstep:rank_compute_seconds:mean5m"), "{{pod}} {{rank}}")],
        "LockstepSlowRank",
    ),
    Chart(
        "Slowest rank over the fastest",
        "short",
        [(of_model("lockstep:rank_skew:ratio"), "{{pod}}")],
        "LockstepSlowRank",
    ),
    Chart(
        "In collectives",
        "percentunit",
        [(rate(of_model("lockstep_worker_rank_collective_seconds_total"), "pod, rank"), "{{pod}} {{rank}}")],
        "LockstepSlowRank",
    ),
    Chart(
        "Steps",
        "ops",
        [(rate(of_model("lockstep_worker_rank_steps_total"), "pod, rank"), "{{pod}} {{rank}}")],
        "LockstepStepStalled",
    ),
    Chart(
        "Memory",
        "bytes",
        [(f"sum by (pod, rank, kind) ({of_model('lockstep_worker_rank_memory_bytes')})", "{{pod}} {{rank}} {{kind}}")],
    ),
    Chart(
        "Ready",
        "short",
        [(f"min by (pod, rank) ({of_model('lockstep_worker_rank_up')})", "{{pod}} {{rank}}")],
        "LockstepRankDown",
    ),
    Chart(
        "Waiting in the queue", "s", percentiles("lockstep_worker_queue_seconds", is_workers=True), "LockstepOverload"
    ),
    Chart("Prefill", "s", percentiles("lockstep_worker_prefill_seconds", is_workers=True), "LockstepSlowFirstToken"),
    Chart("Decoding", "s", percentiles("lockstep_worker_decode_seconds", is_workers=True)),
)

RANKS += (
    Chart(
        "GPUs in use",
        "percentunit",
        [(f"max by (pod, rank) ({of_model('lockstep_worker_gpu_utilization_ratio')})", "{{pod}} {{rank}}")],
    ),
    Chart(
        "GPUs: temperature",
        "celsius",
        [(f"max by (pod, rank) ({of_model('lockstep_worker_gpu_temperature_celsius')})", "{{pod}} {{rank}}")],
        "LockstepGpuThrottled",
    ),
    Chart(
        "GPUs: power",
        "watt",
        [(f"max by (pod, rank) ({of_model('lockstep_worker_gpu_power_watts')})", "{{pod}} {{rank}}")],
    ),
    Chart(
        "GPUs: watched",
        "short",
        [(f"max by (pod, rank) ({of_model('lockstep_worker_gpu_health_available')})", "{{pod}} {{rank}}")],
        "LockstepGpuNotWatched",
        description="0: the other figures of this GPU are missing or old",
    ),
    Chart(
        "GPUs: XID errors since the worker started",
        "short",
        # The count itself: the series of an XID begins with its first error, and from there nothing increases.
        [
            (
                f"sum by (pod, rank, xid) ({of_model('lockstep_worker_gpu_xid_errors_total')})",
                "{{pod}} {{rank}} XID {{xid}}",
            )
        ],
        "LockstepGpuXid",
        description="A line that begins or rises is an error that the driver has just reported",
    ),
    Chart(
        "GPUs: ECC and NVLink errors",
        "short",
        [
            (
                increase(of_model("lockstep_worker_gpu_ecc_errors_total"), "pod, rank, kind"),
                "{{pod}} {{rank}} ECC {{kind}}",
            ),
            (increase(of_model("lockstep_worker_gpu_nvlink_errors_total"), "pod, rank"), "{{pod}} {{rank}} NVLink"),
        ],
        "LockstepGpuEccErrors",
    ),
)

CACHE = (
    Chart(
        "KV blocks by tier and use",
        "short",
        [(f"sum by (tier, use) ({of_model('lockstep_worker_kv_blocks')})", "{{tier}} {{use}}")],
        "LockstepKvCacheFull",
    ),
    Chart(
        "Prompt tokens found in the prefix cache",
        "percentunit",
        [
            (
                (
                    f"{rate(of_model('lockstep_worker_prefix_hit_tokens_total'), 'pod')} / "
                    f"({rate(of_model('lockstep_worker_prompt_tokens_total'), 'pod')} > 0)"
                ),
                "{{pod}}",
            )
        ],
    ),
    Chart(
        "Preemptions",
        "ops",
        [(rate(of_model("lockstep_worker_preemptions_total"), "pod"), "{{pod}}")],
        "LockstepKvPressure",
    ),
    Chart("Compressed blocks", "ops", [(rate(of_model("lockstep_worker_compressed_blocks_total"), "pod"), "{{pod}}")]),
    Chart(
        "Journals behind",
        "s",
        [(f"max by (pod) ({of('lockstep_router_journal_lag_seconds')})", "{{pod}}")],
        "LockstepJournalLag",
    ),
    Chart(
        "State server not called",
        "short",
        [(f"max by (pod, calls) ({of('lockstep_router_state_breaker_open')})", "{{pod}} {{calls}}")],
        "LockstepStateServerUnreachable",
    ),
    Chart(
        "Redis not used",
        "short",
        [(f"max by (pod) ({of('lockstep_state_breaker_open')})", "{{pod}}")],
        "LockstepStateStoreUnreachable",
    ),
    Chart(
        "Calls of the state server",
        "ops",
        [(rate(of("lockstep_state_calls_total"), "method, code"), "{{method}} {{code}}")],
        "LockstepStateRefuses",
    ),
    Chart("Blocks of the state server", "ops", [(rate(of("lockstep_state_blocks_total"), "outcome"), "{{outcome}}")]),
)

TENANTS = (
    Chart("Requests", "reqps", [(rate(of("lockstep_router_tenant_requests_total"), "tenant"), "{{tenant}}")]),
    Chart(
        "Requests that were refused or failed",
        "reqps",
        [
            (
                rate(f'lockstep_router_tenant_requests_total{{{_OF},code!~"2.."}}', "tenant, code"),
                "{{tenant}} {{code}}",
            )
        ],
    ),
    Chart(
        "Tokens in",
        "short",
        [(rate(f'lockstep_router_tenant_tokens_total{{{_OF},direction="in"}}', "tenant"), "{{tenant}}")],
        description="Tokens a second",
    ),
    Chart(
        "Tokens out",
        "short",
        [(rate(f'lockstep_router_tenant_tokens_total{{{_OF},direction="out"}}', "tenant"), "{{tenant}}")],
        description="Tokens a second",
    ),
    Chart("Limits that refused", "reqps", [(rate(of("lockstep_router_limited_total"), "limit"), "{{limit}}")]),
    Chart(
        "Limits counted by each router alone",
        "short",
        [(f"max by (pod) ({of('lockstep_router_limits_fallback')})", "{{pod}}")],
        "LockstepLimitsNotShared",
    ),
)

FAILURES = (
    Chart(
        "Streams that left their worker",
        "ops",
        [(rate(_MOVED, "reason"), "{{reason}}")],
        "LockstepFailovers",
    ),
    Chart(
        "Silence of a stream that moves",
        "s",
        percentiles("lockstep_router_failover_gap_seconds"),
        "LockstepSlowFailover",
    ),
    Chart("Streams by outcome", "ops", [(rate(of("lockstep_router_streams_ended_total"), "outcome"), "{{outcome}}")]),
    Chart(
        "Restarts of ranks",
        "ops",
        [(rate(of_model("lockstep_worker_restarts_total"), "pod"), "{{pod}}")],
        "LockstepRankRestarts",
    ),
    Chart("Frames not taken", "ops", [(rate(of("lockstep_router_dropped_frames_total"), "reason"), "{{reason}}")]),
    Chart("Inexact continuations", "ops", [(rate(of("lockstep_router_inexact_continuations_total")), "streams")]),
    Chart("Resumed requests", "ops", [(rate(of("lockstep_router_resumes_total"), "outcome"), "{{outcome}}")]),
    Chart(
        "Taken over from other routers",
        "ops",
        [(rate(of("lockstep_router_takeovers_total"), "outcome"), "{{outcome}}")],
    ),
    Chart(
        "Impaired workers",
        "short",
        [(f"max by (model, problem) ({of('lockstep_router_impaired_workers')})", "{{model}} {{problem}}")],
        "LockstepWorkerEjected",
    ),
)


def _three_percentiles(selected: str) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({part}, {rate(selected, 'le')})", legend)
        for part, legend in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99"))
    ]


# The same selection of failures as in the rules: a client's own timeout, 504, is none.
_FAILED = f'lockstep_router_requests_total{{{_OF},endpoint=~"/v1/.*",code=~"5..",code!="504"}}'
_ASKED = f'lockstep_router_requests_total{{{_OF},endpoint=~"/v1/(chat/completions|completions|responses|embeddings)"}}'
_TIMED_OUT = _ASKED.removesuffix("}") + ',code="504"}'

SERVICE = (
    Chart("Streams now", "short", [(f"sum({of('lockstep_router_streams')})", "")], is_number=True),
    READY,
    Chart(
        "Generated tokens a second", "short", [(rate(of("lockstep_router_generated_tokens_total")), "")], is_number=True
    ),
    Chart("Requests a second", "reqps", [(f"{rate(_ANSWERED)} or vector(0)", "")], is_number=True),
    Chart(
        "Failing requests",
        "percentunit",
        [(f"({rate(_FAILED)} or vector(0)) / ({rate(_ANSWERED)} > 0) or vector(0)", "")],
        "LockstepErrors",
        is_number=True,
        description="Answers with a status of 5xx, without 504, which is the client's own timeout; the promise is less "
        "than 0.1 %",
    ),
    Chart(
        "Failovers in the last hour",
        "short",
        [(f"sum(increase({_MOVED}[1h])) or vector(0)", "")],
        "LockstepFailovers",
        is_number=True,
        description="Streams that left their worker and went on elsewhere",
    ),
    Chart(
        "Requests by endpoint and status",
        "reqps",
        [(f"{rate(_ANSWERED, 'endpoint, code')} > 0", "{{endpoint}} {{code}}")],
        "LockstepErrors",
        is_stacked=True,
    ),
    Chart(
        "Requests that their clients' timeouts end",
        "percentunit",
        [(f"{rate(_TIMED_OUT)} / ({rate(_ASKED)} > 0)", "")],
        "LockstepTimeouts",
        description="The share of requests to the model with the status 504. They are no errors of the service",
    ),
    Chart(
        "Time to first token",
        "s",
        _three_percentiles(of("lockstep_router_time_to_first_token_seconds_bucket")),
        "LockstepSlowFirstToken",
    ),
    Chart(
        "Time between tokens",
        "s",
        _three_percentiles(of("lockstep_router_inter_token_latency_seconds_bucket")),
        description="Between two deliveries to one stream, failovers included",
    ),
    Chart(
        "Tokens",
        "short",
        [
            (rate(of("lockstep_router_prompt_tokens_total")), "prompt"),
            (rate(of("lockstep_router_generated_tokens_total")), "generated"),
        ],
        description="Tokens a second",
    ),
    Chart(
        "Streams by router", "short", [(f"sum by (pod) ({of('lockstep_router_streams')})", "{{pod}}")], is_stacked=True
    ),
    Chart("Request duration", "s", _three_percentiles(_DURATION)),
    Chart(
        "Failovers by reason",
        "short",
        [(increase(_MOVED, "reason"), "{{reason}}")],
        "LockstepFailovers",
        is_stacked=True,
    ),
    Chart(
        "Silence of a stream that moves",
        "s",
        _three_percentiles(of("lockstep_router_failover_gap_seconds_bucket")),
        "LockstepSlowFailover",
        description="From the last token before a failover to the first after it",
    ),
    Chart(
        "Frames not taken",
        "ops",
        [(rate(of("lockstep_router_dropped_frames_total"), "reason"), "{{reason}}")],
        description="Late frames of workers that streams had left: they show that fencing works",
    ),
    Chart(
        "Workers as routers see them",
        "short",
        [(f"max by (pod, state) ({of('lockstep_router_workers')}) > 0", "{{pod}} {{state}}")],
        "LockstepWorkerNotReady",
    ),
    Chart(
        "Workers found by discovery",
        "short",
        [(f"max by (pod) ({of('lockstep_router_discovered_workers')})", "{{pod}}")],
        "LockstepDiscoveryStale",
    ),
    Chart(
        "Age of discovery",
        "s",
        [(f"max by (pod) ({of('lockstep_router_discovery_age_seconds')})", "{{pod}}")],
        "LockstepDiscoveryStale",
    ),
    Chart(
        "Failed attempts to discover workers",
        "short",
        [(increase(of("lockstep_router_discovery_errors_total"), "pod"), "{{pod}}")],
        "LockstepDiscoveryStale",
    ),
    Chart(
        "Impaired workers",
        "short",
        [(f"max by (model, problem) ({of('lockstep_router_impaired_workers')}) > 0", "{{model}} {{problem}}")],
        "LockstepWorkerEjected",
    ),
    Chart(
        "Workers that became impaired",
        "short",
        [
            (increase(of("lockstep_router_impairments_total"), "problem"), "{{problem}}"),
            (increase(of("lockstep_router_hedged_connects_total")), "hedged connects"),
        ],
        "LockstepWorkerSlow",
    ),
    Chart(
        "Most loaded worker over the average",
        "short",
        [(f"max by (model) ({of('lockstep_router_load_imbalance')})", "{{model}}")],
        "LockstepImbalance",
    ),
    Chart(
        "State server: calls by method and status",
        "reqps",
        [(rate(of("lockstep_state_calls_total"), "method, code"), "{{method}} {{code}}")],
        "LockstepStateRefuses",
    ),
    Chart("State server: time of a call", "s", _three_percentiles(of("lockstep_state_call_seconds_bucket"))),
    Chart(
        "State server: memory",
        "bytes",
        [
            (f"max by (pod) ({of('lockstep_state_memory_bytes')})", "{{pod}}"),
            (f"max by (pod) ({of('lockstep_state_block_memory_bytes')})", "{{pod}} blocks"),
            (f"max by (pod) ({of('lockstep_state_memory_limit_bytes')} > 0)", "{{pod}} limit"),
        ],
        "LockstepStateMemoryNearLimit",
    ),
    Chart(
        "State server: failures of Redis",
        "ops",
        [(rate(of("lockstep_state_store_failures_total"), "reason"), "{{reason}}")],
        "LockstepStateStoreUnreachable",
    ),
    Chart(
        "State server: writes by outcome",
        "ops",
        [(rate(of("lockstep_state_writes_total"), "outcome"), "{{outcome}}")],
    ),
    Chart(
        "State server: evicted and damaged",
        "short",
        [
            (increase(of("lockstep_state_evictions_total"), "kind"), "evicted {{kind}}"),
            (increase(of("lockstep_state_damaged_values_total")), "damaged"),
        ],
        "LockstepStateEvictsStreams",
    ),
)


def _by(function: str, labels: str, metric: str) -> str:
    return f"{function} by ({labels}) ({of_model(metric)})"


WORKERS = (
    Chart("Ready", "short", [(_by("sum", "model", "lockstep_worker_ready"), "{{model}}")], is_number=True),
    Chart("Ranks up", "short", [(_by("sum", "model", "lockstep_worker_rank_up"), "{{model}}")], is_number=True),
    Chart(
        "Restarts of ranks in the last hour",
        "short",
        [(f"sum by (model) (increase({of_model('lockstep_worker_restarts_total')}[1h]))", "{{model}}")],
        "LockstepRankRestarts",
        is_number=True,
    ),
    Chart(
        "Tokens a second",
        "short",
        [(rate(of_model("lockstep_worker_tokens_total"), "model"), "{{model}}")],
        is_number=True,
    ),
    Chart("Running", "short", [(_by("sum", "pod", "lockstep_worker_running"), "{{pod}}")], is_stacked=True),
    Chart(
        "Waiting",
        "short",
        [(_by("sum", "pod", "lockstep_worker_queued"), "{{pod}}")],
        "LockstepOverload",
        is_stacked=True,
    ),
    Chart(
        "KV cache in use",
        "percentunit",
        [(_by("max", "pod", "lockstep_worker_kv_usage_ratio"), "{{pod}}")],
        "LockstepKvCacheFull",
    ),
    Chart(
        "Tokens a second by worker",
        "short",
        [(rate(of_model("lockstep_worker_tokens_total"), "pod"), "{{pod}}")],
        is_stacked=True,
    ),
    Chart(
        "Time of a step", "s", [(_by("max", "pod", "lockstep_worker_step_seconds"), "{{pod}}")], "LockstepWorkerSlow"
    ),
    Chart("Of that, ranks without work", "s", [(_by("max", "pod", "lockstep_worker_driver_seconds"), "{{pod}}")]),
    Chart(
        "Tokens of a step",
        "short",
        [
            (
                f"histogram_quantile(0.5, {rate(of_model('lockstep_worker_step_tokens_bucket'), 'le, pod')})",
                "{{pod}} p50",
            )
        ],
    ),
    Chart(
        "Steps a second",
        "short",
        [(rate(of_model("lockstep_worker_steps_total"), "pod"), "{{pod}}")],
        "LockstepStepStalled",
    ),
    Chart(
        "Ranks that are ready",
        "short",
        [(_by("min", "pod, rank", "lockstep_worker_rank_up"), "{{pod}} rank {{rank}}")],
        "LockstepRankDown",
    ),
    Chart(
        "Submits and refusals",
        "reqps",
        [
            (rate(of_model("lockstep_worker_submitted_total"), "model"), "{{model}} submitted"),
            (rate(of_model("lockstep_worker_rejected_total"), "model, code"), "{{model}} {{code}}"),
        ],
        "LockstepOverload",
    ),
    Chart(
        "Epochs and restarts",
        "short",
        [
            (_by("max", "pod", "lockstep_worker_epoch"), "{{pod}} epoch"),
            (_by("sum", "pod", "lockstep_worker_restarts_total"), "{{pod}} restarts"),
        ],
        "LockstepRankRestarts",
    ),
    Chart(
        "Loading",
        "percentunit",
        [(_by("max", "pod", "lockstep_worker_loading_ratio"), "{{pod}}")],
        "LockstepWorkerNotReady",
        description="Share of the weights read by a start",
    ),
    Chart(
        "Routers and streams",
        "short",
        [
            (_by("sum", "pod", "lockstep_worker_routers"), "{{pod}} routers"),
            (_by("sum", "pod", "lockstep_worker_streams"), "{{pod}} streams"),
        ],
    ),
    Chart(
        "Routers cut off for reading too slowly",
        "short",
        [(increase(of_model("lockstep_worker_overflows_total"), "pod"), "{{pod}}")],
    ),
)

DASHBOARDS = {
    "overview": ("Overview", OVERVIEW),
    "ranks": ("Ranks", RANKS),
    "cache": ("KV and state", CACHE),
    "tenants": ("Tenants", TENANTS),
    "failures": ("Failures", FAILURES),
    "service": ("Service", SERVICE),
    "workers": ("Workers", WORKERS),
}


def build(name: str) -> str:
    """A dashboard as JSON."""
    title, charts = DASHBOARDS[name]
    link = dashboard.DashboardLink("Lockstep").type(models.DashboardLinkType.DASHBOARDS).tags(["lockstep"])
    made = (
        dashboard.Dashboard(f"Lockstep / {title}")
        .uid(f"lockstep-{name}")
        .tags(["lockstep"])
        .refresh("10s")
        .time("now-30m", "now")
        .link(link.as_dropdown(True).include_vars(True).keep_time(True))
    )
    for variable in _variables():
        made = made.with_variable(variable)
    for number, (chart, place) in enumerate(zip(charts, _places(charts), strict=True)):
        made = made.with_panel(_panel(chart, number + 1, place))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _places(charts: Sequence[Chart]) -> Iterator[models.GridPos]:
    """Where each panel stands."""
    numbers = sum(chart.is_number for chart in charts)
    flat = numbers if numbers >= _NUMBERS_OF_A_ROW else 0
    for number in range(flat):
        width = _COLUMNS // flat
        yield models.GridPos(_NUMBERS_HEIGHT, width, width * number, 0)
    for number in range(len(charts) - flat):
        row, column = divmod(number, _COLUMNS // _WIDTH)
        yield models.GridPos(_HEIGHT, _WIDTH, _WIDTH * column, _HEIGHT * row + (_NUMBERS_HEIGHT if flat else 0))


def _variables() -> Iterator[dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.TextBoxVariable]:
    yield dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus")
    queries = {
        "namespace": "label_values(lockstep_router_streams, namespace)",
        "release": 'label_values(lockstep_router_streams{namespace="$namespace"}, release)',
        "model": f"label_values({of('lockstep_worker_ready')}, model)",
    }
    for name, query in queries.items():
        made = dashboard.QueryVariable(name).datasource(SOURCE).query({"query": query, "refId": "V"})
        made = made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        if name == "model":
            made = made.include_all(True).multi(True).current(models.VariableOption(text="All", value="$__all"))
        yield made
    yield dashboard.TextBoxVariable("runbooks").label("Address of docs/runbooks").default_value("docs/runbooks")


def _panel(chart: Chart, number: int, place: models.GridPos) -> stat.Panel | timeseries.Panel:
    panel: stat.Panel | timeseries.Panel = _number() if chart.is_number else _graph(chart)
    panel = panel.id(number).title(chart.title).datasource(SOURCE).unit(chart.unit).grid_pos(place)
    for letter, (query, legend) in zip("ABCDE", chart.queries, strict=False):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter)
        # The last value of a range would be shown as that of now, however old it is.
        target = target.instant() if chart.is_number else target.range()
        # One query of a panel has the examples of all: they are those of the series, not of the percentile.
        if _WITH_EXEMPLARS.search(query) and (query, legend) == chart.queries[-1]:
            target = target.exemplar(True)
        panel = panel.with_target(target)
    if chart.description:
        panel = panel.description(chart.description)
    if chart.alert:
        link = dashboard.DashboardLink(f"Runbook {chart.alert}").type(models.DashboardLinkType.LINK)
        panel = panel.links([link.url(f"${{runbooks}}/{chart.alert}.md").target_blank(True)])
    return panel


def _number() -> stat.Panel:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _graph(chart: Chart) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    graph = timeseries.Panel().min(0).fill_opacity(40 if chart.is_stacked else 10).legend(legend).tooltip(tooltip)
    if chart.is_stacked:
        graph = graph.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return graph


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description="Write the chart's dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not as generated")
    check = parser.parse_args().check
    drifted = [name for name in DASHBOARDS if not _is_current(name)]
    for name in drifted:
        if check:
            print(f"{name}.json is not what tools/dashboards/generate.py makes", file=sys.stderr)
        else:
            (FOLDER / f"{name}.json").write_text(build(name))
    return 1 if check and drifted else 0


def _is_current(name: str) -> bool:
    path = FOLDER / f"{name}.json"
    return path.exists() and path.read_text() == build(name)


if __name__ == "__main__":
    sys.exit(main())
