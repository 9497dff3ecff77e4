"""Faults of running services make the chart's alerts fire, as a real Prometheus sees them; their ends resolve them."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from authority import Authority, Mounted
from fake_kubernetes import NAMESPACE, SELECTOR, FakeEndpointSlices
from lockstep_common.ports import free_port
from lockstep_tools.debug.local import below
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from redis_server import RedisServer, program
from scraper import PATIENCE_S, Prometheus, service_targets
from system import MODEL, REFERENCE, System

pytestmark = pytest.mark.slow

MAIN, EDGE = "main", "edge"
"""Two releases: a stack, and a router alone."""
THRESHOLDS = {
    "LockstepFailovers": ("> 50", "> 2"),
    "LockstepKvPressure": ("> 0.2", "> 0.01"),
    "LockstepRankRestarts": ("> 2", "> 0.5"),
    "LockstepDiscoveryStale": ("> 120", "> 4"),
}
"""One small worker has few streams, and a busy machine starts ranks slowly."""
SETTINGS = {
    "LOCKSTEP_MAX_STREAMS": "6",
    "LOCKSTEP_MAX_SEQS": "4",
    "LOCKSTEP_DECODE_DEADLINE_S": "600",  # so that a rank that hangs stalls the worker for as long as a test wants
    "LOCKSTEP_PREFILL_DEADLINE_S": "600",
    "LOCKSTEP_FIRST_TOKEN_DEADLINE_S": "600",
}
BLOCK = 16
SLOW_FAILOVER_S = 9.0
"""A silence that is longer than LockstepSlowFailover's 8 s, however soon the other alerts fire and the ranks start."""
KEY = "lsk-for-the-tests-of-alerts"


class Clients:
    """Streams that follow each other on several connections, whatever becomes of them."""

    def __init__(
        self, system: System, count: int, tokens: int, prompt_tokens: int = 10, session: str | None = None,
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        self._url = f"{system.api}/completions"
        self._body = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True, "stream": True, "user": session}
        self._prompt_tokens = prompt_tokens
        self._headers = {"X-Lockstep-Resumable": "true"}
        if timeout_s is not None:
            self._headers["X-Request-Timeout"] = str(timeout_s)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        prompt = [100 + number] * self._prompt_tokens  # no two share blocks
        with httpx.Client(timeout=PATIENCE_S, trust_env=False, verify=False) as client:
            while not self._is_over.is_set():
                try:
                    with client.stream(
                        "POST", self._url, json=self._body | {"prompt": prompt}, headers=self._headers
                    ) as answer:
                        for _ in answer.iter_bytes():
                            if self._is_over.is_set():
                                client.delete(f"{self._url.rpartition('/')[0]}/streams/{_stream_id(answer)}")
                                return
                except httpx.TransportError:
                    pass
                self._is_over.wait(0.2)  # a refusal comes at once


class Killer:
    """Each call kills a rank of w0 if it serves; every life of the rank dies once."""

    def __init__(self, system: System, rank: int) -> None:
        self._system = system
        self._rank = rank
        self._killed: set[int] = set()

    def __call__(self) -> None:
        worker = self._system.worker("w0")
        pid = worker["ranks"][self._rank]["pid"]
        if worker["state"] == "ready" and worker["running"] > 0 and pid not in self._killed:
            self._killed.add(pid)
            os.kill(pid, signal.SIGKILL)


def _stream_id(answer: httpx.Response) -> str:
    return answer.headers.get("X-Lockstep-Stream-ID", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alerts")


@pytest.fixture(scope="module")
def redis(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder / "redis")
    yield server
    server.thaw()
    server.kill()


@pytest.fixture(scope="module")
def held(folder: Path) -> Path:
    """While this file exists, ranks that start do not become ready."""
    return folder / "held"


@pytest.fixture(scope="module")
def stack(redis: RedisServer, held: Path, spares_cpu: None) -> Iterator[Stack]:
    """A router, a worker of two ranks with a small cache, and a state server with Redis."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("HELD_RANKS_FILE", str(held))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "slow_rank"), prepend=os.pathsep)
        settings = StackSettings(
            str(REFERENCE), tp=2, device="cpu", threads=1, kv_memory="8Mi", state=redis.address, log_level="warning"
        )
        with Stack(settings) as running:
            running.wait_ready(PATIENCE_S)
            yield running


@pytest.fixture(scope="module")
def system(stack: Stack) -> System:
    return System(stack.url, stack.management_url)


@pytest.fixture(scope="module")
def edge_port() -> int:
    """The management port of the router that is alone."""
    return free_port()


@pytest.fixture(scope="module")
def state_pid(stack: Stack) -> int:
    with httpx.Client(timeout=PATIENCE_S, trust_env=False, verify=False) as client:
        return next(each.pid or 0 for each in below(client, os.getpid()) if each.name == "state")


class ApiServer:
    """A Kubernetes API server that knows of no worker; it runs on a thread."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = FakeEndpointSlices()
        self.start()
        self.kubeconfig = folder / "kubeconfig"
        self._server.kubeconfig(self.kubeconfig)

    def start(self) -> None:
        self._call(self._server.start())

    def stop(self) -> None:
        self._call(self._server.stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _call(self, what: Coroutine[None, None, object]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE_S)


@pytest.fixture(scope="module")
def api_server(folder: Path) -> Iterator[ApiServer]:
    server = ApiServer(folder)
    yield server
    server.close()


@pytest.fixture(scope="module")
def prometheus(stack: Stack, edge_port: int, folder: Path) -> Iterator[Prometheus]:
    targets = {f"127.0.0.1:{edge_port}": {"release": EDGE, "pod": "edge-0"}}
    targets |= service_targets(os.getpid(), MAIN, MODEL)
    with Prometheus(folder / "prometheus", targets, THRESHOLDS) as running:
        wait_for(lambda: running.query(f'lockstep_worker_ready{{release="{MAIN}"}} == 1'), "a scrape", PATIENCE_S)
        yield running


def rank_pid(system: System) -> int:
    """The process of rank 1, once the worker is ready."""
    worker = system.until_ready(PATIENCE_S)["w0"]
    return int(worker["ranks"][1]["pid"])


def test_a_rank_that_hangs(system: System, prometheus: Prometheus) -> None:
    """Streams beyond the router's limit are refused, and those that it took wait for their first token."""
    with Clients(system, 12, 60):
        system.until(lambda workers: workers["w0"]["running"] == 4, "the batch is full", PATIENCE_S)
        pid = rank_pid(system)
        os.kill(pid, signal.SIGSTOP)
        try:
            prometheus.until_fires(
                MAIN,
                "LockstepStepStalled",
                "LockstepErrors",
                "LockstepErrorBudgetBurnsFast",
                "LockstepErrorBudgetBurnsSlowly",
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        prometheus.until_fires(MAIN, "LockstepSlowFirstToken")
    prometheus.until_resolved(
        MAIN,
        "LockstepStepStalled",
        "LockstepErrors",
        "LockstepErrorBudgetBurnsFast",
        "LockstepErrorBudgetBurnsSlowly",
        "LockstepSlowFirstToken",
    )


def test_ranks_that_do_not_come_back(system: System, prometheus: Prometheus, held: Path) -> None:
    with Clients(system, 2, 400):
        system.serving(PATIENCE_S)
        pid = rank_pid(system)
        held.touch()
        try:
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            prometheus.until_fires(
                MAIN, "LockstepRankDown", "LockstepWorkerNotReady", "LockstepModelDown", "LockstepNoWorkerReady"
            )
            wait_for(lambda: time.monotonic() - killed_s > SLOW_FAILOVER_S, "the streams were silent for so long")
        finally:
            held.unlink()
        prometheus.until_fires(MAIN, "LockstepSlowFailover")
    prometheus.until_resolved(
        MAIN,
        "LockstepRankDown",
        "LockstepWorkerNotReady",
        "LockstepModelDown",
        "LockstepNoWorkerReady",
        "LockstepSlowFailover",
    )


def test_ranks_that_die_again_and_again(system: System, prometheus: Prometheus) -> None:
    with Clients(system, 4, 400):
        prometheus.until_fires(MAIN, "LockstepRankRestarts", "LockstepFailovers", meanwhile=Killer(system, 1))
    prometheus.until_resolved(MAIN, "LockstepRankRestarts", "LockstepFailovers")


def test_a_full_cache(system: System, prometheus: Prometheus) -> None:
    """Four streams need more blocks than there are. Together their prompts take four fifths."""
    prompt_tokens = system.worker("w0")["total_blocks"] * BLOCK // 5
    with Clients(system, 4, 800, prompt_tokens):
        prometheus.until_fires(MAIN, "LockstepKvPressure")
    prometheus.until_resolved(MAIN, "LockstepKvPressure")


def test_a_state_server_that_hangs(system: System, prometheus: Prometheus, state_pid: int) -> None:
    with Clients(system, 2, 200):
        system.serving(PATIENCE_S)
        os.kill(state_pid, signal.SIGSTOP)
        try:
            prometheus.until_fires(MAIN, "LockstepStateServerUnreachable", "LockstepJournalLag")
        finally:
            os.kill(state_pid, signal.SIGCONT)
        prometheus.until_resolved(MAIN, "LockstepStateServerUnreachable", "LockstepJournalLag")


def test_a_redis_that_is_away_or_full(system: System, prometheus: Prometheus, redis: RedisServer) -> None:
    def limit(memory: str) -> None:
        command = [program("redis-cli"), "-p", str(redis.port), "config", "set", "maxmemory", memory]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)

    with Clients(system, 2, 200):
        system.serving(PATIENCE_S)
        redis.kill()
        try:
            prometheus.until_fires(MAIN, "LockstepStateStoreUnreachable")
        finally:
            redis.start()
        prometheus.until_resolved(MAIN, "LockstepStateStoreUnreachable")
        limit("1")
        try:
            prometheus.until_fires(MAIN, "LockstepStateStoreFull")
        finally:
            limit("0")
        prometheus.until_resolved(MAIN, "LockstepStateStoreFull")


def test_a_router_that_is_not_there_and_its_files(
    prometheus: Prometheus, edge_port: int, folder: Path, redis: RedisServer, api_server: ApiServer
) -> None:
    """A router with a certificate for a day, then with files that it cannot use, then without the API server."""
    prometheus.until_fires(EDGE, "LockstepNoRouter")
    authority = Authority()
    mounted = Mounted(folder / "tls", authority, "localhost", valid_days=1.0)
    keys = folder / "keys.yaml"
    good = keys_text()
    keys.write_text(good)
    port = free_port()
    command = [sys.executable, "-m", "lockstep_router", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--management-port={edge_port}", "--log-level=error"]
    command += ["--discovery=kubernetes", f"--kubernetes-selector={SELECTOR}", f"--pod-namespace={NAMESPACE}"]
    command += [f"--http-tls-cert={mounted.cert}", f"--http-tls-key={mounted.key}", f"--keys-file={keys}"]
    command += [f"--limits-storage={redis.address}"]
    environment = os.environ | {"KUBECONFIG": str(api_server.kubeconfig)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment) as router:
        try:
            prometheus.until_resolved(EDGE, "LockstepNoRouter")
            with asking(port) as ask:
                prometheus.until_fires(EDGE, "LockstepCertificateExpires", "LockstepNoWorkerReady", meanwhile=ask)
            mounted.write(authority, "localhost", valid_days=90.0)
            prometheus.until_resolved(EDGE, "LockstepCertificateExpires")

            os.replace(_written(folder / "no-certificate", "no certificate"), mounted.directory / "..data/tls.crt")
            os.replace(_written(folder / "no-keys", "tenants: nobody"), keys)
            prometheus.until_fires(EDGE, "LockstepCertificateNotReloaded", "LockstepKeysNotReloaded")
            mounted.write(authority, "localhost", valid_days=90.0)
            os.replace(_written(folder / "keys", good), keys)

            with asking(port) as ask:
                redis.freeze()
                try:
                    prometheus.until_fires(EDGE, "LockstepLimitsNotShared", meanwhile=ask)
                finally:
                    redis.thaw()
                prometheus.until_resolved(EDGE, "LockstepLimitsNotShared", meanwhile=ask)
            prometheus.until_resolved(EDGE, "LockstepCertificateNotReloaded", "LockstepKeysNotReloaded")

            api_server.stop()
            prometheus.until_fires(EDGE, "LockstepDiscoveryStale")
            api_server.start()
            prometheus.until_resolved(EDGE, "LockstepDiscoveryStale")
        finally:
            router.kill()


@contextmanager
def asking(port: int) -> Iterator[Callable[[], None]]:
    """Sends a request that is counted; no worker serves it, so it is not waited for."""
    with httpx.Client(timeout=2.0, trust_env=False, verify=False) as client:

        def ask() -> None:
            headers = {"authorization": f"Bearer {KEY}"}
            with suppress(httpx.TransportError):
                client.post(
                    f"https://127.0.0.1:{port}/v1/completions",
                    json={"model": MODEL, "prompt": "hello"},
                    headers=headers,
                )

        yield ask


def keys_text() -> str:
    """A file with the key of one tenant, whose requests are counted. JSON is YAML, too."""
    keys = [{"sha256": hashlib.sha256(KEY.encode()).hexdigest()}]
    return json.dumps({"tenants": [{"name": "search", "keys": keys, "requests_per_minute": 100_000}]})


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
