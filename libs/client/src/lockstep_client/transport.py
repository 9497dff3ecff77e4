"""Carries requests out: the steps of an exchange over a network, blocking or with asyncio.

`Transport` and `AsyncTransport` differ in their networks only; what to do when something fails is decided by the steps.
"""

import ssl
import time
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import suppress
from random import Random, SystemRandom
from typing import Any, Self
from urllib.request import getproxies, proxy_bypass

import httpx

from lockstep_client.errors import ConnectionFailedError, LockstepError, Received
from lockstep_client.generation import Exchange, StreamedAnswer, exchange_for
from lockstep_client.network import (
    FAREWELL_S,
    AsyncNetwork,
    BlockingNetwork,
    Connections,
    Network,
    Response,
    run_blocking,
)
from lockstep_client.policy import Policy
from lockstep_client.routers import Routers, is_grpc
from lockstep_client.sse import ServerSentEvent
from lockstep_client.steps import BrokenError, Chunk, Expect, Give, Head, Outgoing, Pause, Read, Resolve, Send, Step

Content = bytes | ServerSentEvent


class _Shared:
    """What both transports have."""

    def __init__(self, base_urls: Iterable[str], policy: Policy, random: Random | None) -> None:
        self.policy = policy
        self.random: Random = random or SystemRandom()
        self.routers = Routers(base_urls, avoid_s=policy.avoid_s, clock=time.monotonic, random=self.random)
        is_proxied = any(map(_is_proxied, self.routers.roots))
        if is_proxied:
            self.routers.resolve_nothing()  # the proxy looks names up
        self.connections = Connections(
            policy.connect_timeout_s,
            policy.probe_after_s,
            is_proxied=is_proxied,
            has_grpc=any(map(is_grpc, self.routers.roots)),
            has_tls=is_proxied or any(root.startswith("https:") for root in self.routers.roots),
        )

    def exchange(self, request: Outgoing, policy: Policy | None) -> Exchange:
        """How a request is carried out."""
        return exchange_for(request, self.routers, policy or self.policy, time.monotonic, self.random)


class _ClosedError(Exception):
    """The answer was closed while somebody waited for it."""


class _Course:
    """The way of one request through its steps."""

    def __init__(self, network: Network, exchange: Exchange) -> None:
        self._network = network
        self._exchange = exchange
        self._steps = exchange.run()
        self._response: Response | None = None
        self._is_over = False
        """Whether there is nothing more to give."""
        self._is_closed = False

    @property
    def received(self) -> Received:
        """What has been given of a stream so far; of anything else nothing is kept."""
        exchange = self._exchange
        return exchange.received if isinstance(exchange, StreamedAnswer) else Received()

    async def begin(self) -> Head:
        """The head of the answer.

        Raises:
            LockstepError: there is no answer.
        """
        head = await self._advance()
        assert isinstance(head, Head)
        return head

    async def next(self) -> Content | None:
        """The next part of its content; None at its end.

        Raises:
            LockstepError: the answer cannot be completed.
        """
        value = await self._advance()
        assert not isinstance(value, Head)
        return value

    async def close(self) -> None:
        """Leave the answer: what still runs is cancelled. Another task or thread may wait for the answer meanwhile; it
        gets a `ConnectionFailedError`.
        """
        was_closed, self._is_closed = self._is_closed, True
        response, self._response = self._response, None
        if was_closed and response is None:
            return
        with suppress(ValueError):  # another thread is in them
            self._steps.close()
        await self._network.leave(self._leave(response))

    async def _leave(self, response: Response | None) -> None:
        if response is not None:
            await response.close()
        if (last := self._exchange.last_request()) is not None:
            # The router ends the answer by itself when no client comes back.
            with suppress(BrokenError, LockstepError):
                response = await self._network.open(*last, FAREWELL_S)
                await response.close()

    async def _advance(self) -> Head | Content | None:
        if self._is_over:
            return None
        try:
            return await self._next_given()
        except BaseException as error:
            is_left = self._is_closed and isinstance(error, Exception) and not isinstance(error, LockstepError)
            self._is_over = not self._is_closed
            await self.close()  # again, if a response has been opened since
            if is_left:
                raise ConnectionFailedError("the stream was closed", received=self.received) from None
            raise

    async def _next_given(self) -> Head | Content | None:
        result: Any = None
        broken: BrokenError | LockstepError | None = None
        while not self._is_closed:
            try:
                step = self._steps.send(result) if broken is None else self._steps.throw(broken)
            except StopIteration:
                break
            result = broken = None
            if isinstance(step, Give):
                return step.value
            try:
                result = await self._carry_out(step)
            except (BrokenError, LockstepError) as error:
                broken = error  # nothing in the steps recovers from the second: they say what was received
        if self._is_closed:
            raise _ClosedError
        self._is_over = True
        await self._close_response()
        return None

    async def _carry_out(self, step: Step) -> Head | Chunk | list[str] | None:
        match step:
            case Send():
                await self._close_response()
                self._response = await self._network.open(step.router, step.request, step.silence_s)
                return self._response.head
            case Expect():
                assert self._response is not None
                self._response.expect(step.silence_s)
                return None
            case Read():
                assert self._response is not None
                return await self._response.read()
            case Pause():
                await self._network.sleep(step.seconds)
                return None
            case Resolve():
                return await self._network.look_up(step.name)
        raise AssertionError(step)

    async def _close_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            await response.close()


class Reply:
    """The answer to one request. Iterate over its content, or close it: what still runs is cancelled."""

    def __init__(self, course: _Course) -> None:
        """Wait for the head.

        Raises:
            LockstepError: there is no answer.
        """
        self._course = course
        self.head = run_blocking(course.begin())

    @property
    def received(self) -> Received:
        """What has been given of a stream so far; of anything else nothing is kept."""
        return self._course.received

    def __iter__(self) -> Generator[Content, None, None]:
        """The content as it comes.

        Raises:
            LockstepError: the answer cannot be completed.
        """
        try:
            while (value := run_blocking(self._course.next())) is not None:
                yield value
        finally:
            self.close()

    def close(self) -> None:
        """Leave the answer."""
        run_blocking(self._course.close())


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
        self._network = BlockingNetwork(self._shared.connections, verify)

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
        return Reply(_Course(self._network, self._shared.exchange(request, policy)))

    def close(self) -> None:
        """Close all connections."""
        run_blocking(self._network.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncReply:
    """The answer to one request. Iterate over its content, or close it: what still runs is cancelled."""

    def __init__(self, course: _Course, head: Head) -> None:
        """Made by `AsyncTransport.send`, which waits for the head."""
        self._course = course
        self.head = head

    @property
    def received(self) -> Received:
        """What has been given of a stream so far; of anything else nothing is kept."""
        return self._course.received

    async def __aiter__(self) -> AsyncGenerator[Content, None]:
        """The content as it comes.

        Raises:
            LockstepError: the answer cannot be completed.
        """
        try:
            while (value := await self._course.next()) is not None:
                yield value
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Leave the answer. A task that is cancelled meanwhile does not stop it."""
        await self._course.close()


class AsyncTransport:
    """Sends requests to any of several routers, for one event loop."""

    def __init__(
        self,
        base_urls: Iterable[str],
        policy: Policy,
        *,
        verify: ssl.SSLContext | bool = True,
        random: Random | None = None,
    ) -> None:
        self._shared = _Shared(base_urls, policy, random)
        self._network = AsyncNetwork(self._shared.connections, verify)

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
        course = _Course(self._network, self._shared.exchange(request, policy))
        return AsyncReply(course, await course.begin())

    async def aclose(self) -> None:
        """Close all connections."""
        await self._network.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _is_proxied(root: str) -> bool:
    """Whether the environment names a proxy for a URL. This machine's loopback cannot be reached through one; gRPC uses
    none.
    """
    if is_grpc(root):
        return False
    url = httpx.URL(root)
    proxies = getproxies()
    is_local = url.host in ("localhost", "127.0.0.1", "::1")
    return not is_local and bool(proxies.keys() & {url.scheme, "all"}) and not proxy_bypass(url.host)
