"""Journals in this process's memory: they end with it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.journals.records import ChoiceLog, Claim, Outcome, Piece, Record, StoredStream


@dataclass
class _Entry:
    record: Record
    logs: list[ChoiceLog]
    size_bytes: int
    outcome: Outcome | None = None
    expires_at: float = 0.0


class MemoryJournalStore:
    """A bounded number of journals. Those that ended first are evicted first; those that still run never are."""

    def __init__(self, max_streams: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Make an empty store.

        Args:
            max_streams: journals at a time.
            max_bytes: memory of all journals together, about.
            clock: gives seconds.
        """
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._sealed: dict[str, None] = {}
        """The streams that have ended, in that order."""
        self._claims: dict[str, Claim] = {}
        self._scopes: dict[str, str] = {}
        """The key of each stream that has one."""
        self._size_bytes = 0

    @property
    def kept(self) -> int:
        """Streams that have ended and are still kept."""
        return len(self._sealed)

    @property
    def size_bytes(self) -> int:
        """Approximate memory of all streams."""
        return self._size_bytes

    async def open(self, record: Record) -> None:
        """Begin the journal of a stream.

        Raises:
            LockstepError: OVERLOADED, there is no room for it.
        """
        self.expire()
        while self._sealed and len(self._entries) >= self._max_streams:
            self._evict()
        self._make_room(record.size_bytes)
        if len(self._entries) >= self._max_streams or self._size_bytes + record.size_bytes > self._max_bytes:
            raise LockstepError(
                ErrorCode.OVERLOADED, "this router runs as many resumable streams as it can keep", retry_after_s=1
            )
        self._entries[record.request_id] = _Entry(record, [ChoiceLog() for _ in record.choices], record.size_bytes)
        self._size_bytes += record.size_bytes

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
            entry.size_bytes += piece.size_bytes
            self._size_bytes += piece.size_bytes
            self._make_room(0)

    async def seal(self, request_id: str, outcome: Outcome, keep_s: float) -> None:
        """Note how a stream ended."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.outcome is None:
            entry.outcome, entry.expires_at = outcome, self._clock() + keep_s
            self._sealed[request_id] = None

    async def read(self, request_id: str) -> StoredStream | None:
        """A stream; None if there is none."""
        self.expire()
        entry = self._entries.get(request_id)
        return None if entry is None else StoredStream(entry.record, entry.logs, entry.outcome)

    async def remove(self, request_id: str) -> None:
        """Forget a stream, and the idempotency key that names it."""
        self._remove(request_id)

    async def claim(self, scope: str, claim: Claim) -> Claim | None:
        """Give an idempotency key to a stream, unless another one has it."""
        self.expire()
        known = self._claims.setdefault(scope, claim)
        if known is not claim:
            return known
        self._scopes[claim.request_id] = scope
        return None

    async def release(self, request_id: str) -> None:
        """Make the idempotency key of a stream free for another one."""
        self._release(request_id)

    def shrink(self, wanted_bytes: int) -> None:
        """Forget the streams that ended first, until so many bytes are free."""
        enough = self._size_bytes - wanted_bytes
        while self._sealed and self._size_bytes > enough:
            self._evict()

    def expire(self) -> None:
        """Forget the streams whose time is over."""
        now = self._clock()
        for request_id in [each for each in self._sealed if self._entries[each].expires_at <= now]:
            self._remove(request_id)

    def _make_room(self, wanted_bytes: int) -> None:
        while self._sealed and self._size_bytes + wanted_bytes > self._max_bytes:
            self._evict()

    def _evict(self) -> None:
        self._remove(next(iter(self._sealed)))

    def _remove(self, request_id: str) -> None:
        self._release(request_id)
        self._sealed.pop(request_id, None)
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._size_bytes -= entry.size_bytes

    def _release(self, request_id: str) -> None:
        scope = self._scopes.pop(request_id, None)
        if scope is not None:
            del self._claims[scope]
