"""Prometheus' discovery of pods by a file: Debian's build has no discovery by the API server.

The file has the same targets with the same labels, one for each port of each container, so that the shipped relabeling
is what chooses them: https://prometheus.io/docs/prometheus/latest/configuration/configuration/#pod.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_DISCOVERY = "kubernetes_sd_configs: [{role: pod}]"
_META = "__meta_kubernetes_"


def by_file(configuration: str, path: str) -> str:
    """A Prometheus' configuration that reads the targets from a file."""
    assert configuration.count(_DISCOVERY) == 1
    return configuration.replace(_DISCOVERY, f"file_sd_configs: [{{files: [{path}]}}]")


def targets(pods: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of targets of pods, which are as the API server gives them."""
    return [
        {"targets": [f"{pod['status']['podIP']}:{port['containerPort']}"], "labels": _labels(pod, container, port)}
        for pod in pods
        if "podIP" in pod["status"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
    ]


def _labels(pod: Mapping[str, Any], container: Mapping[str, Any], port: Mapping[str, Any]) -> dict[str, str]:
    metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
    return {
        f"{_META}namespace": metadata["namespace"],
        f"{_META}pod_name": metadata["name"],
        f"{_META}pod_ip": status["podIP"],
        f"{_META}pod_uid": metadata["uid"],
        f"{_META}pod_phase": status["phase"],
        f"{_META}pod_node_name": spec["nodeName"],
        f"{_META}pod_container_name": container["name"],
        f"{_META}pod_container_port_name": port.get("name", ""),
        f"{_META}pod_container_port_number": str(port["containerPort"]),
        **_given("pod_label_", metadata.get("labels", {})),
        **_given("pod_annotation_", metadata.get("annotations", {})),
    }


def _given(kind: str, values: Mapping[str, str]) -> dict[str, str]:
    return {f"{_META}{kind}{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in values.items()}
