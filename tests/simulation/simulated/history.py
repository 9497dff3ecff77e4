"""What clients saw: one history for each stream, and what each stream should have been."""

from dataclasses import dataclass, field
from enum import StrEnum

from simulated.model import Expected


class Kind(StrEnum):
    """The kinds of events of a stream."""

    TEXT = "text"
    FINISH = "finish"
    ERROR = "error"
    LEFT = "left"
    """The client has left."""
    BROKEN = "broken"
    """The connection of the client broke: its router died."""


TERMINAL = frozenset({Kind.FINISH, Kind.ERROR, Kind.LEFT, Kind.BROKEN})


@dataclass(frozen=True)
class Event:
    """One thing that a client saw."""

    at: float
    kind: Kind
    value: str = ""
    """Text, finish reason, error code, or the name of an exception that has no code."""
    tokens: int = 0
    """With text: the stream's tokens so far, as the router counts them."""


@dataclass
class History:
    """One stream as its client saw it."""

    name: str
    expected: Expected
    arrived_at: float
    timeout_s: float | None = None
    has_stops: bool = False
    is_poison: bool = False
    paused_s: float = 0.0
    """Seconds that the client itself did not read."""
    stream_id: str = ""
    router: str = ""
    explained: set[str] = field(default_factory=set)
    """Codes of errors that what happened to this client explains."""
    patience_s: float = 0.0
    """Time that its client takes to come back after its connection broke; the silence may be so much longer."""
    tardy_s: float = 0.0
    """How much later than the request's timeout its client may notice it."""
    usage: int | None = None
    """Tokens that the router counted for the whole answer, if this is its only stream and it has finished."""
    events: list[Event] = field(default_factory=list)

    @property
    def subject(self) -> str:
        """The name of the client's request."""
        return self.name.partition("#")[0].rstrip("~")

    @property
    def ended_at(self) -> float | None:
        return next((event.at for event in self.events if event.kind in TERMINAL), None)

    @property
    def progress_at(self) -> float:
        """The last moment at which the client got something."""
        return self.events[-1].at if self.events else self.arrived_at
