"""The dashboards that are made by code: up to date, and with what every one of them needs."""

import importlib.util
import json
import re
from typing import Any

import pytest
from lockstep_router.faces.access import ENDPOINTS
from lockstep_router.workers.losses import Loss
from lockstep_tools.repository.metric_docs import DOCUMENT

ROOT = DOCUMENT.parents[1]
FOLDER = ROOT / "charts/lockstep/dashboards"
MADE = ("overview", "ranks", "cache", "tenants", "failures", "service", "workers")


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def test_the_committed_dashboards_are_what_the_generator_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools/dashboards/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert set(generate.DASHBOARDS) == set(MADE)
    for name in MADE:
        assert generate.build(name) == (FOLDER / f"{name}.json").read_text(), name


@pytest.mark.parametrize("name", MADE)
def test_a_dashboard_has_variables_and_panels_with_queries(name: str) -> None:
    dashboard = load(name)
    assert dashboard["uid"] == f"lockstep-{name}"
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    assert variables == {"datasource", "namespace", "release", "model", "runbooks"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) >= 6
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert 'namespace="$namespace",release="$release"' in target["expr"]


@pytest.mark.parametrize("name", MADE)
def test_panels_do_not_overlap(name: str) -> None:
    places = [panel["gridPos"] for panel in load(name)["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


@pytest.mark.parametrize("name", MADE)
def test_panels_link_to_runbooks_that_exist(name: str) -> None:
    links = [link["url"] for panel in load(name)["panels"] for link in panel.get("links") or ()]
    assert links
    for link in links:
        variable, _, file = link.partition("/")
        assert variable == "${runbooks}"
        assert (ROOT / "docs/runbooks" / file).exists(), link


@pytest.mark.parametrize(("name", "graphs"), [("overview", 3), ("service", 4), ("ranks", 3), ("failures", 1)])
def test_graphs_of_latencies_show_examples_once(name: str, graphs: int) -> None:
    """Of the histograms that have the ids of traces, which docs/metrics.md names."""
    with_exemplars = re.compile(
        r"lockstep_router_(time_to_first_token|inter_token_latency|request_duration|failover_gap)_seconds_bucket"
        r"|lockstep_worker_(queue|prefill|decode)_seconds_bucket"
    )
    latencies = 0
    for panel in load(name)["panels"]:
        shown = [target.get("exemplar", False) for target in panel["targets"]]
        is_latency = bool(with_exemplars.search(panel["targets"][0]["expr"]))
        latencies += is_latency
        assert sum(shown) == is_latency, panel["title"]
    assert latencies == graphs


@pytest.mark.parametrize("name", MADE)
def test_all_queries_of_a_panel_have_its_unit(name: str) -> None:
    of_unit = {
        "s": "seconds",
        "bytes": "_bytes",
        "celsius": "_celsius",
        "watt": "_watts",
        "ops": "rate(",
        "reqps": "rate(",
    }
    for panel in load(name)["panels"]:
        part = of_unit.get(panel["fieldConfig"]["defaults"]["unit"], "")
        assert all(part in target["expr"] for target in panel["targets"]), panel["title"]
        assert not re.search(r"_celsius|_watts", str(panel["targets"])) or part in ("_celsius", "_watts")


def test_numbers_are_shown_without_workers_and_without_requests() -> None:
    """Nothing, or 0 by 0, would look as if the metrics were not reached."""
    panels = {each["title"]: each for name in ("overview", "service") for each in load(name)["panels"]}
    assert panels["Ready workers"]["targets"][0]["expr"].endswith(") or vector(0)")
    (failing,) = [each for each in load("service")["panels"] if each["title"] == "Failing requests"]
    assert failing["targets"][0]["expr"].endswith(" > 0) or vector(0)")
    assert panels["Requests a second"]["targets"][0]["expr"].endswith(") or vector(0)")


@pytest.mark.parametrize("name", MADE)
def test_numbers_are_of_now_and_graphs_of_the_range(name: str) -> None:
    """The last value of a range is shown however old it is, as if a dead service went on."""
    for panel in load(name)["panels"]:
        for target in panel["targets"]:
            is_number = panel["type"] == "stat"
            assert (target["instant"], target["range"]) == (is_number, not is_number), panel["title"]


def test_xid_errors_are_counts() -> None:
    """A series of them begins at 1, and nothing increases from there."""
    queries = [target["expr"] for panel in load("ranks")["panels"] for target in panel["targets"]]
    (query,) = [each for each in queries if "gpu_xid_errors" in each]
    assert query.startswith("sum by (pod, rank, xid) (lockstep_worker_gpu_xid_errors_total{")


@pytest.mark.parametrize("name", MADE)
def test_rates_without_a_unit_say_that_they_are(name: str) -> None:
    for panel in load(name)["panels"]:
        is_rate = any("rate(" in each["expr"] for each in panel["targets"])
        if is_rate and panel["fieldConfig"]["defaults"]["unit"] == "short":
            said = panel["title"] + panel.get("description", "")
            assert "a second" in said or "histogram_quantile" in panel["targets"][0]["expr"], panel["title"]


def test_processes_of_a_router_do_not_multiply_its_workers() -> None:
    for metric in ("lockstep_router_workers", "lockstep_router_discovered_workers"):
        queries = [target["expr"] for panel in load("service")["panels"] for target in panel["targets"]]
        assert [each for each in queries if f"{metric}{{" in each]
        assert all(each.startswith("max by (pod") for each in queries if f"{metric}{{" in each)


@pytest.mark.parametrize("name", ["overview", "service"])
def test_the_duration_of_requests_is_that_of_requests_to_the_model(name: str) -> None:
    """Not of open WebSockets, probes or polls."""
    (panel,) = [each for each in load(name)["panels"] if each["title"] == "Request duration"]
    asked = {f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "embeddings")}
    for target in panel["targets"]:
        (pattern,) = re.findall(r'endpoint=~"([^"]*)"', target["expr"])
        assert {each for each in (*ENDPOINTS, "/healthz", "/readyz", "other") if re.fullmatch(pattern, each)} == asked


def test_pauses_of_slow_clients_and_refusals_are_no_failovers() -> None:
    queries = [target["expr"] for name in MADE for panel in load(name)["panels"] for target in panel["targets"]]
    moved = [each for each in queries if "lockstep_router_failovers_total" in each]
    assert len(moved) == 3
    for query in moved:
        (pattern,) = re.findall(r'reason!~"([^"]*)"', query)
        assert {reason.value for reason in Loss if re.fullmatch(pattern, reason)} == {"overloaded", "slow_client"}


def test_a_panel_and_the_rules_count_the_same_failures() -> None:
    (panel,) = [each for each in load("service")["panels"] if each["title"] == "Failing requests"]
    rules = (ROOT / "charts/lockstep/rules/lockstep.yaml").read_text()
    failures = re.findall(r"lockstep_router_requests_total\{[^}]*5[^}]*\}", panel["targets"][0]["expr"])
    assert len(failures) == 1
    assert failures[0] in rules


def test_all_dashboards_are_in_the_stack_for_clusters_without_one() -> None:
    text = (ROOT / "k8s/observability/kustomization.yaml").read_text()
    for path in FOLDER.glob("*.json"):
        assert f"dashboards/{path.name}" in text
        assert (ROOT / "k8s/observability/dashboards" / path.name).read_text() == path.read_text()
