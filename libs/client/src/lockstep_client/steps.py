"""What a request asks of the network, as data: requests are generators of these steps and do no input or output.

`transport` carries the steps out, blocking or with asyncio. So the rules of retrying and resuming exist once.
"""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from lockstep_client.routers import Name, Router
from lockstep_client.sse import ServerSentEvent

T = TypeVar("T")

Chunk: TypeAlias = bytes | list[ServerSentEvent]
"""A part of a response's content: bytes over HTTP; over gRPC the bytes of a whole answer, or events, none at all if
nothing has come but the router lives.
"""


@dataclass(frozen=True)
class Outgoing:
    """A request, for any router."""

    method: str
    path: str
    """From the root of the server, with the query."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    content: bytes = field(default=b"", repr=False)
    continues: "Outgoing | None" = field(default=None, repr=False)
    """The request whose answer it continues."""
    made_at: int = field(default_factory=lambda: int(time.time()), compare=False, repr=False)
    """Seconds since 1970."""


@dataclass(frozen=True)
class Head:
    """The head of a response; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]


class BrokenError(Exception):
    """A connection that could not be made, broke, or was silent for too long; `late`: a call of gRPC whose own time has
    ended. The request's deadline has set that, unless something between client and router has a shorter one.
    """

    def __init__(self, kind: Literal["connect", "broken", "silent", "late"], detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Send:
    """Send a request to a router; gives the `Head`, or raises `BrokenError`. An earlier response is closed."""

    router: Router
    request: Outgoing
    silence_s: float
    """The longest wait for the next bytes."""


@dataclass(frozen=True)
class Expect:
    """Change the longest wait for the next bytes of a response, before the first of them is read."""

    silence_s: float


@dataclass(frozen=True)
class Read:
    """The next `Chunk` of the response; None at its end. Raises `BrokenError`."""


@dataclass(frozen=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True)
class Resolve:
    """Look a name up; gives its addresses, none if there are none."""

    name: Name


@dataclass(frozen=True)
class Give:
    """Give something to the sender of the request: the head of the response first, then its content."""

    value: Head | bytes | ServerSentEvent


Step: TypeAlias = Send | Expect | Read | Pause | Resolve | Give
Steps: TypeAlias = Generator[Step, Any, T]


def read_all(limit_bytes: int, check: Callable[[], None]) -> Steps[bytes]:
    """The rest of the response.

    `check` is called whenever something arrives: bytes that trickle are no silence, so what it raises is all that ends
    a response which takes for ever.

    Raises:
        BrokenError: the connection broke, or the response is longer than the limit.
    """
    content = bytearray()
    while (chunk := (yield Read())) is not None:
        check()
        content += chunk if isinstance(chunk, bytes) else b"".join(event.encode() for event in chunk)
        if len(content) > limit_bytes:
            raise BrokenError("broken", f"the response is longer than {limit_bytes} bytes")
    return bytes(content)
