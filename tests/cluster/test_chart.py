"""`helm install`, and what is there afterwards: a service that answers, in time, with no more rights than it uses."""

import json
import re
import time
from datetime import datetime

import pytest
from helm import NAME, Installation, helm
from kube import Json, Report, events_of
from lockstep_tools.chaos.release import ROUTER, WORKER, of
from lockstep_tools.failure import CommandError
from machine import wait_for

RULE = re.compile(r"(\S*)\s+\[(.*?)\]\s+\[(.*?)\]\s+\[(.*?)\]")
"""Resource, path, names and verbs."""

INSTALL_LIMIT_S = 180.0
"""From `helm install` of built images to a green `helm test`."""


def test_helm_test_is_green(served: Installation, report: Report) -> None:
    began_s = time.monotonic()
    output = helm("test", NAME, "-n", served.namespace, "--logs")
    tested_s = time.monotonic() - began_s
    report["helm_test_s"] = round(tested_s, 1)
    for check in ("ok   chat", "ok   stream", "ok   workers: 2 behind"):
        assert check in output, output
    assert served.ready_s + tested_s < INSTALL_LIMIT_S


def test_start_up_by_phase(served: Installation, report: Report) -> None:
    """Figures. The only requirement is that every phase was logged."""
    phases = {}
    for pod in served.release.pods():
        phases[pod.name] = start_up(served, pod.name)
    report["start_up_s"] = phases
    assert all(entry["ready"] > 0 for entry in phases.values())
    workers = [phases[pod.name] for pod in of(served.release.pods(), WORKER)]
    assert all("load" in entry["ranks"] for entry in workers), workers


def start_up(served: Installation, name: str) -> Json:
    """Seconds from the pod's creation until scheduled, image pulled, started, ready; and the phases of its ranks."""
    pod = served.kubectl.json("get", "pod", name)
    made = moment(pod["metadata"]["creationTimestamp"])
    conditions = {each["type"]: moment(each["lastTransitionTime"]) - made for each in pod["status"]["conditions"]}
    (container,) = pod["status"]["containerStatuses"]
    pulled = [event["message"] for event in events_of(served.kubectl, name) if event["reason"] == "Pulled"]
    return {
        "scheduled": conditions["PodScheduled"],
        "pull": pulled[-1] if pulled else "",
        "started": moment(container["state"]["running"]["startedAt"]) - made,
        "ready": conditions["Ready"],
        "ranks": rank_phases(served, name),
    }


def rank_phases(served: Installation, name: str) -> Json:
    """Seconds by phase, as the worker itself logs them."""
    lines = served.kubectl.run("logs", name).splitlines()
    ready = [json.loads(line) for line in lines if '"ranks are ready"' in line]
    return ready[0]["phases_s"] if ready else {}


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_memory_by_container(served: Installation, report: Report) -> None:
    def measured() -> list[dict[str, str]]:
        try:
            lines = served.kubectl.run(*top).splitlines()
        except CommandError:
            return []  # not measured yet
        rows = [dict(zip(("pod", "container", "cpu", "memory"), line.split(), strict=True)) for line in lines]
        return rows if {row["container"] for row in rows} == {"router", "worker"} else []  # not of all containers

    top = ("top", "pods", "--containers", "--no-headers", "-l", f"app.kubernetes.io/instance={NAME}")
    report["usage"] = wait_for(measured, "the metrics server has measured routers and workers", 90.0, every_s=2.0)


@pytest.mark.parametrize(
    ("component", "rights"),
    [(ROUTER, {("endpointslices.discovery.k8s.io", "list watch")}), (WORKER, {("events", "create patch")})],
)
def test_service_accounts_may_do_what_they_do_and_nothing_else(
    served: Installation, component: str, rights: set[tuple[str, str]]
) -> None:
    pod = of(served.release.pods(), component)[0]
    account = served.kubectl.json("get", "pod", pod.name)["spec"]["serviceAccountName"]
    assert account != "default"
    everybodys = rules(served, "nobody")
    assert rules(served, account) - everybodys == rights
    assert everybodys <= rules(served, account)


def rules(served: Installation, account: str) -> set[tuple[str, str]]:
    """What `kubectl auth can-i --list` says of a service account: resources, or paths, and verbs."""
    user = f"system:serviceaccount:{served.namespace}:{account}"
    table = served.kubectl.run("auth", "can-i", "--list", "--no-headers", f"--as={user}")
    found = set()
    for line in table.splitlines():
        subject, path, _, verbs = RULE.fullmatch(line.rstrip()).groups()  # type: ignore[union-attr]
        found.add((subject or path, verbs))
    return found


def test_pods_are_restricted_beyond_the_standard(served: Installation) -> None:
    """The standard does not cover file systems and the environment variables of Services."""
    for pod in served.release.pods():
        spec = served.kubectl.json("get", "pod", pod.name)["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_two_releases_side_by_side(served: Installation, open_served: Installation) -> None:
    for installation, workers in ((served, 2), (open_served, 1)):
        output = helm("test", NAME, "-n", installation.namespace, "--logs")
        assert f"ok   workers: {workers} behind" in output, output
