"""The newest streams of this router and the newest moves between workers, for the console.

It holds times, workers, numbers of tokens and outcomes, never text, token ids or keys. Both lists are bounded, and
nothing here runs for a token: a stream writes when it begins, is sent, starts, gets its first token, moves and ends.
Times are those of the event loop, in seconds.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep_api.v1 import worker_pb2

MAX_STREAMS = 200
MAX_MOVES = 50
MAX_ATTEMPTS = 16
"""Attempts of one stream that are kept; further ones are counted."""
MAX_RANKS = 64
"""Ranks of an attempt that are kept."""
MAX_WORKS = 1024
"""Works of ranks that are kept, of the newest attempts: each is written into the console's state, twice a second while
somebody looks.
"""


class RankWork(NamedTuple):
    """What a rank did while an attempt was in a phase, for all streams of the batch, as the worker reports it."""

    steps: int
    compute_s: float
    collective_s: float
    """Transfer, and waiting for slower ranks."""
    idle_s: float
    """Between steps."""


@dataclass(slots=True)
class AttemptRecord:
    """What is known of one attempt. A time that is None has not come."""

    worker: str
    epoch: int
    number: int
    """Of the attempt in its stream, from 1."""
    chosen_at: float
    started_at: float | None = None
    """When the worker began to run the stream."""
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    """`finished`, `failed`, `cancelled`, or the reason of the loss; empty while it runs."""
    tokens: int = 0
    prefill: tuple[RankWork, ...] = ()
    """The work of each rank, which the worker reports after the end; empty: it has not."""
    decode: tuple[RankWork, ...] = ()

    @property
    def works(self) -> int:
        """Works of ranks that are known of it."""
        return len(self.prefill) + len(self.decode)


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
        is_kept: False: nothing is recorded, because no page can ask for it.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self._streams: dict[str, StreamRecord] = {}
        """By their ids, in the order in which they began; those that run too."""
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self._sessions: dict[str, int] = {}
        """Streams in progress of each session that has any."""
        self._began = 0
        self._moved = 0
        self._with_works: deque[AttemptRecord] = deque()
        """Attempts of whose ranks something is kept, the oldest first."""
        self._works = 0

    @property
    def streams(self) -> tuple[StreamRecord, ...]:
        """The newest, in the order in which they began; those that run too."""
        return tuple(self._streams.values())

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
        self._streams.pop(stream.stream_id, None)
        if len(self._streams) >= MAX_STREAMS:
            del self._streams[next(iter(self._streams))]
        self._streams[stream.stream_id] = stream
        self._sessions[session] = self._sessions.get(session, 0) + 1

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

    def note_ranks(self, worker: str, ended: Iterable[worker_pb2.EndedAttempt]) -> None:
        """Keep what a worker reports of its ranks, for attempts that are in the history."""
        for each in ended:
            stream = self._streams.get(each.stream_id)
            for attempt in stream.attempts if stream is not None else ():
                if (attempt.number, attempt.worker) == (each.attempt, worker) and not attempt.works:
                    attempt.prefill, attempt.decode = _works(each.prefill), _works(each.decode)
                    if attempt.works:
                        self._keep_works(attempt)

    def _keep_works(self, attempt: AttemptRecord) -> None:
        self._with_works.append(attempt)
        self._works += attempt.works
        while self._works > MAX_WORKS:
            oldest = self._with_works.popleft()
            self._works -= oldest.works
            oldest.prefill = oldest.decode = ()


def _works(ranks: Sequence[worker_pb2.RankWork]) -> tuple[RankWork, ...]:
    return tuple(RankWork(each.steps, each.compute_s, each.collective_s, each.idle_s) for each in ranks[:MAX_RANKS])
