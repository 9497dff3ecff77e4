"""Faults of two workers that have to be balanced make the chart's alerts fire, as a real Prometheus sees them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from scraper import PATIENCE_S, Prometheus, service_targets
from system import MODEL, REFERENCE, System
from test_alerts import Clients

pytestmark = pytest.mark.slow

RELEASE = "balance"
THRESHOLDS = {"LockstepLateHeartbeats": ("> 100", "> 1"), "LockstepTimeouts": ("> 20", "> 2")}
"""A hundred late heartbeats would take minutes, and a busy machine ends few requests in a window that is made small."""
SETTINGS = {
    "LOCKSTEP_MAX_SEQS": "2",
    "LOCKSTEP_QUEUE_THRESHOLD": "1000",  # sessions stay where they are, however long the queue there is
    "LOCKSTEP_DECODE_DEADLINE_S": "600",
    "LOCKSTEP_PREFILL_DEADLINE_S": "600",
}


@pytest.fixture(scope="module")
def system(spares_cpu: None) -> Iterator[System]:
    """Two workers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        settings = StackSettings(str(REFERENCE), workers=2, device="cpu", threads=1, log_level="warning")
        with Stack(settings) as stack:
            stack.wait_ready(PATIENCE_S)
            yield System(stack.url, stack.management_url)


@pytest.fixture(scope="module")
def prometheus(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = service_targets(os.getpid(), RELEASE, MODEL)
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets, THRESHOLDS) as running:
        running.until_scraped(targets)
        yield running


@contextmanager
def pulsing(pid: int, stopped_s: float, running_s: float) -> Iterator[None]:
    """A process that is stopped again and again."""
    is_over = threading.Event()

    def pulse() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(stopped_s)
            os.kill(pid, signal.SIGCONT)
            is_over.wait(running_s)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(PATIENCE_S)


def test_a_session_that_overloads_its_worker(system: System, prometheus: Prometheus) -> None:
    """All its requests go to one of the two workers."""
    with Clients(system, 8, 200, session="heavy"):
        prometheus.until_fires(RELEASE, "LockstepImbalance", "LockstepHotspot")
    prometheus.until_resolved(RELEASE, "LockstepImbalance", "LockstepHotspot")


def test_a_worker_that_crawls(system: System, prometheus: Prometheus) -> None:
    """Its rank runs for a tenth of the time, while both workers have requests.

    The streams are long, because steps beside prompts are not compared.
    """
    (rank,) = system.until_ready(PATIENCE_S)["w0"]["ranks"]
    with Clients(system, 12, 800):
        with pulsing(rank["pid"], 0.18, 0.02):
            prometheus.until_fires(RELEASE, "LockstepWorkerSlow")
        prometheus.until_resolved(RELEASE, "LockstepWorkerSlow")


def test_workers_that_crawl_beyond_the_time_of_their_clients(system: System, prometheus: Prometheus) -> None:
    """No answer is ready in its client's time."""
    with ExitStack() as crawling:
        for worker in system.until_ready(PATIENCE_S).values():
            crawling.enter_context(pulsing(worker["ranks"][0]["pid"], 0.18, 0.02))
        with Clients(system, 4, 2000, timeout_s=0.5):
            prometheus.until_fires(RELEASE, "LockstepTimeouts")
    prometheus.until_resolved(RELEASE, "LockstepTimeouts")


def test_heartbeats_that_come_late(system: System, prometheus: Prometheus) -> None:
    with pulsing(system.until_ready(PATIENCE_S)["w0"]["pid"], 1.0, 3.0):
        prometheus.until_fires(RELEASE, "LockstepLateHeartbeats")
    prometheus.until_resolved(RELEASE, "LockstepLateHeartbeats")
