"""Drop-ins for the official classes: `base_url` may be a list of routers, and answers survive the death of routers.

A transport below the official client routes, retries and resumes. The client above it sees one response, so all of it
works unchanged. The official client's own retries are off (`max_retries=0`) unless they are asked for: they would come
on top. Failures are `openai.APIConnectionError` and `openai.APITimeoutError`; `error_of` finds the typed error in them.
"""

import os
import ssl
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import openai

from lockstep_client.attempts import json_object
from lockstep_client.errors import DeadlineExceededError, LockstepError
from lockstep_client.generation import endpoint_of
from lockstep_client.policy import Policy
from lockstep_client.routers import is_grpc
from lockstep_client.steps import Head, Outgoing
from lockstep_client.transport import AsyncReply, AsyncTransport, Content, Reply, Transport

BASE_URL_VARIABLE = "OPENAI_BASE_URL"


class OpenAI(openai.OpenAI):
    """`openai.OpenAI` for several routers."""

    def __init__(
        self,
        *,
        base_url: str | httpx2.URL | Iterable[str] | None = None,
        policy: Policy | None = None,
        verify: ssl.SSLContext | bool = True,
        max_retries: int = 0,
        http_client: httpx2.Client | None = None,
        **options: Any,
    ) -> None:
        """Connect to nothing yet.

        Args:
            base_url: of the routers; default: the environment variable OPENAI_BASE_URL, comma-separated.
            policy: the limits of requests. `timeout` of the official client is the limit of a whole answer, and of
                the silence of a stream.
            verify: TLS settings.
            max_retries: of the official client, on top of the policy's.
            http_client: replaces the transport, and with it all that this class adds.
            **options: as the official class has them.

        Raises:
            ValueError: an argument cannot be used.
        """
        urls = _urls(base_url)
        if http_client is None:
            transport = _Transport(urls, policy or Policy(timeout_s=None), verify)
            http_client = httpx2.Client(transport=transport, trust_env=False)
        super().__init__(base_url=urls[0], http_client=http_client, max_retries=max_retries, **options)


class AsyncOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` for several routers."""

    def __init__(
        self,
        *,
        base_url: str | httpx2.URL | Iterable[str] | None = None,
        policy: Policy | None = None,
        verify: ssl.SSLContext | bool = True,
        max_retries: int = 0,
        http_client: httpx2.AsyncClient | None = None,
        **options: Any,
    ) -> None:
        """Connect to nothing yet; the arguments are those of `OpenAI`.

        Raises:
            ValueError: an argument cannot be used.
        """
        urls = _urls(base_url)
        if http_client is None:
            transport = _AsyncTransport(urls, policy or Policy(timeout_s=None), verify)
            http_client = httpx2.AsyncClient(transport=transport, trust_env=False)
        super().__init__(base_url=urls[0], http_client=http_client, max_retries=max_retries, **options)


def error_of(error: BaseException) -> LockstepError | None:
    """The typed error behind one of the official client's, with what has been received of a stream."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, LockstepError):
        cause = cause.__cause__
    return cause


class _Transport(httpx2.BaseTransport):
    def __init__(self, urls: list[str], policy: Policy, verify: ssl.SSLContext | bool) -> None:
        self._transport = Transport(urls, policy, verify=verify)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        outgoing = _outgoing(request, self._transport.roots[0], request.read())
        with _as_official(request):
            reply = self._transport.send(outgoing, _policy(self._transport.policy, request, outgoing))
        return httpx2.Response(reply.head.status, headers=_headers(reply.head), stream=_Body(reply, request))

    def close(self) -> None:
        self._transport.close()


class _AsyncTransport(httpx2.AsyncBaseTransport):
    def __init__(self, urls: list[str], policy: Policy, verify: ssl.SSLContext | bool) -> None:
        self._transport = AsyncTransport(urls, policy, verify=verify)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        outgoing = _outgoing(request, self._transport.roots[0], await request.aread())
        with _as_official(request):
            reply = await self._transport.send(outgoing, _policy(self._transport.policy, request, outgoing))
        return httpx2.Response(reply.head.status, headers=_headers(reply.head), stream=_AsyncBody(reply, request))

    async def aclose(self) -> None:
        await self._transport.aclose()


class _Body(httpx2.SyncByteStream):
    def __init__(self, reply: Reply, request: httpx2.Request) -> None:
        self._reply = reply
        self._request = request

    def __iter__(self) -> Generator[bytes, None, None]:
        with _as_official(self._request):
            for item in self._reply:
                yield _bytes(item)

    def close(self) -> None:
        self._reply.close()


class _AsyncBody(httpx2.AsyncByteStream):
    def __init__(self, reply: AsyncReply, request: httpx2.Request) -> None:
        self._reply = reply
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_official(self._request):
            async for item in self._reply:
                yield _bytes(item)

    async def aclose(self) -> None:
        await self._reply.aclose()


def _urls(base_url: str | httpx2.URL | Iterable[str] | None) -> list[str]:
    if base_url is None:
        base_url = [url.strip() for url in os.environ.get(BASE_URL_VARIABLE, "").split(",") if url.strip()]
    urls = [str(base_url)] if isinstance(base_url, str | httpx2.URL) else [str(url) for url in base_url]
    if not urls:
        raise ValueError(f"base_url must name at least one router, or {BASE_URL_VARIABLE} must")
    if any(map(is_grpc, urls)):
        raise ValueError("base_url must be http(s) URLs: the official client knows no other")
    return urls


def _outgoing(request: httpx2.Request, root: str, content: bytes) -> Outgoing:
    """The request for any router: its path follows the root that the official client knows.

    Raises:
        httpx2.UnsupportedProtocol: the URL is not the routers'.
    """
    url = str(request.url)
    if not url.startswith(root + "/"):
        raise httpx2.UnsupportedProtocol("the URL is not one of the routers'", request=request)
    return Outgoing(request.method, url.removeprefix(root), dict(request.headers), content)


def _policy(policy: Policy, request: httpx2.Request, outgoing: Outgoing) -> Policy:
    """The policy with the official client's `timeout`."""
    read_s = request.extensions.get("timeout", {}).get("read")
    if read_s is None:
        return policy
    body = json_object(outgoing.content) if endpoint_of(outgoing.path) else None
    if body is not None and body.get("stream"):
        return replace(policy, silence_timeout_s=min(policy.silence_timeout_s, read_s))
    return replace(policy, timeout_s=read_s if policy.timeout_s is None else min(policy.timeout_s, read_s))


def _headers(head: Head) -> list[tuple[str, str]]:
    return list(head.headers.items())


def _bytes(item: Content) -> bytes:
    return item if isinstance(item, bytes) else item.encode()


@contextmanager
def _as_official(request: httpx2.Request) -> Iterator[None]:
    """Errors as those of the official client's transport, which it turns into its own."""
    try:
        yield
    except DeadlineExceededError as error:
        raise httpx2.ReadTimeout(str(error), request=request) from error
    except LockstepError as error:
        raise httpx2.RemoteProtocolError(str(error), request=request) from error
