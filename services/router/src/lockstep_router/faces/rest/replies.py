"""Responses that are cancelled when the client disconnects or stops reading."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from lockstep_common.errors import MEANINGS, ErrorCode, LockstepError
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep_router.faces.rest.channel import Channel, channel_of
from lockstep_router.faces.rest.record import Record
from lockstep_router.settings import RouterSettings

logger = logging.getLogger("lockstep.router")

CLIENT_DISCONNECTED_STATUS = MEANINGS[ErrorCode.CANCELLED].http_status

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A complete JSON response. A body of bytes is JSON already."""
    content = body if isinstance(body, bytes) else to_json(body)
    return Response(content, status, headers, media_type="application/json")


def error_reply(error: LockstepError) -> Response:
    """An error in OpenAI's shape."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    if error.code is ErrorCode.INVALID_API_KEY:
        headers["www-authenticate"] = "Bearer"
    return json_reply(error.openai_body(), error.meaning.http_status, headers)


def event(event_id: str, data: bytes) -> bytes:
    """One server-sent event; its data are one line."""
    return b"id: %b\ndata: %b\n\n" % (event_id.encode(), data)


class Client:
    """Writes a response to one client connection.

    Nothing is sent before the first bytes of the answer exist, so that an earlier failure gets an HTTP status. The
    exception is a stream that has nothing to send for `keepalive_interval_s`: the client gets the headers and a
    comment, and another comment after each further interval, because proxies cut silent connections.

    Args:
        send: the ASGI server's.
        record: of the request.
        settings: of the router.
        channel: of the answer, if its server has one.
    """

    def __init__(self, send: Send, record: Record, settings: RouterSettings, channel: Channel | None = None) -> None:
        self._send = send
        self._channel = channel
        self._record = record
        self._write_timeout_s = settings.write_timeout_s
        self._keepalive_s = settings.keepalive_interval_s
        self._wants_events = False
        self._event_headers = _EVENT_STREAM_HEADERS
        self._is_started = False
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._writing_since: float | None = None
        self._comment: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def expect_events(self) -> None:
        """Note that the answer will be a stream."""
        self._wants_events = True

    async def reply(self, response: Response) -> None:
        """Send a complete response."""
        await self._put(_start(response.status_code, response.raw_headers))
        await self._put(_body(bytes(response.body), more=False))

    async def reply_events(
        self, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None, *, end: bytes = _DONE
    ) -> None:
        """Send server-sent events as they come, then `end`; with further headers, if there are any.

        Raises:
            LockstepError: raised by `events`. The caller passes it to `fail`.
        """
        if headers:
            more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            self._event_headers = _EVENT_STREAM_HEADERS + more
        async for data in events:
            if not self._is_started:
                await self._begin_events()
            await self._put(_body(data, more=True))
        if not self._is_started:
            await self._begin_events()
        await self._put(_body(end, more=False))

    @property
    def takes_events(self) -> bool:
        """Whether the answer has begun and more events can be written at once with `write_events`."""
        channel = self._channel
        return self._is_started and self._comment is None and channel is not None and channel.is_open

    def write_events(self, data: bytes) -> None:
        """Write events as they come, without waiting: only if `takes_events`, and while `reply_events` waits for its
        next ones.
        """
        assert self._channel is not None
        self._written_at = self._loop.time()
        self._channel.write(data)

    async def _begin_events(self) -> None:
        self._is_started = True
        await self._put(_start(200, self._event_headers))

    async def fail(self, error: LockstepError) -> None:
        """Send an error: as the answer, or as an event if the answer has begun."""
        if self._is_started:
            self._record.status = error.meaning.http_status
            await self._put(_body(b"data: " + to_json(error.openai_body()) + b"\n\n", more=False))
        else:
            await self.reply(error_reply(error))

    def watch(self, on_stuck: Callable[[], None]) -> None:
        """Start sending comments, and call `on_stuck` once the client has read nothing for `write_timeout_s`."""
        now = self._loop.time()
        if self._writing_since is not None and now - self._writing_since >= self._write_timeout_s:
            on_stuck()
            return
        is_silent = self._writing_since is None and now - self._written_at >= self._keepalive_s > 0
        if self._wants_events and is_silent:
            self._comment = asyncio.ensure_future(self._send_comment())
        # One timer serves all deadlines of a client, so that writing a token sets no timer.
        interval_s = min(self._write_timeout_s, self._keepalive_s or self._write_timeout_s) / 4
        self._timer = self._loop.call_later(interval_s, self.watch, on_stuck)

    async def stop(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)

    async def _send_comment(self) -> None:
        try:
            if not self._is_started:
                self._is_started = True
                await self._deliver(_start(200, self._event_headers))
            await self._deliver(_body(_KEEP_ALIVE, more=True))
        finally:
            self._comment = None

    async def _put(self, message: dict[str, Any]) -> None:
        if self._comment is not None:
            await asyncio.wait((self._comment,))
        await self._deliver(message)

    async def _deliver(self, message: dict[str, Any]) -> None:
        # `send` waits while the server's buffer is full, as it is when the client does not read.
        self._writing_since = self._written_at = self._loop.time()
        await self._send(message)
        self._writing_since = None


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class LiveReply(Response):
    """A response that is computed while the client waits; cancelled if the client disconnects or stops reading."""

    def __init__(
        self, answer: Callable[[Client], Awaitable[None]], *, record: Record, settings: RouterSettings
    ) -> None:
        super().__init__()
        self._answer = answer
        self._record = record
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the computation until it ends or the client disconnects."""
        channel = channel_of(scope)
        client = Client(send, self._record, self._settings, channel)
        if channel is None:
            await self._run_beside(client, receive)
        else:
            await self._run_on(client, channel)

    async def _run_on(self, client: Client, channel: Channel) -> None:
        """Run in this task, which is cancelled if the connection ends."""
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                # The unfinished answer makes the server close the connection.
                self._record.status = CLIENT_DISCONNECTED_STATUS
                task.cancel()

        def on_stuck() -> None:
            self._note_stuck()
            leave()

        client.watch(on_stuck)
        channel.watch(leave)
        try:
            await self._run(client)
        except asyncio.CancelledError:
            if not has_left or task.uncancel():
                raise  # the server itself ends the task
        finally:
            channel.unwatch()
            await client.stop()

    async def _run_beside(self, client: Client, receive: Receive) -> None:
        """Run in a task beside one that reads the connection: all that ASGI knows."""
        answering = asyncio.ensure_future(self._run(client))
        disconnect = asyncio.ensure_future(_wait_disconnect(receive))

        def on_stuck() -> None:
            self._note_stuck()
            disconnect.cancel()

        client.watch(on_stuck)
        try:
            await asyncio.wait({answering, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                # The unfinished answer makes the server close the connection.
                self._record.status = CLIENT_DISCONNECTED_STATUS
        finally:
            disconnect.cancel()
            answering.cancel()
            await client.stop()
            await asyncio.gather(answering, disconnect, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    def _note_stuck(self) -> None:
        logger.warning("client does not read", extra={"request_id": self._record.request_id})

    async def _run(self, client: Client) -> None:
        try:
            # No reference is kept: it holds the request, which is large and needed at the beginning only.
            answer, self._answer = self._answer(client), _no_answer
            await answer
        except LockstepError as error:
            await client.fail(error)


async def _no_answer(_: Client) -> None:
    raise AssertionError("an answer is computed once")


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
