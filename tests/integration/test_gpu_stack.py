"""What the stacks of `test_alerts` and `test_dashboards` do not have: GPUs, a router of two processes with a
certificate, and a state server that keeps everything in its memory. As a real Prometheus sees them, their alerts
fire and resolve, and their queries return data.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from authority import Authority, Mounted
from dashboard_table import OTHER_STACK
from lockstep_api.v1 import state_pb2, state_pb2_grpc
from lockstep_common.lifecycle import DIE_WITH_PARENT_VARIABLE
from lockstep_common.ports import free_port
from machine import wait_for
from nvml import Readings
from scraper import PATIENCE_S, Prometheus, queries, wait_for_alerts
from system import MODEL, REFERENCE
from test_state_alerts import RECORD_BYTES, TTL_S, State, state_server

pytestmark = pytest.mark.slow

RELEASE = "gpus"
GPUS = ("GPU-a", "GPU-b")
"""Of ranks 0 and 1."""
THERMAL = 0x40
"""NVML's bit of a clock that heat lowers."""
LOST = 79
"""The XID of a GPU that has fallen off the bus."""


@pytest.fixture(scope="module")
def readings(private_tmp: Path) -> Readings:
    """What NVML reports to the worker."""
    return Readings(private_tmp / "readings")


@contextmanager
def service(*command: str) -> Iterator[str]:
    """A running service; the address of its metrics."""
    port = free_port()
    environment = os.environ | {DIE_WITH_PARENT_VARIABLE: str(os.getpid())}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    arguments = [sys.executable, *command, f"--management-port={port}", "--log-level=error"]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, env=environment) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def worker(readings: Readings, private_tmp: Path) -> Iterator[str]:
    flags = (f"--model={REFERENCE}", f"--listen=unix:{private_tmp}/w0.sock", "--worker-id=w0", "--tp=2", "--min-shm=1")
    with service(str(Path(__file__).parent / "gpu_worker.py"), str(readings.path), *flags) as address:
        yield address


@pytest.fixture(scope="module")
def router(private_tmp: Path) -> Iterator[str]:
    """Two processes with a certificate."""
    mounted = Mounted(private_tmp / "tls", Authority(), "localhost", valid_days=90.0)
    flags = ("--processes=2", "--host=127.0.0.1", "--port=0", f"--workers=unix:{private_tmp}/w0.sock")
    certificate = (f"--http-tls-cert={mounted.cert}", f"--http-tls-key={mounted.key}")
    with service("-m", "lockstep_router", *flags, *certificate) as address:
        yield address


@pytest.fixture(scope="module")
def state(private_tmp: Path) -> Iterator[tuple[State, str]]:
    """A state server with little memory, and the address of its metrics."""
    with state_server(private_tmp, "state", f"--max-memory-bytes={1 << 20}") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(private_tmp: Path, worker: str, router: str, state: tuple[State, str]) -> Iterator[Prometheus]:
    targets = {
        worker: {"release": RELEASE, "pod": "w0", "model": MODEL},
        router: {"release": RELEASE, "pod": "r0"},
        state[1]: {"release": RELEASE, "pod": "s0"},
    }
    with Prometheus(private_tmp / "prometheus", targets) as running:
        running.until_scraped(targets)
        watched = f'lockstep_worker_gpu_health_available{{release="{RELEASE}"}} == 1'
        wait_for(lambda: len(running.query(watched)) == len(GPUS), "all GPUs are watched", PATIENCE_S)
        yield running


def lose(readings: Readings, gpu: str) -> None:
    """The GPU falls off the bus, and the driver says so."""
    readings.tell(lost=[gpu], events=[[gpu, LOST]])


def test_gpus_that_fail(readings: Readings, prometheus: Prometheus) -> None:
    """One loses data and is too hot, the other one is lost; the alerts name the ranks."""
    hurt, lost = GPUS
    expected = {
        ("LockstepGpuEccErrors", "0"),
        ("LockstepGpuThrottled", "0"),
        ("LockstepGpuXid", "1"),
        ("LockstepGpuNotWatched", "1"),
    }
    readings.tell(ecc={hurt: [0, 1]}, reasons=THERMAL)
    lose(readings, lost)
    names = {name for name, _ in expected}
    prometheus.until_fires(RELEASE, *names)
    fired = prometheus.query('last_over_time(ALERTS{alertstate="firing",alertname=~"LockstepGpu.*"}[5m])')
    assert {(each["metric"]["alertname"], each["metric"]["rank"]) for each in fired} == expected
    readings.tell(reasons=0, lost=[])
    prometheus.until_resolved(RELEASE, *names)


def test_a_router_process_that_dies_again_and_again(router: str, prometheus: Prometheus) -> None:
    killed: set[int] = set()

    def kill() -> None:
        answer = httpx.get(f"http://{router}/status", timeout=PATIENCE_S, trust_env=False)
        pid = answer.json()["processes"][1]["pid"]
        if pid not in killed and pid is not None:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)

    prometheus.until_fires(RELEASE, "LockstepRouterProcessDown", meanwhile=kill)
    prometheus.until_resolved(RELEASE, "LockstepRouterProcessDown")


def take_leases(server: State) -> grpc.StatusCode:
    """The status of the first call that is refused."""
    leases = state_pb2_grpc.LeasesStub(server.channel)
    try:
        for number in range(1000):
            request = state_pb2.AcquireLeaseRequest(name=f"n{number}", owner="o", ttl_s=TTL_S)
            leases.Acquire(request, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_each_query_that_the_other_stack_has_no_data_for_returns_some(
    readings: Readings, state: tuple[State, str], prometheus: Prometheus
) -> None:
    """A GPU is lost, and the state server has no room for a lease besides the streams that run."""
    lose(readings, GPUS[1])
    server, _ = state
    server.fill("large", RECORD_BYTES)
    server.fill("small", 1)
    assert take_leases(server) == grpc.StatusCode.RESOURCE_EXHAUSTED
    missing = {where: query for where, query in queries(RELEASE).items() if where.startswith(tuple(OTHER_STACK))}

    def found() -> bool:
        for where in [where for where, query in missing.items() if prometheus.has_data(query)]:
            del missing[where]
        return not missing

    wait_for_alerts(found, "each query returns data", lambda: f"{sorted(missing)} do not")
