"""The clients of `router.py`: many connections in one event loop that count answers and take times.

Bytes are looked at as little as an honest count allows, since on a small machine the clients take their CPU time from
the router: an answer is over where HTTP says so. `router.py` reports what this costs.
"""

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_TEXT = b'"text"'
_CONNECT_AT_ONCE = 64


def request(tokens: int, *, stream: bool) -> bytes:
    """The request that all clients send."""
    body = {"model": "reference", "prompt": "It was a dark night, and", "max_tokens": tokens, "stream": stream}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(content)}"
    return head.encode() + _HEAD_END + content


@dataclass
class Figures:
    """What the clients have seen since the beginning of a stretch. Times are in seconds."""

    answers: int = 0
    events: int = 0
    """Pieces of text in answers. One can have several tokens, if a router puts them together."""
    first_s: list[float] = field(default_factory=list)
    """To the first byte of each answer's body."""
    whole_s: list[float] = field(default_factory=list)
    """To the end of each answer."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two arrivals at one stream."""


class Client(asyncio.Protocol):
    """One connection, one request at a time.

    Args:
        content: the request.
        figures: of all clients.
        on_end: called at the end of each answer.
    """

    def __init__(self, content: bytes, figures: Figures, on_end: Callable[["Client"], None]) -> None:
        self._content = content
        self._figures = figures
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._began_s = self._last_s = 0.0
        self._head = b""
        self._tail = b""
        self._left: int | None = None
        """Bytes of the body that are still to come; None: it is chunked."""
        self._in_body = False
        self.error: str | None = None
        """Why it has stopped."""
        self.kept: list[bytes] | None = None
        """The pieces of the answer's body, if somebody asks for them."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed it, or the load is over."""
        self._transport = None
        self.error = self.error or f"the connection was closed: {exc}"

    @property
    def is_open(self) -> bool:
        """Whether it can send."""
        return self._transport is not None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, due_s: float | None = None) -> None:
        """Send the request. Its times count from `due_s`, of `time.perf_counter`, or from now."""
        self._began_s = time.perf_counter() if due_s is None else due_s
        self._head, self._tail, self._in_body = b"", b"", False
        if self._transport is not None:
            self._transport.write(self._content)

    def data_received(self, data: bytes) -> None:
        """Find the first byte and the end of the answer's body."""
        now_s = time.perf_counter()  # that of the event loop has whole milliseconds
        if not self._in_body:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self.error = (head + data)[:400].decode(errors="replace")
                self.close()
                return
            found = _LENGTH.search(head)
            self._left = int(found[1]) if found else None
            if not data:
                return
        if not self._in_body:
            self._in_body = True
            self._figures.first_s.append(now_s - self._began_s)
        else:
            self._figures.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        self._figures.events += data.count(_TEXT)
        if self.kept is not None:
            self.kept.append(data)
        if self._left is not None:
            self._left -= len(data)
            is_over = self._left <= 0
        else:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :] if len(data) < len(_LAST_CHUNK) else data
            is_over = self._tail.endswith(_LAST_CHUNK)
        if is_over:
            self._figures.answers += 1
            self._figures.whole_s.append(now_s - self._began_s)
            self._on_end(self)


async def connect(
    port: int, count: int, content: bytes, figures: Figures, on_end: Callable[[Client], None]
) -> list[Client]:
    """So many connections, a few at a time."""
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    while len(clients) < count:
        wanted = min(_CONNECT_AT_ONCE, count - len(clients))
        made = (
            loop.create_connection(lambda: Client(content, figures, on_end), "127.0.0.1", port) for _ in range(wanted)
        )
        clients += [client for _, client in await asyncio.gather(*made)]
    return clients


class Load:
    """Clients that send again as soon as their answer is complete, or all together at a given rate.

    Args:
        port: the server's.
        clients: their number.
        tokens: of each answer.
        stream: whether answers are streamed.
        rate: requests per second, evenly spaced; a request for which no client is free counts from when it was due.
            None: each client sends at once again.
    """

    def __init__(self, port: int, clients: int, *, tokens: int, stream: bool, rate: float | None = None) -> None:
        self._port = port
        self._count = clients
        self._content = request(tokens, stream=stream)
        self._rate = rate
        self._clients: list[Client] = []
        self._idle: deque[Client] = deque()
        self._due: deque[float] = deque()
        self.figures = Figures()

    async def __aenter__(self) -> "Load":
        on_end = self._again if self._rate is None else self._take_due
        self._clients = await connect(self._port, self._count, self._content, self.figures, on_end)
        if self._rate is None:
            for client in self._clients:
                client.send()
        else:
            self._idle.extend(self._clients)
            self._pacing = asyncio.create_task(self._pace(1 / self._rate))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._rate is not None:
            self._pacing.cancel()
        for client in self._clients:
            client.close()
        await asyncio.sleep(0.05)

    def take(self) -> Figures:
        """What has been seen since the last call."""
        taken = Figures(**vars(self.figures))
        vars(self.figures).update(vars(Figures()))
        return taken

    def check(self) -> None:
        """Fail if a client has stopped."""
        errors = [client.error for client in self._clients if client.error]
        assert not errors, f"{len(errors)} of {self._count} clients: {errors[0]}"

    def _again(self, client: Client) -> None:
        client.send()

    def _take_due(self, client: Client) -> None:
        if self._due:
            client.send(self._due.popleft())
        else:
            self._idle.append(client)

    async def _pace(self, interval_s: float) -> None:
        due_s = time.perf_counter()
        while True:
            due_s += interval_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            if self._idle:
                self._idle.popleft().send(due_s)
            else:
                self._due.append(due_s)


async def stream_text(port: int, tokens: int, timeout_s: float) -> str:
    """The text of one whole stream, to see that a server says what it should."""
    ended = asyncio.Event()
    (client,) = await connect(port, 1, request(tokens, stream=True), Figures(), lambda _: ended.set())
    client.kept = []
    client.send()
    try:
        await asyncio.wait_for(ended.wait(), timeout_s)
    finally:
        client.close()
    lines = [line for line in b"".join(client.kept).splitlines() if line.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
    return "".join(choice.get("text") or "" for choice in choices)
