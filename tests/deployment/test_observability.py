"""k8s/observability without a cluster: its rules are of every release, and its programs accept their files."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pod_discovery
import pytest
import yaml

ROOT = Path(__file__).parents[2]
STACK = ROOT / "k8s/observability"
CONFIG = STACK / "config"
RULES = STACK / "rules/lockstep.yaml"
TESTS = ROOT / "charts/lockstep/tests"
PROVISIONING = ("datasources", "dashboards")
ONE, OTHER = ("serving", "chat"), ("lockstep", "search")
"""Namespace and release."""

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_rules(directory: Path, tests: list[dict[str, Any]]) -> None:
    file = directory / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


def provisioning(kind: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CONFIG / f"grafana-{kind}.yaml").read_text())
    return loaded


def documents(name: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((STACK / f"{name}.yaml").read_text())}


def series(of: tuple[str, str], metric: str, values: str, **labels: str) -> dict[str, str]:
    given = {"namespace": of[0], "release": of[1], **labels}
    selector = ",".join(f'{name}="{value}"' for name, value in given.items())
    return {"series": f"{metric}{{{selector}}}", "values": values}


def firing(alert: str, at: str, *of: tuple[str, str]) -> dict[str, Any]:
    """Exactly these releases have the alert."""
    samples = [{"labels": f'{{namespace="{namespace}",release="{release}"}}', "value": 1} for namespace, release in of]
    query = f'count by (namespace, release) (ALERTS{{alertstate="firing",alertname="{alert}"}})'
    return {"expr": query, "eval_time": at, "exp_samples": samples}


def test_no_rule_is_of_one_release() -> None:
    text = RULES.read_text()
    assert not re.search(r'(?<!\$labels\.)\b(namespace|release)\s*(=|=~|:)\s*["$\w]', text)
    assert not re.search(r"\$(namespace|release|runbooks)\b|absent\(", text)


@needs_promtool
def test_each_of_two_releases_has_its_own_alerts(tmp_path: Path) -> None:
    given = [
        series(ONE, "lockstep_router_streams", "3x60", pod="r-0"),
        series(ONE, "lockstep_worker_ready", "0x60", model="m", pod="w-0"),
        series(OTHER, "lockstep_router_streams", "3x60", pod="r-0"),
        series(OTHER, "lockstep_worker_ready", "1x60", model="m", pod="w-0"),
        series(OTHER, "lockstep_router_requests_total", "0+600x60", endpoint="/v1/completions", code="200"),
        series(OTHER, "lockstep_router_requests_total", "0+6x60", endpoint="/v1/completions", code="503"),
        series(ONE, "lockstep_router_requests_total", "0+600x60", endpoint="/v1/completions", code="200"),
    ]
    expected = [
        firing("LockstepModelDown", "30m", ONE),
        firing("LockstepErrors", "30m", OTHER),
        firing("LockstepNoRouter", "30m"),
    ]
    check_rules(tmp_path, [{"name": "two", "interval": "1m", "input_series": given, "promql_expr_test": expected}])


@needs_promtool
def test_a_release_without_a_router_is_named_beside_one_that_has_its_own(tmp_path: Path) -> None:
    """While its workers are there, and for a day if they are gone too; a release that never was has no alert."""
    given = [
        series(ONE, "lockstep_router_streams", "3x10 _x1590", pod="r-0"),
        series(ONE, "lockstep_worker_ready", "1x10 _x1590", model="m", pod="w-0"),
        series(OTHER, "lockstep_router_streams", "3x1600", pod="r-0"),
        series(("late", "late"), "lockstep_worker_ready", "_x120 1x1480", model="m", pod="w-0"),
    ]
    expected = [
        firing("LockstepNoRouter", "9m"),
        firing("LockstepNoRouter", "30m", ONE),
        firing("LockstepNoRouter", "100m", ONE),
        firing("LockstepNoRouter", "140m", ONE, ("late", "late")),
        firing("LockstepNoRouter", "25h", ("late", "late")),
    ]
    check_rules(tmp_path, [{"name": "gone", "interval": "1m", "input_series": given, "promql_expr_test": expected}])


@needs_promtool
def test_each_alert_of_the_chart_fires_and_resolves_here_too(tmp_path: Path) -> None:
    check_rules(tmp_path, yaml.safe_load((TESTS / "alerts.yaml").read_text())["tests"])


@needs_promtool
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """The files lie as in the pod's ConfigMap."""
    (tmp_path / "lockstep.yaml").write_text(RULES.read_text())
    text = (CONFIG / "prometheus.yml").read_text()
    if has_no_discovery(tmp_path):
        text = pod_discovery.by_file(text, "targets.json")
    assert "/etc/prometheus/" in text
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/", f"{tmp_path}/"))
    promtool("check", "config", tmp_path / "prometheus.yml")


@needs_helm
@pytest.mark.parametrize("name", ["lockstep", "llm"])
def test_prometheus_keeps_all_services_whatever_the_chart_is_called(name: str) -> None:
    values = f"state.enabled=true,nameOverride={name}"
    command = ["helm", "template", "r", str(ROOT / "charts/lockstep"), "--set", values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    templates = [
        each["spec"]["template"]
        for each in yaml.safe_load_all(done.stdout)
        if each and each["kind"] in ("Deployment", "StatefulSet")
    ]
    pods = [
        {
            "metadata": {"namespace": "n", "name": "p", "uid": "u"} | template["metadata"],
            "spec": {"nodeName": "n"} | template["spec"],
            "status": {"podIP": "10.0.0.1", "phase": "Running"},
        }
        for template in templates
    ]
    (job,) = yaml.safe_load((CONFIG / "prometheus.yml").read_text())["scrape_configs"]
    (keep,) = [each for each in job["relabel_configs"] if each.get("action") == "keep"]
    kept = [
        target["targets"][0]
        for target in pod_discovery.targets(pods)
        if re.fullmatch(keep["regex"], ";".join(target["labels"].get(label, "") for label in keep["source_labels"]))
    ]
    assert sorted(kept) == ["10.0.0.1:8001", "10.0.0.1:9001", "10.0.0.1:9101"]


def has_no_discovery(directory: Path) -> bool:
    """Whether this promtool is Debian's, which does not know what it was built without."""
    file = directory / "pods.yml"
    file.write_text(json.dumps({"scrape_configs": [{"job_name": "j", "kubernetes_sd_configs": [{"role": "pod"}]}]}))
    command = ["promtool", "check", "config", "--syntax-only", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "kubernetes_sd_configs not found" in done.stdout + done.stderr


@pytest.mark.parametrize("kind", PROVISIONING)
def test_grafana_accepts_its_provisioning_files(kind: str) -> None:
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - takes a second, and each process of pytest-xdist imports this file

    schema = json.loads((Path(__file__).parent / "grafana-provisioning.schema.json").read_text())
    validator = Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"})
    assert not list(validator.iter_errors(provisioning(kind)))
    assert list(validator.iter_errors(provisioning(kind) | {"apiversion": 1})), (
        "the schema refuses what it does not know"
    )


def test_grafana_finds_what_its_files_name() -> None:
    sources = {each["uid"]: each for each in provisioning("datasources")["datasources"]}
    for source in sources.values():
        name, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
        assert int(port) in [each["port"] for each in documents(name)["Service"]["spec"]["ports"]]
    (provider,) = provisioning("dashboards")["providers"]
    (grafana,) = documents("grafana")["Deployment"]["spec"]["template"]["spec"]["containers"]
    mounts = {each["mountPath"]: each["name"] for each in grafana["volumeMounts"]}
    assert mounts[provider["options"]["path"]] == "dashboards"


def test_an_example_of_a_latency_leads_to_its_trace() -> None:
    """From the router's label by Prometheus' storage and Grafana's link to Jaeger."""
    (prometheus,) = documents("prometheus")["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert "--enable-feature=exemplar-storage" in prometheus["args"]
    sources = {each["type"]: each for each in provisioning("datasources")["datasources"]}
    (link,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert (link["name"], link["datasourceUid"]) == ("trace_id", sources["jaeger"]["uid"])


def test_prometheus_keeps_what_the_rules_and_dashboards_look_back_at() -> None:
    (prometheus,) = documents("prometheus")["Deployment"]["spec"]["template"]["spec"]["containers"]
    (kept,) = [each.partition("=")[2] for each in prometheus["args"] if "retention.time" in each]
    texts = [RULES.read_text(), *(path.read_text() for path in (STACK / "dashboards").glob("*.json"))]
    ranges = [each for text in texts for each in re.findall(r"\[(\d+[smhdw])\]", text)]
    assert "3d" in ranges
    assert hours(kept) >= max(map(hours, ranges))


def hours(duration: str) -> float:
    return int(duration[:-1]) * {"s": 1 / 3600, "m": 1 / 60, "h": 1, "d": 24, "w": 168}[duration[-1]]


def test_traces_go_on_to_the_jaeger_that_grafana_asks() -> None:
    collector = yaml.safe_load((CONFIG / "otel-collector.yaml").read_text())
    (exporter,) = collector["service"]["pipelines"]["traces"]["exporters"]
    name, port = collector["exporters"][exporter]["endpoint"].split(":")
    assert int(port) in [each["port"] for each in documents(name)["Service"]["spec"]["ports"]]
