"""Calls of `lockstep.v1.Inference` that look like answers over HTTP: a head, then the content. With asyncio only.

A call that is silent is not given up while its router answers questions for its health: streams over gRPC have no
comments that would show that it lives.
"""

import asyncio
import json
import math
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc

from lockstep_client.grpc_messages import GrpcRequest, grpc_request, metadata_of
from lockstep_client.routers import Router
from lockstep_client.sse import ServerSentEvent
from lockstep_client.steps import BrokenError, Chunk, Head, Outgoing

T = TypeVar("T")

MAX_ANSWER_BYTES = 256 << 20
_MAX_CHANNELS = 64
"""Connections that are kept; those with calls on them are kept in any case."""
_SERVICE = "/lockstep.v1.Inference/"
_HEALTH = "/grpc.health.v1.Health/Check"
_ROUTER = "x-lockstep-router"
_TIMEOUT = "x-request-timeout"
_ERROR_CODE, _ERROR_FIELD, _HTTP_STATUS = "lockstep-error-code", "lockstep-field", "lockstep-http-status"
_STATUSES: Mapping[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.UNAUTHENTICATED: (401, "invalid_api_key"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "not_found"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (503, "overloaded"),
}
"""Statuses that gRPC itself, or a proxy, may give, as HTTP status and error code. Others mean a broken connection."""
_LAST_S = 0.5
"""Of a call's time: what is left of it when the last question for the router's health has had its time."""
_DEAD = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""What a question for a router's health ends with if there was no answer. All else is one."""


class GrpcNetwork:
    """The connections to routers over gRPC, for one event loop.

    Args:
        connect_timeout_s: for each connection.
        probe_after_s: silence after which a router is asked for its health.
        verify: TLS settings: of an `SSLContext` its authorities are used.

    Raises:
        ValueError: gRPC cannot do without verification.
    """

    def __init__(self, connect_timeout_s: float, probe_after_s: float, verify: ssl.SSLContext | bool) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._probe_after_s = probe_after_s
        self._credentials = _credentials(verify)
        self._channels: OrderedDict[Router, _Channel] = OrderedDict()
        self._dropped: list[_Channel] = []
        """Those that no further call gets, while calls are on them."""

    @property
    def has_channels(self) -> bool:
        """Whether there is something to close."""
        return bool(self._channels or self._dropped)

    async def open(self, router: Router, request: Outgoing, silence_s: float) -> "OpenCall":
        """Begin a call and wait for the head of its answer; of an answer that is no stream, for all of it.

        Raises:
            BrokenError: there is no connection, it broke, or the router does not live.
            InvalidRequestError: the request cannot be made over gRPC.
        """
        if request.path.partition("?")[0] == "/healthz":
            return await self._ask_health(router)
        wanted = grpc_request(request)
        is_alone = any(name.lower() == "connection" and value == "close" for name, value in request.headers.items())
        channel = self._own_channel(router) if is_alone else self._channel(router)
        silence_s = min(silence_s, self._probe_after_s)
        call = OpenCall(channel, wanted, request, silence_s, self._connect_timeout_s, is_alone=is_alone)
        try:
            await call.begin()
        except BaseException:
            await call.close()
            raise
        return call

    async def close(self) -> None:
        """Close all connections."""
        channels = [each.channel for each in (*self._channels.values(), *self._dropped)]
        self._channels.clear()
        self._dropped.clear()
        for channel in channels:
            await channel.close()

    async def _ask_health(self, router: Router) -> "OpenCall":
        channel = self._channel(router)
        if not await channel.lives(self._connect_timeout_s):
            raise BrokenError("silent", "the router does not answer")
        call = OpenCall(channel, None, Outgoing("GET", "/healthz"), 0.0, 0.0, is_alone=False)
        call.head = Head(200, {_ROUTER: ""})
        return call

    def _channel(self, router: Router) -> "_Channel":
        channel = self._channels.get(router)
        if channel is not None and channel.is_dead:
            # Other calls on it may have a router that was merely slow: they find out for themselves.
            self._dropped = [each for each in (*self._dropped, self._channels.pop(router)) if each.calls]
            channel.drop()
            channel = None
        if channel is None:
            channel = self._channels[router] = self._new_channel(router)
        self._channels.move_to_end(router)
        for old in [each for each, kept in self._channels.items() if not kept.calls and kept is not channel]:
            if len(self._channels) <= _MAX_CHANNELS:
                break
            self._channels.pop(old).drop()
        return channel

    def _own_channel(self, router: Router) -> "_Channel":
        """A connection for one call."""
        channel = self._new_channel(router)
        self._dropped = [*(each for each in self._dropped if each.calls), channel]
        return channel

    def _new_channel(self, router: Router) -> "_Channel":
        parts = urlsplit(router.root)
        host = router.address or parts.hostname or ""
        target = f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}"
        options: list[tuple[str, Any]] = [
            ("grpc.primary_user_agent", "lockstep-client"),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            # The limit for a connection that is being made; and tries again are the caller's to decide.
            ("grpc.min_reconnect_backoff_ms", max(100, int(self._connect_timeout_s * 1000))),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        if parts.scheme == "grpc":
            return _Channel(grpc.aio.insecure_channel(target, options=options))
        if router.address is not None:
            options.append(("grpc.ssl_target_name_override", parts.hostname))
        return _Channel(grpc.aio.secure_channel(target, self._credentials, options=options))


class _Channel:
    """One connection, and the number of calls on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.is_dead = False
        """Whether its router did not answer on it: the connection may have vanished, so no further call gets it."""
        self._is_dropped = False
        self._closing: asyncio.Task[None] | None = None

    async def lives(self, timeout_s: float) -> bool:
        """Whether the router answers a question for its health, whatever the answer is."""
        ask = self.channel.unary_unary(_HEALTH, request_serializer=bytes, response_deserializer=bytes)
        try:
            await ask(b"", timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self.is_dead = self.is_dead or error.code() in _DEAD
            return error.code() not in _DEAD
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            _raise_own(error)
            self.is_dead = True
            return False
        return True

    def drop(self) -> None:
        """Close it after its last call, without a wait."""
        self._is_dropped = True
        self._close_if_idle()

    def note_end(self) -> None:
        """A call on it is over."""
        self.calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_dropped and not self.calls and self._closing is None:
            self._closing = asyncio.ensure_future(self.channel.close())


class OpenCall:
    """A call in progress. `grpc_calls.GrpcNetwork` begins it."""

    def __init__(
        self,
        channel: _Channel,
        wanted: GrpcRequest | None,
        request: Outgoing,
        silence_s: float,
        connect_timeout_s: float,
        *,
        is_alone: bool,
    ) -> None:
        self.head = Head(200, {})
        self._channel = channel
        self._wanted = wanted
        self._request = request
        self._silence_s = silence_s
        self._connect_timeout_s = connect_timeout_s
        self._is_alone = is_alone
        self._ask_by = -math.inf
        """When a silent router is asked for its health for the last time, in the event loop's time. Later the call's
        own time would end before it is known whether the router hangs, and the next request could get it again.
        """
        self._call: Any = None
        self._reading: asyncio.Future[Any] | None = None
        self._rest: list[Chunk] = []
        """What can be read without the call."""
        self._is_over = False
        """Whether there is nothing more to read than that."""

    async def begin(self) -> None:
        """Send the message and wait for the head. Raises `BrokenError`."""
        wanted = self._wanted
        assert wanted is not None
        start = self._channel.channel.unary_stream(
            _SERVICE + wanted.method,
            request_serializer=type(wanted.message).SerializeToString,
            response_deserializer=wanted.response.FromString,
        )
        given_s = next((value for name, value in self._request.headers.items() if name.lower() == _TIMEOUT), None)
        timeout_s = None if given_s is None else float(given_s)
        if timeout_s is not None:
            self._ask_by = asyncio.get_running_loop().time() + timeout_s - self._connect_timeout_s - _LAST_S
        try:
            self._call = start(wanted.message, metadata=metadata_of(self._request), timeout=timeout_s)
        except grpc.aio.UsageError:
            raise _closed() from None
        self._channel.calls += 1
        metadata = _texts(await self._patiently(self._call.initial_metadata()))
        if _ROUTER not in metadata:
            await self._refused()
            return
        kind = "text/event-stream" if wanted.answer.is_stream else "application/json"
        self.head = Head(200, {**metadata, "content-type": kind})
        if not wanted.answer.is_stream:
            await self._collect(wanted)

    def expect(self, silence_s: float) -> None:
        """Change the longest silence after which the router is asked whether it lives."""
        self._silence_s = min(silence_s, self._silence_s)

    async def read(self) -> Chunk | None:
        """The next events; none while the router lives and has none; None at the end. Raises `BrokenError`."""
        if self._rest:
            return self._rest.pop(0)
        if self._is_over or self._wanted is None:
            return None
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        await asyncio.wait({self._reading}, timeout=self._patience_s)
        if not self._reading.done():
            await self._check_life()
            return []
        reading, self._reading = self._reading, None
        try:
            message = reading.result()
        except grpc.aio.AioRpcError:
            message = grpc.aio.EOF
        except (asyncio.CancelledError, grpc.aio.UsageError) as ended:
            _raise_own(ended)
            raise _closed() from None
        if message is not grpc.aio.EOF:
            return self._wanted.answer.take(message)
        error = await self._error()
        self._is_over = True
        return self._wanted.answer.end() if error is None else [ServerSentEvent(json.dumps(error[1]))]

    async def close(self) -> None:
        """Leave the rest; the call is cancelled."""
        call, self._call = self._call, None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        if call is not None:
            call.cancel()
            self._channel.note_end()
        if self._is_alone:
            await self._channel.channel.close()

    async def _collect(self, wanted: GrpcRequest) -> None:
        """The whole answer, or the error in its place."""
        size_bytes = 0
        while True:
            try:
                message = await self._patiently(self._call.read())
            except grpc.aio.AioRpcError:
                message = grpc.aio.EOF
            if message is grpc.aio.EOF:
                break
            size_bytes += message.ByteSize()
            if size_bytes > MAX_ANSWER_BYTES:
                raise BrokenError("broken", f"the response is longer than {MAX_ANSWER_BYTES} bytes")
            wanted.answer.take(message)
        if await self._code() is grpc.StatusCode.OK:
            self._rest, self._is_over = [wanted.answer.end()], True
        else:
            await self._refused()

    async def _refused(self) -> None:
        """Take the call's error for the answer. Raises `BrokenError` if it is one of the connection."""
        error = await self._error()
        if error is None:
            raise BrokenError("broken", "the call ended without an answer")
        self.head, body = error
        self._rest, self._is_over = [json.dumps(body).encode()], True

    async def _error(self) -> tuple[Head, dict[str, Any]] | None:
        """The error that the call ended with, as an answer over HTTP; None: it is complete. Raises `BrokenError`."""
        code, details = await self._code(), await self._call.details() or ""
        if code is grpc.StatusCode.OK:
            return None
        trailing = _texts(await self._call.trailing_metadata())
        headers = {name: trailing[name] for name in ("retry-after", _ROUTER) if name in trailing}
        if _ERROR_CODE in trailing:
            error = {"message": details, "param": trailing.get(_ERROR_FIELD), "code": trailing[_ERROR_CODE]}
            return Head(int(trailing.get(_HTTP_STATUS, "500")), headers), {"error": error}
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise BrokenError("late", "the time for the call was over")
        if code not in _STATUSES:
            is_early = code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower()
            raise BrokenError("connect" if is_early else "broken", f"the connection broke: {code.name}")
        is_too_long = "larger than max" in details
        status, name = (413, "payload_too_large") if is_too_long else _STATUSES[code]
        return Head(status, headers), {"error": {"message": details, "param": None, "code": name}}

    async def _code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self._call.code()
        return code

    async def _patiently(self, awaited: Awaitable[T]) -> T:
        """The result, as long as the router lives. Raises `BrokenError`."""
        waiting = asyncio.ensure_future(awaited)
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=self._patience_s)
                if not waiting.done():
                    await self._check_life()
        except BaseException:
            waiting.cancel()
            raise
        try:
            return waiting.result()
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            _raise_own(error)
            raise _closed() from None

    @property
    def _patience_s(self) -> float:
        """How long to wait for something before the router is asked whether it lives."""
        left_s = self._ask_by - asyncio.get_running_loop().time()
        return min(self._silence_s, left_s) if left_s > 0 else self._silence_s

    async def _check_life(self) -> None:
        if not await self._channel.lives(self._connect_timeout_s):
            raise BrokenError("silent", "the router does not answer")


def _raise_own(error: BaseException) -> None:
    """Raise a cancellation that is this task's own: calls that end with their channel look like cancelled tasks."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def _closed() -> BrokenError:
    return BrokenError("broken", "the connection was closed")


def _texts(metadata: Any) -> dict[str, str]:
    return {name: value for name, value in metadata or () if isinstance(value, str)}


def _credentials(verify: ssl.SSLContext | bool) -> grpc.ChannelCredentials:
    if verify is True:
        return grpc.ssl_channel_credentials()
    if verify is False or verify.verify_mode is not ssl.CERT_REQUIRED:
        raise ValueError("verify: connections over gRPC are always verified")
    found = b"".join(ssl.DER_cert_to_PEM_cert(each).encode() for each in verify.get_ca_certs(binary_form=True))
    return grpc.ssl_channel_credentials(root_certificates=found or None)
