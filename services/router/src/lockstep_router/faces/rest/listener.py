"""Accepts connections, some in each turn of the event loop.

One in its TLS handshake counts, and has a time limit, like any other.

The servers of asyncio and uvloop accept all waiting connections at once, which stops the event loop for a fifth of a
second if there are thousands, and they call a protocol only when the handshake is over. It never sees a request.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable

from lockstep_router import metrics
from lockstep_router.faces.rest.open_connections import Connections

logger = logging.getLogger("lockstep.router")

_RETRY_S = 0.1
_CONNECTION_S = 50e-6
_HANDSHAKE_S = 1e-3
"""Time that a connection takes without and with TLS: a handshake's is mostly the server's signature."""
_LEAST_S = 2e-3
_SHARE = 0.1
"""Time for new connections in each turn of the event loop, and as a share of the last turn if that is more. A loaded
router's turn takes many milliseconds, so with one connection in each, new clients would wait for seconds.
"""


class Handshake:
    """A connection in its TLS handshake."""

    def __init__(self, connections: Connections, client: str) -> None:
        self._connections = connections
        self._client = client
        self._is_counted = connections.admit(self, client)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_admitted(self) -> bool:
        """Whether there was room for it."""
        return self._is_counted

    def run_as(self, task: asyncio.Task[None]) -> None:
        """Name the task that does the handshake."""
        self._task = task

    def evict(self) -> None:
        """Give up the handshake because the server is full."""
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """The handshake is over: its protocol counts from now on, or nothing does. A second call does nothing."""
        if self._is_counted:
            self._is_counted = False
            self._connections.forget(self, self._client)


class Listener:
    """Accepts connections from a socket, and gives each a protocol, after its handshake if there is one.

    Args:
        listener: bound and listening.
        context: of the server; None: plain HTTP.
        connections: where handshakes count.
        handshake_timeout_s: for each.
        make_protocol: makes a connection's protocol; that calls the given function as soon as it is connected, and may
            write to the given socket, if there is one.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        connections: Connections,
        handshake_timeout_s: float,
        make_protocol: Callable[[Callable[[], None], socket.socket | None], asyncio.Protocol],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._context = context
        self._connections = connections
        self._handshake_timeout_s = handshake_timeout_s
        self._make_protocol = make_protocol
        self._beginning: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept nothing more, and give up the handshakes that are not over."""
        for task in (self._accepting, *self._beginning):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing of it runs, after `close`."""
        await asyncio.gather(self._accepting, *self._beginning, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        each_s = _CONNECTION_S if self._context is None else _HANDSHAKE_S
        turn_s = 0.0
        while True:
            at_once = int(max(_LEAST_S, _SHARE * turn_s) / each_s)
            try:
                self._begin(*await loop.sock_accept(self._listener))
                with contextlib.suppress(BlockingIOError):  # no further one waits
                    for _ in range(at_once - 1):
                        self._begin(*self._listener.accept())
            except OSError as error:  # too many open files, or a client that has gone already
                logger.debug("cannot accept", exc_info=error)
                await asyncio.sleep(_RETRY_S)
                continue
            began_s = time.perf_counter()
            await asyncio.sleep(0)  # in a burst of new connections, other work has its turn between two batches
            turn_s = time.perf_counter() - began_s

    def _begin(self, accepted: socket.socket, address: tuple[str, int]) -> None:
        accepted.setblocking(False)
        client = str(address[0])
        handshake = None if self._context is None else Handshake(self._connections, client)
        if handshake is not None and not handshake.is_admitted:
            metrics.REFUSED_CONNECTIONS.labels("503").inc()
            accepted.close()
            return
        task = asyncio.get_running_loop().create_task(self._connect(accepted, handshake))
        if handshake is not None:
            handshake.run_as(task)
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, accepted: socket.socket, handshake: Handshake | None) -> None:
        end = handshake.end if handshake is not None else lambda: None
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(end, accepted if self._context is None else None),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else self._handshake_timeout_s,
            )
        except (OSError, asyncio.CancelledError) as error:
            # Clients cause it: they speak no TLS, or leave. A cancelled handshake was given up.
            logger.debug("connection not begun", exc_info=error)
            accepted.close()
        finally:
            end()
