"""The router's process: binds its port, serves until a signal, drains and exits."""

import asyncio
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from typing import Any, cast

import grpc
import uvicorn
import uvloop
from fastapi import FastAPI
from lockstep_common import telemetry
from lockstep_common.errors import LockstepError
from lockstep_common.garbage import spare_existing_objects
from lockstep_common.lifecycle import end_soon, name_process, stop_event
from lockstep_common.management import Reports, managed
from lockstep_common.settings import fail
from lockstep_common.termination import leave_message
from lockstep_common.tracing import setup_tracing

from lockstep_router.console import files
from lockstep_router.console.others import OtherRouters
from lockstep_router.console.state import ConsoleState
from lockstep_router.faces.grpc.server import GrpcServer
from lockstep_router.faces.rest.app import create_app
from lockstep_router.faces.rest.connections import BoundedProtocol
from lockstep_router.faces.rest.listener import Listener
from lockstep_router.faces.rest.open_connections import ConnectionLimits, Connections
from lockstep_router.router import FAREWELL_S, Router
from lockstep_router.settings import RouterSettings
from lockstep_router.status import status_body
from lockstep_router.tls import RouterTls

logger = logging.getLogger("lockstep.router")

_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 1
_DATE_EVERY_S = 1.0
_RECEIVE_BUFFER_BYTES = 64 << 10
_SWITCH_INTERVAL_S = 0.0005
"""Longest time for which a thread that works on text keeps Python's global lock from the event loop. Python's default
is ten times as long, and each busy thread adds it once.
"""
_OTHER_FILES = 256
"""File descriptors for everything except clients: workers, log, management."""
KEEP_ALIVE_S = 75
"""Timeout for idle connections, longer than that of clients and proxies (httpx 5 s, nginx and AWS's load balancers
60 s). If clients close first, no connection closes under a new request.
"""


Reporting = Callable[[RouterSettings, Reports, RouterTls], AbstractAsyncContextManager[int | None]]
OnListening = Callable[[dict[str, object]], None]


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: this process handles signals itself, and calls `end`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Close what is open, and let `serve` return."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Renew the date of all answers each second. Uvicorn's own loop looks ten times as often whether to end, and
        each time costs an idle router about as much as a token.
        """
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_EVERY_S):
                    await self._ending.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with `Listener` in the place of the event loop's own server."""
        config = self.config
        assert isinstance(config, HttpConfig)
        assert sockets is not None

        def make_protocol(on_connected: Callable[[], None], wire: socket.socket | None) -> BoundedProtocol:
            return BoundedProtocol(
                config,
                self.server_state,
                self.lifespan.state,
                open_connections=config.open_connections,
                on_connected=on_connected,
                wire=wire,
            )

        timeout_s = config.open_connections.limits.header_timeout_s
        self.servers: list[Any] = [
            Listener(listener, config.tls, config.open_connections, timeout_s, make_protocol) for listener in sockets
        ]
        self.started = True


def _on_port(settings: RouterSettings, reports: Reports, tls: RouterTls) -> AbstractAsyncContextManager[int]:
    """Reports on the management port; yields it."""
    return managed(
        settings.management_host,
        settings.management_port,
        reports,
        liveness_timeout_s=settings.liveness_timeout_s,
        tls=tls.management_context,
    )


def _log_listening(fields: dict[str, object]) -> None:
    logger.info("listening", extra=fields)


def run(
    settings: RouterSettings, *, reporting: Reporting = _on_port, on_listening: OnListening = _log_listening
) -> None:
    """Run a router in this process until a signal.

    Args:
        settings: its settings.
        reporting: a context in which its reports are given.
        on_listening: called with the addresses as soon as clients can connect.
    """
    name_process("router")
    telemetry.setup("router", level=settings.log_level, pod=settings.pod_name)
    listener = bind(settings)
    raise_file_limit(settings)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        uvloop.run(_serve_to_the_end(settings, listener, reporting, on_listening))
    except LockstepError as error:
        fail(error.message, settings.termination_log)
    except Exception as error:
        leave_message(f"the router has a defect: {type(error).__name__}; its log has more", settings.termination_log)
        raise


def raise_file_limit(settings: RouterSettings) -> None:
    """Raise the limit of open files to the hard limit; log a warning if that is too low for `max_connections`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < settings.max_connections + _OTHER_FILES:
        logger.warning(
            "too few file descriptors for max_connections",
            extra={"limit": hard, "max_connections": settings.max_connections},
        )


def bind(settings: RouterSettings) -> socket.socket:
    """The bound socket; ends the process with one sentence if the address cannot be bound.

    It listens, unless other processes share the port: they get all connections until this one can serve them.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit the timeout: the kernel closes a connection whose peer does not acknowledge data, so
        # that a closed connection does not linger with a full buffer.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.write_timeout_s * 1000))
        # They inherit this too: what the kernel takes from a client at a time, and so the longest single read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        if settings.processes > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((settings.host, settings.port))
        if settings.processes == 1:
            listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        fail(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", settings.termination_log)
    listener.setblocking(False)
    return listener


class HttpConfig(uvicorn.Config):
    """Uvicorn's configuration, with what it has no place for."""

    open_connections: Connections
    tls: ssl.SSLContext | None
    application: FastAPI


def grpc_server(config: HttpConfig, router: Router, credentials: grpc.ServerCredentials | None) -> GrpcServer | None:
    """The gRPC face, which shares the limits of bodies with HTTP; None if it has no port.

    Raises:
        LockstepError: INVALID_REQUEST, the port cannot be used.
    """
    if router.settings.grpc_port is None:
        return None
    state = config.application.state
    return GrpcServer(router, state.bodies, state.turns, credentials)


def http_config(router: Router, tls: ssl.SSLContext | None = None) -> HttpConfig:
    """Uvicorn's configuration for HTTP, or HTTPS if there is a context.

    Every response names the router, also one that never reaches the application.
    """
    settings = router.settings
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        max_connections_per_client=settings.max_connections_per_client,
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        dropped_bytes_per_s=settings.bodies_bytes_per_s,
        keep_alive_s=KEEP_ALIVE_S,
    )
    connections = Connections(limits)
    # Uvicorn calls this object as it calls its own protocol classes.
    protocol = cast("type[asyncio.Protocol]", partial(BoundedProtocol, open_connections=connections))
    application = create_app(router)
    config = HttpConfig(
        application,
        http=protocol,
        ws="none",
        proxy_headers=False,  # the application does it, for requests that need no ASGI as well
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        headers=[("X-Lockstep-Router", settings.router_id)],
        backlog=_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    config.open_connections, config.tls, config.application = connections, tls, application
    return config


def close_after_answers(server: uvicorn.Server) -> None:
    """Close idle connections now, those that have just come after a moment, and the others after their answers.

    An answer whose headers were sent before the shutdown began has no `Connection: close`. If its connection stayed
    open, the client's next request would come here and be refused.
    """
    for connection in list(server.server_state.connections):
        connection.shutdown()


async def _until_ready(router: Router) -> None:
    """Wait until the router is ready, or has had the time for it: then clients learn why it is not."""
    until = asyncio.get_running_loop().time() + router.settings.connect_timeout_s
    while router.unready is not None and await router.workers.wait_change(until):
        pass


async def _serve_to_the_end(
    settings: RouterSettings, listener: socket.socket, reporting: Reporting, on_listening: OnListening
) -> None:
    await serve(settings, listener, reporting, on_listening)
    end_soon()


async def serve(
    settings: RouterSettings, listener: socket.socket, reporting: Reporting, on_listening: OnListening
) -> None:
    """Serve on the socket until SIGTERM or SIGINT, then drain."""
    stop = stop_event()
    tls = RouterTls.load(settings)
    tracing = setup_tracing("router", settings.router_id, settings)
    router = Router(settings, dial=tls.dial, dial_state=tls.dial_state, tracing=tracing)
    others = OtherRouters(settings, tls.management_certificates)
    console = ConsoleState(router, others=others)
    reports = Reports(
        unready=lambda: router.unready,
        status=lambda: status_body(router),
        files=files.of(settings.console),
        views={}
        if settings.console == "off"
        else {files.STATE: console.on_management, files.ROUTER: console.of_router},
        settings=settings.shown(),
        has_native_histograms=settings.native_histograms,
    )
    async with reporting(settings, reports, tls) as management_port, tls.watched(), router:
        if settings.processes > 1:
            await _until_ready(router)
            listener.listen(_BACKLOG)
        config = http_config(router, tls.http_context)
        server, calls = Server(config), grpc_server(config, router, tls.grpc_credentials)
        if calls is not None:
            await calls.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        fields = {"host": host, "port": port, "management_port": management_port, "discovery": settings.discovery}
        if calls is not None:
            fields["grpc_port"] = calls.port
        spare_existing_objects()
        on_listening(fields)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ending: list[asyncio.Task[None]] = []

        def on_drain() -> None:
            close_after_answers(server)
            if calls is not None:
                # Calls that outlast the drain get the router's error first.
                ending.append(asyncio.create_task(calls.stop(settings.drain_timeout_s + FAREWELL_S)))

        if stop.is_set():
            await router.leave(on_drain=on_drain)
        if calls is not None:
            await calls.stop(_CLOSE_TIMEOUT_S)
            await asyncio.gather(*ending)
        stopping.cancel()
        server.end()
        await serving
    await others.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    logger.info("stopped")
