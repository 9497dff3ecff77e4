"""The router's process: binds its port, serves until a signal, drains and exits."""

import asyncio
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import grpc
import uvicorn
import uvloop
from fastapi import FastAPI
from lockstep_common import telemetry
from lockstep_common.errors import LockstepError
from lockstep_common.lifecycle import name_process, obey_parent, stop_event
from lockstep_common.management import Reports, managed
from lockstep_common.settings import fail
from lockstep_common.termination import leave_message

from lockstep_router.faces.grpc.server import GrpcServer
from lockstep_router.faces.rest.app import create_app
from lockstep_router.faces.rest.connections import BoundedProtocol, ConnectionLimits, Connections
from lockstep_router.faces.rest.listener import Listener
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.status import status_body
from lockstep_router.tls import RouterTls

logger = logging.getLogger("lockstep.router")

_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 1
_SWITCH_INTERVAL_S = 0.0005
"""Longest time for which a thread that works on text keeps Python's global lock from the event loop. Python's default
is ten times as long, and each busy thread adds it once.
"""
_OTHER_FILES = 256
"""File descriptors for everything except clients: workers, log, management."""
_KEEP_ALIVE_S = 75
"""Timeout for idle connections, longer than that of clients and proxies (httpx 5 s, nginx and AWS's load balancers
60 s). If clients close first, no connection closes under a new request.
"""


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: this process handles signals itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with `Listener` in the place of the event loop's own server."""
        config = self.config
        assert isinstance(config, HttpConfig)
        assert sockets is not None

        def make_protocol(on_connected: Callable[[], None]) -> BoundedProtocol:
            return BoundedProtocol(
                config,
                self.server_state,
                self.lifespan.state,
                open_connections=config.open_connections,
                on_connected=on_connected,
            )

        timeout_s = config.open_connections.limits.header_timeout_s
        self.servers: list[Any] = [
            Listener(listener, config.tls, config.open_connections, timeout_s, make_protocol) for listener in sockets
        ]
        self.started = True


def main() -> None:
    """The process's entry point."""
    obey_parent()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # the links log lost connections themselves
    settings = RouterSettings.load("lockstep-router")
    name_process("router")
    telemetry.setup("router", level=settings.log_level)
    listener = bind(settings)
    raise_file_limit(settings)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        uvloop.run(serve(settings, listener))
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
    """The listening socket; ends the process with one sentence if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit the timeout: the kernel closes a connection whose peer does not acknowledge data, so
        # that a closed connection does not linger with a full buffer.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.write_timeout_s * 1000))
        listener.bind((settings.host, settings.port))
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
    return GrpcServer(router, state.bodies, state.parsing, credentials)


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
    )
    connections = Connections(limits)
    # Uvicorn calls this object as it calls its own protocol classes.
    protocol = cast("type[asyncio.Protocol]", partial(BoundedProtocol, open_connections=connections))
    application = create_app(router)
    config = HttpConfig(
        application,
        http=protocol,
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        headers=[("X-Lockstep-Router", settings.router_id)],
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    config.open_connections, config.tls, config.application = connections, tls, application
    return config


def close_after_answers(server: uvicorn.Server) -> None:
    """Close idle connections now, and the others after their answers.

    An answer whose headers were sent before the shutdown began has no `Connection: close`. If its connection stayed
    open, the client's next request would come here and be refused.
    """
    for connection in list(server.server_state.connections):
        connection.shutdown()


async def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Serve on the socket until SIGTERM or SIGINT, then drain."""
    stop = stop_event()
    tls = RouterTls.load(settings)
    router = Router(settings, dial=tls.dial)
    reports = Reports(unready=lambda: router.unready, status=lambda: status_body(router))
    managing = managed(
        settings.management_host,
        settings.management_port,
        reports,
        liveness_timeout_s=settings.liveness_timeout_s,
        tls=tls.management_context,
    )
    async with managing as management_port, tls.watched(), router:
        config = http_config(router, tls.http_context)
        server, calls = Server(config), grpc_server(config, router, tls.grpc_credentials)
        if calls is not None:
            await calls.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        fields = {"host": host, "port": port, "management_port": management_port, "discovery": settings.discovery}
        if calls is not None:
            fields["grpc_port"] = calls.port
        logger.info("listening", extra=fields)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ending: list[asyncio.Task[None]] = []

        def on_drain() -> None:
            close_after_answers(server)
            if calls is not None:
                ending.append(asyncio.create_task(calls.stop(settings.drain_timeout_s)))

        if stop.is_set():
            await router.leave(on_drain=on_drain)
        if calls is not None:
            await calls.stop(_CLOSE_TIMEOUT_S)
            await asyncio.gather(*ending)
        stopping.cancel()
        server.should_exit = True
        await serving
    logger.info("stopped")
