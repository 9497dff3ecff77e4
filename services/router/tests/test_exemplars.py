"""Histograms of latency name traces that are kept, to scrapers that ask for OpenMetrics."""

import asyncio
import re
import shutil

import httpx
import pytest
from lockstep_common.distributions import Distribution
from lockstep_common.management import Reports, managed
from lockstep_common.ports import free_port
from lockstep_common.telemetry import OPENMETRICS, REGISTRY, exposition_for
from lockstep_common.tracing import Tracing
from lockstep_router.lanes import Lane, Outlet, push
from lockstep_router.processes.answers import _Labelled
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

PROMETHEUS = shutil.which("prometheus")
HISTOGRAMS = {
    "lockstep_router_time_to_first_token_seconds",
    "lockstep_router_inter_token_latency_seconds",
    "lockstep_router_request_duration_seconds",
}
ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""Of Prometheus 2.42."""


def examples(trace_id):
    """The histograms that have the trace as an example."""
    text = exposition_for(OPENMETRICS)[0].decode()
    return {
        family.name
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": f"{trace_id:032x}"}
    }


@pytest.mark.parametrize("ratio", [1.0, 0.0])
async def test_only_a_trace_that_is_kept_is_an_example(make_cluster, ratio):
    cluster = await make_cluster()
    spans = []
    cluster.router.tracing = Tracing(ratio=ratio, slow_s=60.0, export=spans.extend)
    made = []
    begin = cluster.router.tracing.trace
    cluster.router.tracing.trace = lambda parent=None: made.append(begin(parent)) or made[-1]
    assert (await cluster.complete(stream=True)).status_code == 200
    (trace,) = made
    assert examples(trace.trace_id) == (HISTOGRAMS if ratio else set())


async def test_a_failover_gap_has_the_trace_that_is_kept_because_of_it(make_cluster):
    cluster = await make_cluster()
    spans = []
    cluster.router.tracing = Tracing(ratio=0.0, slow_s=60.0, export=spans.extend)
    first, _ = cluster.worker_of("user:u")
    first.script.die_after = 5
    assert (await cluster.complete()).status_code == 200
    (trace_id,) = {span.trace.trace_id for span in spans}
    assert "lockstep_router_failover_gap_seconds" in examples(trace_id)


def test_tokens_of_a_lane_have_an_example():
    lanes = {}
    outlet = Outlet(b"", b"", b"", send=len, send_later=lambda _: None)
    lane = Lane([1], {2: b"x"}, outlet, on_close=lambda: None, on_failure=lambda error: pytest.fail(str(error)))
    lane.open(lanes, 7, 10, 1.0, 0xE1)
    assert push([7], [1], [2], lanes, 1.5) == []
    assert examples(0xE1) == {"lockstep_router_inter_token_latency_seconds"}


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        (ACCEPTS, True),
        (OPENMETRICS, True),
        ("text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
        (";;=,q", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_openmetrics_is_for_who_prefers_it(accept, is_openmetrics):
    body, content_type = exposition_for(accept)
    assert content_type.startswith(OPENMETRICS) is is_openmetrics
    assert body.endswith(b"# EOF\n") is is_openmetrics


def series(families):
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families
        for sample in family.samples
        if not sample.name.startswith(("process_", "python_"))
    }


def test_both_formats_have_the_same_series():
    """Otherwise a scraper that changes the format would break dashboards and alerts."""
    assert series(parse_openmetrics(exposition_for(OPENMETRICS)[0].decode())) == series(
        parse_text(exposition_for("")[0].decode())
    )


def test_names_with_a_colon_are_the_same_in_both_formats():
    """Those of vLLM, which autoscalers look for."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests.", ["model_name"], registry=registry).labels("a").set(1)
    (line,) = {
        line
        for accept in (OPENMETRICS, "")
        for line in exposition_for(accept, registry)[0].decode().splitlines()
        if not line.startswith("#")
    }
    assert line == 'vllm:num_requests_running{model_name="a"} 1.0'


def test_examples_are_those_of_each_process():
    texts = {}
    for process in ("0", "1"):
        registry = CollectorRegistry()
        Distribution("lockstep_s", "Time.", buckets=(1, 2), registry=registry).observe(1.5, 1, 0xA + int(process))
        texts[process] = exposition_for(OPENMETRICS, registry)[0].decode()
    joint = CollectorRegistry()
    joint.register(_Labelled(texts))
    found = re.findall(
        r'le="2.0",process="(\d)"} 1.0 # {trace_id="(\w+)"} 1.5', exposition_for(OPENMETRICS, joint)[0].decode()
    )
    assert found == [("0", f"{10:032x}"), ("1", f"{11:032x}")]
    assert b"trace_id" not in exposition_for("", joint)[0]


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
async def test_a_prometheus_has_the_example(tmp_path):
    seconds = Distribution("lockstep_test_example_seconds", "Time.", buckets=(1, 2), registry=REGISTRY)
    seconds.observe(1.5, 1, 0xABC)
    port = free_port()
    try:
        async with managed("127.0.0.1", 0, Reports(lambda: None), liveness_timeout_s=60.0) as own_port:
            (tmp_path / "prometheus.yml").write_text(
                "scrape_configs:\n- job_name: j\n  scrape_interval: 1s\n"
                f"  static_configs: [{{targets: ['127.0.0.1:{own_port}']}}]\n"
            )
            process = await asyncio.create_subprocess_exec(
                str(PROMETHEUS),
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                assert await _example_of(port) == {"labels": {"trace_id": f"{0xABC:032x}"}, "value": "1.5"}
            finally:
                process.kill()
                await process.wait()
    finally:
        REGISTRY.unregister(seconds)


async def _example_of(port):
    query = {"query": "lockstep_test_example_seconds_bucket", "start": "0", "end": "9999999999"}
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
        while True:
            try:
                answer = await client.get(f"http://127.0.0.1:{port}/api/v1/query_exemplars", params=query)
                if answer.status_code == 200 and (found := answer.json()["data"]):
                    (example,) = found[0]["exemplars"]
                    return {name: example[name] for name in ("labels", "value")}
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
