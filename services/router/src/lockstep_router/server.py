"""The router as a process: binds its port, serves until a signal, lets its streams finish, leaves."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
import uvloop
from lockstep_common import telemetry
from lockstep_common.lifecycle import name_process, obey_parent, stop_event
from lockstep_common.settings import fail
from lockstep_common.termination import leave_message

from lockstep_router.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings

logger = logging.getLogger("lockstep.router")

_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 1
_KEEP_ALIVE_S = 75
"""For idle connections. Longer than clients and proxies keep theirs (httpx 5 s, nginx and AWS's load balancers 60 s):
who closes later never closes on a request that is just coming.
"""


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the process decides when it is over."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def main() -> None:
    """The process's entry point."""
    obey_parent()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes on every lost connection are told better by the links
    settings = RouterSettings.load("lockstep-router")
    name_process("router")
    telemetry.setup("router", level=settings.log_level)
    listener = bind(settings)
    try:
        uvloop.run(serve(settings, listener))
    except Exception as error:
        leave_message(f"the router has a defect: {type(error).__name__}; its log has more", settings.termination_log)
        raise


def bind(settings: RouterSettings) -> socket.socket:
    """The listening socket; ends the process with a sentence if the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: the kernel drops a peer that does not take its data, so that a connection which
        # was given up on does not linger with a full buffer.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.write_timeout_s * 1000))
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        fail(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", settings.termination_log)
    listener.setblocking(False)
    return listener


def http_config(router: Router) -> uvicorn.Config:
    """How HTTP is served. Every response names the router, also those that never reach the application."""
    return uvicorn.Config(
        create_app(router),
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        headers=[("X-Lockstep-Router", router.settings.router_id)],
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


def close_after_answers(server: uvicorn.Server) -> None:
    """Close idle connections now, and the others after their answers.

    An answer whose head was sent before this router began to leave has not told its client to close. Left open, its
    connection would bring the client's next request here, to be refused.
    """
    for connection in list(server.server_state.connections):
        connection.shutdown()


async def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Serve on the socket until SIGTERM or SIGINT, then leave."""
    stop = stop_event()
    async with Router(settings) as router:
        server = Server(http_config(router))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        logger.info("listening", extra={"host": host, "port": port, "discovery": settings.discovery})
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await router.leave(on_drain=partial(close_after_answers, server))
        stopping.cancel()
        server.should_exit = True
        await serving
    logger.info("stopped")
