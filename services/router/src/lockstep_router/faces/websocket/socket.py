"""One WebSocket after its handshake: whole text messages in both directions, within limits.

It reads no further message before the last one has been taken, and takes no further one to send while the client does
not read. It never looks into a message.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol as Interface
from typing import cast

from lockstep_common.errors import LockstepError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import OPEN, SERVER, Protocol

from lockstep_router.faces.bodies import BodyBudget, Reservation

logger = logging.getLogger("lockstep.router")
frames_logger = logging.getLogger("lockstep.websocket")
frames_logger.setLevel(logging.ERROR)  # below that the library logs what clients send

_SLICE_BYTES = 4 << 10
"""Bytes parsed at a time: some hundred frames at most."""
_FRAMES_PER_TURN = 64
_TURN_S = 0.05
"""Pause after so many frames in one read, so that floods of tiny frames leave the event loop to others."""
_MAX_FRAGMENTS = 1024
_LARGE_MESSAGE_BYTES = 64 << 10
"""Bytes of a message that are read without pacing."""
_CLOSE_S = 2.0
"""From sending a close frame to the end of the connection, if the client does not answer it."""
_MAX_LATE_BYTES = 64 << 10
_MAX_LATE_FRAMES = 256
"""What is read of a client while the connection closes: its answer to the close frame, behind what was on its way."""
_MIN_TICK_S = 0.01

RESTART = CloseCode.SERVICE_RESTART
TRY_AGAIN = CloseCode.TRY_AGAIN_LATER
POLICY = CloseCode.POLICY_VIOLATION
GOING_AWAY = CloseCode.GOING_AWAY
DEFECT = CloseCode.INTERNAL_ERROR


class SocketClosedError(Exception):
    """Nothing can be sent any more."""


class Holder(Interface):
    """What a socket is counted in."""

    def note_busy(self, *, is_busy: bool) -> None:
        """The socket has requests in progress, so a full server keeps it, or has none."""

    def note_lost(self, error: Exception | None) -> None:
        """The connection has ended."""


@dataclass(frozen=True)
class SocketLimits:
    """Limits of one socket. Times are in seconds."""

    max_message_bytes: int
    message_timeout_s: float
    """From the first to the last byte of a message."""
    write_timeout_s: float
    """A client that reads nothing for this long is cut off."""
    ping_interval_s: float
    """Silence of the client after which it is sent a ping; 0: never."""
    pong_timeout_s: float
    """A client that is silent for this long after a ping is cut off."""
    idle_timeout_s: float
    """A socket without a request for this long is closed."""


@dataclass(frozen=True)
class Message:
    """A text message that has arrived. The code that takes it releases its memory."""

    text: bytes
    reservation: Reservation


class Socket(asyncio.Protocol):
    """A socket that is open once it has its transport.

    Args:
        limits: of this socket.
        budget: where the bytes of messages count until they are released.
        holder: where the socket counts.
    """

    def __init__(self, limits: SocketLimits, budget: BodyBudget, holder: Holder) -> None:
        self._limits = limits
        self._budget = budget
        self._holder = holder
        self._loop = asyncio.get_running_loop()
        self._frames = Protocol(SERVER, max_size=limits.max_message_bytes, logger=frames_logger)
        self._transport: asyncio.Transport | None = None
        self._on_shutdown: Callable[[], None] = lambda: None
        self._unparsed = bytearray()
        self._fragments: list[bytes] = []
        self._fragments_bytes = 0
        self._reservation: Reservation | None = None
        """Of the message that is arriving."""
        self._inbox: deque[Message] = deque()
        self._has_news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_lost = False
        self._is_busy = False
        self._late_bytes = self._late_frames = 0
        self._waits_until = 0.0
        """No more is parsed until then."""
        self._resume_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        now = self._loop.time()
        self._heard_at = self._idle_since = now
        self._pinged_at: float | None = None
        self._stuck_since: float | None = None
        self._message_since: float | None = None

    # For the session.

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._frames.state is OPEN and not self._is_lost

    async def receive(self) -> Message | None:
        """The next message; None once the connection is closed or closing.

        What a client had sent whole before it left still comes: it may be why it could leave.
        """
        while not self._inbox:
            if not self.is_open:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        message = self._inbox.popleft()
        self._advance()
        return message

    async def send(self, text: bytes) -> None:
        """Send a message as soon as the client has read enough of the last ones.

        Raises:
            SocketClosedError: the connection is closed or closing.
        """
        await self._writable.wait()
        if not self.is_open:
            raise SocketClosedError
        self._frames.send_text(text)
        self._flush()

    def note_busy(self, *, is_busy: bool) -> None:
        """Note whether requests are in progress: without any, the socket is closed after a time, or when the server is
        full.
        """
        if is_busy != self._is_busy and not self._is_lost:
            self._is_busy = is_busy
            self._idle_since = self._loop.time()
            self._holder.note_busy(is_busy=is_busy)

    def call_on_shutdown(self, on_shutdown: Callable[[], None]) -> None:
        """Have a function called whenever the server wants the connection to end."""
        self._on_shutdown = on_shutdown

    def close(self, code: int, reason: str) -> None:
        """Begin to close. The connection ends when the client has answered, or after a time."""
        if self.is_open:
            self._frames.send_close(code, reason)
            self.drop_messages()
            self._end()

    def drop_messages(self) -> None:
        """Free the messages that have not been taken."""
        for message in self._inbox:
            message.reservation.release()
        self._inbox.clear()

    # For the server.

    def shutdown(self) -> None:
        """The server wants the connection to end."""
        self._on_shutdown()

    def evict(self) -> None:
        """Close the connection because the server is full."""
        self.close(TRY_AGAIN, "the server is full")

    # For the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._tick()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what has not arrived whole, and wake up all that wait."""
        self._is_lost = True
        for timer in (self._resume_timer, self._tick_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._drop_incomplete()
        self._has_news.set()
        self._writable.set()
        self._holder.note_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse it, unless there is still a message that was not taken."""
        self._heard_at = self._loop.time()
        self._pinged_at = None
        if self.is_open:
            self._unparsed += data
            self._advance()
        else:
            self._take_late(data)

    def eof_received(self) -> bool:
        """The client sends nothing more: the connection ends."""
        return False

    def pause_writing(self) -> None:
        """The client does not read: nothing more is sent or read."""
        self._writable.clear()
        self._stuck_since = self._loop.time()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._writable.set()
        self._stuck_since = None
        self._advance()

    # Input.

    def _advance(self) -> None:
        """Parse until a message is complete, and read on when there is nothing left to parse."""
        if self._transport is None or self._transport.is_closing():
            return
        frames = 0
        while self._may_parse():
            piece = bytes(self._unparsed[:_SLICE_BYTES])
            del self._unparsed[:_SLICE_BYTES]
            frames += self._parse(piece)
            if frames > _FRAMES_PER_TURN:
                self._wait(_TURN_S)
        if not self.is_open:
            return  # only the answer to the close frame is read
        if self._inbox or self._unparsed or not self._writable.is_set() or self._is_waiting():
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _may_parse(self) -> bool:
        has_room = not self._inbox and self._writable.is_set()
        return bool(self._unparsed) and has_room and self.is_open and not self._is_waiting()

    def _is_waiting(self) -> bool:
        return self._loop.time() < self._waits_until

    def _wait(self, seconds: float) -> None:
        self._waits_until = self._loop.time() + seconds
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._resume_timer = self._loop.call_at(self._waits_until, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._waits_until = 0.0
        self._advance()

    def _parse(self, piece: bytes) -> int:
        """Parse a slice; the number of frames that were complete in it."""
        self._frames.receive_data(piece)
        frames = self._frames.events_received()
        for frame in frames:
            assert isinstance(frame, Frame)
            self._take(frame)
        self._flush()
        if not self.is_open:
            self._end()
            return len(frames)
        pending = self._fragments_bytes + len(self._frames.reader.buffer)
        if pending == 0:
            self._message_since = None
        else:
            self._hold(pending, len(piece))
        return len(frames)

    def _take_late(self, data: bytes) -> None:
        """Look for the answer to the close frame, and drop all else. Of a client that goes on sending nothing more is
        read: it can still read why the connection closes, which ends after a time.
        """
        assert self._transport is not None
        self._late_bytes += len(data)
        for start in range(0, len(data), _SLICE_BYTES):
            if self._late_bytes > _MAX_LATE_BYTES or self._late_frames > _MAX_LATE_FRAMES:
                if not self._transport.is_closing():
                    self._transport.pause_reading()
                return
            self._frames.receive_data(data[start : start + _SLICE_BYTES])
            self._late_frames += len(self._frames.events_received())
            self._flush()

    def _hold(self, pending: int, piece: int) -> None:
        """Count the bytes of a message that is not complete."""
        if self._message_since is None:
            self._message_since = self._loop.time()
        if not self._reserve(pending):
            return
        if pending > _LARGE_MESSAGE_BYTES and (wait_s := self._budget.pace.take(piece)):
            self._wait(wait_s)

    def _reserve(self, size_bytes: int) -> bool:
        if self._reservation is None:
            self._reservation = self._budget.reserve(self._on_refused)
        try:
            self._reservation.grow_to(size_bytes)
        except LockstepError as error:
            self.close(TRY_AGAIN, error.message)
            return False
        return True

    def _on_refused(self) -> None:
        self.close(TRY_AGAIN, "this router holds too many request bodies")

    def _take(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY:
            self.close(CloseCode.UNSUPPORTED_DATA, "messages must be text")
        is_closed_here = not self.is_open and self._frames.close_rcvd is None
        if frame.opcode not in (Opcode.TEXT, Opcode.CONT) or is_closed_here:
            return
        self._fragments.append(bytes(frame.data))
        self._fragments_bytes += len(frame.data)
        if len(self._fragments) > _MAX_FRAGMENTS:
            self.close(POLICY, f"a message may have {_MAX_FRAGMENTS} fragments")
        elif frame.fin and self._reserve(self._fragments_bytes):
            assert self._reservation is not None
            self._reservation.complete()
            self._inbox.append(Message(b"".join(self._fragments), self._reservation))
            self._fragments, self._fragments_bytes, self._reservation = [], 0, None
            self._message_since = None
            self._has_news.set()

    def _drop_incomplete(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
        self._unparsed.clear()
        self._fragments, self._fragments_bytes, self._reservation = [], 0, None

    # Output.

    def _flush(self) -> None:
        """Write what the protocol has to send; its empty piece means that the connection ends."""
        assert self._transport is not None
        pieces = self._frames.data_to_send()
        if self._transport.is_closing():
            return
        if len(pieces) == 1 and pieces[0]:
            self._transport.write(pieces[0])
        elif pieces:
            self._transport.write(b"".join(pieces))
            if b"" in pieces:
                self._transport.close()

    def _end(self) -> None:
        """Read no more messages, and close the connection once the client has answered, or after a time."""
        self._flush()
        self._drop_incomplete()
        self._has_news.set()
        self._writable.set()
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.resume_reading()
            if self._close_timer is None:
                self._close_timer = self._loop.call_later(_CLOSE_S, self._transport.abort)

    # Time.

    def _tick(self) -> None:
        """Check all deadlines. One timer serves them all, so that a message sets no timer."""
        assert self._transport is not None
        limits, now = self._limits, self._loop.time()
        if not self.is_open:
            return
        if self._stuck_since is not None and now - self._stuck_since >= limits.write_timeout_s:
            logger.warning("client does not read")
            self._transport.abort()
            return
        is_reading = self._writable.is_set() and not self._inbox
        if self._message_since is not None and is_reading and now - self._message_since >= limits.message_timeout_s:
            self.close(POLICY, f"the message did not arrive within {limits.message_timeout_s:g} seconds")
        elif not self._is_busy and now - self._idle_since >= limits.idle_timeout_s:
            self.close(GOING_AWAY, "idle")
        elif self._pinged_at is not None and is_reading and now - self._pinged_at >= limits.pong_timeout_s:
            self._transport.abort()
            return
        elif self._pinged_at is None and 0 < limits.ping_interval_s <= now - self._heard_at and is_reading:
            self._pinged_at = now
            self._frames.send_ping(os.urandom(4))
            self._flush()
        waits = (limits.write_timeout_s, limits.message_timeout_s, limits.idle_timeout_s, limits.pong_timeout_s)
        shortest = min(*waits, limits.ping_interval_s or limits.pong_timeout_s)
        self._tick_timer = self._loop.call_later(max(_MIN_TICK_S, shortest / 4), self._tick)
