"""A client of any OpenAI endpoint: lists models and streams completions as pieces of text with their times.

The load generator, `lockstep check` and the demo use it. It checks nothing: events are passed on as they arrive.
"""

import argparse
import json
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from lockstep_common.address import check_host

from lockstep_tools.arguments import api_key
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.load.resuming import ResumingTransport
from lockstep_tools.load.sse import Decoder, ServerSentEvent

CONNECT_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 120.0
"""A stream that is silent for longer has failed."""

_EVENT_IDS = {"X-Lockstep-Event-IDs": "true"}
"""Lockstep's routers number the events of a stream for clients that ask; histories count and compare tokens by them."""

_CONNECT_FAILED = "connection.connect_tcp.failed"  # httpcore's name for it

PROXY_ERRORS = (ImportError, ValueError, httpx.InvalidURL)
"""What a client raises when it is made, for a proxy of the environment: SOCKS needs a package that is not installed."""


class EndpointError(Exception):
    """The server refused a request, broke off a stream, or did not follow OpenAI's protocol."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Piece:
    """The content of one server-sent event."""

    at_s: float
    """Arrival time on the monotonic clock."""
    id: str | None = None
    """The event's SSE id."""
    choice: int | None = None
    """Index of the choice; None: the event has no choice (usage alone, or the end)."""
    text: str = ""
    tokens: int | None = None
    """Tokens in this piece, when log probabilities were asked for."""
    finish: str | None = None
    usage: Mapping[str, Any] | None = None
    done: bool = False
    """This is `[DONE]`."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a server and the options of its connections."""

    url: str
    """Base URL with the version: https://host/v1."""
    api_key: str | None = field(default=None, repr=False)
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    connect_retries: int = 0
    """How often a connection that could not be made is tried again. The official client does so twice."""
    silence_limit_s: float = SILENCE_LIMIT_S
    resumes: bool = False
    """Whether streams survive routers that die, as those of `lockstep_client` do."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """TLS settings for HTTPS; the system's authorities are trusted if None."""

    @property
    def root(self) -> str:
        """The server's address without the API's version."""
        return root_url(self.url)

    def client(self, *, connections: int = 1) -> httpx.AsyncClient:
        """An HTTP client for this endpoint; the caller closes it.

        Raises:
            CommandError: a proxy of the environment cannot be used.
        """
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        verify = self.tls or True
        try:
            return httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(self.silence_limit_s, connect=self.connect_timeout_s),
                limits=limits,
                verify=verify,
                trust_env=not _is_local(self.url),
                # A client with a given transport ignores proxies from the environment.
                transport=self._transport(limits),
            )
        except PROXY_ERRORS as error:
            raise unusable_proxy(error) from None

    def _transport(self, limits: httpx.Limits) -> httpx.AsyncBaseTransport | None:
        verify = self.tls or True
        if self.resumes:
            return ResumingTransport(
                self.url,
                connect_timeout_s=self.connect_timeout_s,
                silence_limit_s=self.silence_limit_s,
                verify=verify,
            )
        if self.connect_retries:
            return httpx.AsyncHTTPTransport(verify=verify, limits=limits, retries=self.connect_retries)
        return None


def from_arguments(arguments: argparse.Namespace) -> Endpoint:
    """The endpoint that the options of `arguments.add_endpoint` name.

    Raises:
        CommandError: the URL, the key or a file cannot be used.
    """
    key = api_key(arguments.api_key_env)
    return Endpoint(checked_url(arguments.url), key, tls=tls_context(arguments))


def tls_context(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """The TLS context of the options of `arguments.add_tls`; None if none is given.

    Raises:
        CommandError: a file cannot be used.
    """
    if not arguments.ca_file and not arguments.client_cert:
        return None
    context = ssl.create_default_context()
    try:
        for path in arguments.ca_file:
            context.load_verify_locations(path)
        if arguments.client_cert:
            context.load_cert_chain(arguments.client_cert, arguments.client_key)
    except OSError as error:
        raise CommandError(f"--ca-file, --client-cert: {error.strerror or error}", UNUSABLE) from None
    return context


def checked_url(url: str, option: str = "--url") -> str:
    """`url` without a slash at its end; `option` is what gave it.

    Raises:
        CommandError: it is not an http(s) URL.
    """
    try:
        parsed = httpx.URL(url)
        check_host(parsed.raw_host.decode())
        host = parsed.host
    except (httpx.InvalidURL, ValueError) as error:  # also of a name in Punycode that is none
        raise CommandError(f"{option} {url}: {error}", UNUSABLE) from None
    if parsed.scheme not in ("http", "https") or not host:
        raise CommandError(f"{option} {url}: not a URL such as http://127.0.0.1:8000/v1", UNUSABLE)
    return url.rstrip("/")


def root_url(url: str) -> str:
    """`url` without the API's version: both spellings name the same server."""
    return url.rstrip("/").removesuffix("/v1")


def _is_local(url: str) -> bool:
    # A proxy from the environment cannot reach this machine's loopback.
    return httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")


def unusable_proxy(error: Exception) -> CommandError:
    """What a command says of one of the `PROXY_ERRORS`."""
    return CommandError(f"a proxy of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY): {error}", UNUSABLE)


async def first_model(client: httpx.AsyncClient) -> str:
    """The first model that the server lists.

    Raises:
        EndpointError: there is no server, or it lists none.
    """
    try:
        response = await client.get("/models")
    except httpx.HTTPError as error:
        raise EndpointError(_connection_sentence(client, error)) from error
    if response.status_code != 200:
        raise _refusal(response.status_code, response.content)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise EndpointError(f"{client.base_url}models lists no model") from None


async def stream(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    on_answer: Callable[[httpx.Response], None] = lambda _: None,
    on_connect_failure: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Piece, None]:
    """Send a request with `stream: true` and yield what comes back, the end mark included. Events have ids, where the
    server has any.

    Args:
        client: of `Endpoint.client`.
        path: /completions or /chat/completions.
        body: the request; `stream` is set here.
        headers: further headers of this request.
        on_answer: called with the answer's head, also with a refusal's.
        on_connect_failure: called for each connection that could not be made, also for those that are tried again.

    Raises:
        EndpointError: refused, broken off, or an error event in the stream.
    """

    async def trace(event: str, _: Mapping[str, Any]) -> None:
        if event == _CONNECT_FAILED:
            on_connect_failure()

    decoder = Decoder()
    sent = client.stream(
        "POST",
        path,
        json={**body, "stream": True},
        headers={**_EVENT_IDS, **(headers or {})},
        extensions={"trace": trace},
    )
    try:
        async with sent as response:
            on_answer(response)
            if response.status_code != 200:
                raise _refusal(response.status_code, await response.aread())
            async for chunk in response.aiter_bytes():
                at_s = time.monotonic()
                for event in decoder.feed(chunk):
                    for piece in _pieces(event, at_s):
                        yield piece
    except httpx.HTTPError as error:
        raise EndpointError(_connection_sentence(client, error)) from error


def _pieces(event: ServerSentEvent, at_s: float) -> list[Piece]:
    if event.data == "[DONE]":
        return [Piece(at_s, event.id, done=True)]
    try:
        body = json.loads(event.data)
    except ValueError:
        raise EndpointError(f"the stream has an event that is not JSON: {event.data[:200]}") from None
    if not isinstance(body, dict):
        raise EndpointError(f"the stream has an event that is no object: {event.data[:200]}")
    if "error" in body:
        raise _error(body, None)
    usage = body.get("usage")
    choices = body.get("choices") or []
    if not choices:
        return [Piece(at_s, event.id, usage=usage)]
    return [_piece(choice, at_s, event.id, usage if number == 0 else None) for number, choice in enumerate(choices)]


def _piece(choice: Mapping[str, Any], at_s: float, event_id: str | None, usage: Mapping[str, Any] | None) -> Piece:
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    logprobs = choice.get("logprobs") or {}
    listed = logprobs.get("content") if "content" in logprobs else logprobs.get("tokens")
    return Piece(
        at_s=at_s,
        id=event_id,
        choice=choice.get("index", 0),
        text=text or "",
        tokens=None if listed is None else len(listed),
        finish=choice.get("finish_reason"),
        usage=usage,
    )


def _refusal(status: int, content: bytes) -> EndpointError:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if isinstance(body, dict) and "error" in body:
        return _error(body, status)
    return EndpointError(f"the server answered with status {status}", status=status)


def _error(body: Mapping[str, Any], status: int | None) -> EndpointError:
    error = body["error"]
    if isinstance(error, dict):
        return EndpointError(str(error.get("message")), status=status, code=str(error.get("code")))
    return EndpointError(str(error), status=status)


def _connection_sentence(client: httpx.AsyncClient, error: httpx.HTTPError) -> str:
    where = str(client.base_url).rstrip("/")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no server answers at {where} ({error or type(error).__name__}): start one with `lockstep serve`"
    if isinstance(error, httpx.TimeoutException):
        return f"{where} said nothing for {client.timeout.read:g} s"
    return f"the connection to {where} broke: {error or type(error).__name__}"
