"""k8s/observability beside a release, and the commands that look into a release.

It finds routers, workers and state servers; its rules are evaluated; a request's trace arrives in Jaeger, and leads
there from an example of a latency. LOCKSTEP_PROMETHEUS_IMAGE and LOCKSTEP_JAEGER_IMAGE name images; `stack` says what
is not as shipped.
"""

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import runbooks
import stack
import yaml
from helm import NAME, Installation, install
from kube import Json, Namespaces
from lockstep_common.tracing import names
from lockstep_tools.chaos.release import ROUTER, STATE, WORKER, of
from machine import wait_for
from stack import Observability, observability

MODEL = "reference"
RANKS = 2
COMPONENTS = {ROUTER: 1, WORKER: 1, STATE: 1}
_WAIT_S = 90.0
_ASK = """\
import json, sys, urllib.request as r
body = {"model": sys.argv[1], "prompt": "It was night", "max_tokens": 8, "ignore_eos": True}
kind = {"content-type": "application/json"}
asked = r.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), kind)
with r.urlopen(asked, timeout=60) as answer:
    answer.read()
    print(answer.headers["x-request-id"])
"""

pytestmark = pytest.mark.skipif(
    not (stack.PROMETHEUS_IMAGE and stack.JAEGER_IMAGE),
    reason="LOCKSTEP_PROMETHEUS_IMAGE or LOCKSTEP_JAEGER_IMAGE not set",
)


@pytest.fixture(scope="module")
def observed(namespaces: Namespaces, registry: str) -> Iterator[Installation]:
    """One of each, all of whose traces are kept."""
    values = {
        "router": {"replicas": 1},
        "modelDefaults": {"replicas": 1, "tp": RANKS},
        "state": {"enabled": True},
        "tracing": {"endpoint": f"otel-collector.{stack.NAMESPACE}.svc:4317", "ratio": 1},
    }
    with install(namespaces.new("observed"), registry, values) as installation:
        yield installation


@pytest.fixture(scope="module")
def running(observed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observability]:
    pods = observed.kubectl.json("get", "pods")["items"]
    with observability(tmp_path_factory.mktemp("observability"), pods) as ready:
        yield ready


@pytest.fixture(scope="module")
def request_id(observed: Installation, running: Observability) -> str:
    """The id of a request that was made while the collector was there."""
    (router,) = of(observed.release.pods(), ROUTER)
    return observed.kubectl.run("exec", router.name, "-c", "router", "--", "python", "-c", _ASK, MODEL).strip()


@pytest.fixture(scope="module")
def trace(running: Observability, request_id: str) -> Json:
    """The request's trace, with the spans of all services, as Jaeger's API has it."""

    def complete() -> Json | None:
        query = {"service": "lockstep-router", "tags": json.dumps({names.REQUEST_ID: request_id})}
        found = running.asked("jaeger:query", "api/traces", **query)["data"]
        return found[0] if found and ranks(found[0]) == set(range(RANKS)) and not orphans(found[0]) else None

    found = wait_for(complete, "the request's trace is in Jaeger, with every rank", _WAIT_S, every_s=1.0)
    assert found is not None
    return found


def ranks(trace: Json) -> set[int]:
    return {tag["value"] for span in trace["spans"] for tag in span["tags"] if tag["key"] == names.RANK}


def orphans(trace: Json) -> set[str]:
    """Parents that are missing: a trace comes in parts, from each pod its own."""
    parents = {reference["spanID"] for span in trace["spans"] for reference in span["references"]}
    return parents - {span["spanID"] for span in trace["spans"]}


def lockstep(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep_tools.cli", *arguments],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_service_is_scraped_with_the_labels_of_its_release(observed: Installation, running: Observability) -> None:
    def scraped() -> dict[str, int] | None:
        found = dict.fromkeys(COMPONENTS, 0)
        for sample in running.samples(f'up{{namespace="{observed.namespace}",release="{NAME}"}} == 1'):
            found[sample["metric"]["component"]] += 1
        return found if found == COMPONENTS else None

    wait_for(scraped, "each service is scraped", _WAIT_S, every_s=1.0)
    (ready,) = running.samples(f'lockstep_worker_ready{{namespace="{observed.namespace}"}}')
    assert (ready["metric"]["release"], ready["metric"]["model"], ready["value"][1]) == (NAME, MODEL, "1")
    # Those of the stack itself too, each of which is scraped at a time of its own.
    wait_for(
        lambda: {each["health"] for each in running.prometheus("targets")["activeTargets"]} == {"up"},
        "every target is up",
        _WAIT_S,
        every_s=1.0,
    )


def test_prometheus_and_the_collector_have_the_rights_that_they_need(running: Observability) -> None:
    for account, verbs in (("prometheus", "list pods"), ("otel-collector", "watch replicasets")):
        user = f"--as=system:serviceaccount:{stack.NAMESPACE}:{account}"
        assert running.kubectl.run("auth", "can-i", *verbs.split(), "--all-namespaces", user).strip() == "yes"


def test_all_rules_are_loaded_and_evaluated(running: Observability) -> None:
    text = (stack.STACK / "rules/lockstep.yaml").read_text()
    shipped = [rule.get("alert") or rule["record"] for each in yaml.safe_load(text)["groups"] for rule in each["rules"]]

    def evaluated() -> list[Json] | None:
        found = [rule for group in running.prometheus("rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else None

    rules = wait_for(evaluated, "all rules are evaluated", _WAIT_S, every_s=1.0)
    assert rules is not None
    assert sorted(rule["name"] for rule in rules) == sorted(shipped)
    assert [rule for rule in rules if rule["health"] != "ok"] == []


def test_the_trace_of_a_request_is_in_jaeger(trace: Json) -> None:
    """From the router over the worker to each of its ranks, of which the spans are below one that began it all."""
    assert {process["serviceName"] for process in trace["processes"].values()} >= {"lockstep-router", "lockstep-worker"}
    assert len([span for span in trace["spans"] if not span["references"]]) == 1


def test_an_example_of_a_latency_is_of_a_trace_that_jaeger_has(running: Observability, trace: Json) -> None:
    """What a click in Grafana needs."""
    metric = "lockstep_router_time_to_first_token_seconds_bucket"

    def stored() -> set[str] | None:
        found = running.prometheus("query_exemplars", query=metric, start="0", end="9999999999")
        return {each["labels"]["trace_id"] for series in found for each in series["exemplars"]} or None

    examples = wait_for(stored, "Prometheus has an example", _WAIT_S, every_s=1.0)
    assert examples == {trace["traceID"]}


def test_the_logs_of_all_pods_are_read_and_searched(observed: Installation, request_id: str) -> None:
    given = ("logs", "--release", NAME, "-n", observed.namespace, "--json")
    # The line of a request is written when its client has the answer already.
    wait_for(lambda: request_id in lockstep(*given), "its line is written", _WAIT_S, every_s=1.0)
    lines = [json.loads(line) for line in lockstep(*given).splitlines()]
    assert {line["pod"] for line in lines} == {pod.name for pod in observed.release.pods()}
    found = [json.loads(line) for line in lockstep(*given, "--request", request_id).splitlines()]
    assert {line["request_id"] for line in found} == {request_id}


def test_a_request_is_drawn_from_the_pods_own_memory(observed: Installation, request_id: str) -> None:
    drawn = lockstep("trace", request_id, "--release", NAME, "-n", observed.namespace)
    assert "rank 0" in drawn, drawn
    assert "rank 1" in drawn, drawn


def test_a_bundle_of_the_release_has_every_pod(observed: Installation, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.tar.gz"
    said = lockstep("debug", "--release", NAME, "-n", observed.namespace, "--output", str(bundle))
    assert "nothing unusual" in said, said
    with tarfile.open(bundle) as files:
        members = files.getnames()
    for pod in observed.release.pods():
        assert any(f"pod-{pod.name}/stacks-2.json" in member for member in members), members
    assert any(member.endswith("cluster/pods.txt") for member in members)


def test_what_runbooks_look_with_works_here(observed: Installation, tmp_path: Path) -> None:
    """Commands of which the release has nothing to show, as without a GPU, are the only ones left out."""
    lines = runbooks.commands()
    left_out = [line for line in lines if any(each in line for each in runbooks.NOT_HERE)]
    assert all(any(each in line for line in left_out) for each in runbooks.NOT_HERE)
    with runbooks.shell(observed.kubectl, lines, tmp_path) as shell:
        wait_for(
            lambda: not shell.complaint("kubectl top pods"), "the metrics server has measured", _WAIT_S, every_s=2.0
        )
        remaining = [line for line in lines if line not in left_out and not line.endswith(" &")]
        assert [complaint for line in remaining if (complaint := shell.complaint(line))] == []


def test_the_missing_router_of_a_release_is_reported(observed: Installation, running: Observability) -> None:
    """The last test of this file: the router is gone afterwards."""
    observed.kubectl.run("scale", f"deployment/{NAME}-router", "--replicas=0")
    query = f'ALERTS{{alertname="LockstepNoRouter",namespace="{observed.namespace}",release="{NAME}"}}'
    (alert,) = wait_for(lambda: running.samples(query), "the alert is pending", _WAIT_S, every_s=1.0)
    assert alert["metric"]["severity"] == "critical"
