"""Carries requests out over HTTP: the steps of an exchange, blocking or with asyncio.

`Transport` and `AsyncTransport` differ in nothing but that; what to do when something fails is decided by the steps.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from random import Random, SystemRandom
from typing import Any, Self
from urllib.request import getproxies, proxy_bypass

import httpx

from lockstep_client.errors import Received
from lockstep_client.generation import Exchange, StreamedAnswer, exchange_for
from lockstep_client.policy import Policy
from lockstep_client.routers import Name, Router, Routers
from lockstep_client.sse import ServerSentEvent
from lockstep_client.steps import BrokenError, Give, Head, Outgoing, Pause, Read, Resolve, Send, Step

Content = bytes | ServerSentEvent

_FAREWELL_S = 2.0
"""The limit for the request that cancels a stream, and for each of its parts."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
_USER_AGENT = "lockstep-client"
_NOT_FORWARDED = frozenset({"host", "content-length", "transfer-encoding", "accept-encoding"})
_NOT_GIVEN = frozenset({"content-length", "transfer-encoding", "content-encoding", "connection", "keep-alive"})


class _Shared:
    """What both transports have."""

    def __init__(self, base_urls: Iterable[str], policy: Policy, random: Random | None) -> None:
        self.policy = policy
        self.random: Random = random or SystemRandom()
        self.routers = Routers(base_urls, avoid_s=policy.avoid_s, clock=time.monotonic, random=self.random)
        self.is_proxied = any(map(_is_proxied, self.routers.roots))
        """The environment names a proxy for a router: the proxy looks names up, and the client does not."""
        if self.is_proxied:
            self.routers.resolve_nothing()

    def exchange(self, request: Outgoing, policy: Policy | None) -> Exchange:
        """How a request is carried out."""
        return exchange_for(request, self.routers, policy or self.policy, time.monotonic, self.random)

    def build(
        self, client: httpx.Client | httpx.AsyncClient, router: Router, request: Outgoing, silence_s: float | None
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
            timeout=httpx.Timeout(silence_s, connect=self.policy.connect_timeout_s),
            extensions=extensions,
        )


class Reply:
    """The answer to one request. Iterate over its content, or close it: what still runs is cancelled."""

    def __init__(self, client: httpx.Client, shared: _Shared, exchange: Exchange) -> None:
        """Wait for the head.

        Raises:
            LockstepError: there is no answer.
        """
        self._client = client
        self._shared = shared
        self._exchange = exchange
        self._steps = exchange.run()
        self._response: httpx.Response | None = None
        self._chunks: Iterator[bytes] = iter(())
        self._is_closed = False
        head = self._advance()
        assert isinstance(head, Head)
        self.head = head

    @property
    def received(self) -> Received:
        """What has been given of a stream so far; of anything else nothing is kept."""
        exchange = self._exchange
        return exchange.received if isinstance(exchange, StreamedAnswer) else Received()

    def __iter__(self) -> Generator[Content, None, None]:
        """The content as it comes.

        Raises:
            LockstepError: the answer cannot be completed.
        """
        try:
            while (value := self._advance()) is not None:
                assert not isinstance(value, Head)
                yield value
        finally:
            self.close()

    def close(self) -> None:
        """Leave the answer."""
        if self._is_closed:
            return
        self._is_closed = True
        self._steps.close()
        self._close_response()
        if (last := self._exchange.last_request()) is not None:
            request = self._shared.build(self._client, *last, _FAREWELL_S)
            request.extensions["timeout"] = httpx.Timeout(_FAREWELL_S).as_dict()
            with suppress(httpx.HTTPError):  # the router ends the stream by itself when nobody comes back
                self._client.send(request)

    def _advance(self) -> Head | Content | None:
        result: Any = None
        broken: BrokenError | None = None
        try:
            while True:
                step = self._steps.send(result) if broken is None else self._steps.throw(broken)
                result = broken = None
                if isinstance(step, Give):
                    return step.value
                try:
                    result = self._carry_out(step)
                except BrokenError as error:
                    broken = error
        except StopIteration:
            self._close_response()
            return None
        except BaseException:
            self.close()
            raise

    def _carry_out(self, step: Step) -> Any:
        match step:
            case Send():
                return self._send(step)
            case Read():
                with _as_broken():
                    return next(self._chunks, None)
            case Pause():
                return time.sleep(step.seconds)
            case Resolve():
                return _addresses(step.name)
        raise AssertionError(step)

    def _send(self, step: Send) -> Head:
        self._close_response()
        with _as_broken():
            request = self._shared.build(self._client, step.router, step.request, step.silence_s)
            self._response = self._client.send(request, stream=True)
        self._chunks = self._response.iter_bytes()
        return _head(self._response)

    def _close_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.close()


class Transport:
    """Sends requests to any of several routers, blocking; it may be used by several threads."""

    def __init__(
        self,
        base_urls: Iterable[str],
        policy: Policy,
        *,
        verify: ssl.SSLContext | bool = True,
        random: Random | None = None,
    ) -> None:
        self._shared = _Shared(base_urls, policy, random)
        self._client = httpx.Client(
            verify=verify, limits=_LIMITS, trust_env=self._shared.is_proxied, headers={"User-Agent": _USER_AGENT}
        )

    @property
    def policy(self) -> Policy:
        """The limits of requests without limits of their own."""
        return self._shared.policy

    @property
    def roots(self) -> tuple[str, ...]:
        """The base URLs without /v1."""
        return self._shared.routers.roots

    def send(self, request: Outgoing, policy: Policy | None = None) -> Reply:
        """Send a request and wait for the head of its answer; the caller reads the reply or closes it.

        Raises:
            LockstepError: there is no answer.
        """
        return Reply(self._client, self._shared, self._shared.exchange(request, policy))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncReply:
    """The answer to one request. Iterate over its content, or close it: what still runs is cancelled."""

    def __init__(self, client: httpx.AsyncClient, shared: _Shared, exchange: Exchange) -> None:
        """Made by `AsyncTransport.send`, which waits for the head."""
        self._client = client
        self._shared = shared
        self._exchange = exchange
        self._steps = exchange.run()
        self._response: httpx.Response | None = None
        self._chunks: AsyncGenerator[bytes, None] | None = None
        self._is_closed = False
        self.head: Head

    async def begin(self) -> Self:
        """Wait for the head.

        Raises:
            LockstepError: there is no answer.
        """
        head = await self._advance()
        assert isinstance(head, Head)
        self.head = head
        return self

    @property
    def received(self) -> Received:
        """What has been given of a stream so far; of anything else nothing is kept."""
        exchange = self._exchange
        return exchange.received if isinstance(exchange, StreamedAnswer) else Received()

    async def __aiter__(self) -> AsyncGenerator[Content, None]:
        """The content as it comes.

        Raises:
            LockstepError: the answer cannot be completed.
        """
        try:
            while (value := await self._advance()) is not None:
                assert not isinstance(value, Head)
                yield value
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Leave the answer. A task that is cancelled meanwhile does not stop it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._steps.close()
        await asyncio.shield(asyncio.ensure_future(self._leave()))

    async def _leave(self) -> None:
        await self._close_response()
        if (last := self._exchange.last_request()) is not None:
            request = self._shared.build(self._client, *last, _FAREWELL_S)
            try:
                async with asyncio.timeout(_FAREWELL_S):
                    await self._client.send(request)
            except (httpx.HTTPError, TimeoutError):
                pass  # the router ends the stream by itself when nobody comes back

    async def _advance(self) -> Head | Content | None:
        result: Any = None
        broken: BrokenError | None = None
        try:
            while True:
                step = self._steps.send(result) if broken is None else self._steps.throw(broken)
                result = broken = None
                if isinstance(step, Give):
                    return step.value
                try:
                    result = await self._carry_out(step)
                except BrokenError as error:
                    broken = error
        except StopIteration:
            await self._close_response()
            return None
        except BaseException:
            await self.aclose()
            raise

    async def _carry_out(self, step: Step) -> Any:
        match step:
            case Send():
                return await self._send(step)
            case Read():
                assert self._chunks is not None
                with _as_broken():
                    return await anext(self._chunks, None)
            case Pause():
                return await asyncio.sleep(step.seconds)
            case Resolve():
                return await self._look_up(step.name)
        raise AssertionError(step)

    async def _send(self, step: Send) -> Head:
        await self._close_response()
        with _as_broken():
            request = self._shared.build(self._client, step.router, step.request, step.silence_s)
            self._response = await self._client.send(request, stream=True)
        self._chunks = self._response.aiter_bytes()  # type: ignore[assignment]  # it is an async generator
        return _head(self._response)

    async def _look_up(self, name: Name) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._shared.policy.connect_timeout_s):
                found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            return []
        return [str(entry[4][0]) for entry in found]

    async def _close_response(self) -> None:
        chunks, self._chunks = self._chunks, None
        response, self._response = self._response, None
        if chunks is not None:
            await chunks.aclose()
        if response is not None:
            await response.aclose()


class AsyncTransport:
    """Sends requests to any of several routers, in one event loop."""

    def __init__(
        self,
        base_urls: Iterable[str],
        policy: Policy,
        *,
        verify: ssl.SSLContext | bool = True,
        random: Random | None = None,
    ) -> None:
        self._shared = _Shared(base_urls, policy, random)
        self._client = httpx.AsyncClient(
            verify=verify, limits=_LIMITS, trust_env=self._shared.is_proxied, headers={"User-Agent": _USER_AGENT}
        )

    @property
    def policy(self) -> Policy:
        """The limits of requests without limits of their own."""
        return self._shared.policy

    @property
    def roots(self) -> tuple[str, ...]:
        """The base URLs without /v1."""
        return self._shared.routers.roots

    async def send(self, request: Outgoing, policy: Policy | None = None) -> AsyncReply:
        """Send a request and wait for the head of its answer; the caller reads the reply or closes it.

        Raises:
            LockstepError: there is no answer.
        """
        return await AsyncReply(self._client, self._shared, self._shared.exchange(request, policy)).begin()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@contextmanager
def _as_broken() -> Iterator[None]:
    """Failures of connections as `BrokenError`. The text names no header."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise BrokenError("connect", f"no connection: {error or type(error).__name__}") from None
    except httpx.TimeoutException:
        raise BrokenError("silent", "the connection was silent for too long") from None
    except httpx.HTTPError as error:
        raise BrokenError("broken", f"the connection broke: {type(error).__name__}") from None


def _head(response: httpx.Response) -> Head:
    headers = {name: value for name, value in response.headers.items() if name not in _NOT_GIVEN}
    return Head(response.status_code, headers)


def _is_proxied(root: str) -> bool:
    """Whether the environment names a proxy for a URL. This machine's loopback cannot be reached through one."""
    url = httpx.URL(root)
    proxies = getproxies()
    is_local = url.host in ("localhost", "127.0.0.1", "::1")
    return not is_local and bool(proxies.keys() & {url.scheme, "all"}) and not proxy_bypass(url.host)


def _addresses(name: Name) -> list[str]:
    try:
        found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]
