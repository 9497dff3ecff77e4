"""k8s/observability on this cluster, with images of this machine's programs in place of those that cannot be pulled.

What is not as shipped, and why:

- Prometheus reads its targets from a file (`pod_discovery`): Debian's build has no discovery by the API server. The
  rights that the shipped one needs are asked for separately.
- The collector is Jaeger, which is built of the collector's parts, but without the processor `k8sattributes` and with
  another extension for its health.
- Grafana has no pod: there is no package of it. Its files are checked without a cluster.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pod_discovery
import yaml
from kube import Json
from lockstep_tools.chaos.kubectl import Kubectl

PROMETHEUS_IMAGE = os.environ.get("LOCKSTEP_PROMETHEUS_IMAGE", "")
JAEGER_IMAGE = os.environ.get("LOCKSTEP_JAEGER_IMAGE", "")
"""Images with `prometheus` and with `jaeger`; tests/cluster/program-image makes them."""

STACK = Path(__file__).parents[2] / "k8s/observability"
NAMESPACE = "monitoring"
RUNNING = ("prometheus", "jaeger", "otel-collector")
_ROLLOUT_S = 120


class Observability:
    """The stack, reached through the API server."""

    def __init__(self) -> None:
        self.kubectl = Kubectl(NAMESPACE)

    def asked(self, service: str, path: str, /, **query: str) -> Any:
        """What one of its Services answers, which is JSON."""
        page = f"/api/v1/namespaces/{NAMESPACE}/services/{service}/proxy/{path}"
        return json.loads(self.kubectl.run("get", "--raw", f"{page}?{urlencode(query)}" if query else page))

    def prometheus(self, path: str, /, **query: str) -> Any:
        """The data of a page of Prometheus' API."""
        return self.asked("prometheus:http", f"api/v1/{path}", **query)["data"]

    def samples(self, query: str) -> list[Json]:
        """The result of a query now."""
        found: list[Json] = self.prometheus("query", query=query)["result"]
        return found


@contextmanager
def observability(directory: Path, pods: Sequence[Json]) -> Iterator[Observability]:
    """The stack, ready; it scrapes these pods and those of its own. Deleted at the end.

    Args:
        directory: for the files of the kustomization.
        pods: as the API server gives them.
    """
    _write(directory, pods)
    running = Observability()
    running.kubectl.run("apply", "-k", str(directory), timeout_s=120)
    try:
        for name in RUNNING:
            running.kubectl.run(
                "rollout", "status", f"deployment/{name}", f"--timeout={_ROLLOUT_S}s", timeout_s=_ROLLOUT_S + 10
            )
        yield running
    finally:
        running.kubectl.run("delete", "-k", str(directory), timeout_s=120)


def _write(directory: Path, pods: Sequence[Json]) -> None:
    """A kustomization that changes what the module's docstring says."""
    prometheus = pod_discovery.by_file((STACK / "config/prometheus.yml").read_text(), "/etc/prometheus/targets.json")
    (directory / "prometheus.yml").write_text(prometheus)
    (directory / "targets.json").write_text(json.dumps(pod_discovery.targets(pods)))
    (directory / "config.yaml").write_text(json.dumps(_collector()))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [os.path.relpath(STACK, directory.resolve())],
        "replicas": [{"name": "grafana", "count": 0}],
        "images": [
            _image(f"docker.io/{name}", image)
            for name, image in (
                ("prom/prometheus", PROMETHEUS_IMAGE),
                ("jaegertracing/jaeger", JAEGER_IMAGE),
                ("otel/opentelemetry-collector-contrib", JAEGER_IMAGE),
            )
        ],
        "configMapGenerator": [
            {"name": "prometheus", "behavior": "merge", "files": ["prometheus.yml", "targets.json"]},
            {"name": "otel-collector", "behavior": "merge", "files": ["config.yaml"]},
        ],
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))


def _collector() -> Json:
    """The collector's configuration without what only its contrib distribution has."""
    given: Json = yaml.safe_load((STACK / "config/otel-collector.yaml").read_text())
    health = given["extensions"].pop("health_check")
    given["extensions"]["healthcheckv2"] = {
        "use_v2": True,
        "http": {**health, "status": {"enabled": True, "path": "/"}},
    }
    given["service"]["extensions"] = ["healthcheckv2"]
    del given["processors"]["k8sattributes"]
    for pipeline in given["service"]["pipelines"].values():
        pipeline["processors"].remove("k8sattributes")
    return given


def _image(name: str, reference: str) -> Json:
    repository, _, tag = reference.rpartition(":")
    return {"name": name, "newName": repository, "newTag": tag}
