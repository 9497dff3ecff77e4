"""Health, metrics and status of a service, and what operators ask of it, on a port and in a thread of their own.

Liveness must not depend on the serving loop's load, and must fail when the loop is dead: the thread answers `/healthz`
from the time at which the loop last ran. Readiness and status are computed in the loop, with a deadline. Nothing
here serves users' requests. Connections, their lifetimes and the bytes of a request are bounded.
"""

import asyncio
import errno
import io
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar

from lockstep_common.answers import Answer, as_json, needs_certificate, not_found
from lockstep_common.errors import cannot_listen
from lockstep_common.operations import (
    Operations,
    Profile,
    is_for_browsers,
    is_for_operators,
    is_local,
    is_relayed,
    names_another_host,
    names_this_host,
    refused,
)
from lockstep_common.telemetry import exposition_for

logger = logging.getLogger("lockstep.management")

_PROBES = frozenset({"/healthz", "/readyz"})
MAX_CONNECTIONS = 32
"""One more connection closes the oldest one that has not sent its request, so that idle connections keep no probe out;
the oldest of all if there is none.
"""

MAX_CONNECTIONS_PER_S = 100
"""Rate at which connections are accepted after a burst: each starts a thread and takes time of the interpreter, and has
the time to send its request before so many others come that it is closed.
"""

MAX_REQUEST_BYTES = 16 << 10
REQUEST_TIMEOUT_S = 5.0
"""Limit from a connection's arrival to the end of its request, TLS included; the answer has the same limit, and more
if it is large.
"""

SLOWEST_BYTES_PER_S = 1 << 18
"""Large answers, such as profiles, may be taken as slowly as this: `kubectl port-forward` from afar is not fast."""

ACCEPT_AGAIN_S = 0.1
"""Pause after a connection could not be accepted for want of files or memory. It waits in the kernel's queue, so that
without a pause the thread would try again at once, without end, and take Python's lock from the loop.
"""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_BEAT_S = 0.25
ASK_TIMEOUT_S = 1.5  # below the timeouts of probes, so that they get an answer from a busy process
_END_S = 1.0
"""Longest wait for the thread that accepts connections to end; nothing keeps it longer than a moment."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Reports:
    """A service's readiness and state. Both functions are called in the serving loop, and must not block."""

    unready: Callable[[], str | None]
    """Why no requests should be sent here, in a few words; None if the service is ready."""
    status: Callable[[], Any] | None = None
    """The service's state as JSON types; without it there is no `/status`."""
    files: Mapping[str, Answer] = field(default_factory=dict)
    """Answers that never change, by their paths: web pages and what belongs to them."""
    views: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Further states as JSON types, by their paths. They are called in the serving loop, and must not block."""
    stacks: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Parts of `/debug/stacks`, by name, as JSON types. Unlike the others they are called in any thread."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The service's settings without secrets, as JSON types."""
    profile: Profile | None = None
    """Profiles the service; None: it cannot."""
    has_native_histograms: bool = True
    """Whether `/metrics` has them for a scraper that asks."""


class Answers(Protocol):
    """Makes the answer to each path. It is called in many threads."""

    def of(self, path: str, *, is_stranger: bool, accept: str = "") -> Answer:
        """The answer to a GET.

        Args:
            path: with or without a query.
            is_stranger: the client has to show a certificate for more than health, and has not.
            accept: the request's header `Accept`.
        """

    def to_operator(self, method: str, path: str) -> Answer:
        """The answer to an operator's GET or POST of one of the paths of `operations`."""


class Heartbeat:
    """When a loop last ran. `run` is a task of that loop; the age may be read in any thread."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the loop last ran."""
        return time.monotonic() - self._at

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._at = time.monotonic()
            await asyncio.sleep(_BEAT_S)


@asynccontextmanager
async def managed(
    host: str, port: int, reports: Reports, *, liveness_timeout_s: float, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve management requests about the running loop; yields the port.

    Args:
        host: address to listen on.
        port: 0 picks a free one.
        reports: the service's readiness and state.
        liveness_timeout_s: the loop counts as dead if it has not run for this long.
        tls: HTTPS with this context; plain HTTP if None. With HTTPS, `/metrics` and `/status` are for clients that have
            shown a certificate; the context has to ask for one and verify it.

    Raises:
        LockstepError: INVALID_REQUEST, the address cannot be listened on.
    """
    async with (
        reporting(reports, liveness_timeout_s=liveness_timeout_s) as answers,
        served(host, port, answers, tls=tls) as own_port,
    ):
        yield own_port


@asynccontextmanager
async def reporting(reports: Reports, *, liveness_timeout_s: float) -> AsyncIterator[Answers]:
    """The answers about the running loop, without a port; arguments as for `managed`."""
    heartbeat = Heartbeat()
    beating = asyncio.create_task(heartbeat.run())
    try:
        yield _OwnAnswers(asyncio.get_running_loop(), reports, heartbeat, liveness_timeout_s)
    finally:
        beating.cancel()


@asynccontextmanager
async def served(host: str, port: int, answers: Answers, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve management requests with these answers; yields the port. Arguments and errors as for `managed`."""
    server = _Server(host, port, answers, tls)
    thread = Thread(target=server.accept_all, name="management", daemon=True)
    thread.start()
    try:
        yield server.port
    finally:
        server.end()
        await asyncio.to_thread(thread.join, _END_S)
        server.server_close()


class _OwnAnswers:
    """Answers about a loop of this process."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reports: Reports, heartbeat: Heartbeat, liveness_timeout_s: float
    ) -> None:
        self._loop = loop
        self._reports = reports
        self._heartbeat = heartbeat
        self._liveness_timeout_s = liveness_timeout_s
        self._operations = Operations(loop, reports.stacks, reports.settings, reports.profile)

    def to_operator(self, method: str, path: str) -> Answer:
        """The answer to an operator."""
        return self._operations.of(method, path)

    def of(self, path: str, *, is_stranger: bool, accept: str = "") -> Answer:
        """The answer to a GET."""
        match path.partition("?")[0]:
            case "/healthz":
                return self._healthz()
            case "/readyz":
                return self._readyz()
            case _ if is_stranger:
                return needs_certificate()
            case "/metrics":
                body, content_type = exposition_for(accept, has_native=self._reports.has_native_histograms)
                return Answer(200, content_type, body)
            case name:
                return self._report(name)

    def _report(self, path: str) -> Answer:
        """What the service itself reports at a path."""
        reports = self._reports
        view = reports.status if path == "/status" else reports.views.get(path)
        if view is not None:
            return self._status(view)
        return reports.files.get(path) or not_found()

    def _healthz(self) -> Answer:
        age_s = self._heartbeat.age_s
        if age_s <= self._liveness_timeout_s:
            return as_json(200, {"status": "alive"})
        return as_json(503, {"status": f"the serving loop has not run for {age_s:.1f} s"})

    def _readyz(self) -> Answer:
        try:
            reason = self._ask(self._reports.unready)
        except _NoAnswerError as error:
            reason = str(error)
        return as_json(200, {"status": "ready"}) if reason is None else as_json(503, {"status": reason})

    def _status(self, status: Callable[[], Any]) -> Answer:
        try:
            return as_json(200, self._ask(status))
        except _NoAnswerError as error:
            return as_json(503, {"error": str(error)})

    def _ask(self, function: Callable[[], Value]) -> Value:
        """Call a function in the serving loop, whose state no other thread may read."""
        future: Future[Value] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(call)
            return future.result(ASK_TIMEOUT_S)
        except TimeoutError:
            future.cancel()
            raise _NoAnswerError("the serving loop does not answer") from None
        except RuntimeError as error:
            logger.debug("no answer", exc_info=error)
            raise _NoAnswerError("the service is ending") from None


class _NoAnswerError(Exception):
    """The serving loop does not answer."""


class _Server(ThreadingMixIn, TCPServer):
    """Serves each connection in a thread of its own; the number of both is bounded."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, answers: Answers, tls: ssl.SSLContext | None) -> None:
        self.answers = answers
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tls = tls
        self._open: dict[Any, bool] = {}
        """Connections, the oldest first, and whether they have sent their request."""
        self._lock = Lock()
        self._next_at = 0.0
        self._has_ended = False
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            address = f"{host}:{port} for health and metrics"
            raise cannot_listen("management_port", address, error.strerror or str(error)) from None

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self.server_address[1])

    def accept_all(self) -> None:
        """Serve until `end`. Unlike `serve_forever` it never looks in between whether to end: ten times a second, that
        would take the processor and Python's lock from the loop, which has them for each step of its streams.
        """
        while not self._has_ended:
            self.handle_request()

    def end(self) -> None:
        """Accept no more. Outside Linux `shutdown` may not wake the thread; it then ends with the process."""
        self._has_ended = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Its TLS handshake runs in its own thread."""
        try:
            connection, address = super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(ACCEPT_AGAIN_S)
            raise
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close another one if there are too many."""
        self._pace()
        evicted = None
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                silent = (connection for connection, has_sent in self._open.items() if not has_sent)
                evicted = next(silent, next(iter(self._open)))
                del self._open[evicted]
            self._open[request] = False
        if evicted is not None:
            with suppress(OSError):
                evicted.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def note_request(self, request: Any) -> None:
        """Mark a connection whose request has arrived."""
        with self._lock:
            if request in self._open:
                self._open[request] = True

    def _pace(self) -> None:
        """Wait if connections come faster than they may. Others wait in the kernel's queue meanwhile."""
        now = time.monotonic()
        self._next_at = max(now, self._next_at + 1 / MAX_CONNECTIONS_PER_S)
        ahead_s = self._next_at - now - MAX_CONNECTIONS / MAX_CONNECTIONS_PER_S
        if ahead_s > 0:
            time.sleep(ahead_s)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Log a broken connection at debug level only: clients cause it."""
        logger.debug("connection failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers the one request of a connection."""

    server: _Server
    error_content_type = "text/plain;charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def setup(self) -> None:
        """Prepare reading the request within the limits for time and size."""
        self.connection = self.request
        self.connection.settimeout(REQUEST_TIMEOUT_S)
        deadline_s = time.monotonic() + REQUEST_TIMEOUT_S
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()
        self.rfile = io.BufferedReader(_BoundedReader(self.connection, deadline_s))
        self._answered = self.wfile = io.BytesIO()

    def finish(self) -> None:
        """Send the answer."""
        answer = self._answered.getvalue()
        self.connection.settimeout(REQUEST_TIMEOUT_S + len(answer) / SLOWEST_BYTES_PER_S)
        self.connection.sendall(answer)
        self.rfile.close()

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer(with_body=True)

    def do_POST(self) -> None:
        """Answer a POST, of which only its path is read."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer a HEAD: as a GET, without the body."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        connection = self.connection
        self.server.note_request(connection)
        is_stranger = isinstance(connection, ssl.SSLSocket) and not connection.getpeercert(binary_form=True)
        if is_for_operators(self.path):
            answer = self._to_operator(is_stranger=is_stranger)
        elif self.command == "POST":
            answer = as_json(405, {"error": "method not allowed"})
        elif self._is_of_another_site():
            answer = names_another_host()
        else:
            accept = self.headers.get("Accept", "")
            answer = self.server.answers.of(self.path, is_stranger=is_stranger, accept=accept)
        answer = answer.unless_known(self.headers.get("If-None-Match", ""))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        if answer.status != 304:
            self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)

    def _to_operator(self, *, is_stranger: bool) -> Answer:
        """The answer to an operator. A browser's page of another origin is none, wherever the browser runs."""
        if is_stranger:
            return needs_certificate()
        has_certificate = isinstance(self.connection, ssl.SSLSocket)
        is_here = is_local(str(self.client_address[0])) and names_this_host(self.headers.get("Host", ""))
        if not (has_certificate or is_here) or self.headers.get("Origin") or is_relayed(self.headers):
            return refused()
        return self.server.answers.to_operator("POST" if self.command == "POST" else "GET", self.path)

    def _is_of_another_site(self) -> bool:
        """Whether a browser may ask for a page whose site has let its name point here (DNS rebinding). With TLS, the
        certificate is of no such name. Except for the console this is a danger only to what listens on this machine, a
        forwarded port too: scrapers elsewhere use names of their own.
        """
        host = self.headers.get("Host", "")
        if isinstance(self.connection, ssl.SSLSocket) or names_this_host(host):
            return False
        if self.path.partition("?")[0] in _PROBES:
            return False
        is_here = is_local(str(self.client_address[0])) and not is_relayed(self.headers)
        return is_for_browsers(self.path) or (is_here and host != "")

    def version_string(self) -> str:
        """The `Server` header, which names neither Python nor its version."""
        return "lockstep"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: probes would fill the log."""


class _BoundedReader(io.RawIOBase):
    """Reads a connection until a deadline; after too many bytes it reports the end of the file."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._left = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that have arrived, or wait for some until the deadline."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request is not complete in time")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(buffer, min(len(buffer), self._left)) if self._left else 0
        self._left -= count
        return count
