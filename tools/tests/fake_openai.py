"""A real HTTP server with scripted answers in OpenAI's protocol, also with pauses and errors."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Script = Iterable[bytes | float]
"""Bytes to send, and seconds to wait."""


@dataclass(frozen=True)
class Event:
    """A server-sent event to send."""

    data: Any
    id: str | None = None

    def encode(self) -> bytes:
        text = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        head = "" if self.id is None else f"id: {self.id}\n"
        return f"{head}data: {text}\n\n".encode()


@dataclass(frozen=True)
class Received:
    """A request as received."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """An answer that is not a stream: an error, or with status 200 a complete answer."""

    status: int
    body: Any


def events(texts: Sequence[str], *, chat: bool = False, logprobs: bool = False, finish: str = "length") -> list[Event]:
    """The events of a correct server for these tokens: each with its position, then the usage, then the end mark."""
    found = []
    for number, text in enumerate(texts, start=1):
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish if number == len(texts) else None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if logprobs:
            entry = {"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}
            plain = {"tokens": [text], "token_logprobs": [-0.5]}
            choice["logprobs"] = {"content": [entry]} if chat else plain
        found.append(Event({"choices": [choice], "usage": None}, f"cmpl-1:{number}"))
    usage = {"prompt_tokens": 5, "completion_tokens": len(texts), "total_tokens": 5 + len(texts)}
    return [*found, Event({"choices": [], "usage": usage}, f"cmpl-1:{len(texts)}"), Event("[DONE]")]


def script(sent: Iterable[Event], pause_s: float = 0.0) -> list[bytes | float]:
    """Events with a pause before each but the first."""
    steps: list[bytes | float] = []
    for event in sent:
        steps += [pause_s, event.encode()] if steps and pause_s else [event.encode()]
    return steps


_UNKNOWN = Refusal(404, {"error": {"message": "there is no such stream", "code": "stream_not_found"}})


@dataclass
class FakeOpenAI:
    """The server. `answer(number, request)` gives the n-th completion's answer, `resume(request)` the rest of a stream
    that a client comes back to.
    """

    answer: Callable[[int, Received], Script | Refusal] = lambda number, request: script(
        events(["Hel", "lo", " wor", "ld"], chat="chat" in request.path)
    )
    resume: Callable[[Received], Script | Refusal] = lambda request: _UNKNOWN
    models: Sequence[str] = ("fake",)
    status: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every answer."""
    received: list[Received] = field(default_factory=list)
    resumed: list[Received] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Paths of the streams that clients ended."""
    cut: bool = False
    """Close the connection instead of ending the body."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Each request has its own number, also when two come at once."""

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no further connections; those that there are go on."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignores clients that leave in the middle, as some tests do."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, fake: FakeOpenAI, *arguments: Any) -> None:
        self._fake = fake
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": name} for name in self._fake.models]})
        elif self.path == "/status" and self._fake.status is not None:
            self._json(200, self._fake.status)
        elif self.path.startswith("/v1/streams/"):
            request = self._request({})
            self._fake.resumed.append(request)
            self._answer(self._fake.resume(request))
        else:
            self._json(404, {"detail": "no such path"})

    def do_POST(self) -> None:
        request = self._request(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        with self._fake.lock:
            self._fake.received.append(request)
            number = len(self._fake.received)
        self._answer(self._fake.answer(number, request))

    def do_DELETE(self) -> None:
        self._fake.cancelled.append(self.path)
        self._json(200, {"deleted": True})

    def _request(self, body: dict[str, Any]) -> Received:
        return Received(self.path, {key.lower(): value for key, value in self.headers.items()}, body)

    def _answer(self, answer: Script | Refusal) -> None:
        if isinstance(answer, Refusal):
            self._json(answer.status, answer.body)
            return
        with suppress(BrokenPipeError, ConnectionResetError):
            self._stream(answer)

    def _stream(self, steps: Script) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self._end_head()
        for step in steps:
            if isinstance(step, float):
                time.sleep(step)
            else:
                self.wfile.write(f"{len(step):x}\r\n".encode() + step + b"\r\n")
                self.wfile.flush()
        if self._fake.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _json(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self._end_head()
        self.wfile.write(content)

    def _end_head(self) -> None:
        for name, value in self._fake.headers.items():
            self.send_header(name, value)
        self.end_headers()
