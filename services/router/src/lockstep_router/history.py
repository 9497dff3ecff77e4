"""The newest streams of this router and the newest moves between workers, for the console.

It holds times, workers, numbers of tokens and outcomes, never text, token ids or keys. Both lists are bounded, and
nothing here runs for a token: a stream writes when it begins, is sent, starts, gets its first token, moves and ends.
Times are those of the event loop, in seconds.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_STREAMS = 200
MAX_MOVES = 50
MAX_ATTEMPTS = 16
"""Attempts of one stream that are kept; further ones are counted."""


@dataclass(slots=True)
class AttemptRecord:
    """What is known of one attempt. A time that is None has not come."""

    worker: str
    epoch: int
    chosen_at: float
    started_at: float | None = None
    """When the worker began to run the stream."""
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    """`finished`, `failed`, `cancelled`, or the reason of the loss; empty while it runs."""
    tokens: int = 0


@dataclass(slots=True)
class StreamRecord:
    """What is known of one stream."""

    number: int
    """Of the stream among those of this router."""
    stream_id: str
    run_id: str
    """Of its resumable request; empty: it has none."""
    tenant: str
    model: str
    arrived_at: float
    prompt_tokens: int
    max_tokens: int
    attempts: list[AttemptRecord] = field(default_factory=list)
    attempts_left_out: int = 0
    ended_at: float | None = None
    outcome: str = ""
    """`finished`, `cancelled` or the code of an error; empty while it runs."""
    emitted: Sequence[int] | None = None
    """Its tokens so far, of which only the number is read; None once it has ended."""
    tokens_at_end: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that it has."""
        return self.tokens_at_end if self.emitted is None else len(self.emitted)


@dataclass(slots=True)
class Move:
    """A stream that left a worker before its end."""

    number: int
    stream_id: str
    run_id: str
    tenant: str
    from_worker: str
    reason: str
    at: float
    tokens: int
    """Tokens that it had then."""
    to_worker: str = ""
    gap_s: float | None = None
    """Between its last token before the move and the next one."""
    ended: str = ""
    """How it ended before its next token; empty: it has not."""


class History:
    """The newest streams and moves.

    Args:
        is_kept: False: nothing is recorded, because nobody can ask for it.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self.streams: deque[StreamRecord] = deque(maxlen=MAX_STREAMS)
        """In the order in which they began; those that run too."""
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self._sessions: Counter[str] = Counter()
        self._began = 0
        self._moved = 0

    @property
    def sessions(self) -> int:
        """Sessions with streams in progress."""
        return len(self._sessions)

    def next_number(self) -> int:
        """The number of the next stream."""
        self._began += 1
        return self._began

    def begin(self, stream: StreamRecord, session: str) -> None:
        """Note that a stream begins."""
        self.streams.append(stream)
        self._sessions[session] += 1

    def end(self, session: str) -> None:
        """Note that a stream of a session has ended."""
        self._sessions[session] -= 1
        if self._sessions[session] <= 0:
            del self._sessions[session]

    def move(self, stream: StreamRecord, worker: str, reason: str, at: float) -> Move:
        """Note that a stream leaves a worker."""
        self._moved += 1
        move = Move(self._moved, stream.stream_id, stream.run_id, stream.tenant, worker, reason, at, stream.tokens)
        self.moves.append(move)
        return move
