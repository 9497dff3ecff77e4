"""HTTP between clients and routers on virtual time: real applications behind connections that delay and break.

A connection carries one request. Its bytes keep their order and are cut anywhere; a slow reader makes the router
wait. The application is called as ASGI says, so all that the REST face does is part of the simulation.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from lockstep_client.steps import BrokenError, Head, Outgoing

from simulated.kernel import Kernel, ProcessLoop

if TYPE_CHECKING:
    from simulated.processes import RouterProcess
    from simulated.tracks import Track

CONNECT_TIMEOUT_S = 1.0
VANISHED_S = 2.0
"""Time after which a router gives a connection up whose client does not acknowledge what it sends."""

_MIN_LATENCY_S, _JITTER_S = 0.0005, 0.002
_WINDOW = 64
"""Pieces of an answer that the client has not read, after which the router waits."""
_TURN_S = 0.01
"""A router that goes on after a stop has done nothing yet in this time."""
_CUT_SHARE = 0.05
"""Of the pieces: they arrive in two parts."""

_END, _BROKEN = object(), object()

STREAM_HEADER = "x-lockstep-stream-id"


class Wire:
    """All connections between clients and routers.

    Args:
        kernel: the clock.
        rng: the source of delays.
        loop: of the clients.
        on_request: what becomes of a request on its way; a mutation, to test the checker.
        on_answer: the same for a piece of an answer.
        on_unfinished: called when a router ends an answer that is not complete.
    """

    def __init__(
        self,
        kernel: Kernel,
        rng: Random,
        loop: ProcessLoop,
        on_request: Callable[[Outgoing], Outgoing],
        on_answer: Callable[[bytes], list[bytes]],
        on_unfinished: Callable[["Exchange"], None],
    ) -> None:
        self.kernel = kernel
        self.rng = rng
        self.loop = loop
        self.on_request = on_request
        self.on_answer = on_answer
        self.on_unfinished = on_unfinished
        self.exchanges: list[Exchange] = []
        """Those that the router still knows."""
        self._cut_until: dict[int, float] = {}

    def cut(self, index: int, seconds: float) -> None:
        """Let no byte pass between the clients and a router for so long. Connections that were open are lost."""
        until = self.kernel.now + seconds
        self._cut_until[index] = max(until, self._cut_until.get(index, 0.0))
        for exchange in self.of(index):
            exchange.vanish()

    def reset(self, index: int) -> None:
        """Reset all connections of clients to a router."""
        for exchange in self.of(index):
            exchange.reset()

    def of(self, index: int) -> list["Exchange"]:
        return [each for each in self.exchanges if each.process.index == index]

    def delay_s(self) -> float:
        return _MIN_LATENCY_S + self.rng.random() * _JITTER_S

    async def open(
        self,
        find: Callable[[], "RouterProcess | None"],
        index: int,
        request: Outgoing,
        subject: str,
        connect_s: float = CONNECT_TIMEOUT_S,
    ) -> "Exchange":
        """Connect to a router and send a request.

        Args:
            find: the router's process; None: nothing listens.
            index: the router's number.
            request: the request.
            subject: the name of the client's request, which all that belong to it share.
            connect_s: the longest wait for the connection.

        Raises:
            BrokenError: nothing listens, or the way is cut.
        """
        await asyncio.sleep(2 * self.delay_s())
        if self.kernel.now < self._cut_until.get(index, 0.0):
            await asyncio.sleep(connect_s)
            raise BrokenError("connect", "no answer")
        process = find()
        if process is None or not process.listens:
            raise BrokenError("connect", "connection refused")
        exchange = Exchange(self, process, self.on_request(request), subject)
        self.kernel.after(self.delay_s(), exchange.begin)
        return exchange


class Exchange:
    """One request and its answer, on a connection of its own."""

    def __init__(self, wire: Wire, process: "RouterProcess", request: Outgoing, subject: str) -> None:
        self.process = process
        self.subject = subject
        self.is_reading = request.method != "DELETE"
        self.stream_id: str | None = None
        """Of the resumable stream that it reads, once the head has named it."""
        self.track: Track | None = None
        """Of that stream, if its router has it then."""
        self._wire = wire
        self._kernel = wire.kernel
        self._request = request
        self._last_at = 0.0
        self._is_complete = self._has_vanished = self._is_closed = False
        self._came_to_frozen = False
        # The router's side.
        self._gone = asyncio.Event()
        self._room = asyncio.Event()
        self._is_given = self._has_head = False
        self._task: asyncio.Task[None] | None = None
        self._is_known = True
        # The client's side.
        self._arrived: deque[Any] = deque()
        self._unread = 0
        self._arrival = asyncio.Event()
        wire.exchanges.append(self)

    # The router's side.

    def begin(self) -> None:
        """The request arrives."""
        self._came_to_frozen = self.process.loop.is_frozen
        self.process.call(self._begin)

    def _begin(self) -> None:
        if not self._is_known or self.process.loop.is_dead:
            return
        if self.process.app is None:
            self.die()
            return
        self._task = self.process.loop.create_task(self._serve())

    async def _serve(self) -> None:
        path, _, query = self._request.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self._request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self._request.headers.items()],
            "client": ("10.9.0.1", 40000),
            "server": ("10.1.0.1", 8000),
        }
        app = self.process.app
        assert app is not None
        try:
            await app(scope, self._receive, self._send)
            if not self._is_complete and not self._gone.is_set():
                self._wire.on_unfinished(self)
        finally:
            if not self._is_complete:
                self._send_down(_BROKEN)
            self.forget()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_given:
            self._is_given = True
            return {"type": "http.request", "body": self._request.content, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        while self._unread >= _WINDOW and not self._gone.is_set():
            self._room.clear()
            await self._room.wait()
        if self._gone.is_set():
            return
        is_head = message["type"] == "http.response.start"
        if is_head == self._has_head:
            # As uvicorn does it.
            raise RuntimeError(f"{message['type']} came {'twice' if is_head else 'before the head'}")
        if is_head:
            self._has_head = True
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
            headers["x-lockstep-router"] = self.process.name
            if (stream_id := headers.get(STREAM_HEADER)) is not None and self.is_reading:
                self.stream_id = stream_id
                self.process.note_reader(self)
            self._send_down(Head(message["status"], headers))
            return
        for piece in self._wire.on_answer(message["body"]) if message["body"] else ():
            self._send_bytes(piece)
        if not message.get("more_body", False):
            self._is_complete = True
            self._send_down(_END)

    def _send_bytes(self, piece: bytes) -> None:
        rng = self._wire.rng
        if len(piece) > 1 and rng.random() < _CUT_SHARE:
            at = rng.randrange(1, len(piece))
            self._send_down(piece[:at])
            piece = piece[at:]
        self._send_down(piece)

    def _send_down(self, item: Any) -> None:
        self._unread += 1
        self._last_at = max(self._last_at, self._kernel.now + self._wire.delay_s())
        self._kernel.at(self._last_at, partial(self._arrive, item))

    def disconnect(self) -> None:
        """The router learns that the client has left."""
        if self._is_known and not self.process.loop.is_dead:
            self.process.call(self._note_gone)

    def _note_gone(self) -> None:
        self._gone.set()
        self._room.set()

    def forget(self) -> None:
        """The router does not know it any more."""
        if self._is_known:
            self._is_known = False
            self._wire.exchanges.remove(self)
            self.process.note_left(self)

    def die(self) -> None:
        """The router's process dies: its machine resets the connection."""
        self.forget()
        self._send_down(_BROKEN)

    @property
    def is_waiting(self) -> bool:
        """Whether the router still owes its client something that could arrive."""
        return self._task is not None and not self._has_vanished and not self._gone.is_set() and self._unread < _WINDOW

    @property
    def had_no_turn(self) -> bool:
        """Whether the router was stopped when the request came, and has just gone on: it cannot have answered yet."""
        return self._came_to_frozen and self._kernel.now - self.process.loop.thawed_at < _TURN_S

    def cut_off(self) -> None:
        """The router's process ends: what its server still serves is cancelled."""
        if self._task is not None:
            self._task.cancel()

    # Both.

    def reset(self) -> None:
        """Both sides learn that the connection has broken."""
        self._send_down(_BROKEN)
        self.disconnect()

    def vanish(self) -> None:
        """Nothing arrives any more, and neither side learns it."""
        self._has_vanished = True
        self._kernel.after(VANISHED_S, self.disconnect)

    # The client's side.

    def _arrive(self, item: Any) -> None:
        if not self._has_vanished and not self._is_closed:
            self._arrived.append(item)
            self._arrival.set()

    async def read(self, silence_s: float) -> Any:
        """The head, then pieces of the body, then None.

        Raises:
            BrokenError: the connection has broken, or nothing has come for so long.
        """
        try:
            async with asyncio.timeout(silence_s):
                while not self._arrived:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            raise BrokenError("silent", f"nothing came for {silence_s:g} s") from None
        item = self._arrived.popleft()
        self._unread -= 1
        if self._is_known and not self.process.loop.is_dead:
            self.process.call(self._room.set)
        if item is _BROKEN:
            self._arrived.append(item)
            raise BrokenError("broken", "the connection was reset")
        return None if item is _END else item

    def close(self) -> None:
        """The client hangs up."""
        if not self._is_closed:
            self._is_closed = True
            if not self._has_vanished:
                self._kernel.after(self._wire.delay_s(), self.disconnect)
