"""What carries out single steps: requests over HTTP or gRPC, waits, look-ups; blocking or with asyncio.

Both networks have the same coroutines. Those of `BlockingNetwork` never wait for an event loop, so `run_blocking` runs
them to their end at once. So all that is above exists once.
"""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import httpx

from lockstep_client.errors import ConnectionFailedError, InvalidRequestError
from lockstep_client.loop_thread import run_in_loop
from lockstep_client.routers import Name, Router, is_grpc
from lockstep_client.steps import BrokenError, Chunk, Head, Outgoing

if TYPE_CHECKING:
    from lockstep_client.grpc_calls import GrpcNetwork, OpenCall

T = TypeVar("T")

FAREWELL_S = 2.0
"""The limit for the request that cancels an answer."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
_USER_AGENT = "lockstep-client"
_TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients without TLS: to load the system's certificates takes 25 ms."""
_NOT_FORWARDED = frozenset({"host", "content-length", "transfer-encoding", "accept-encoding"})
_NOT_GIVEN = frozenset({"content-length", "transfer-encoding", "content-encoding", "connection", "keep-alive"})


@dataclass(frozen=True)
class Connections:
    """What connections there may be, and their limits."""

    connect_timeout_s: float
    """For each connection."""
    probe_after_s: float
    """Silence over gRPC after which a router is asked for its health."""
    is_proxied: bool
    """Whether the environment names a proxy for HTTP."""
    has_grpc: bool
    """Whether some routers are spoken to over gRPC."""
    has_tls: bool
    """Whether there may be connections with TLS over HTTP, to a router or a proxy."""


class Response(Protocol):
    """The answer of one router to one request."""

    head: Head

    def expect(self, silence_s: float) -> None:
        """Change the longest wait for the next bytes, before the first of them is read."""

    async def read(self) -> Chunk | None:
        """The next part of the content; None at its end. Raises `BrokenError`."""

    async def close(self) -> None:
        """Leave the rest."""


class Network(Protocol):
    """Carries out steps."""

    async def open(self, router: Router, request: Outgoing, silence_s: float) -> Response:
        """Send a request and wait for the head of its answer.

        Raises:
            BrokenError: there is no connection, it broke, or was silent for too long.
            ConnectionFailedError: the network is closed.
            InvalidRequestError: the request cannot be sent.
        """

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def look_up(self, name: Name) -> list[str]:
        """The addresses of a name; none if there are none."""

    async def leave(self, leaving: Coroutine[Any, Any, None]) -> None:
        """Run what ends an answer, for a short time at most, whatever happens to the caller meanwhile."""

    async def close(self) -> None:
        """Close all connections."""


def _look_up(name: Name) -> list[str]:
    try:
        return _addresses(socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM))
    except OSError:
        return []


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing but a `BlockingNetwork`."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a blocking network waited for an event loop")


class BlockingNetwork:
    """Blocks the calling thread; it may be used by several threads.

    Args:
        connections: their kinds and limits.
        verify: TLS settings.

    Raises:
        ValueError: gRPC is not installed, or cannot use these TLS settings.
    """

    def __init__(self, connections: Connections, verify: ssl.SSLContext | bool) -> None:
        self._connect_timeout_s = connections.connect_timeout_s
        headers = {"User-Agent": _USER_AGENT}
        self._client = httpx.Client(
            verify=verify if connections.has_tls else _TRUSTS_NOBODY,
            limits=_LIMITS,
            trust_env=connections.is_proxied,
            headers=headers,
        )
        self._grpc = _grpc_network(connections, verify) if connections.has_grpc else None

    async def open(self, router: Router, request: Outgoing, silence_s: float) -> Response:
        """Send a request and wait for the head of its answer."""
        _check_open(self._client)
        if self._grpc is not None and is_grpc(router.root):
            return _BlockingCall(run_in_loop(self._grpc.open(router, request, silence_s)))
        with _as_broken():
            built = _built(self._client, router, request, silence_s, self._connect_timeout_s)
            return _BlockingResponse(self._client.send(built, stream=True))

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this

    async def look_up(self, name: Name) -> list[str]:
        """The addresses of a name. The look-up of the system has no limit, so that its thread may outlast this."""
        found: SimpleQueue[list[str]] = SimpleQueue()
        threading.Thread(target=lambda: found.put(_look_up(name)), name="look-up", daemon=True).start()
        try:
            return found.get(timeout=self._connect_timeout_s)
        except Empty:
            return []

    async def leave(self, leaving: Coroutine[Any, Any, None]) -> None:
        """Run what ends an answer: each of its parts has a limit."""
        await leaving

    async def close(self) -> None:
        """Close all connections."""
        self._client.close()
        if self._grpc is not None and self._grpc.has_channels:
            run_in_loop(self._grpc.close())


class AsyncNetwork:
    """Lets the event loop run; it belongs to one. The arguments are those of `BlockingNetwork`."""

    def __init__(self, connections: Connections, verify: ssl.SSLContext | bool) -> None:
        self._connect_timeout_s = connections.connect_timeout_s
        headers = {"User-Agent": _USER_AGENT}
        self._client = httpx.AsyncClient(
            verify=verify if connections.has_tls else _TRUSTS_NOBODY,
            limits=_LIMITS,
            trust_env=connections.is_proxied,
            headers=headers,
        )
        self._grpc = _grpc_network(connections, verify) if connections.has_grpc else None

    async def open(self, router: Router, request: Outgoing, silence_s: float) -> Response:
        """Send a request and wait for the head of its answer."""
        _check_open(self._client)
        if self._grpc is not None and is_grpc(router.root):
            return await self._grpc.open(router, request, silence_s)
        with _as_broken():
            built = _built(self._client, router, request, silence_s, self._connect_timeout_s)
            return _AsyncResponse(await self._client.send(built, stream=True))

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def look_up(self, name: Name) -> list[str]:
        """The addresses of a name."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return _addresses(await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM))
        except (OSError, TimeoutError):
            return []

    async def leave(self, leaving: Coroutine[Any, Any, None]) -> None:
        """Run what ends an answer. A task that is cancelled meanwhile does not stop it."""
        await asyncio.shield(asyncio.ensure_future(_limited(leaving)))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        if self._grpc is not None:
            await self._grpc.close()


def _grpc_network(connections: Connections, verify: ssl.SSLContext | bool) -> "GrpcNetwork":
    try:
        from lockstep_client.grpc_calls import GrpcNetwork  # noqa: PLC0415 - not everyone has gRPC
    except ImportError as error:
        raise ValueError(f"routers over gRPC need lockstep-client[grpc]: {error}") from error
    return GrpcNetwork(connections.connect_timeout_s, connections.probe_after_s, verify)


async def _limited(leaving: Coroutine[Any, Any, None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await leaving


class _BlockingResponse:
    """An answer over HTTP."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks: Iterator[bytes] = response.iter_bytes()
        self._is_reading = False
        self._is_left = False
        self.head = _head(response)

    def expect(self, silence_s: float) -> None:
        """Change the longest wait for the next bytes."""
        _expect(self._response, silence_s)

    async def read(self) -> Chunk | None:
        """The next bytes."""
        self._is_reading = True
        try:
            with _as_broken():
                return next(self._chunks, None)
        finally:
            self._is_reading = False
            if self._is_left:
                self._response.close()

    async def close(self) -> None:
        """Leave the rest. A thread that reads it is woken, and closes the connection itself: closed below a read, the
        number of its socket might be another connection's already.
        """
        self._is_left = True
        if self._is_reading:
            with suppress(OSError):
                self._response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        else:
            self._response.close()


class _AsyncResponse:
    """An answer over HTTP."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks: AsyncGenerator[bytes, None] = response.aiter_bytes()  # type: ignore[assignment]  # it is one
        self.head = _head(response)

    def expect(self, silence_s: float) -> None:
        """Change the longest wait for the next bytes."""
        _expect(self._response, silence_s)

    async def read(self) -> Chunk | None:
        """The next bytes."""
        with _as_broken():
            return await anext(self._chunks, None)

    async def close(self) -> None:
        """Leave the rest. A task that reads it is woken by the end of the connection."""
        try:
            with suppress(RuntimeError):  # another task is in it
                await self._chunks.aclose()
        finally:
            await self._response.aclose()


class _BlockingCall:
    """An answer over gRPC, whose call runs in the loop of another thread."""

    def __init__(self, call: "OpenCall") -> None:
        self._call = call
        self.head = call.head

    def expect(self, silence_s: float) -> None:
        """Change the longest silence after which the router is asked whether it lives."""
        self._call.expect(silence_s)

    async def read(self) -> Chunk | None:
        """The next events."""
        return run_in_loop(self._call.read())

    async def close(self) -> None:
        """Leave the rest."""
        run_in_loop(self._call.close())


def _check_open(client: httpx.Client | httpx.AsyncClient) -> None:
    """Refuse a request of a client that is closed: nobody would close the connection that it makes."""
    if client.is_closed:
        raise ConnectionFailedError("the client is closed")


def _built(
    client: httpx.Client | httpx.AsyncClient, router: Router, request: Outgoing, silence_s: float, connect_s: float
) -> httpx.Request:
    """The request to one address."""
    url = httpx.URL(router.root + request.path)
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED}
    headers |= {"Accept-Encoding": "identity", "Host": url.netloc.decode()}
    extensions: dict[str, Any] = {}
    if router.address is not None:
        extensions["sni_hostname"] = url.host
        url = url.copy_with(host=router.address)
    return client.build_request(
        request.method,
        url,
        headers=headers,
        content=request.content or None,
        timeout=httpx.Timeout(silence_s, connect=min(connect_s, silence_s)),
        extensions=extensions,
    )


def _expect(response: httpx.Response, silence_s: float) -> None:
    # The limits of a request are one of the documented extensions; that for reading is looked up when reading begins.
    response.request.extensions["timeout"]["read"] = silence_s


@contextmanager
def _as_broken() -> Iterator[None]:
    """Failures of connections as `BrokenError`. The text names no header. A request that HTTP cannot carry is none: no
    router would take it.
    """
    try:
        yield
    except httpx.LocalProtocolError:
        raise InvalidRequestError("the request has a header that HTTP cannot carry") from None
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise BrokenError("connect", f"no connection: {error or type(error).__name__}") from None
    except httpx.TimeoutException:
        raise BrokenError("silent", "the connection was silent for too long") from None
    except httpx.HTTPError as error:
        raise BrokenError("broken", f"the connection broke: {type(error).__name__}") from None


def _head(response: httpx.Response) -> Head:
    headers = {name: value for name, value in response.headers.items() if name not in _NOT_GIVEN}
    return Head(response.status_code, headers)


def _addresses(found: list[Any]) -> list[str]:
    return [str(entry[4][0]) for entry in found]
