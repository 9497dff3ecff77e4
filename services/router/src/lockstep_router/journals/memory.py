"""Journals in this process's memory: they end with it."""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.journals.records import ChoiceLog, Claim, Outcome, Piece, RequestRecord, StoredStream

_SPARE_REMINDERS = 64


@dataclass
class _Holding:
    """What one tenant has in the store."""

    streams: int = 0
    size_bytes: int = 0
    sealed: dict[str, int] = field(default_factory=dict)
    """Its streams that have ended, in that order, with their numbers among all that ended."""

    @property
    def oldest(self) -> int:
        """The number of its stream that ended first."""
        return next(iter(self.sealed.values()))


@dataclass
class _Entry:
    record: RequestRecord
    holding: _Holding
    logs: list[ChoiceLog]
    size_bytes: int
    outcome: Outcome | None = None
    expires_at: float = 0.0


class MemoryJournalStore:
    """A bounded number of journals. Those that still run are never evicted. Of the others, the tenant that has the most
    loses those that ended first, so no tenant can push out what a smaller one keeps.
    """

    def __init__(self, max_streams: int, max_bytes: int, clock: Callable[[], float] | None = None) -> None:
        """Make an empty store.

        Args:
            max_streams: journals at a time.
            max_bytes: memory of all journals together, about.
            clock: gives seconds; None: the time of the running event loop.
        """
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._clock = clock or _loop_time
        self._entries: dict[str, _Entry] = {}
        self._holdings: dict[str, _Holding] = {}
        """By the tenant, those that are not empty."""
        self._kept = 0
        self._ended = 0
        """Streams that have ended since the beginning."""
        self._due: list[tuple[float, str]] = []
        """When to look at each stream that has ended, the earliest first. Those that are gone or go on may be in it."""
        self._claims: dict[str, Claim] = {}
        self._scopes: dict[str, str] = {}
        """The key of each stream that has one."""
        self._size_bytes = 0

    @property
    def kept(self) -> int:
        """Streams that have ended and are still kept."""
        return self._kept

    @property
    def size_bytes(self) -> int:
        """Approximate memory of all streams."""
        return self._size_bytes

    async def open(self, record: RequestRecord) -> None:
        """Begin the journal of a stream.

        Raises:
            LockstepError: OVERLOADED, there is no room for it.
        """
        self.expire()
        own = self._holdings.get(record.tenant) or _Holding()
        while len(self._entries) >= self._max_streams and self._evict(_streams_of, own.streams + 1, own):
            pass
        wanted = record.size_bytes
        while self._size_bytes + wanted > self._max_bytes and self._evict(_bytes_of, own.size_bytes + wanted, own):
            pass
        if len(self._entries) >= self._max_streams or self._size_bytes + wanted > self._max_bytes:
            raise LockstepError(
                ErrorCode.OVERLOADED, "this router runs as many resumable streams as it can keep", retry_after_s=1
            )
        own = self._holdings.setdefault(record.tenant, own)
        own.streams += 1
        self._entries[record.request_id] = _Entry(record, own, [ChoiceLog() for _ in record.choices], 0)
        self._grow(self._entries[record.request_id], wanted)

    def append(self, request_id: str, piece: Piece) -> None:
        """Append tokens.

        Raises:
            ValueError: the piece does not continue its choice.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.outcome is not None:
            return
        log = entry.logs[piece.index]
        before = len(log.ids)
        log.add(piece)
        if len(log.ids) > before:
            self._grow(entry, piece.size_bytes)
            own = entry.holding
            while self._size_bytes > self._max_bytes and self._evict(_bytes_of, own.size_bytes, own):
                pass

    async def seal(self, request_id: str, outcome: Outcome, keep_s: float) -> None:
        """Note how a stream ended."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.outcome is None:
            entry.outcome, entry.expires_at = outcome, self._clock() + keep_s
            self._kept += 1
            self._ended += 1
            entry.holding.sealed[request_id] = self._ended
            self._remind(entry.expires_at, request_id)

    async def read(self, request_id: str) -> StoredStream | None:
        """A stream; None if there is none."""
        self.expire()
        return self.held(request_id)

    def held(self, request_id: str) -> StoredStream | None:
        """A stream that is kept now; None if there is none. Its logs go on growing while it runs."""
        entry = self._entries.get(request_id)
        return None if entry is None else StoredStream(entry.record, entry.logs, entry.outcome)

    async def remove(self, request_id: str) -> None:
        """Forget a stream, and the idempotency key that names it."""
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """The same at once."""
        self._remove(request_id)

    async def settle(self, request_id: str) -> None:
        """Return at once: no other router knows a stream of this store."""

    async def leave(self, request_id: str) -> None:
        """Forget a stream: no other router knows it."""
        self._remove(request_id)

    @property
    def is_away(self) -> bool:
        """There are no other routers to ask about."""
        return False

    async def look_up(self, request_id: str, owner: str) -> StoredStream | None:  # noqa: ARG002
        """None: this store knows no other router's streams."""
        return None

    async def take(self, known: StoredStream) -> StoredStream | None:
        """Let a stream go on that has failed here: this store knows no other router's streams."""
        return self.reopen(known.record.request_id)

    def reopen(self, request_id: str) -> StoredStream | None:
        """Let a stream go on that has ended here, after what it has; None: there is none."""
        entry = self._entries.get(request_id)
        if entry is None or entry.outcome is None:
            return None
        entry.outcome = None
        del entry.holding.sealed[request_id]
        self._kept -= 1
        return StoredStream(entry.record, [log.copied() for log in entry.logs], None)

    async def discard(self, request_id: str, owner: str) -> bool:  # noqa: ARG002
        """False: this store knows no other router's streams."""
        return False

    def on_taken(self, callback: Callable[[str, float, bool], None]) -> None:
        """Do nothing: no router takes a stream from this store."""

    async def claim(self, scope: str, claim: Claim) -> Claim | None:
        """Give an idempotency key to a stream, unless another one has it."""
        self.expire()
        known = self._claims.setdefault(scope, claim)
        if known is not claim:
            return known
        self._scopes[claim.request_id] = scope
        return None

    async def find(self, scope: str) -> Claim | None:
        """The claim of the stream that has an idempotency key; None if none has it."""
        self.expire()
        return self._claims.get(scope)

    async def release(self, request_id: str) -> None:
        """Make the idempotency key of a stream free for another one."""
        self._release(request_id)

    def shrink(self, wanted_bytes: int) -> None:
        """Forget streams that have ended, until so many bytes are free."""
        enough = self._size_bytes - wanted_bytes
        while self._size_bytes > enough and self._evict(_bytes_of, 0, None):
            pass

    def expire(self) -> None:
        """Forget the streams whose time is over. It looks at no others: every request calls this."""
        if not self._due:
            return
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, request_id = heapq.heappop(self._due)
            entry = self._entries.get(request_id)
            # One that has gone on and ended again has a later reminder.
            if entry is not None and entry.outcome is not None and entry.expires_at <= now:
                self._remove(request_id)

    def _remind(self, at: float, request_id: str) -> None:
        """Look at a stream at this time. Reminders of streams that are gone or go on are few."""
        heapq.heappush(self._due, (at, request_id))
        if len(self._due) > 2 * self._kept + _SPARE_REMINDERS:
            ended = (each for holding in self._holdings.values() for each in holding.sealed)
            self._due = [(self._entries[each].expires_at, each) for each in ended]
            heapq.heapify(self._due)

    def _evict(self, size_of: Callable[[_Holding], int], least: int, own: _Holding | None) -> bool:
        """Forget one stream of the tenant that has the most, if that is at least so much, or else one of `own`; whether
        there was one.
        """
        holdings = [each for each in self._holdings.values() if each.sealed]
        if not holdings:
            return False
        chosen = max(holdings, key=lambda each: (size_of(each), -each.oldest))
        if size_of(chosen) < least and chosen is not own:
            if own is None or not own.sealed:
                return False
            chosen = own
        self._remove(next(iter(chosen.sealed)))
        return True

    def _grow(self, entry: _Entry, size_bytes: int) -> None:
        entry.size_bytes += size_bytes
        entry.holding.size_bytes += size_bytes
        self._size_bytes += size_bytes

    def _remove(self, request_id: str) -> None:
        self._release(request_id)
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._grow(entry, -entry.size_bytes)
        holding = entry.holding
        holding.streams -= 1
        if holding.sealed.pop(request_id, None) is not None:
            self._kept -= 1
        if not holding.streams:
            del self._holdings[entry.record.tenant]

    def _release(self, request_id: str) -> None:
        scope = self._scopes.pop(request_id, None)
        if scope is not None:
            del self._claims[scope]


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _streams_of(holding: _Holding) -> int:
    return holding.streams


def _bytes_of(holding: _Holding) -> int:
    return holding.size_bytes
