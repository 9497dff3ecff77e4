"""Pods with GPUs: scheduled where a node offers them, with a clear reason where none does."""

import json
from collections.abc import Iterator

import pytest
from helm import app_version, install
from kube import Json, Namespaces, await_pods, ended
from lockstep_tools.chaos.kubectl import Kubectl

GPU = "nvidia.com/gpu"
WORKERS = "app.kubernetes.io/component=inference-worker"


@pytest.fixture
def no_gpus(registry: str) -> Iterator[str]:
    """A node that offers no GPU; what a test adds is removed after it."""
    kubectl = Kubectl("default")
    nodes = kubectl.json("get", "nodes")["items"]
    if any(GPU in node["status"]["capacity"] for node in nodes):
        pytest.skip("this cluster has GPUs, or offers them already")
    name = nodes[0]["metadata"]["name"]
    yield name
    patch_gpus(name, None)


def patch_gpus(node: str, count: int | None) -> None:
    """What an extended resource's plugin does: the scheduler and the kubelet take it as real."""
    change = json.dumps({"status": {"capacity": {GPU: None if count is None else str(count)}}})
    Kubectl("default").run("patch", "node", node, "--subresource=status", "--type=merge", "-p", change)


def test_a_gpu_worker_waits_for_gpus_then_reports_that_it_finds_none(
    namespaces: Namespaces, registry: str, no_gpus: str
) -> None:
    """With four GPUs it is scheduled. They are not real, so the worker ends with one sentence and exit code 2."""
    kubectl = namespaces.new("gpu")
    values = {
        "router": {"replicas": 1},
        "modelDefaults": {
            "device": "cuda",
            "tp": 4,
            "replicas": 1,
            # Any build of torch reports that there is no GPU.
            "image": {"tag": f"{app_version()}-cpu"},
        },
    }
    with install(kubectl, registry, values, ready=False):
        (pod,) = await_pods(kubectl, WORKERS, lambda pods: pods and unschedulable(pods[0]), "the worker is Pending")
        assert f"Insufficient {GPU}" in unschedulable(pod)
        assert container(pod)["resources"]["limits"][GPU] == "4"
        patch_gpus(no_gpus, 4)
        (pod,) = await_pods(kubectl, WORKERS, lambda pods: pods and ended(pods[0]), "the worker has ended")
        assert pod["spec"]["nodeName"] == no_gpus
        end = ended(pod)
        assert end["exitCode"] == 2
        assert "cuda" in end["message"].lower()
        assert end["message"].strip().count("\n") == 0


def unschedulable(pod: Json) -> str:
    """The scheduler's reason, if it has found no node."""
    conditions = pod["status"].get("conditions", [])
    return next((each["message"] for each in conditions if each.get("reason") == "Unschedulable"), "")


def container(pod: Json) -> Json:
    return pod["spec"]["containers"][0]
