"""Attacks on the WebSocket door, at the port of HTTP. Frames are made by hand: a client's library would check them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

from lockstep_tools.hostile.attacks.http import empty_messages
from lockstep_tools.hostile.attacks.registry import MODEL, Address, attack_on, connection, needs_effect, repeat

_CHUNK = 64 << 10
_SOCKETS = 8
_REQUESTS = 16
"""At a time on each socket."""
_MESSAGE_BYTES = 60 << 10
_FIRST_TOKEN_S = 5.0
_HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: router\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_ERROR = b'{"type":"error"'
_EVENT = b'{"type":"event"'


def _text(message: bytes) -> bytes:
    """A frame with a text, masked by zeros."""
    size = len(message)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = b"\xfe" + size.to_bytes(2) if size < 1 << 16 else b"\xff" + size.to_bytes(8)
    return b"\x81" + length + bytes(4) + message


def _generate(client_id: str, endpoint: str, body: bytes) -> bytes:
    """A request."""
    head = {"type": "generate", "id": client_id, "endpoint": endpoint}
    return _text(json.dumps(head).encode()[:-1] + b', "body": ' + body + b"}")


@contextlib.asynccontextmanager
async def _socket(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with connection(address) as (reader, writer):
        writer.write(_HANDSHAKE)
        if b" 101 " not in await reader.readuntil(b"\r\n\r\n"):
            raise ConnectionError("the handshake is refused")
        yield reader, writer


async def _read_until(reader: asyncio.StreamReader, message: bytes, times: int, note: Callable[[], None]) -> None:
    """Read until the beginning of a message has come so many times."""
    rest = b""
    while times > 0:
        data = await reader.read(_CHUNK)
        if not data:
            raise ConnectionError("the socket has been closed")
        rest += data
        if count := rest.count(message):
            note()
        times -= count
        rest = rest[1 - len(message) :]


@attack_on("websocket")
async def websocket_messages(address: Address) -> None:
    """Chats of empty messages, many at a time on each socket, which are refused once they have been read."""
    body = empty_messages(_MESSAGE_BYTES)
    data = b"".join(_generate(str(index), "chat.completions", body) for index in range(_REQUESTS))

    with needs_effect("the router has read no message") as note_refused:

        async def act() -> None:
            async with _socket(address) as (reader, writer):
                while True:
                    writer.write(data)
                    await _read_until(reader, _ERROR, _REQUESTS, note_refused)

        await repeat(_SOCKETS, act)


@attack_on("websocket")
async def websocket_vanishing(address: Address) -> None:
    """Clients that leave after the first token, and will not come back for the others."""
    fields = {"model": MODEL, "prompt": "hi", "max_tokens": 1000, "ignore_eos": True, "resumable": False}
    data = _generate("a", "completions", json.dumps(fields).encode())

    with needs_effect("no token came") as note_token:

        async def act() -> None:
            async with _socket(address) as (reader, writer):
                writer.write(data)
                async with asyncio.timeout(_FIRST_TOKEN_S):
                    await _read_until(reader, _EVENT, 1, note_token)

        await repeat(16, act)
