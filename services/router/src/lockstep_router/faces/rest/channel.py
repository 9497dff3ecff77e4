"""What an answer needs of its connection and ASGI has no calls for. Only this project's own server offers it."""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from starlette.types import Scope

EXTENSION = "lockstep.channel"
"""The channel's name among the extensions of an ASGI scope."""


class Channel(Protocol):
    """The way of one answer to its client."""

    @property
    def is_open(self) -> bool:
        """Whether the body has begun, and more of it can be written without waiting for the client."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing that was written still waits in this process."""

    def write(self, data: bytes) -> None:
        """Send a piece of the body at once. The channel must be open."""

    def take_body(self) -> bytearray:
        """The request's body, which is not kept."""

    @property
    def takes_whole(self) -> bool:
        """Whether nothing of the answer has been sent, and all of it can be written without waiting for the client."""

    def write_whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer at once; its headers name the length. `takes_whole` must hold."""

    @property
    def takes_chunks(self) -> bool:
        """Whether `takes_whole`, and the client understands an answer in chunks."""

    def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]], data: bytes) -> None:
        """Send the head of an answer in chunks and the first piece of its body at once. `takes_chunks` must hold."""

    def end(self, data: bytes) -> None:
        """Send the last piece of an answer that `begin` has begun. The channel must be open."""

    send: Callable[[bytes], int]
    """Send bytes as they are, framed as a part of the body already, and return how many of them the connection has
    taken; OSError: none. The channel must be open and empty.
    """

    def send_later(self, data: bytes) -> None:
        """Send the bytes that `send` has left. Afterwards the channel is not empty."""

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call a function, once, if the client leaves before the answer is complete."""

    def unwatch(self) -> None:
        """Do not call it any more."""


def channel_of(scope: Scope) -> Channel | None:
    """The channel of a request's answer; None: another server runs the application."""
    return cast("Channel | None", scope.get("extensions", {}).get(EXTENSION))
