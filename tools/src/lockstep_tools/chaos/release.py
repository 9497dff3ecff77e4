"""A Helm release as the cluster reports it: its pods, their nodes, and whether all are ready."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.failure import UNUSABLE, CommandError

ROUTER, WORKER, STATE, REDIS = "router", "inference-worker", "kv-state-server", "redis"

_INSTANCE = "app.kubernetes.io/instance"
_COMPONENT = "app.kubernetes.io/component"
_SETTLE_S = 180.0
_POLL_S = 1.0
_ENDED = ("Failed", "Succeeded")


@dataclass(frozen=True)
class Pod:
    """A pod of the release. A worker's id and a router's id are their pods' names."""

    name: str
    component: str
    node: str
    ready: bool
    restarts: int
    leaving: bool
    """It is being deleted."""
    uid: str
    runs: bool = True
    """All of its containers run: none waits for its start or has ended."""


class Release:
    """The release `name` in the namespace of `kubectl`."""

    def __init__(self, name: str, kubectl: Kubectl) -> None:
        self.name = name
        self.kubectl = kubectl

    def pods(self) -> list[Pod]:
        """Its routers and workers, its state servers and its bundled Redis if it has them, as they are now."""
        found = self.kubectl.json("get", "pods", "-l", self._selector)["items"]
        # Kubernetes keeps an evicted pod beside the one that has replaced it.
        return [_pod(item) for item in found if item["status"].get("phase") not in _ENDED]

    def controllers(self) -> list[Mapping[str, Any]]:
        """The controllers of its pods: StatefulSets and Deployments. Not those of other charts in the same release."""
        found = self.kubectl.json("get", "statefulsets,deployments", "-l", self._selector)
        items: list[Mapping[str, Any]] = found["items"]
        return items

    @property
    def _selector(self) -> str:
        return f"{_INSTANCE}={self.name},{_COMPONENT} in ({ROUTER},{WORKER},{STATE},{REDIS})"

    def require(self) -> list[Pod]:
        """Its pods, ready or not.

        Raises:
            CommandError: there are none.
        """
        pods = self.pods()
        if not pods:
            raise CommandError(f"no release {self.name} in namespace {self.kubectl.namespace}", UNUSABLE)
        return pods

    def ready_pods(self) -> list[Pod]:
        """Its pods.

        Raises:
            CommandError: there are none, or not all are ready: a release with a fault is not disturbed further.
        """
        pods = self.require()
        unready = [pod.name for pod in pods if not pod.ready or pod.leaving]
        if unready:
            raise CommandError(f"not ready: {', '.join(unready)}")
        return pods

    def is_settled(self) -> bool:
        """Exactly the pods that its controllers want exist, with the newest specification, and all are ready."""
        pods = self.pods()
        if any(pod.leaving or not pod.ready for pod in pods):
            return False
        controllers = self.controllers()
        return all(map(_is_rolled_out, controllers)) and len(pods) == sum(
            controller["spec"].get("replicas", 1) for controller in controllers
        )

    def await_settled(self) -> None:
        """Wait until `is_settled`.

        Raises:
            CommandError: it is not, after `_SETTLE_S`.
        """
        deadline_s = time.monotonic() + _SETTLE_S
        while not self.is_settled():
            if time.monotonic() > deadline_s:
                raise CommandError(f"release {self.name} has not become ready within {_SETTLE_S:g} s")
            time.sleep(_POLL_S)

    def logs_since(self, pod: Pod, container: str, since_s: float) -> list[str]:
        """A container's log lines from a time on; none if it is gone."""
        since = datetime.fromtimestamp(since_s, UTC).isoformat().replace("+00:00", "Z")
        try:
            return self.kubectl.run("logs", pod.name, "-c", container, f"--since-time={since}").splitlines()
        except CommandError:
            return []


def of(pods: Sequence[Pod], component: str) -> list[Pod]:
    """The pods of one component, by name."""
    return sorted((pod for pod in pods if pod.component == component), key=lambda pod: pod.name)


def _pod(item: Mapping[str, Any]) -> Pod:
    status = item["status"]
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
    containers = status.get("containerStatuses", [])
    return Pod(
        name=item["metadata"]["name"],
        component=item["metadata"]["labels"][_COMPONENT],
        node=item["spec"].get("nodeName", ""),
        ready=conditions.get("Ready") == "True",
        restarts=sum(container["restartCount"] for container in containers),
        leaving="deletionTimestamp" in item["metadata"],
        uid=item["metadata"]["uid"],
        runs=bool(containers) and all("running" in container.get("state", {}) for container in containers),
    )


def _is_rolled_out(controller: Mapping[str, Any]) -> bool:
    """A rollout, if there was one, is over."""
    status = controller["status"]
    wanted = controller["spec"].get("replicas", 1)
    return bool(
        status.get("observedGeneration", 0) >= controller["metadata"]["generation"]
        and status.get("readyReplicas", 0) == wanted
        and status.get("updatedReplicas", wanted) == wanted
    )
