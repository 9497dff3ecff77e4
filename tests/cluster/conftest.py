"""The cluster, the images, and the releases that tests share. Where one is missing, all tests are skipped visibly.

KUBECONFIG names the cluster, LOCKSTEP_IMAGES the registry that it pulls the release's images from.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helm import SMALL_QUEUES, Installation, install
from kube import Namespaces, Report

_HERE = Path(__file__).parent
_NEEDED = ("KUBECONFIG", "LOCKSTEP_IMAGES")
_REPORT = "LOCKSTEP_CLUSTER_REPORT"
_skipped: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs a Kubernetes cluster and images")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if _HERE in item.path.parents]
    reason = _missing()
    for item in here:
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    if here and reason:
        _skipped.append(f"CLUSTER TESTS DID NOT RUN: {len(here)} tests skipped, {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _skipped:
        terminalreporter.write_line(line, yellow=True, bold=True)


def _missing() -> str:
    unset = [name for name in _NEEDED if not os.environ.get(name)]
    if unset:
        return f"{' and '.join(unset)} not set"
    absent = [tool for tool in ("kubectl", "helm") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not installed" if absent else ""


@pytest.fixture(scope="session")
def registry() -> str:
    """The registry from which the cluster pulls images."""
    return os.environ["LOCKSTEP_IMAGES"]


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """Figures of this run, in a file named by LOCKSTEP_CLUSTER_REPORT if that is set."""
    figures = Report()
    yield figures
    if path := os.environ.get(_REPORT):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")


@pytest.fixture(scope="session")
def namespaces() -> Iterator[Namespaces]:
    """Creates namespaces that are deleted after the session."""
    with Namespaces() as made:
        yield made


@pytest.fixture(scope="session")
def served(namespaces: Namespaces, registry: str, report: Report) -> Iterator[Installation]:
    """The release that most tests look at and disturb: the chart's defaults but for short queues."""
    with install(namespaces.new("serving"), registry, SMALL_QUEUES) as installation:
        report["install_to_ready_s"] = installation.ready_s
        yield installation


@pytest.fixture(scope="session")
def open_served(namespaces: Namespaces, registry: str) -> Iterator[Installation]:
    """A second release next to it, small, without NetworkPolicies."""
    values = {
        "router": {"replicas": 1},
        "modelDefaults": {"replicas": 1, "tp": 1},
        "networkPolicy": {"enabled": False},
    }
    with install(namespaces.new("open"), registry, values) as installation:
        yield installation
