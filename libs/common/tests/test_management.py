"""Health, metrics and status are served within bounds, and liveness follows the serving loop without waiting for it."""

import asyncio
import contextlib
import errno
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request

import pytest
from authority import Authority, Mounted
from lockstep_common import management
from lockstep_common.errors import LockstepError
from lockstep_common.management import Reports, managed
from lockstep_common.telemetry import REGISTRY
from lockstep_common.tls import Certificates, TlsFiles, server_context
from prometheus_client import Counter

COUNTED = Counter("lockstep_test_management", "For this test.", registry=REGISTRY)
READY = Reports(unready=lambda: None, status=lambda: {"streams": 3})


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A pause of the machine must not look like a loop that does not answer."""
    monkeypatch.setattr(management, "ASK_TIMEOUT_S", 30.0)


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def ask(port: int, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(get, port, path)


def handling() -> int:
    """Threads that serve connections."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def converse(port: int, request: bytes) -> bytes:
    """Everything that comes back until the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(request)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                received += data
        return received


async def test_answers_on_every_path():
    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        assert await ask(port, "/healthz") == (200, '{"status":"alive"}')
        assert await ask(port, "/readyz?verbose") == (200, '{"status":"ready"}')
        assert await ask(port, "/status") == (200, '{"streams":3}')
        COUNTED.inc(7)
        status, metrics = await ask(port, "/metrics")
        assert (status, "lockstep_test_management_total 7.0" in metrics) == (200, True)
        assert (await ask(port, "/nowhere"))[0] == 404


async def test_without_files_for_connections_it_tries_again_after_a_pause(monkeypatch):
    tried_at, accept = [], socket.socket.accept

    def exhausted(self):
        tried_at.append(time.monotonic())
        if len(tried_at) <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        monkeypatch.setattr(socket.socket, "accept", exhausted)
        assert await ask(port, "/healthz") == (200, '{"status":"alive"}')
    assert tried_at[3] - tried_at[0] >= 3 * management.ACCEPT_AGAIN_S


async def test_nothing_of_it_is_left_after_its_end():
    before = set(threading.enumerate())
    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        (accepting,) = {thread for thread in threading.enumerate() if thread.name == "management"} - before
    accepting.join(30)  # the end of `managed` waits for it for a second only
    assert not accepting.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 30)


@pytest.mark.parametrize(
    ("head", "statuses"),
    [
        ("Host: evil.example:8001\r\n", [403, 403, 200, 200]),
        ("Host: evil.example:8001\r\nX-Forwarded-For: 10.0.0.7\r\n", [200, 200, 200, 200]),
        ("Host: localhost:9\r\n", [200, 200, 200, 200]),
        ("", [200, 200, 200, 200]),
    ],
)
async def test_a_page_whose_name_points_here_reads_nothing(head, statuses):
    """Scrapers elsewhere, also those behind a proxy on this machine, may use any name, and tools need none."""
    found = []
    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        for path in ("/status", "/metrics", "/healthz", "/readyz?verbose"):
            answer = await asyncio.to_thread(converse, port, f"GET {path} HTTP/1.0\r\n{head}\r\n".encode())
            found.append(int(answer.split()[1]))
    assert found == statuses


async def test_readiness_says_why_not():
    async with managed("127.0.0.1", 0, Reports(unready=lambda: "draining"), liveness_timeout_s=30) as port:
        assert await ask(port, "/readyz") == (503, '{"status":"draining"}')
        assert (await ask(port, "/status"))[0] == 404


class BlockedLoop:
    """A serving loop in a thread, which stands still between `block` and `release`."""

    def __init__(self, liveness_timeout_s: float) -> None:
        self.port = 0
        self._release = threading.Event()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(liveness_timeout_s),))

    async def _run(self, liveness_timeout_s: float) -> None:
        async with managed("127.0.0.1", 0, READY, liveness_timeout_s=liveness_timeout_s) as self.port:
            self._started.set()
            await self._stop.wait()

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_):
        self.release()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()

    def block(self) -> None:
        self._loop.call_soon_threadsafe(self._release.wait)

    def release(self) -> None:
        self._release.set()


def test_busy_loop_lives_and_is_not_ready(monkeypatch):
    with BlockedLoop(liveness_timeout_s=600) as loop:
        assert get(loop.port, "/readyz")[0] == 200
        loop.block()
        monkeypatch.setattr(management, "ASK_TIMEOUT_S", 0.5)
        assert get(loop.port, "/readyz") == (503, '{"status":"the serving loop does not answer"}')
        assert get(loop.port, "/status")[0] == 503
        assert get(loop.port, "/healthz") == (200, '{"status":"alive"}')
        assert get(loop.port, "/metrics")[0] == 200
        loop.release()
        deadline_s = time.monotonic() + 30
        while get(loop.port, "/readyz")[0] != 200:
            assert time.monotonic() < deadline_s


def test_dead_loop_is_not_alive():
    with BlockedLoop(liveness_timeout_s=0.5) as loop:
        loop.block()
        deadline_s = time.monotonic() + 30
        while (answer := get(loop.port, "/healthz"))[0] == 200:
            assert time.monotonic() < deadline_s
        assert json.loads(answer[1])["status"].startswith("the serving loop has not run for")


async def test_idle_connections_keep_no_probe_out():
    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(3 * management.MAX_CONNECTIONS):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert (await ask(port, "/healthz"))[0] == 200
            async with asyncio.timeout(30):
                while handling() > management.MAX_CONNECTIONS:
                    await asyncio.sleep(0.01)


async def test_connection_that_has_sent_its_request_is_not_closed_for_idle_ones():
    with contextlib.ExitStack() as stack:

        def unready():
            """The request waits for its answer while they come."""
            for _ in range(3 * management.MAX_CONNECTIONS):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        async with managed("127.0.0.1", 0, Reports(unready=unready), liveness_timeout_s=30) as port:
            assert (await ask(port, "/readyz"))[0] == 200


async def test_flood_of_connections_is_paced():
    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        began = time.monotonic()
        for _ in range(2 * management.MAX_CONNECTIONS):
            assert (await ask(port, "/healthz"))[0] == 200
        assert time.monotonic() - began > 0.9 * management.MAX_CONNECTIONS / management.MAX_CONNECTIONS_PER_S


async def test_strangers_over_tls_get_health_and_nothing_else(tmp_path):
    authority = Authority()
    mounted = Mounted(tmp_path / "tls", authority, "localhost")
    files = TlsFiles(mounted.cert, mounted.key, mounted.ca)
    server = server_context(Certificates("management", files, {}), verify_clients=ssl.CERT_OPTIONAL)

    def statuses(port: int, context: ssl.SSLContext) -> dict[str, int]:
        found = {}
        for path in ("/healthz", "/readyz", "/metrics", "/status", "/nowhere"):
            connection = http.client.HTTPSConnection("localhost", port, timeout=30, context=context)
            connection.request("GET", path)
            found[path] = connection.getresponse().status
            connection.close()
        return found

    context = ssl.create_default_context(cadata=authority.ca.cert_pem.bytes().decode())
    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30, tls=server) as port:
        health = {"/healthz": 200, "/readyz": 200}
        rest = {"/metrics": 403, "/status": 403, "/nowhere": 403}
        assert await asyncio.to_thread(statuses, port, context) == health | rest
        authority.issue("prometheus.test").configure_cert(context)
        rest = {"/metrics": 200, "/status": 200, "/nowhere": 404}
        assert await asyncio.to_thread(statuses, port, context) == health | rest
        context = ssl.create_default_context(cadata=authority.ca.cert_pem.bytes().decode())
        Authority().issue("prometheus.test").configure_cert(context)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            await asyncio.to_thread(statuses, port, context)


async def test_request_that_trickles_is_cut_off():
    def trickle(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n")
            while True:
                time.sleep(0.05)
                connection.sendall(b"a: b\r\n")

    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        async with asyncio.timeout(30):
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                await asyncio.to_thread(trickle, port)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"GET /" + b"x" * 1_000_000,
        b"GET /healthz HTTP/1.1\r\nx: " + b"x" * 1_000_000,
        b"\x16\x03\x01\x02\x00" + bytes(600),
        b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"",
    ],
)
async def test_hostile_requests_disturb_nothing(request_bytes):
    async with managed("127.0.0.1", 0, READY, liveness_timeout_s=30) as port:
        with contextlib.suppress(ConnectionError):
            if request_bytes:
                await asyncio.to_thread(converse, port, request_bytes + b"\r\n\r\n")
            else:
                socket.create_connection(("127.0.0.1", port)).close()
        assert (await ask(port, "/healthz"))[0] == 200


async def test_taken_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LockstepError, match=f"cannot listen on 127.0.0.1:{port} for health and metrics: Address"):
            async with managed("127.0.0.1", port, READY, liveness_timeout_s=30):
                pass
