"""Server-sent events, decoded from bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Lines end at CR, LF or CRLF and nowhere else. Libraries that split text at every Unicode line separator split an
event whose JSON holds U+2028 or U+0085. This is not the client's decoder (`lockstep_client.sse`): the load generator
checks what servers send, so it takes events of any size, and its own time counts in what it measures.
"""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class ServerSentEvent:
    """One event: its data, and the id in force when it was sent."""

    data: str
    id: str | None = None


class Decoder:
    """Turns chunks of a response body into events; a chunk may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that `chunk` completes."""
        buffer = self._rest + chunk
        # A CR at the very end may be half of a CRLF.
        held = b"\r" if buffer.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(buffer[: len(buffer) - len(held)])
        self._rest = rest + held
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            data, self._data = self._data, []
            return ServerSentEvent("\n".join(data), self._id) if data else None
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = value
        return None
