"""Attacks on the HTTP door."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
from collections.abc import Awaitable, Callable

from lockstep_tools.hostile.attacks.registry import (
    ATTACKS,
    BODY_BYTES,
    LEAST_S,
    MODEL,
    Address,
    attack_on,
    connection,
    count_connection,
    filled,
    needs_effect,
    repeat,
)

_CHUNK = 64 << 10
_CHAT = "/v1/chat/completions"
_LARGE_TOKENS = 3000
_CHOICES = 16
_LEAST_TOKEN_BYTES = 512
"""Of JSON, with twenty alternatives: about half of what most take."""
_IDLE_CONNECTIONS = 3000
_SMALL_BODY_BYTES = (64 << 10) - 64
"""A little less than what the router parses without waiting for others."""
_LINES = 300
_MAX_MESSAGES = 4096
"""The router's limit for one chat."""
_FEW_MESSAGES = 3
_MESSAGE_BYTES = 48
"""Of JSON, for each message, apart from its text."""
_WORDS = "something beautiful, hello "
"""Few enough tokens, so that a chat of this text fits into the model's context."""


def request(body: bytes, path: str = "/v1/completions", more: bytes = b"") -> bytes:
    """A POST with a JSON body."""
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + more + b"\r\n" + body


async def send(address: Address, data: bytes) -> bytes:
    """Send, and give the beginning of the answer."""
    async with connection(address) as (reader, writer):
        writer.write(data)
        await writer.drain()
        return await reader.read(_CHUNK)


def _bodies(times: int, path: str, body: bytes) -> Callable[[Address], Awaitable[None]]:
    async def run(address: Address) -> None:
        await repeat(times, lambda: send(address, request(body, path)))

    return run


_PROMPT = b'{"model": "%s", "prompt": ' % MODEL.encode()
_KEYS = b"{" + b",".join(b'"k%d":1' % index for index in range(330_000)) + b"}"

ATTACKS["mixed-prompt"] = _bodies(2, "/v1/completions", filled(_PROMPT + b'["a"', b",1", b"]}"))
ATTACKS["id-lists"] = _bodies(2, "/v1/completions", filled(_PROMPT + b"[[1]", b",[]", b"]}"))
ATTACKS["unknown-fields"] = _bodies(2, "/v1/completions", _KEYS)
ATTACKS["empty-messages"] = _bodies(
    2, _CHAT, filled(b'{"model": "%s", "messages": [{}' % MODEL.encode(), b",{}", b"]}")
)
ATTACKS["many-texts"] = _bodies(2, "/v1/completions", filled(_PROMPT + b'["a"', b',"a"', b"]}"))
ATTACKS["largest-ids"] = _bodies(
    2, "/v1/completions", _PROMPT + b"[" + b",".join([b"77777"] * 149_000) + b'], "max_tokens": 1}'
)


@attack_on("http")
async def long_text(address: Address) -> None:
    """A million characters to tokenize."""
    body = _PROMPT + b'"' + b"hello <|world " * 72_000 + b'", "max_tokens": 1}'
    await repeat(4, lambda: send(address, request(body)))


@attack_on("http")
async def medium_prompts(address: Address) -> None:
    """As many prompts in one request as it may have, none of them long."""
    fields = {"model": MODEL, "prompt": ["hello <|world " * 290 + str(index) for index in range(64)], "max_tokens": 1}
    body = json.dumps(fields).encode()
    await repeat(8, lambda: send(address, request(body)))


@attack_on("http")
async def waiting_texts(address: Address) -> None:
    """Complete bodies of 4 MiB that wait to be tokenized."""
    body = filled(_PROMPT + b'"', b"hello world, ", b'"}')
    await repeat(40, lambda: send(address, request(body, "/tokenize")))


@attack_on("http")
async def early_answers(address: Address) -> None:
    """Bodies that go on after they were refused."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: router\r\ncontent-length: 1000000000\r\n\r\n"

    async def act() -> None:
        async with connection(address) as (_, writer):
            writer.write(head)
            for _ in range(1000):
                writer.write(b"x" * _CHUNK)
                await writer.drain()

    await repeat(8, act)


@attack_on("http")
async def long_word(address: Address) -> None:
    """Four million characters without a space."""
    body = filled(_PROMPT + b'"', b"ab", b'", "max_tokens": 1}')
    await repeat(2, lambda: send(address, request(body)))


@attack_on("http")
async def many_headers(address: Address) -> None:
    """Sixteen megabytes of headers on each of eight connections."""
    block = b"".join(b"x-%d: %s\r\n" % (index, b"y" * 1000) for index in range(60))

    async def act() -> None:
        async with connection(address) as (_, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: router\r\n")
            for _ in range((16 << 20) // len(block)):
                writer.write(block)
                await writer.drain()
            await asyncio.sleep(1)

    await repeat(8, act)


@attack_on("http")
async def large_header(address: Address) -> None:
    """One header of 32 MB."""

    async def act() -> None:
        async with connection(address) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: router\r\nx: ")
            for _ in range((32 << 20) // _CHUNK):
                writer.write(b"y" * _CHUNK)
                await writer.drain()
            writer.write(b"\r\n\r\n")
            await reader.read(_CHUNK)

    await repeat(1, act)


@attack_on("http")
async def tiny_chunks(address: Address) -> None:
    """A body of one byte a chunk."""
    block = b"1\r\n \r\n" * 10_000

    async def act() -> None:
        async with connection(address) as (_, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(400):
                writer.write(block)
                await writer.drain()

    await repeat(4, act)


@attack_on("http")
async def slow_headers(address: Address) -> None:
    """Two thousand connections that send a byte of their headers now and then."""

    async def act() -> None:
        async with connection(address) as (_, writer):
            for byte in b"GET /healthz HTTP/1.1\r\n":
                writer.write(bytes([byte]))
                await asyncio.sleep(0.5)

    await repeat(2000, act)


@attack_on("http")
async def connections(address: Address) -> None:
    """More connections without a request than the router takes; those that it closes come back."""
    with needs_effect("the router takes all these connections") as note_closed:

        async def act() -> None:
            async with connection(address) as (reader, _):
                await reader.read(_CHUNK)
            note_closed()
            await asyncio.sleep(1)

        await repeat(_IDLE_CONNECTIONS, act)


@attack_on("http")
async def stalled_bodies(address: Address) -> None:
    """Two hundred and fifty bodies of 4 MiB that lack their last byte."""
    data = request(filled(_PROMPT + b'"', b"a b ", b'"}'))[:-1]

    async def act() -> None:
        async with connection(address) as (reader, writer):
            for start in range(0, len(data), _CHUNK):
                writer.write(data[start : start + _CHUNK])
                await writer.drain()
            await reader.read(_CHUNK)

    await repeat(250, act)


@attack_on("http")
async def many_answers(address: Address) -> None:
    """As many answers of one request as it may ask for."""
    fields = {"model": MODEL, "prompt": [f"prompt {index}" for index in range(64)], "n": 16, "max_tokens": 1000}
    body = json.dumps(fields | {"stream": True}).encode()

    async def act() -> None:
        async with connection(address) as (reader, writer):
            writer.write(request(body))
            for _ in range(20):
                if not await reader.read(_CHUNK):
                    return
            await asyncio.sleep(0.2)

    await repeat(4, act)


@attack_on("http")
async def whole_logprobs(address: Address) -> None:
    """Answers in one piece with twenty alternatives for each token, and a large one, for which the attack waits."""

    async def whole(max_tokens: int) -> int:
        fields = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": _CHOICES}
        fields["max_tokens"] = max_tokens
        body = json.dumps(fields | {"logprobs": True, "top_logprobs": 20}).encode()
        size = 0
        async with connection(address) as (reader, writer):
            writer.write(request(body, _CHAT, b"connection: close\r\n"))
            while data := await reader.read(_CHUNK):
                size += len(data)
        return size

    with needs_effect("the large answer did not come") as note_came:
        others = asyncio.ensure_future(repeat(2, lambda: whole(24)))
        try:
            if await whole(_LARGE_TOKENS) > _CHOICES * _LARGE_TOKENS * _LEAST_TOKEN_BYTES:
                note_came()
        finally:
            others.cancel()


LEAST_S["whole-logprobs"] = 60.0


@attack_on("http")
async def pipelining(address: Address) -> None:
    """A second request before the first one is answered, and then the end of the connection."""
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1000, "stream": True}).encode()

    async def act() -> None:
        async with connection(address) as (reader, writer):
            writer.write(request(body) * 2)
            await reader.read(_CHUNK)
            await asyncio.sleep(0.2)

    await repeat(16, act)


@attack_on("http")
async def vanishing(address: Address) -> None:
    """Clients that leave after the first token, or before."""
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1000, "stream": True}).encode()

    async def act() -> None:
        async with connection(address) as (reader, writer):
            writer.write(request(body))
            await asyncio.wait_for(reader.read(_CHUNK), 5)

    await repeat(16, act)


@attack_on("http")
async def unread(address: Address) -> None:
    """Clients that do not read what they asked for."""
    # Sixteen echoes of the prompt are more than the kernel's buffers of both sides hold.
    fields = {"model": MODEL, "prompt": "hello " * 32_000, "echo": True, "max_tokens": 1000, "n": 16, "stream": True}
    data = request(json.dumps(fields).encode())

    async def act() -> None:
        # The kernel holds little for this client, so that the router's buffers are full soon.
        loop = asyncio.get_running_loop()
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.setblocking(False)
            await loop.sock_connect(line, address)
            count_connection()
            await loop.sock_sendall(line, data)
            await asyncio.sleep(30)

    await repeat(2, act)


def empty_messages(size: int) -> bytes:
    """A chat of about `size` bytes with as many empty messages as that holds.

    It is refused for its last field, once all messages have been read. `top_logprobs` keeps it from the short way that
    simple bodies take.
    """
    head = b'{"model": "%s", "messages": [{"role":"user","content":""}' % MODEL.encode()
    return filled(head, b',{"role":"user","content":""}', b'], "top_logprobs": null, "max_tokens": 0}', size)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The head of an answer that has been read whole."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    if length is None:
        raise ConnectionError("the answer has no length")
    await reader.readexactly(int(length[1]))
    return head


@attack_on("http")
async def small_bodies(address: Address) -> None:
    """Bodies that are small enough to be read at once, on many connections in step."""
    data = request(empty_messages(_SMALL_BODY_BYTES), _CHAT)

    with needs_effect("the router has read no body") as note_refused:

        async def act() -> None:
            async with contextlib.AsyncExitStack() as stack:
                lines = [await stack.enter_async_context(connection(address)) for _ in range(_LINES)]
                while True:
                    for _, writer in lines:
                        writer.write(data)
                    for reader, _ in lines:
                        if b" 400 " in await _answer(reader):
                            note_refused()

        await repeat(1, act)


@attack_on("http")
async def large_chat(address: Address) -> None:
    """Valid chats of nearly 4 MiB, of as many messages as there may be and of a few long ones: until each kind has been
    answered, while others are sent.
    """

    def chat(count: int) -> bytes:
        text = _WORDS * ((BODY_BYTES // count - _MESSAGE_BYTES) // len(_WORDS))
        messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index in range(count)]
        return request(json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode(), _CHAT)

    async def ask(data: bytes) -> bool:
        async with connection(address) as (reader, writer):
            writer.write(data)
            await writer.drain()
            return b" 200 " in await _answer(reader)

    kinds = [chat(_MAX_MESSAGES - 1), chat(_FEW_MESSAGES)]
    more = itertools.cycle(kinds)
    with needs_effect("no chat of each kind was answered") as note_answered:
        others = asyncio.ensure_future(repeat(2, lambda: ask(next(more))))
        try:
            if all([await ask(data) for data in kinds]):
                note_answered()
        finally:
            others.cancel()


LEAST_S["large-chat"] = 60.0
