"""Responses that are cancelled when the client disconnects or stops reading."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lockstep_common.errors import MEANINGS, ErrorCode, LockstepError
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.channel import Channel, channel_of
from lockstep_router.lanes import Outlet
from lockstep_router.settings import RouterSettings

logger = logging.getLogger("lockstep.router")

Headers = list[tuple[bytes, bytes]]
"""Of an answer, as bytes; names are in lower case."""

AtOnce = Callable[[int, Headers, bytes], bool]

CLIENT_DISCONNECTED_STATUS = MEANINGS[ErrorCode.CANCELLED].http_status

_FINAL = frozenset({ErrorCode.STREAM_MOVED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NUMERICAL_ERROR})
"""Errors that another try meets again, with statuses that OpenAI's clients try again by themselves."""
_EVENT_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_BLOCK_BYTES = 64 << 10
"""Bytes of an answer that are copied and sent in one turn of the event loop, about."""
DONE = b"data: [DONE]\n\n"
_SILENCE_HEADER = b"x-lockstep-max-silence"
_KEEP_ALIVE = b": keep-alive\n\n"


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A complete JSON response. A body of bytes is JSON already."""
    content = body if isinstance(body, bytes) else to_json(body)
    return Response(content, status, headers, media_type="application/json")


def error_reply(error: LockstepError) -> Response:
    """An error in OpenAI's shape."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_whole_s)}
    if error.code is ErrorCode.INVALID_API_KEY:
        headers["www-authenticate"] = "Bearer"
    if error.code in _FINAL:
        headers["x-should-retry"] = "false"
    return json_reply(error.openai_body(), error.meaning.http_status, headers)


async def send_response(response: Response, send: Send) -> None:
    """Send a complete response."""
    await send(_start(response.status_code, response.raw_headers))
    await send(_body(bytes(response.body), more=False))


def named_event(kind: str, event_id: str, data: bytes) -> bytes:
    """One server-sent event with a type, if it is not empty, and an id, if that is not; its data are one line."""
    lines = [b"event: %b\n" % kind.encode()] if kind else []
    lines += [b"id: %b\n" % event_id.encode()] if event_id else []
    return b"%bdata: %b\n\n" % (b"".join(lines), data)


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
        reply_at_once: sends a whole response in one write if the connection takes it now; False: it does not.
        begin_at_once: the same for the head of a response in chunks and its first chunk; None: nothing can.
        loop: the event loop; None: it is looked up, which takes a system call in Python 3.11.
    """

    _wants_events = False
    _is_started = False
    _began_at_once = False
    _writing_since: float | None = None
    _outlet: Outlet | None = None
    _comment: asyncio.Task[None] | None = None
    _on_stuck: Callable[[], None] | None = None
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        send: Send,
        record: Record,
        settings: RouterSettings,
        channel: Channel | None = None,
        reply_at_once: AtOnce = lambda _status, _headers, _body: False,
        begin_at_once: AtOnce | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._send = send
        self._channel = channel
        self._reply_at_once = reply_at_once
        self._begin_at_once = begin_at_once
        self._record = record
        self._write_timeout_s = settings.write_timeout_s
        self._keepalive_s = settings.keepalive_interval_s
        self._event_headers = _event_stream_headers(self._keepalive_s, self._write_timeout_s)
        self.loop = loop or asyncio.get_running_loop()
        self._written_at = self.loop.time()

    def expect_events(self, headers: Mapping[str, str] | None = None) -> None:
        """Note that the answer will be a stream; with further headers, if there are any."""
        if headers:
            self._event_headers = _event_stream_headers(self._keepalive_s, self._write_timeout_s) + _lower(headers)
        self._wants_events = True
        self._begin_watch()

    async def reply(self, response: Response) -> None:
        """Send a complete response."""
        await self._reply(response.status_code, response.raw_headers, bytes(response.body))

    async def reply_json(self, pieces: Sequence[bytes | bytearray], headers: Mapping[str, str] | None = None) -> None:
        """Send a complete response of JSON, a large one in blocks: others have their turn between two of them, and the
        next one waits until the client has read.
        """
        left = sum(map(len, pieces))
        fields = [*_lower(headers or {}), (b"content-length", b"%d" % left), (b"content-type", b"application/json")]
        if left <= _BLOCK_BYTES:
            await self._reply(200, fields, b"".join(pieces))
            return
        await self._put(_start(200, fields))
        for block in _blocks(pieces):
            left -= len(block)
            # The last one ends the answer: the client may send its next request as soon as it has all of it.
            await self._put(_body(block, more=left > 0))
            await asyncio.sleep(0)

    async def _reply(self, status: int, headers: Headers, body: bytes) -> None:
        if self._comment is None and self._reply_at_once(status, headers, body):
            return
        await self._put(_start(status, headers))
        await self._put(_body(body, more=False))

    async def reply_events(self, events: AsyncIterator[bytes], *, end: Callable[[], bytes]) -> None:
        """Send server-sent events as they come. What `end` gives after the last one ends the answer, in one write.

        Raises:
            LockstepError: raised by `events`. The caller passes it to `fail`.
        """
        async for data in events:
            if not self._is_started:
                if self._begin_events_with(data):
                    continue
                await self._begin_events()
            await self._put(_body(data, more=True))
        if not self._is_started:
            await self._begin_events()
        if self._began_at_once and self.takes_events:
            assert self._channel is not None
            self._channel.end(end())
            return
        await self._put(_body(end(), more=False))

    def _begin_events_with(self, data: bytes) -> bool:
        """Begin with the first events in one write; False: the connection does not take them now."""
        if self._begin_at_once is None or not self._begin_at_once(200, self._event_headers, data):
            return False
        self._is_started = self._began_at_once = True
        self._written_at = self.loop.time()
        self._begin_watch()
        return True

    @property
    def takes_events(self) -> bool:
        """Whether events can be written at once with `write_events`: the next ones, or the first ones with the head."""
        channel = self._channel
        if channel is None or self._comment is not None:
            return False
        return channel.is_open if self._is_started else self._begin_at_once is not None and channel.takes_chunks

    def write_events(self, data: bytes) -> None:
        """Write events as they come, without waiting: only if `takes_events`, and while `reply_events` waits for its
        next ones.
        """
        assert self._channel is not None
        if not self._is_started:
            self._begin_events_with(data)
            return
        self._written_at = self.loop.time()
        self._channel.write(data)

    @property
    def has_begun(self) -> bool:
        """Whether the head of the answer was sent."""
        return self._is_started

    @property
    def is_caught_up(self) -> bool:
        """Whether the answer has begun, and the connection has taken everything that was written."""
        return self._is_started and self._channel is not None and self._channel.is_empty

    def outlet(self, before: bytes, between: bytes | None, after: bytes) -> Outlet | None:
        """The way of events past `write_events`, for as long as it is caught up and takes events; see `Outlet`."""
        if self._channel is None:
            return None
        self._outlet = Outlet(before, between, after, send=self._channel.send, send_later=self._channel.send_later)
        return self._outlet

    async def _begin_events(self) -> None:
        await self._settle()
        if not self._is_started:
            self._is_started = True
            await self._put(_start(200, self._event_headers))

    async def fail(self, error: LockstepError) -> None:
        """Send an error: as the answer, or as an event if the answer has begun."""
        await self._settle()
        if self._is_started:
            self._record.status = error.meaning.http_status
            await self._put(_body(b"data: " + to_json(error.openai_body()) + b"\n\n", more=False))
        else:
            await self.reply(error_reply(error))

    def watch(self, on_stuck: Callable[[], None]) -> None:
        """From the first write on, or from `expect_events` on: send comments, and call `on_stuck` once the client has
        read nothing for `write_timeout_s`.
        """
        self._on_stuck = on_stuck

    def _begin_watch(self) -> None:
        if self._timer is None and self._on_stuck is not None:
            self._watch(self._on_stuck)

    def _watch(self, on_stuck: Callable[[], None]) -> None:
        now = self.loop.time()
        if self._writing_since is not None and now - self._writing_since >= self._write_timeout_s:
            on_stuck()
            return
        lane = None if self._outlet is None else self._outlet.lane
        written_at = self._written_at if lane is None else max(self._written_at, lane.at)
        is_silent = self._writing_since is None and now - written_at >= self._keepalive_s > 0
        if self._wants_events and is_silent:
            if lane is not None:
                lane.close()
            self._comment = asyncio.ensure_future(self._send_comment())
        # One timer serves all deadlines of a client, so that writing a token sets no timer.
        interval_s = _watch_interval_s(self._keepalive_s, self._write_timeout_s)
        self._timer = self.loop.call_later(interval_s, self._watch, on_stuck)

    async def stop(self) -> None:
        """Send nothing more."""
        self._on_stuck = None
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
        await self._settle()
        await self._deliver(message)

    async def _settle(self) -> None:
        """Wait for the comment that is being sent: it may begin the answer."""
        if self._comment is not None:
            await asyncio.wait((self._comment,))

    async def _deliver(self, message: dict[str, Any]) -> None:
        # `send` waits while the server's buffer is full, as it is when the client does not read.
        self._writing_since = self._written_at = self.loop.time()
        self._begin_watch()
        await self._record.write(self._send(message))
        self._writing_since = None


def _watch_interval_s(keepalive_s: float, write_timeout_s: float) -> float:
    return min(write_timeout_s, keepalive_s or write_timeout_s) / 4


@functools.cache
def _event_stream_headers(keepalive_s: float, write_timeout_s: float) -> Headers:
    """The headers of all streams, which are not changed: clients learn after which silence the connection is lost."""
    if not keepalive_s:
        return _EVENT_STREAM_HEADERS
    silence_s = keepalive_s + _watch_interval_s(keepalive_s, write_timeout_s)
    return [*_EVENT_STREAM_HEADERS, (_SILENCE_HEADER, b"%.3f" % silence_s)]


def _lower(headers: Mapping[str, str]) -> Headers:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def _blocks(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """The same bytes in pieces of about `_BLOCK_BYTES`."""
    block = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _BLOCK_BYTES):
            block += view[start : start + _BLOCK_BYTES]
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)


def _start(status: int, headers: Headers) -> dict[str, Any]:
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
            # No reference is kept: it holds the request, which is large and needed at the beginning only.
            answer, self._answer = self._answer(client), _no_answer
            await run_live(answer, client, channel, self._record)

    async def _run_beside(self, client: Client, receive: Receive) -> None:
        """Run in a task next to one that reads the connection: all that ASGI knows."""
        answering = asyncio.ensure_future(self._run(client))
        disconnect = asyncio.ensure_future(_wait_disconnect(receive))

        def on_stuck() -> None:
            _note_stuck(self._record)
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

    async def _run(self, client: Client) -> None:
        answer, self._answer = self._answer(client), _no_answer
        await _run_reporting_errors(answer, client)


async def run_live(answer: Awaitable[None], client: Client, channel: Channel, record: Record) -> None:
    """Run the computation of an answer in this task, until it ends or the client disconnects or stops reading."""
    task = asyncio.current_task(client.loop)
    assert task is not None
    has_left = False

    def leave() -> None:
        nonlocal has_left
        if not has_left:
            has_left = True
            # The unfinished answer makes the server close the connection.
            record.status = CLIENT_DISCONNECTED_STATUS
            task.cancel()

    def on_stuck() -> None:
        _note_stuck(record)
        leave()

    client.watch(on_stuck)
    channel.watch(leave)
    try:
        await _run_reporting_errors(answer, client)
    except asyncio.CancelledError:
        if not has_left or task.uncancel():
            raise  # the server itself ends the task
    finally:
        channel.unwatch()
        await client.stop()


async def _run_reporting_errors(answer: Awaitable[None], client: Client) -> None:
    """Run the computation of an answer; the client gets its errors."""
    try:
        await answer
    except LockstepError as error:
        await client.fail(error)


def _note_stuck(record: Record) -> None:
    logger.warning("client does not read", extra=record.log_fields())


async def _no_answer(_: Client) -> None:
    raise AssertionError("an answer is computed once")


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
