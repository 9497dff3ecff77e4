"""The attacks by name, and what they share: connections that are counted, a bound of time, a check of the effect.

It knows no attack. Each module beside it has those of one door.
"""

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

MODEL = "reference"
BODY_BYTES = (4 << 20) - 1024
"""Of a large body: a little less than the router takes."""
_NO_FILES = (errno.EMFILE, errno.ENFILE)

Address = tuple[str, int]
Attack = Callable[[Address], Awaitable[None]]

Door = Literal["http", "websocket", "grpc"]

ATTACKS: dict[str, Attack] = {}
_DOORS: dict[str, Door] = {}
"""Where they come in; HTTP if they are not named here."""
LEAST_S: dict[str, float] = {}
"""Time that an attack may take to do what it is for; the others end when theirs is over."""


@dataclass
class _Made:
    """What the attack of this process has reached."""

    connections: int = 0


_MADE = _Made()


def attack_on(door: Door) -> Callable[[Attack], Attack]:
    """Register an attack under its function's name."""

    def register(function: Attack) -> Attack:
        name = function.__name__.replace("_", "-")
        ATTACKS[name], _DOORS[name] = function, door
        return function

    return register


def count_connection() -> None:
    """Note that the attack has made a connection."""
    _MADE.connections += 1


def filled(head: bytes, item: bytes, tail: bytes, size: int = BODY_BYTES) -> bytes:
    """A body of nearly `size` bytes that repeats an item."""
    return head + item * ((size - len(head) - len(tail)) // len(item)) + tail


@contextlib.asynccontextmanager
async def connection(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is reset in the end, as a client that vanishes."""
    reader, writer = await asyncio.open_connection(*address)
    count_connection()
    try:
        yield reader, writer
    finally:
        with contextlib.suppress(OSError):
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


@contextlib.contextmanager
def needs_effect(failure: str) -> Iterator[Callable[[], None]]:
    """Gives a function to call once the attack has had its effect.

    Raises:
        ConnectionError: it was not called, also if the attack's time is over. The text is `failure`.
    """
    effects = 0

    def note() -> None:
        nonlocal effects
        effects += 1

    try:
        yield note
    finally:
        if not effects:
            raise ConnectionError(failure)


async def repeat(times: int, act: Callable[[], Awaitable[object]]) -> None:
    """Act again and again on several lines at once, whatever comes back.

    Raises:
        OSError: this process may not open so many connections.
    """

    async def line() -> None:
        while True:
            try:
                await act()
            except (OSError, EOFError) as error:
                if isinstance(error, OSError) and error.errno in _NO_FILES:
                    raise
                await asyncio.sleep(0.05)

    await asyncio.gather(*(line() for _ in range(times)))


async def run(name: str, address: Address, seconds: float) -> None:
    """Run one attack for a time, then close all its connections.

    Raises:
        OSError: it could not be made: no connection, or too few.
    """
    _MADE.connections = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s(name, seconds)):
            await ATTACKS[name](address)
    if not _MADE.connections:
        raise ConnectionError(f"no connection to {address[0]}:{address[1]} could be made")


def longest_s(name: str, seconds: float) -> float:
    """How long an attack lasts at most, if it is to last `seconds`."""
    return max(seconds, LEAST_S.get(name, 0.0))


def door_of(name: str) -> Door:
    """Where an attack comes in: WebSockets have the port of HTTP, gRPC has one of its own."""
    return _DOORS.get(name, "http")


def names() -> Iterator[str]:
    """Of all attacks."""
    return iter(ATTACKS)
