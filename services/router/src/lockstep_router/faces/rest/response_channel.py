"""How one answer reaches a connection: through uvicorn's cycle of the request, and past it.

It writes the bytes that uvicorn's `send` would write. It never reads a request and never closes a connection that
the answer has not ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from socket import socket
from typing import Any, Protocol, cast

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle


class AnswerConnection(Protocol):
    """What an answer needs of its connection."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: RequestResponseCycle
    wire: socket | None

    def send(self, data: bytes) -> None:
        """Send data."""

    def end_response(self) -> None:
        """Close the connection after a response."""


_last_headers: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")
"""The headers that all responses have, in the list that uvicorn makes each second, and as lines."""


def _lines_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Such a list as lines."""
    global _last_headers  # noqa: PLW0603 - of the one server of the process, or of another one in tests
    if _last_headers[0] is not headers:
        _last_headers = (headers, b"".join([b"%b: %b\r\n" % field for field in headers]))
    return _last_headers[1]


class _NobodyWaits:
    """In the place of an event of asyncio: a request that has arrived in one piece is not waited for."""

    def set(self) -> None:
        """Do nothing."""


class DirectCycle(RequestResponseCycle):
    """Uvicorn's cycle of a request for the direct face; made in less time.

    Args:
        connection: of the request.
        keep_alive: whether the connection may be used again.
        on_response: called when the response is complete.
    """

    access_log = False
    disconnected = False
    waiting_for_100_continue = False
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding = None
    expected_content_length = 0
    message_event = cast("asyncio.Event", _NobodyWaits())

    def __init__(self, connection: HttpToolsProtocol, *, keep_alive: bool, on_response: Callable[..., None]) -> None:
        self.scope = connection.scope
        self.transport = connection.transport
        self.flow = connection.flow
        self.logger = connection.logger
        self.default_headers = connection.server_state.default_headers
        self.keep_alive = keep_alive
        self.on_response = on_response
        self.body = bytearray()


def knows_chunks(version: str) -> bool:
    """Whether clients of a version of HTTP understand answers in chunks."""
    return version not in ("0.9", "1.0")


def without_chunks(cycle: RequestResponseCycle) -> Send:
    """`send` for a client that knows no chunks: an answer without a length in its head ends with its connection."""
    has_length = True

    async def send(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = cycle.keep_alive = False
        elif not has_length:
            # Uvicorn compares the body with what the headers have promised.
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(cast("Any", message))

    return send


class ResponseTransport:
    """What a response is written to. Closing it lets the connection drop the rest of the body first.

    The head waits for the first piece of the body, for one turn of the event loop at most: together they are sent in
    one system call.
    """

    def __init__(self, connection: AnswerConnection, cycle: RequestResponseCycle) -> None:
        self.connection = connection
        self._cycle = cycle
        self._head: bytes | None = None
        """The head while it waits; empty afterwards."""

    def write(self, data: bytes) -> None:
        """Send."""
        if self._head:
            data, self._head = self._head + data, b""
        elif self._head is None and self._cycle.response_started:
            self._head = data
            self.connection.loop.call_soon(self._send_head)
            return
        self.connection.send(data)

    @property
    def holds_head(self) -> bool:
        """Whether the head waits for the first piece of the body."""
        return bool(self._head)

    def write_whole(self, data: bytes) -> None:
        """Send a whole answer, or its head together with the first piece of its body."""
        self._head = b""
        self.connection.send(data)

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self.connection.transport.is_closing():
            self.connection.send(head)

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self.connection.transport.is_closing()

    def close(self) -> None:
        """The response is complete, or cannot be completed."""
        self._send_head()
        if self.connection.cycle.response_complete:
            self.connection.end_response()
        else:
            self.connection.transport.close()


class ResponseChannel:
    """The channel of one answer; see `channel.Channel`."""

    def __init__(self, cycle: RequestResponseCycle, transport: ResponseTransport) -> None:
        self._cycle = cycle
        self._transport = transport
        self._on_lost: Callable[[], None] | None = None
        wire = transport.connection.wire
        self.send = self._send_through if wire is None else wire.send

    @property
    def is_open(self) -> bool:
        """Whether the body has begun, and more of it can be written without waiting for the client."""
        cycle = self._cycle
        # An answer in chunks: the headers of others name the length, so they are not written in pieces.
        return cycle.chunked_encoding is True and not (
            cycle.flow.write_paused or cycle.response_complete or cycle.disconnected
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing that was written still waits in this process."""
        return not (self._transport.holds_head or self._transport.connection.transport.get_write_buffer_size())

    def _send_through(self, data: bytes) -> int:
        """`send` for connections whose transport changes the bytes."""
        if not self.is_open:
            return 0
        self._transport.connection.transport.write(data)
        return len(data)

    def send_later(self, data: bytes) -> None:
        """Send what `send` has left."""
        if not self._transport.is_closing():
            self._transport.connection.transport.write(data)

    def write(self, data: bytes) -> None:
        """Send a chunk. Uvicorn's `send` writes the same bytes."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def take_body(self) -> bytearray:
        """The request's body, which is not kept."""
        body, self._cycle.body = self._cycle.body, bytearray()
        return body

    @property
    def takes_whole(self) -> bool:
        """Whether nothing of the answer has been sent, and all of it can be written without waiting for the client."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.response_started or cycle.disconnected)

    @property
    def takes_chunks(self) -> bool:
        """Whether `takes_whole`, and the client understands an answer in chunks."""
        return self.takes_whole and knows_chunks(self._cycle.scope["http_version"])

    def write_whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer at once. Uvicorn's `send` writes the same bytes."""
        cycle = self._cycle
        lines = self._head_lines(status, headers)
        lines += (b"\r\n", body)
        cycle.response_started = cycle.response_complete = True
        self._transport.write_whole(b"".join(lines))
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]], data: bytes) -> None:
        """Send the head of an answer in chunks and the first one. Uvicorn's `send` writes the same bytes."""
        cycle = self._cycle
        lines = self._head_lines(status, headers)
        lines.append(b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))
        cycle.response_started = cycle.chunked_encoding = True
        self._transport.write_whole(b"".join(lines))

    def end(self, data: bytes) -> None:
        """Send the last chunk, and end the answer. Uvicorn's `send` writes the same bytes."""
        cycle = self._cycle
        cycle.response_complete = True
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    def _head_lines(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        cycle = self._cycle
        lines = [STATUS_LINE[status], _lines_of(cycle.default_headers), *[b"%b: %b\r\n" % field for field in headers]]
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        return lines

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call a function, once, if the client leaves before the answer is complete."""
        if self._cycle.disconnected:
            on_lost()
            return
        self._on_lost = on_lost
        # A large body may have stopped the reading, and only a connection that is read shows that its client leaves.
        if self._cycle.flow.read_paused:
            self._cycle.flow.resume_reading()

    def unwatch(self) -> None:
        """Do not call it any more."""
        self._on_lost = None

    def note_lost(self) -> None:
        """The connection has ended."""
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None and not self._cycle.response_complete:
            on_lost()
