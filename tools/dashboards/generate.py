"""`python tools/dashboards/generate.py [--check]`: writes the chart's dashboards that are made by code.

They are `overview`, `ranks`, `cache`, `tenants` and `failures` in `charts/lockstep/dashboards`; then `make manifests`
copies them to `k8s/observability`. It needs the package grafana-foundation-sdk; nothing else does.
"""

import argparse
import json
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
_WIDTH, _HEIGHT = 8, 7


@dataclass(frozen=True)
class Chart:
    """One panel: queries, each with the legend of its series."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    alert: str = ""
    """The alert whose runbook explains it."""
    is_number: bool = False
    """Show the last value instead of a graph."""


def of(metric: str) -> str:
    """A metric of the release."""
    return f"{metric}{{{_OF}}}"


def of_model(metric: str) -> str:
    """A worker's metric, of the chosen models."""
    return f"{metric}{{{_OF_MODEL}}}"


def rate(selected: str, by: str = "") -> str:
    """The rate of a counter, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({selected}[$__rate_interval]))"


def percentiles(metric: str, *, is_workers: bool = False) -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile of a histogram."""
    selected = (of_model if is_workers else of)(f"{metric}_bucket")
    return tuple(
        (f"histogram_quantile({part}, {rate(selected, 'le')})", legend)
        for part, legend in (("0.5", "half"), ("0.99", "99 %"))
    )


_ANSWERED = f'lockstep_router_requests_total{{{_OF},endpoint=~"/v1/.*"}}'

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
    Chart("Ready workers", "short", [(f"sum({of('lockstep_worker_ready')})", "")], "LockstepModelDown", is_number=True),
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
    ),
    Chart("Request duration", "s", percentiles("lockstep_router_request_duration_seconds")),
)

RANKS = (
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
    ),
    Chart(
        "Tokens out",
        "short",
        [(rate(f'lockstep_router_tenant_tokens_total{{{_OF},direction="out"}}', "tenant"), "{{tenant}}")],
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
        [(rate(of("lockstep_router_failovers_total"), "reason"), "{{reason}}")],
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

DASHBOARDS = {
    "overview": ("Overview", OVERVIEW),
    "ranks": ("Ranks", RANKS),
    "cache": ("KV and state", CACHE),
    "tenants": ("Tenants", TENANTS),
    "failures": ("Failures", FAILURES),
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
    for number, chart in enumerate(charts):
        row, column = divmod(number, 24 // _WIDTH)
        made = made.with_panel(
            _panel(chart, number + 1, models.GridPos(_HEIGHT, _WIDTH, _WIDTH * column, _HEIGHT * row))
        )
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


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
    panel: stat.Panel | timeseries.Panel = _number() if chart.is_number else _graph()
    panel = panel.id(number).title(chart.title).datasource(SOURCE).unit(chart.unit).grid_pos(place)
    for letter, (query, legend) in zip("ABCDE", chart.queries, strict=False):
        panel = panel.with_target(prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter))
    if chart.alert:
        link = dashboard.DashboardLink(f"Runbook {chart.alert}").type(models.DashboardLinkType.LINK)
        panel = panel.links([link.url(f"${{runbooks}}/{chart.alert}.md").target_blank(True)])
    return panel


def _number() -> stat.Panel:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _graph() -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    return timeseries.Panel().min(0).fill_opacity(10).legend(legend).tooltip(tooltip)


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
