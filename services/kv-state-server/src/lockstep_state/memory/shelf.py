"""Values with a size, a tenant and a time to live, and the room that several shelves of them share."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lockstep_state import metrics

Value = TypeVar("Value")

ENTRY_BYTES = 400
"""Memory of an entry besides its value, about."""
_SPARE_REMINDERS = 64


@dataclass
class Tally:
    """What a tenant has."""

    size_bytes: int = 0
    streams: int = 0


class Room:
    """A number of bytes, and what each tenant has of them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._tallies: dict[str, Tally] = {}
        self._evictable: Sequence[Shelf[object]] = ()

    def evict_from(self, shelves: "Sequence[Shelf[object]]") -> None:
        """Set where room is made, the first one first."""
        self._evictable = shelves

    def tally(self, tenant: str) -> Tally:
        """What a tenant has now."""
        return self._tallies.get(tenant, Tally())

    def count(self, tenant: str, size_bytes: int, streams: int) -> None:
        """Note that a tenant's part has changed."""
        self.used_bytes += size_bytes
        tally = self._tallies.setdefault(tenant, Tally())
        tally.size_bytes += size_bytes
        tally.streams += streams
        if not tally.size_bytes and not tally.streams:
            del self._tallies[tenant]

    def can_make(self, wanted_bytes: int, shelves: "Sequence[Shelf[object]]") -> bool:
        """Whether so many bytes would be free if all on these shelves were evicted."""
        evictable = sum(shelf.size_bytes for shelf in shelves)
        return self.used_bytes - evictable + wanted_bytes <= self.max_bytes

    def make(self, wanted_bytes: int, shelves: "Sequence[Shelf[object]] | None" = None) -> bool:
        """Evict until so many bytes are free; False if they cannot be. Then nothing is evicted for them.

        Args:
            wanted_bytes: that have to be free.
            shelves: from which is evicted; all that are evictable if not given.
        """
        if shelves is None:
            shelves = self._evictable
        if not self.can_make(wanted_bytes, shelves):
            return False
        for shelf in shelves:
            while self.used_bytes + wanted_bytes > self.max_bytes and shelf.evict():
                pass
        return True


@dataclass
class Entry(Generic[Value]):
    """A value on a shelf."""

    value: Value
    size_bytes: int
    tenant: str
    expires_at: float


class Shelf(Generic[Value]):
    """Values by key; the least recently used is evicted first.

    Args:
        name: in metrics.
        room: where sizes count.
        clock: gives seconds.
        counts_streams: each value is a stream of its tenant.
        on_take: called with each entry that is removed, for whatever reason, and its key.
        on_evict: called with each entry that is evicted, and its key. It may put less on another shelf.
    """

    def __init__(
        self,
        name: str,
        room: Room,
        clock: Callable[[], float],
        *,
        counts_streams: bool = False,
        on_take: Callable[[str, Entry[Value]], None] = lambda *_: None,
        on_evict: Callable[[str, Entry[Value]], None] = lambda *_: None,
    ) -> None:
        self.name = name
        self._on_take = on_take
        self._on_evict = on_evict
        metrics.EVICTIONS.labels(name)  # from 0: of a series that begins at 1, Prometheus sees no increase
        self.size_bytes = 0
        self._room = room
        self._clock = clock
        self._streams = int(counts_streams)
        self._entries: OrderedDict[str, Entry[Value]] = OrderedDict()
        self._due: list[tuple[float, str]] = []
        """When to look at each entry: at least once, at or before its time is over."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def find(self, key: str) -> Entry[Value] | None:
        """An entry whose time is not over; it counts as used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_at <= self._clock():
            self.take(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def put(self, key: str, value: Value, size_bytes: int, tenant: str, ttl_s: float) -> None:
        """Put a value in the place of one that may be there. The room has been made."""
        self.take(key)
        entry = Entry(value, size_bytes, tenant, self._clock() + ttl_s)
        self._entries[key] = entry
        self._remind(entry.expires_at, key)
        self._count(entry, size_bytes, self._streams)

    def grow(self, key: str, by_bytes: int, ttl_s: float) -> None:
        """Note that a value has grown; its time begins again."""
        entry = self._entries[key]
        entry.size_bytes += by_bytes
        self._count(entry, by_bytes, 0)
        expires_at = self._clock() + ttl_s
        if expires_at < entry.expires_at:
            self._remind(expires_at, key)
        entry.expires_at = expires_at

    def take(self, key: str) -> Entry[Value] | None:
        """Remove an entry."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(entry, -entry.size_bytes, -self._streams)
            self._on_take(key, entry)
        return entry

    def evict(self) -> bool:
        """Remove the least recently used entry; False if there is none."""
        if not self._entries:
            return False
        key = next(iter(self._entries))
        entry = self._entries[key]
        self.take(key)
        metrics.EVICTIONS.labels(self.name).inc()
        self._on_evict(key, entry)
        return True

    def expire(self) -> None:
        """Remove the entries whose time is over."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.expires_at <= now:
                self.take(key)
            else:
                heapq.heappush(self._due, (entry.expires_at, key))

    def _remind(self, at: float, key: str) -> None:
        """Look at an entry at this time. Reminders of entries that are gone or replaced are few."""
        heapq.heappush(self._due, (at, key))
        if len(self._due) > 2 * len(self._entries) + _SPARE_REMINDERS:
            self._due = [(entry.expires_at, each) for each, entry in self._entries.items()]
            heapq.heapify(self._due)

    def _count(self, entry: Entry[Value], size_bytes: int, streams: int) -> None:
        self.size_bytes += size_bytes
        self._room.count(entry.tenant, size_bytes, streams)
