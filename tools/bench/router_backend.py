"""An OpenAI server whose answers follow a script, as a process of its own: what other routers of `router.py` serve.

`router_backend.py STEP_EVERY_S`: prints its port. A stream's first token comes at once, and then all streams get one in
each step: the same tokens at the same pace as from `router_worker.py`, as text.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import cast

import uvloop
from router_script import ENCODING, token
from tokenizers import Tokenizer

_MODEL = Path(__file__).resolve().parents[2] / "models/reference/tokenizer.json"
_STEP_EVERY_S = float(sys.argv[1])
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_MODELS = json.dumps({"object": "list", "data": [{"id": "reference", "object": "model", "owned_by": "bench"}]}).encode()


def _texts() -> dict[int, bytes]:
    """The text of each token that the script has, as the inside of a JSON string."""
    tokenizer = Tokenizer.from_file(str(_MODEL))
    return {each: json.dumps(tokenizer.decode([each])).encode()[1:-1] for each in ENCODING}


TEXTS = _texts()


def event(number: int, position: int, *, is_last: bool) -> bytes:
    """One token as an HTTP chunk with an event of OpenAI's."""
    body = (
        b'data: {"id":"cmpl-%d","object":"text_completion","created":1700000000,"model":"reference","choices":'
        b'[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b}]}\n\n'
    ) % (number, TEXTS[token(number, position)], b'"length"' if is_last else b"null")
    return b"%x\r\n%b\r\n" % (len(body), body)


def answer(number: int, tokens: int) -> bytes:
    """A whole completion as a response."""
    text = b"".join(TEXTS[token(number, position)] for position in range(tokens))
    body = (
        b'{"id":"cmpl-%d","object":"text_completion","created":1700000000,"model":"reference","choices":[{"index":0,'
        b'"text":"%b","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":15,"completion_tokens":%d,'
        b'"total_tokens":%d}}'
    ) % (number, text, tokens, 15 + tokens)
    return response(body)


def response(body: bytes) -> bytes:
    """A response with a JSON body."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Steps:
    """All connections whose requests have further tokens, and the step that gives each its next one."""

    def __init__(self) -> None:
        self.live: set[Connection] = set()
        self.requests = 0
        self._next: asyncio.TimerHandle | None = None

    def add(self, connection: "Connection") -> None:
        """Let a connection take part from the next step on."""
        self.live.add(connection)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(_STEP_EVERY_S, self._step)

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.live = {connection for connection in self.live if connection.step()}
        wait_s = max(0.0, began + _STEP_EVERY_S - loop.time())
        self._next = loop.call_later(wait_s, self._step) if self.live else None


class Connection(asyncio.Protocol):
    """One client connection, one request at a time."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._number = self._position = self._tokens = 0
        self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Its request is over."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Answer the request as soon as it is complete."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        found = _LENGTH.search(head)
        if found is None and b"chunked" in head.lower():
            raise ValueError("a chunked request body, which this script does not read")
        if found is not None and len(body) < int(found[1]):
            return
        self._received = b""
        if head.startswith(b"POST"):
            self._begin(json.loads(body))
        elif self._transport is not None:
            self._transport.write(response(_MODELS))

    def _begin(self, request: dict[str, int]) -> None:
        self._steps.requests += 1
        # The worker of Lockstep counts its streams in the same way, so that texts are of the same kind.
        self._number, self._position = self._steps.requests, 1
        self._tokens, self._streams = request["max_tokens"], bool(request.get("stream"))
        if self._transport is None:
            return
        if self._streams:
            first = _STREAM_HEAD + event(self._number, 0, is_last=self._tokens == 1)
            self._transport.write(first + _LAST if self._tokens == 1 else first)
        elif self._tokens == 1:
            self._transport.write(answer(self._number, 1))
        if self._tokens > 1:
            self._steps.add(self)

    def step(self) -> bool:
        """Send the next token; whether there are more."""
        if self._transport is None:
            return False
        position = self._position
        self._position += 1
        is_last = self._position == self._tokens
        if self._streams:
            sent = event(self._number, position, is_last=is_last)
            self._transport.write(sent + _LAST if is_last else sent)
        elif is_last:
            self._transport.write(answer(self._number, self._tokens))
        return not is_last


async def main() -> None:
    """Serve until the process is killed."""
    steps = Steps()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(steps), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
