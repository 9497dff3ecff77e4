"""Workers that fail, or that are full, make the chart's alerts fire, as a real Prometheus sees them; they resolve."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from scraper import PATIENCE_S, Prometheus, service_targets
from system import MODEL, REFERENCE, System
from test_alerts import Clients, Killer

pytestmark = pytest.mark.slow

RELEASE = "filled"
HEARTBEAT_S = 0.1
SETTINGS = {
    "LOCKSTEP_MAX_SEQS": "2",
    "LOCKSTEP_MAX_QUEUE": "2",
    "LOCKSTEP_EJECT_INITIAL_S": "4",
    "LOCKSTEP_DECODE_DEADLINE_S": "600",  # a rank that hangs stalls the worker for as long as a test wants
}


@pytest.fixture(scope="module")
def systems(spares_cpu: None) -> Iterator[list[System]]:
    """Two routers with the same two workers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        settings = StackSettings(
            str(REFERENCE), workers=2, routers=2, device="cpu", threads=1, kv_memory="12Mi", log_level="warning"
        )
        with Stack(settings) as stack:
            stack.wait_ready(PATIENCE_S)
            yield [System(*urls) for urls in zip(stack.urls, stack.management_urls, strict=True)]


@pytest.fixture(scope="module")
def targets(systems: list[System]) -> dict[str, dict[str, str]]:
    """What Prometheus asks."""
    return service_targets(os.getpid(), RELEASE, MODEL)


@pytest.fixture(scope="module")
def prometheus(targets: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
        running.until_scraped(targets)
        yield running


def test_routers_that_fill_the_same_queues(systems: list[System], prometheus: Prometheus) -> None:
    """Each router knows of the other's requests only what a status says, so both take the same place in a queue."""
    with ExitStack() as clients:
        for system in systems:
            clients.enter_context(Clients(system, 16, 20))
        prometheus.until_fires(RELEASE, "LockstepOverload")
    prometheus.until_resolved(RELEASE, "LockstepOverload")


def test_a_worker_whose_ranks_die_under_what_the_other_completes(systems: list[System], prometheus: Prometheus) -> None:
    with Clients(systems[0], 4, 200):
        prometheus.until_fires(RELEASE, "LockstepWorkerEjected", meanwhile=Killer(systems[0], 0))
        prometheus.until_resolved(RELEASE, "LockstepWorkerEjected")


def test_a_cache_that_stays_full(
    systems: list[System], targets: dict[str, dict[str, str]], prometheus: Prometheus
) -> None:
    """Two streams fill it with what they say, and the moment before one is preempted is made long: the rank stops."""
    addresses = {labels["pod"]: address for address, labels in targets.items() if "model" in labels}

    def is_full() -> bool:
        return max(map(kv_usage, addresses.values())) > 0.95

    def stop_when_full() -> int | None:
        if not is_full():
            return None
        pid = int(systems[0].serving(PATIENCE_S)["ranks"][0]["pid"])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3 * HEARTBEAT_S)
        if is_full():
            return pid
        os.kill(pid, signal.SIGCONT)
        return None

    with Clients(systems[0], 2, 2000, session="long"):
        pid = wait_for(stop_when_full, "the cache is full when the rank stops", PATIENCE_S)
        try:
            prometheus.until_fires(RELEASE, "LockstepKvCacheFull")
        finally:
            os.kill(pid, signal.SIGCONT)
    prometheus.until_resolved(RELEASE, "LockstepKvCacheFull")


def kv_usage(address: str) -> float:
    """What a worker's metrics say."""
    text = httpx.get(f"http://{address}/metrics", timeout=PATIENCE_S, trust_env=False).text
    (usage,) = re.findall(r"^lockstep_worker_kv_usage_ratio (\S+)$", text, re.MULTILINE)
    return float(usage)
