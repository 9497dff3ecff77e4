"""A transport for the load's clients whose streams survive routers that die, by the rules of `lockstep_client`."""

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
from lockstep_client.errors import LockstepError
from lockstep_client.policy import Policy
from lockstep_client.steps import Outgoing
from lockstep_client.transport import AsyncReply, AsyncTransport


class ResumingTransport(httpx.AsyncBaseTransport):
    """Continues streams as users' clients do. Times and events are those that a user sees."""

    def __init__(
        self, url: str, *, connect_timeout_s: float, silence_limit_s: float, verify: ssl.SSLContext | bool
    ) -> None:
        policy = Policy(timeout_s=None, connect_timeout_s=connect_timeout_s, silence_timeout_s=silence_limit_s)
        self._transport = AsyncTransport([url], policy, verify=verify)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; its answer's content comes over as many connections as it takes."""
        root = self._transport.roots[0]
        path = str(request.url).removeprefix(root)
        outgoing = Outgoing(request.method, path, dict(request.headers), await request.aread())
        with _as_httpx(request):
            reply = await self._transport.send(outgoing)
        return httpx.Response(reply.head.status, headers=dict(reply.head.headers), stream=_Body(reply, request))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, reply: AsyncReply, request: httpx.Request) -> None:
        self._reply = reply
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx(self._request):
            async for item in self._reply:
                yield item if isinstance(item, bytes) else item.encode()

    async def aclose(self) -> None:
        await self._reply.aclose()


@contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    try:
        yield
    except LockstepError as error:
        raise httpx.RemoteProtocolError(f"{error.code}: {error.message}", request=request) from error
