"""The HTTP/1.1 connections of the REST face: their number, and limits for each until a request is accepted.

It bounds connections, headers, framing and waiting times. It never looks into a body and never routes a request. A
connection that becomes a WebSocket still counts here.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import httptools
from lockstep_common.errors import ErrorCode, LockstepError
from pydantic_core import to_json
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from lockstep_router import metrics
from lockstep_router.faces.rest import channel
from lockstep_router.faces.websocket import handshake
from lockstep_router.faces.websocket.socket import Socket

_MAX_HEADERS = 128
_SLICE_BYTES = 16 << 10
"""Bytes parsed at a time, so that input which is expensive to parse is refused before all of it is parsed."""
_MAX_LATE_BYTES = 64 << 10
"""Bytes after which a client is disconnected that goes on sending behind an unanswered request."""
_MAX_UNREAD_BODY_BYTES = 8 << 20
_UNREAD_BODY_S = 5.0
"""Limits for the rest of a body that arrives after the response: it is dropped, so that the client can finish sending
and reads the response. Closing at once could make the client's kernel discard it.
"""
_DROP_EVERY_S = 0.05
"""Interval between two reads of such a rest, so that many of them leave the event loop time for streams."""


class Evictable(Protocol):
    """A connection that a full server may close."""

    def evict(self) -> None:
        """Close it."""


class _NotServedError(Exception):
    """Stops the parser of a connection on which no further request is served."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits for client connections."""

    max_connections: int
    max_connections_per_client: int
    """Connections from one client address; 0: no limit."""
    max_header_bytes: int
    """Bytes of a request's line, headers, chunk framing and trailers together."""
    header_timeout_s: float
    """Seconds from the first byte of a request, or the beginning of the connection, to the end of the headers."""


@dataclass
class Connections:
    """The open connections of one server."""

    limits: ConnectionLimits
    count: int = 0
    of_client: Counter[str] = field(default_factory=Counter)
    waiting: dict[Evictable, None] = field(default_factory=dict)
    """Connections without a complete request, the longest waiting first."""

    def admit(self, connection: Evictable, client: str) -> bool:
        """Count a new connection, or refuse it. A full server first closes the connection that has had no complete
        request for the longest time: connections that are only kept open must not keep clients away.
        """
        limit = self.limits.max_connections_per_client
        is_full = self.count >= self.limits.max_connections
        if (limit and self.of_client[client] >= limit) or (is_full and not self._evict()):
            return False
        self.count += 1
        self.of_client[client] += 1
        self.waiting[connection] = None
        return True

    def forget(self, connection: Evictable, client: str) -> None:
        """Remove an admitted connection that has ended."""
        self.count -= 1
        self.waiting.pop(connection, None)
        self.of_client[client] -= 1
        if not self.of_client[client]:
            del self.of_client[client]

    def wait(self, connection: Evictable) -> None:
        """Put an admitted connection at the end of those that wait."""
        self.waiting.pop(connection, None)
        self.waiting[connection] = None

    def _evict(self) -> bool:
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return False
        del self.waiting[oldest]
        oldest.evict()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1 protocol with bounds.

    A second request that arrives before the first one is answered is never begun, and the connection is closed after
    the answer: RFC 9112, section 9.3.2, requires clients to expect that. Uvicorn would stop reading the connection
    instead, and could not notice that the client disconnects.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        open_connections: Connections,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._open_connections = open_connections
        self._on_connected = on_connected
        self._limits = open_connections.limits
        self._client_address = ""
        self._is_admitted = False
        self._ignores_input = False
        """Whether further input is dropped: no further request is served."""
        self._late_bytes = 0
        self._framing_bytes = 0
        """Bytes received for the current request, without its body."""
        self._body_bytes = 0
        self._received_bytes = 0
        """Size of the piece that is being parsed."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._max_late_bytes = _MAX_LATE_BYTES
        self._may_keep_alive = False
        """Whether the connection may be used again after the current request."""
        self._socket: Socket | None = None
        """What the connection was given to."""
        self._response: _Response | None = None

    def evict(self) -> None:
        """Close the connection because the server is full."""
        if self._socket is not None:
            self._socket.evict()
        else:
            self.transport.close()

    def switch(self, socket: Socket, head: bytes) -> None:
        """Send the head of the answer to the current request, and give the connection to the socket for good.

        Raises:
            LockstepError: INVALID_REQUEST, the client has not waited for the answer.
        """
        if self._late_bytes:
            raise LockstepError(ErrorCode.INVALID_REQUEST, "data was sent before the answer to the handshake")
        if self.transport.is_closing():
            raise LockstepError(ErrorCode.CANCELLED, "the client has gone")
        self._socket = socket
        self.cycle.response_started = self.cycle.response_complete = True
        defaults = [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        self.transport.write(b"".join([head, *defaults, b"\r\n"]))
        self.transport.set_protocol(socket)
        self._open_connections.wait(self)
        socket.connection_made(self.transport)
        self.flow.resume_reading()

    def note_busy(self, *, is_busy: bool) -> None:
        """The socket has requests in progress, so a full server keeps the connection, or has none."""
        if is_busy:
            self._open_connections.waiting.pop(self, None)
        else:
            self._open_connections.wait(self)

    def note_lost(self, error: Exception | None) -> None:
        """The connection of the socket has ended."""
        self.connection_lost(error)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection or refuse it."""
        super().connection_made(transport)
        self._on_connected()
        self._client_address = self.client[0] if self.client else ""
        self._is_admitted = self._open_connections.admit(self, self._client_address)
        if self._is_admitted:
            self._expect_headers()
        else:
            self._refuse(503, ErrorCode.OVERLOADED, "there are too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what the connection held."""
        self._stop_header_timer()
        if self._body_timer is not None:
            self._body_timer.cancel()
        if self._is_admitted:
            self._is_admitted = False
            self._open_connections.forget(self, self._client_address)
        super().connection_lost(exc)
        if self._response is not None:
            self._response.note_lost()
        # Uvicorn's timer would keep this object, with the last request's body, until the time for keep-alive is over.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Parse the data, unless the connection ignores further input."""
        if self._ignores_input:
            self._late_bytes += len(data)
            if self._late_bytes > self._max_late_bytes:
                self.transport.abort()
            elif self._body_timer is not None:
                self.flow.pause_reading()
                self.loop.call_later(_DROP_EVERY_S, self._resume_dropping)
            return
        self._unset_keepalive_if_required()
        for start in range(0, len(data), _SLICE_BYTES):
            self._feed(data[start : start + _SLICE_BYTES] if len(data) > _SLICE_BYTES else data)
            if self._ignores_input:
                self._late_bytes += max(0, len(data) - start - _SLICE_BYTES)
                return

    def _feed(self, data: bytes) -> None:
        self._received_bytes = len(data)
        self._framing_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The request is answered as if it had not asked for an upgrade, unless its handler switches. Data after it
            # on this connection would be in the other protocol.
            self._late_bytes += len(data) - int(upgrade.args[0])
            self._stop_reading()
        except httptools.HttpParserError as error:
            if not isinstance(error.__context__, _NotServedError):
                self._refuse(400, ErrorCode.INVALID_REQUEST, "this is not valid HTTP/1.1")
            return
        if self._framing_bytes > self._limits.max_header_bytes + self._body_bytes // 2:
            self._refuse_framing()

    def on_message_begin(self) -> None:
        """Begin a request, unless another one is in progress."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_reading()
            raise _NotServedError
        # All bytes received together with the first one count, though a few may belong to the previous request.
        self._framing_bytes, self._body_bytes = self._received_bytes, 0
        if self._header_timer is None:
            self._expect_headers()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header, or a trailer."""
        if len(self.headers) >= _MAX_HEADERS:
            self._refuse(431, ErrorCode.PAYLOAD_TOO_LARGE, f"there are more than {_MAX_HEADERS} headers")
            raise _NotServedError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request to the application."""
        self._stop_header_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._limits.max_header_bytes:
            self._refuse_framing()
            raise _NotServedError
        if self.parser.should_upgrade():
            self.scope["extensions"] = cast("dict[str, dict[object, object]]", {handshake.EXTENSION: self})
        super().on_headers_complete()
        self._open_connections.wait(self)
        # Until the body is complete, a response announces that the connection closes: the rest is not read.
        self._may_keep_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False
        transport = _ResponseTransport(self, self.cycle)
        self._response = _Response(self.cycle, transport)
        self.cycle.transport = cast("asyncio.Transport", transport)
        self.scope.setdefault("extensions", {})[channel.EXTENSION] = cast("dict[object, object]", self._response)

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Serve the request to its end, even if the server is full."""
        self._open_connections.waiting.pop(self, None)
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = self._may_keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.cycle.body = bytearray()
        super().on_response_complete()
        if self._is_admitted and not self.transport.is_closing():
            self._open_connections.wait(self)

    def shutdown(self) -> None:
        """Close the connection now, or after the response."""
        if self._socket is not None:
            self._socket.shutdown()
            return
        self._may_keep_alive = False
        super().shutdown()

    def end_response(self) -> None:
        """Close the connection after a response. The rest of the request's body is dropped first, within limits."""
        if self.cycle is None or not self.cycle.more_body or self.transport.is_closing():
            self.transport.close()
            return
        self._ignores_input = True
        self._max_late_bytes = _MAX_UNREAD_BODY_BYTES
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._body_timer = self.loop.call_later(_UNREAD_BODY_S, self.transport.close)

    def _resume_dropping(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self._framing_bytes:
            self._refuse(408, ErrorCode.INVALID_REQUEST, "the headers did not arrive in time")
        else:
            self.transport.close()

    def _stop_reading(self) -> None:
        self._ignores_input = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _refuse_framing(self) -> None:
        limit = self._limits.max_header_bytes
        sentence = f"request line, headers and framing have more than {limit} bytes"
        self._refuse(431, ErrorCode.PAYLOAD_TOO_LARGE, sentence)

    def _refuse(self, status: int, code: ErrorCode, sentence: str) -> None:
        """Close the connection, with an error response unless a request is in progress."""
        self._ignores_input = True
        self._stop_header_timer()
        metrics.REFUSED_CONNECTIONS.labels(str(status)).inc()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # The application has this request already, and notices that its client disconnects.
            self.transport.abort()
            return
        defaults = [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        body = to_json(LockstepError(code, sentence).openai_body())
        head = [
            STATUS_LINE[status],
            *defaults,
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"retry-after: 1\r\n" if status == 503 else b"",
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join(head) + body)
        self.transport.close()


class _Response:
    """The channel of one answer; see `channel.Channel`."""

    def __init__(self, cycle: RequestResponseCycle, transport: "_ResponseTransport") -> None:
        self._cycle = cycle
        self._transport = transport
        self._on_lost: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the body has begun, and more of it can be written without waiting for the client."""
        cycle = self._cycle
        # An answer in chunks: the headers of others name the length, so they are not written in pieces.
        return cycle.chunked_encoding is True and not (
            cycle.flow.write_paused or cycle.response_complete or cycle.disconnected
        )

    def write(self, data: bytes) -> None:
        """Send a chunk. Uvicorn's `send` writes the same bytes."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call a function, once, if the client leaves before the answer is complete."""
        if self._cycle.disconnected:
            on_lost()
            return
        self._on_lost = on_lost
        # A large body may have stopped the reading, and only a connection that is read shows that its client leaves.
        self._cycle.flow.resume_reading()

    def unwatch(self) -> None:
        """Do not call it any more."""
        self._on_lost = None

    def note_lost(self) -> None:
        """The connection has ended."""
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None and not self._cycle.response_complete:
            on_lost()


class _ResponseTransport:
    """What a response is written to. Closing it lets the connection drop the rest of the body first.

    The head waits for the first piece of the body, for one turn of the event loop at most: together they are sent in
    one system call.
    """

    def __init__(self, connection: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._head: bytes | None = None
        """The head while it waits; empty afterwards."""

    def write(self, data: bytes) -> None:
        """Send."""
        if self._head:
            data, self._head = self._head + data, b""
        elif self._head is None and self._cycle.response_started:
            self._head = data
            self._connection.loop.call_soon(self._send_head)
            return
        self._connection.transport.write(data)

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self._connection.transport.is_closing():
            self._connection.transport.write(head)

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """The response is complete, or cannot be completed."""
        self._send_head()
        if self._connection.cycle.response_complete:
            self._connection.end_response()
        else:
            self._connection.transport.close()
