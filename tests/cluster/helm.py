"""A release of the chart, installed for a test and uninstalled after it."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import Release, of
from machine import wait_for

CHART = Path(__file__).parents[2] / "charts/lockstep"
NAME = "lockstep"

# A queue that a hundred clients can fill and eight clients cannot, even with one worker missing.
SMALL_QUEUES = {"modelDefaults": {"settings": {"max_seqs": 16, "max_queue": 16}}}

_READY_S = 180.0


@dataclass(frozen=True)
class Installation:
    """A release that is ready."""

    release: Release
    ready_s: float
    """Seconds from `helm install` until every pod was ready."""

    @property
    def kubectl(self) -> Kubectl:
        return self.release.kubectl

    @property
    def namespace(self) -> str:
        return self.kubectl.namespace

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """Change some values, and wait until it is ready."""
        helm("upgrade", NAME, str(CHART), "-n", self.namespace, "--reuse-values", "-f", "-", stdin=json.dumps(values))
        self.await_whole()

    def addresses(self, component: str) -> dict[str, str]:
        """The IP address of each pod of a component, by the pod's name."""
        pods = of(self.release.pods(), component)
        return {pod.name: self.kubectl.json("get", "pod", pod.name)["status"]["podIP"] for pod in pods}

    def managed(self, router: str, path: str) -> str:
        """What a router's management port answers, to a process in its pod: policies keep others away."""
        code = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())"
        url = f"http://127.0.0.1:8001/{path}"
        return self.kubectl.run("exec", router, "-c", "router", "--", "python", "-c", code, url)

    def status(self, router: str) -> dict[str, Any]:
        """A router's /status."""
        found: dict[str, Any] = json.loads(self.managed(router, "status"))
        return found

    def await_whole(self) -> None:
        wait_for(self.release.is_settled, f"release in {self.namespace} is ready", _READY_S, every_s=1.0)


@contextmanager
def install(
    kubectl: Kubectl, registry: str, values: Mapping[str, Any], *, ready: bool = True
) -> Iterator[Installation]:
    """The chart with these values in a namespace; uninstalled at the end."""
    began_s = time.monotonic()
    given = {"global": {"imageRegistry": registry}, **values}
    helm("install", NAME, str(CHART), "-n", kubectl.namespace, "-f", "-", stdin=json.dumps(given))
    try:
        installation = Installation(Release(NAME, kubectl), 0.0)
        if ready:
            installation.await_whole()
        yield Installation(installation.release, round(time.monotonic() - began_s, 1))
    finally:
        helm("uninstall", NAME, "-n", kubectl.namespace, "--ignore-not-found")


def app_version() -> str:
    """The version that the chart installs by default."""
    return str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])


def helm(*arguments: str, stdin: str = "", within_s: float = 300.0) -> str:
    """What helm prints; fails the test when helm fails."""
    done = subprocess.run(
        ["helm", *arguments], input=stdin, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, f"helm {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout
