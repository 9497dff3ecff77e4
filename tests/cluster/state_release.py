"""Releases with a state server: their values, and what its metrics say."""

import os
from collections.abc import Mapping

from helm import Installation
from kube import Json
from lockstep_tools.chaos.release import STATE, of

IMAGE = os.environ.get("LOCKSTEP_REDIS_IMAGE", "")
"""An image with `redis-server`, in the registry of the others; tests/cluster/program-image makes one."""

_METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9101/metrics', timeout=30).read().decode())"


def in_memory() -> Json:
    """The values of a release whose state server keeps everything in its memory."""
    return {"state": {"enabled": True}}


def on_redis(registry: str, replicas: int = 2) -> Json:
    """The values of a release with the bundled Redis, from the test's image."""
    image, _, tag = IMAGE.removeprefix(f"{registry}/").partition(":")
    bundled = {"enabled": True, "image": {"repository": image, "tag": tag or "latest"}}
    return {"state": {"enabled": True, "backend": "redis", "replicas": replicas, "redis": {"bundled": bundled}}}


def metric(installation: Installation, name: str, labels: Mapping[str, str] | None = None) -> float:
    """The sum of a metric's samples with these labels over all state servers."""
    wanted = [f'{label}="{value}"' for label, value in (labels or {}).items()]
    return sum(
        float(line.rpartition(" ")[2])
        for pod in of(installation.release.pods(), STATE)
        for line in metrics(installation, pod.name).splitlines()
        if line.partition("{")[0].partition(" ")[0] == name and all(each in line for each in wanted)
    )


def metrics(installation: Installation, pod: str) -> str:
    """What a state server's management port answers, to a process in its pod: policies keep others away."""
    return installation.kubectl.run("exec", pod, "-c", "state", "--", "python", "-c", _METRICS)
