"""What an answer needs of its connection and ASGI has no calls for. Only this project's own server offers it."""

from collections.abc import Callable
from typing import Protocol, cast

from starlette.types import Scope

EXTENSION = "lockstep.channel"
"""The channel's name among the extensions of an ASGI scope."""


class Channel(Protocol):
    """The way of one answer to its client."""

    @property
    def is_open(self) -> bool:
        """Whether the body has begun, and more of it can be written without waiting for the client."""

    def write(self, data: bytes) -> None:
        """Send a piece of the body at once. The channel must be open."""

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call a function, once, if the client leaves before the answer is complete."""

    def unwatch(self) -> None:
        """Do not call it any more."""


def channel_of(scope: Scope) -> Channel | None:
    """The channel of a request's answer; None: another server runs the application."""
    return cast("Channel | None", scope.get("extensions", {}).get(EXTENSION))
