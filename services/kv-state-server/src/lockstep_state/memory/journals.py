"""Journals of streams in memory. Streams that run are never evicted; those that have ended are, the oldest first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep_api.v1 import state_pb2
from lockstep_api.v1.state_pb2 import WriteResult

from lockstep_state import results
from lockstep_state.backend import Limits, StoredStream, Take, Write
from lockstep_state.logs import Log
from lockstep_state.memory.shelf import ENTRY_BYTES, Entry, Room, Shelf

_LOG_BYTES = 300
"""Memory of one choice without its tokens, about."""

MAX_TOMBSTONES = 16_384
"""Of all tenants; beyond it the oldest are forgotten."""


@dataclass
class Stream:
    """One stream."""

    record: bytes
    owner: str
    epoch: int
    logs: list[Log]
    ends_at: float | None = None
    """When the request's own timeout ends."""
    seal: bytes | None = None


class Journals:
    """The streams.

    Args:
        room: where they count.
        limits: of a stream and of a tenant.
        clock: gives seconds.
        on_change: called with the key of each stream that begins to run, or runs no more.
    """

    def __init__(
        self, room: Room, limits: Limits, clock: Callable[[], float], on_change: Callable[[str], None]
    ) -> None:
        self._room = room
        self._limits = limits
        self._clock = clock
        self._on_change = on_change
        self.running: Shelf[Stream] = Shelf(
            "running", room, clock, counts_streams=True, on_take=lambda key, _: on_change(key)
        )
        self.ended: Shelf[Stream] = Shelf("ended", room, clock, counts_streams=True, on_evict=self._fence_evicted)
        self.tombstones: Shelf[int] = Shelf("marks", room, clock)  # its name in the metrics
        """The epochs of trimmed and evicted streams that had been taken: a router that had one before must not open it
        again.
        """

    def append(self, write: Write) -> WriteResult:
        """Write to one stream, completely or not at all."""
        entry = self._find(write.key)
        if entry is None:
            return self._open(write)
        stream = entry.value
        if write.epoch < stream.epoch:
            return results.stale(stream.epoch)
        if write.opening is not None and write.opening.record != stream.record:
            return results.plain(state_pb2.WRITE_OUTCOME_CONFLICT)
        refused = results.refusal(stream.logs, write.pieces) or results.seal_refusal(stream.logs, stream.seal, write)
        if refused is None:
            refused = self._grow(entry, write)
        return refused or results.ok(stream.epoch)

    def read(self, key: str, take: Take | None) -> StoredStream | None:
        """A stream; with `take` under a higher epoch."""
        entry = self._find(key)
        if entry is None:
            return None
        stream = entry.value
        if take is not None:
            stream.epoch += 1
            stream.owner = take.owner
            (self.running if stream.seal is None else self.ended).grow(key, 0, take.ttl_s)
        left_s = None if stream.ends_at is None else max(0.0, stream.ends_at - self._clock())
        return StoredStream(stream.record, stream.logs, stream.seal, stream.epoch, stream.owner, left_s)

    def trim(self, key: str, tombstone_ttl_s: float) -> bool:
        """Forget a stream; whether there was one. One that was taken leaves a tombstone."""
        self._find(key)  # one whose time is over is none
        entry = self.running.take(key) or self.ended.take(key)
        if entry is None:
            return False
        self._fence(key, entry, tombstone_ttl_s)
        return True

    def _fence_evicted(self, key: str, entry: Entry[Stream]) -> None:
        """Leave the tombstone that a trim would, for as long as the stream would have been there."""
        self._fence(key, entry, entry.expires_at - self._clock())

    def _fence(self, key: str, entry: Entry[Stream], ttl_s: float) -> None:
        epoch = entry.value.epoch
        if epoch > 1 and ttl_s > 0:  # no write has an epoch below the first one
            while len(self.tombstones) >= MAX_TOMBSTONES and self.tombstones.evict():
                pass
            self.tombstones.put(key, epoch, ENTRY_BYTES, entry.tenant, ttl_s)

    def _find(self, key: str) -> Entry[Stream] | None:
        return self.running.find(key) or self.ended.find(key)

    def _open(self, write: Write) -> WriteResult:
        tombstone = self.tombstones.find(write.key)
        if tombstone is not None and write.epoch < tombstone.value:
            return results.stale(tombstone.value)
        opening = write.opening
        if opening is None:
            return results.plain(state_pb2.WRITE_OUTCOME_UNKNOWN)
        logs = [Log() for _ in range(opening.choices)]
        refused = results.refusal(logs, write.pieces)
        if refused is not None:
            return refused
        tally = self._room.tally(write.tenant)
        size_bytes = ENTRY_BYTES + len(opening.record) + _LOG_BYTES * opening.choices
        if tally.streams >= self._limits.tenant_streams or tally.size_bytes + size_bytes > self._limits.tenant_bytes:
            return results.plain(state_pb2.WRITE_OUTCOME_FULL)
        refused = self._refuse_size(size_bytes + _growth_bytes(logs, write), 0)
        if refused is not None:
            return refused
        ends_at = None if opening.left_s is None else self._clock() + opening.left_s
        stream = Stream(opening.record, opening.owner, write.epoch, logs, ends_at)
        self.running.put(write.key, stream, size_bytes, write.tenant, write.ttl_s)
        self._on_change(write.key)
        self._apply(stream, write, _growth_bytes(logs, write))
        return results.ok(stream.epoch)

    def _grow(self, entry: Entry[Stream], write: Write) -> WriteResult | None:
        growth = _growth_bytes(entry.value.logs, write) if entry.value.seal is None else 0
        refused = self._refuse_size(growth, entry.size_bytes)
        if refused is None:
            self._apply(entry.value, write, growth)
        return refused

    def _refuse_size(self, growth_bytes: int, size_bytes: int) -> WriteResult | None:
        if size_bytes + growth_bytes > self._limits.stream_bytes:
            return results.plain(state_pb2.WRITE_OUTCOME_TOO_LARGE)
        if growth_bytes and not self._room.make(growth_bytes):
            return results.plain(state_pb2.WRITE_OUTCOME_FULL)
        return None

    def _apply(self, stream: Stream, write: Write, growth: int) -> None:
        stream.epoch = write.epoch
        if stream.seal is not None:
            return  # a repeat: what is kept after the end is kept as long as it was to be
        for piece in write.pieces:
            log = stream.logs[piece.choice]
            if log.is_news(piece):
                log.add(log.rest(piece))
        self.running.grow(write.key, growth, write.ttl_s)
        if write.seal is not None:
            stream.seal = write.seal
            entry = self.running.take(write.key)
            assert entry is not None
            self.ended.put(write.key, stream, entry.size_bytes, entry.tenant, write.ttl_s)


def _growth_bytes(logs: Sequence[Log], write: Write) -> int:
    seal = 0 if write.seal is None else len(write.seal)
    return seal + sum(_piece_bytes(logs[piece.choice], piece) for piece in write.pieces)


def _piece_bytes(log: Log, piece: state_pb2.Piece) -> int:
    fresh = max(0, piece.position + len(piece.ids) - len(log.ids))
    logprobs = sum(each.ByteSize() + 40 for each in piece.logprobs[len(piece.logprobs) - fresh :]) if fresh else 0
    return 4 * fresh + logprobs
