"""What became of each resumable stream of one router process, as its journal store and its connections show.

From it follows what a client that comes back must find, and what it cannot find any more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep_router.journals import Claim, JournalStore, Outcome, RequestRecord, StoredStream

SLACK_S = 0.3
"""Delays of the network, and turns of the event loop."""
_EXPIRY_S = 1.0
"""Routers forget streams about every second."""


@dataclass
class Track:
    """One resumable stream in one router process."""

    request_id: str
    stream_ids: tuple[str, ...]
    readers: int = 0
    """Connections that have named it."""
    left_at: float | None = None
    """When the last of them ended."""
    sealed_at: float | None = None
    cancelled_at: float | None = None
    """When a client's cancel was answered."""
    has_failed: bool = False
    owned_at: float = 0.0
    """Since when its router has it."""

    def must_exist(self, now: float, window_s: float) -> bool:
        """Whether a client that comes now must find it, if its router has not been stopped meanwhile."""
        if self.cancelled_at is not None:
            return False
        if self.sealed_at is not None:
            return now - self.sealed_at < window_s - SLACK_S
        return self.readers > 0 or (self.left_at is not None and now - self.left_at < window_s - SLACK_S)

    def cannot_exist(self, now: float, window_s: float) -> bool:
        """Whether a client that comes now cannot find it."""
        if self.cancelled_at is not None:
            return now > self.cancelled_at
        if self.sealed_at is not None:
            return now - self.sealed_at > window_s + _EXPIRY_S + SLACK_S
        return self.readers == 0 and self.left_at is not None and now - self.left_at > window_s + SLACK_S


@dataclass
class Tracks:
    """The resumable streams of one router process."""

    by_id: dict[str, Track] = field(default_factory=dict)
    left_at: dict[str, float] = field(default_factory=dict)
    """By the subject: when the last of them ended."""
    scopes: list[str] = field(default_factory=list)
    """Idempotency keys that were claimed."""
    _by_stream: dict[str, Track] = field(default_factory=dict)

    def of_stream(self, stream_id: str) -> Track | None:
        """The resumable stream that one of a worker's streams belongs to."""
        return self._by_stream.get(stream_id)

    def add(self, track: Track) -> None:
        self.by_id[track.request_id] = track
        self._by_stream.update(dict.fromkeys(track.stream_ids, track))


class WatchedStore:
    """Passes everything on to a store, and notes when streams begin and end."""

    def __init__(
        self, store: JournalStore, tracks: Tracks, now: Callable[[], float], on_owned: Callable[[str], None]
    ) -> None:
        self._store = store
        self._tracks = tracks
        self._now = now
        self._on_owned = on_owned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def open(self, record: RequestRecord) -> None:
        await self._store.open(record)
        self._begin(record)

    async def seal(self, request_id: str, outcome: Outcome, keep_s: float) -> None:
        await self._store.seal(request_id, outcome, keep_s)
        track = self._tracks.by_id.get(request_id)
        if track is not None:
            track.sealed_at, track.has_failed = self._now(), outcome.failure is not None

    async def take(self, known: StoredStream) -> StoredStream | None:
        taken = await self._store.take(known)
        track = self._tracks.by_id.get(known.record.request_id)
        if taken is not None and track is None:
            track = self._begin(taken.record)
        if taken is not None and track is not None:
            self._on_owned(track.request_id)
            track.owned_at = self._now()
            if taken.outcome is None:
                track.sealed_at, track.has_failed = None, False  # it had failed, and goes on
            else:
                track.sealed_at, track.has_failed = self._now(), taken.outcome.failure is not None
        return taken

    def _begin(self, record: RequestRecord) -> Track:
        streams = tuple(choice.stream_id for choice in record.choices)
        track = Track(record.request_id, streams, owned_at=self._now())
        self._tracks.add(track)
        self._on_owned(record.request_id)
        return track

    async def claim(self, scope: str, claim: Claim) -> Claim | None:
        self._tracks.scopes.append(scope)
        return await self._store.claim(scope, claim)
