"""An HTTP/1.1 connection of the REST face, and its limits until a request is accepted.

It bounds headers, framing and waiting times. It never looks into a body and never routes a request. A
connection that becomes a WebSocket still counts here.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import httptools
from lockstep_common.errors import ErrorCode, LockstepError
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from lockstep_router import metrics
from lockstep_router.faces.rest import channel
from lockstep_router.faces.rest.open_connections import Connections
from lockstep_router.faces.rest.response_channel import (
    DirectCycle,
    ResponseChannel,
    ResponseTransport,
    knows_chunks,
    without_chunks,
)
from lockstep_router.faces.websocket import handshake
from lockstep_router.faces.websocket.socket import Socket

for _status in (400, 408, 431, 503):
    metrics.REFUSED_CONNECTIONS.labels(str(_status))  # from 0
_MAX_HEADERS = 128
MAX_DIRECT_BYTES = 64 << 10
"""Largest body of a request that is served without ASGI's messages: reading it takes no pacing."""
_SLICE_BYTES = 16 << 10
"""Bytes parsed at a time, so that input which is expensive to parse is refused before all of it is parsed."""
_MAX_LATE_BYTES = 64 << 10
"""Bytes after which a client is disconnected that goes on sending behind an unanswered request."""
_MAX_UNREAD_BODY_BYTES = 8 << 20
UNREAD_BODY_S = 5.0
"""Limits for the rest of a body that arrives after the response: it is dropped, so that the client can finish sending
and reads the response. Closing at once could make the client's kernel discard it.
"""
_DROP_EVERY_S = 0.05
"""Least interval between two reads of such a rest."""
_LAST_REQUEST_S = 1.0
"""Time for a request that was on its way when the router began to drain: network and a busy event loop."""


class _NotServedError(Exception):
    """Stops the parser of a connection on which no further request is served."""


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
        wire: socket.socket | None = None,
    ) -> None:
        """Make it for one connection.

        Args:
            config: uvicorn's.
            server_state: uvicorn's.
            app_state: uvicorn's.
            _loop: the event loop, if it is not the running one.
            open_connections: all of the server.
            on_connected: called when the connection is made.
            wire: the socket, if the bytes on it are those of HTTP: not with TLS.
        """
        super().__init__(config, server_state, app_state, _loop)
        self.wire = wire
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
        self._header_bytes = 0
        """Names and values of its headers so far."""
        self._awaits_headers = False
        """Whether a request has begun whose headers are not complete."""
        self._body_bytes = 0
        self._received_bytes = 0
        """Size of the piece that is being parsed."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._max_late_bytes = _MAX_LATE_BYTES
        self._may_keep_alive = False
        """Whether the connection may be used again after the current request."""
        self._is_leaving = False
        """Whether the current request, or the one that is about to come, is the connection's last."""
        self._socket: Socket | None = None
        """What the connection was given to."""
        self._response: ResponseChannel | None = None
        self._direct = getattr(self.app, "direct", None)
        """Serves requests that arrive in one piece; None: the application has no such part."""
        self._begun = False
        """Whether there is a request for it whose body has not been parsed yet."""

    def send(self, data: bytes) -> None:
        """Send data. What the kernel takes at once does not go through the transport, which takes much longer."""
        transport = self.transport
        sent = 0
        if self.wire is not None and not transport.get_write_buffer_size() and not transport.is_closing():
            try:
                sent = self.wire.send(data)
            except OSError:
                sent = 0  # the transport gets an error, too, when it writes what was not sent
        if sent < len(data):
            transport.write(data[sent:])

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
        self._open_connections.idle.pop(self, None)
        if self._response is not None:
            self._response.note_lost()
            self._part_from_cycle()

    def data_received(self, data: bytes) -> None:
        """Parse the data, unless the connection ignores further input."""
        if self._ignores_input:
            self._late_bytes += len(data)
            if self._late_bytes > self._max_late_bytes:
                self.transport.abort()
            elif self._body_timer is not None:
                self.flow.pause_reading()
                wait_s = self._open_connections.dropping.take(len(data))
                self.loop.call_later(max(wait_s, _DROP_EVERY_S), self._resume_dropping)
            return
        if len(data) <= _SLICE_BYTES:
            self._feed(data)
        else:
            for start in range(0, len(data), _SLICE_BYTES):
                self._feed(data[start : start + _SLICE_BYTES])
                if self._ignores_input:
                    self._late_bytes += max(0, len(data) - start - _SLICE_BYTES)
                    break
        if self._begun:
            # The rest of the body is still to come.
            self._start_through_asgi()
        if self._awaits_headers and self._header_timer is None and not self._ignores_input:
            # Most requests arrive in one piece and need no timer.
            self._expect_headers()

    def _start_through_asgi(self) -> None:
        self._begun = False
        if self.cycle.more_body:
            self._open_connections.wait(self)
        event = self.cycle.message_event = asyncio.Event()
        if self.cycle.body:
            event.set()
        self._start_asgi_task(self.cycle, self.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not knows_chunks(cycle.scope["http_version"]):
            send, application = without_chunks(cycle), app

            async def app(scope: Scope, receive: Receive, _: Send) -> None:
                await application(scope, receive, send)

        super()._start_asgi_task(cycle, app)

    def _start_direct(self) -> None:
        self._begun = False
        assert self._response is not None
        task = self.loop.create_task(self._serve_direct(self.cycle, self._response))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _serve_direct(self, cycle: RequestResponseCycle, response: ResponseChannel) -> None:
        assert self._direct is not None
        try:
            send = cycle.send if knows_chunks(cycle.scope["http_version"]) else without_chunks(cycle)
            await self._direct.serve(cycle.scope, send, response)
        except BaseException as error:
            await cycle.run_asgi(_ended_with(error))
        else:
            if not cycle.response_complete:
                await cycle.run_asgi(_ended_with(None))

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
        # Not sooner: line ends between two requests begin nothing, and keep no connection open.
        self._open_connections.idle.pop(self, None)
        # All bytes received together with the first one count, though a few may belong to the previous request.
        self._framing_bytes, self._body_bytes = self._received_bytes, 0
        self._header_bytes, self._awaits_headers = 0, True
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header. Trailers are dropped: no proxy in front of the router has checked them."""
        if not self._awaits_headers:
            return
        headers = self.headers
        if len(headers) >= _MAX_HEADERS:
            self._refuse(431, ErrorCode.PAYLOAD_TOO_LARGE, f"there are more than {_MAX_HEADERS} headers")
            raise _NotServedError
        self._header_bytes += len(name) + len(value)
        name = name.lower()
        headers.append((name, value))
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        """Hand the request to the application, or wait for its body if it may be served without ASGI."""
        self._awaits_headers = False
        if self._header_timer is not None:
            self._stop_header_timer()
        if len(self.url) + self._header_bytes > self._limits.max_header_bytes:
            self._refuse_framing()
            raise _NotServedError
        path = None if self._direct is None else self._direct.paths.get(self.url)
        if path is None or not self._begin_direct(path):
            self._begin_asgi()
        if not self._begun:
            self._open_connections.wait(self)
        cycle = self.cycle
        # Until the body is complete, a response announces that the connection closes: the rest is not read.
        self._may_keep_alive, cycle.keep_alive = cycle.keep_alive and not self._is_leaving, False
        transport: Any = ResponseTransport(self, cycle)
        response: Any = ResponseChannel(cycle, transport)
        self._response, cycle.transport = response, transport
        self.scope.setdefault("extensions", {})[channel.EXTENSION] = response

    def _begin_asgi(self) -> None:
        """Begin any request as uvicorn does."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        if self.parser.should_upgrade():
            self.scope["extensions"] = cast("dict[str, dict[object, object]]", {handshake.EXTENSION: self})
        super().on_headers_complete()

    def _begin_direct(self, path: str) -> bool:
        """Begin a request for the direct face, if it may get it: what `_begin_asgi` does, for the usual request."""
        parser = self.parser
        if parser.get_method() != b"POST" or self.expect_100_continue or parser.should_upgrade():
            return False
        version = parser.get_http_version()
        scope: Any = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers,
            "state": {},
            "method": "POST",
            "path": path,
            "raw_path": self.url,
            "query_string": b"",
        }
        self.scope = scope
        keep_alive = knows_chunks(version) and parser.should_keep_alive()
        self.cycle = DirectCycle(self, keep_alive=keep_alive, on_response=self.on_response_complete)
        self._begun = True
        return True

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        size_bytes = len(body)
        self._framing_bytes -= size_bytes
        self._body_bytes += size_bytes
        if self._begun and self._body_bytes <= MAX_DIRECT_BYTES:
            self.cycle.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Serve the request to its end, even if the server is full."""
        self._open_connections.waiting.pop(self, None)
        cycle = self.cycle
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = self._may_keep_alive
        if not self._begun:
            super().on_message_complete()
            return
        cycle.more_body = False
        if self._body_bytes <= MAX_DIRECT_BYTES:
            self._start_direct()
        else:
            self._start_through_asgi()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.cycle.body = bytearray()
        self._part_from_cycle()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        self._open_connections.note_idle(self, self.loop)
        if self._is_admitted:
            self._open_connections.wait(self)

    def close_idle(self) -> None:
        """Close the connection: no further request has come."""
        if not self.transport.is_closing():
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection now, or after the response.

        A client that has just connected, or has begun to send a request, cannot know that the router leaves. It is
        given a moment to send all of it. The second call ends that.
        """
        if self._socket is not None:
            self._socket.shutdown()
            return
        self._may_keep_alive = False
        awaits_request = self._is_admitted and self not in self._open_connections.idle
        if awaits_request and not self._is_leaving and (self.cycle is None or self.cycle.response_complete):
            self._is_leaving = True
            self.loop.call_later(_LAST_REQUEST_S, self.shutdown)
            return
        self._is_leaving = True
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
        self._body_timer = self.loop.call_later(UNREAD_BODY_S, self.transport.close)

    def _part_from_cycle(self) -> None:
        """Drop the references to and from a request that is over.

        In a circle they would wait for the garbage collector, which would stop the event loop for thousands of them.
        """
        self._response = None
        self.scope["extensions"].pop(channel.EXTENSION, None)
        self.cycle.transport = self.transport
        self.cycle.on_response = _nothing

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
        is_unseen, self._begun = self._begun, False
        self._stop_header_timer()
        metrics.REFUSED_CONNECTIONS.labels(str(status)).inc()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete and not is_unseen:
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


def _nothing() -> None:
    """Do nothing."""


def _ended_with(error: BaseException | None) -> Callable[..., Coroutine[Any, Any, None]]:
    """An application that has written no more, or has failed: uvicorn knows what follows."""

    async def application(*_: object) -> None:
        if error is not None:
            raise error

    return application
