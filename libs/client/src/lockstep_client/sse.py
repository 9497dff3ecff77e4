"""Server-sent events as bytes, in both directions (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Lines end at CR, LF or CRLF and nowhere else. The decoder holds at most one event, of bounded length.
"""

import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 8 << 20
"""An event of a few tokens with 20 alternatives each has a few kilobytes."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLongError(Exception):
    """A line or an event is longer than the limit."""


@dataclass(frozen=True)
class ServerSentEvent:
    """One event: its data, the last id that the stream has set, and its type (empty: `message`)."""

    data: str
    id: str = ""
    type: str = ""

    def encode(self) -> bytes:
        """The event as it is sent."""
        lines = [f"event: {self.type}"] if self.type else []
        lines += [f"id: {self.id}"] if self.id else []
        lines += [f"data: {line}" for line in self.data.split("\n")]
        return ("\n".join(lines) + "\n\n").encode()


class Decoder:
    """Turns chunks of one response body into events; a chunk may end anywhere. Incomplete events are dropped."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()
        self._searched = 0
        """Bytes of the rest without the end of a line."""
        self._is_begun = False
        self._data: list[str] = []
        self._data_bytes = 0
        self._type = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that `chunk` completes.

        Raises:
            EventTooLongError: a line or an event exceeds the limit.
        """
        self._rest += chunk
        if not self._is_begun and not self._begin():
            return []
        events = []
        begin, search = 0, self._searched
        while (end := _LINE_END.search(self._rest, search)) is not None:
            if end[0] == b"\r" and end.end() == len(self._rest):
                break  # it may be half of a CRLF
            if (event := self._line(bytes(self._rest[begin : end.start()]))) is not None:
                events.append(event)
            begin = search = end.end()
        del self._rest[:begin]
        self._searched = max(0, len(self._rest) - 1)
        if len(self._rest) + self._data_bytes > self._max_event_bytes:
            raise EventTooLongError(f"an event of the stream is longer than {self._max_event_bytes} bytes")
        return events

    def _begin(self) -> bool:
        """Drop a byte order mark; false while it is not known whether there is one."""
        if self._rest.startswith(_BYTE_ORDER_MARK):
            del self._rest[: len(_BYTE_ORDER_MARK)]
        elif _BYTE_ORDER_MARK.startswith(bytes(self._rest)):
            return False
        self._is_begun = True
        return True

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"data":
            self._data.append(text)
            self._data_bytes += len(value) + 1
        elif name == b"event":
            self._type = text
        elif name == b"id" and "\0" not in text:
            self._id = text
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        data, kind = self._data, self._type
        self._data, self._data_bytes, self._type = [], 0, ""
        return ServerSentEvent("\n".join(data), self._id, kind) if data else None
