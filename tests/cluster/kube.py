"""Helpers for tests on a cluster: namespaces, pods that try connections, and figures."""

import json
import secrets
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lockstep_tools.chaos.kubectl import Kubectl
from machine import wait_for

_PREFIX = "lockstep-test"
_RUN = secrets.token_hex(2)
_INSIDE = Path(__file__).parent / "inside"

Json = dict[str, Any]


class Report(dict[str, Any]):
    """Figures by name."""


class Namespaces:
    """Namespaces that accept what the `restricted` Pod Security Standard accepts, deleted at the end."""

    def __init__(self) -> None:
        self._made: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._made:
            Kubectl("default").run("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def new(self, purpose: str) -> Kubectl:
        """Create a namespace; returns kubectl in it."""
        name = f"{_PREFIX}-{_RUN}-{purpose}"
        kubectl = Kubectl(name)
        kubectl.run("create", "namespace", name)
        self._made.append(name)
        kubectl.run("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        return kubectl


def image_of(kubectl: Kubectl, pod: str) -> str:
    """The image of a pod's only container: it has Python, and it is on a node already."""
    return str(kubectl.json("get", "pod", pod)["spec"]["containers"][0]["image"])


class Visitor:
    """A pod that belongs to no release, from which connections are tried."""

    def __init__(self, kubectl: Kubectl, image: str, labels: Json | None = None) -> None:
        self.kubectl = kubectl
        self.where: tuple[str, ...] = ("visitor",)
        context = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container = {
            "name": "visitor",
            "image": image,
            "command": ["sleep", "3600"],
            "securityContext": context,
        }
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False}
        metadata = {"name": "visitor", "labels": labels or {}}
        apply(kubectl, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        kubectl.run("wait", "--for=condition=Ready", "pod/visitor", "--timeout=60s", timeout_s=70)

    def reaches(self, *targets: tuple[str, int]) -> dict[tuple[str, int], bool]:
        """Which of these addresses and ports take a connection within two seconds."""
        code = (
            "import json, socket, sys\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "def reached(target):\n"
            "    try:\n"
            "        socket.create_connection(target, 2).close()\n"
            "    except OSError:\n"
            "        return False\n"
            "    return True\n"
            "targets = json.loads(sys.argv[1])\n"
            "print(json.dumps(list(ThreadPoolExecutor(32).map(reached, map(tuple, targets)))))\n"
        )
        found = json.loads(self.kubectl.run("exec", *self.where, "--", "python", "-c", code, json.dumps(targets)))
        return dict(zip(targets, found, strict=True))

    def runs(self, script: str, within_s: float = 300.0, **given: Any) -> Any:
        """What a script of `inside` prints in this pod, which is JSON."""
        return json.loads(self.kubectl.run("exec", *self.command(script, **given), timeout_s=within_s))

    def starts(self, script: str, **given: Any) -> subprocess.Popen[str]:
        """A script of `inside` that runs during the test."""
        return self.kubectl.start("exec", *self.command(script, **given))

    def command(self, script: str, **given: Any) -> list[str]:
        """The arguments of `kubectl exec`."""
        return [*self.where, "--", "python", "-c", (_INSIDE / f"{script}.py").read_text(), json.dumps(given)]


class Insider(Visitor):
    """A pod of a release itself, from which connections are tried."""

    def __init__(self, kubectl: Kubectl, pod: str, container: str) -> None:
        self.kubectl = kubectl
        self.where = (pod, "-c", container)


def declared_ports(kubectl: Kubectl, pod: str) -> set[int]:
    """The ports that a pod's containers declare."""
    spec = kubectl.json("get", "pod", pod)["spec"]
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    return {port["containerPort"] for container in containers for port in container.get("ports", [])}


def apply(kubectl: Kubectl, entry: Json) -> None:
    """`kubectl apply` of an object."""
    kubectl.run("apply", "-f", "-", stdin=json.dumps(entry))


def events_of(kubectl: Kubectl, pod: str) -> list[Json]:
    """The Events about a pod, oldest first."""
    found = kubectl.json("get", "events", f"--field-selector=involvedObject.name={pod}")["items"]
    return sorted(found, key=lambda event: event["metadata"]["creationTimestamp"])


def await_pods(kubectl: Kubectl, selector: str, holds, what: str, within_s: float = 120.0) -> list[Json]:
    """Wait until something holds of the pods that a selector finds; returns them."""

    def find() -> list[Json] | None:
        pods = kubectl.json("get", "pods", "-l", selector)["items"]
        return pods if holds(pods) else None

    found = wait_for(find, what, within_s, every_s=0.5)
    assert found is not None
    return found


def ended(pod: Json) -> Json:
    """The last end of the worker's container, if it has ended."""
    for status in pod["status"].get("containerStatuses", []):
        found = status["state"].get("terminated") or status.get("lastState", {}).get("terminated")
        if found:
            return found
    return {}


def resources(kubectl: Kubectl) -> set[str]:
    """Every object in the namespace, besides those that Kubernetes keeps itself and Events."""
    kinds = kubectl.run("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    kept = [kind for kind in kinds if not kind.startswith(("events", "pods.metrics", "packagemanifests"))]
    names = kubectl.run("get", ",".join(kept), "--ignore-not-found", "-o", "name").split()
    own = ("configmap/kube-root-ca.crt", "serviceaccount/default", "lease")
    return {name for name in names if not name.startswith(own)}
