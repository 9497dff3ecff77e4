"""The open HTTP connections of one server: their number, and which of them wait for a request.

It bounds how many there are and how long they may be idle. It never reads or writes one.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from lockstep_router.faces.bodies import ReadingPace


class Evictable(Protocol):
    """A connection that a full server may close."""

    def evict(self) -> None:
        """Close it."""


class Idle(Protocol):
    """A connection without a request."""

    def close_idle(self) -> None:
        """Close it."""


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
    dropped_bytes_per_s: int
    """Rate at which all connections together read bodies that are dropped."""
    keep_alive_s: float
    """Seconds after an answer without a further request."""


@dataclass
class Connections:
    """The open connections of one server."""

    limits: ConnectionLimits
    count: int = 0
    of_client: Counter[str] = field(default_factory=Counter)
    waiting: dict[Evictable, None] = field(default_factory=dict)
    """Connections without a complete request, the longest waiting first."""
    idle: dict[Idle, float] = field(default_factory=dict)
    """Connections whose last answer is complete, and since when in the event loop's time: the oldest first. One timer
    serves all of them.
    """

    def __post_init__(self) -> None:
        self.dropping = ReadingPace(self.limits.dropped_bytes_per_s)
        self._closing: asyncio.TimerHandle | None = None

    def note_idle(self, connection: Idle, loop: asyncio.AbstractEventLoop) -> None:
        """Close a connection if it has no request for `keep_alive_s`: until then it has to be removed from `idle`."""
        self.idle[connection] = loop.time()
        if self._closing is None:
            self._closing = loop.call_later(self.limits.keep_alive_s, self._close_idle, loop)

    def _close_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closing = None
        while self.idle:
            connection, since = next(iter(self.idle.items()))
            left_s = since + self.limits.keep_alive_s - loop.time()
            if left_s > 0:
                self._closing = loop.call_later(left_s, self._close_idle, loop)
                break
            del self.idle[connection]
            connection.close_idle()

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
