"""Names in memory: sessions and idempotency keys. The key of a request that runs is never evicted: whoever looked for
it would find it free, and begin the request a second time. All other names are, the least recently used first.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep_state.backend import Binding, Limits
from lockstep_state.errors import full, over_quota
from lockstep_state.memory.shelf import ENTRY_BYTES, Entry, Room, Shelf

CLAIMED_S = 3.0
"""A key is kept for so long after it, or its mark, was claimed, though there is no stream: a request that is being
prepared, or whose stream finds no room, is marked every second.
"""
_INDEX_BYTES = 400
"""Memory of what finds a name by its stream, about."""


@dataclass(frozen=True)
class Bound:
    """What a name is bound to."""

    binding: Binding
    stream: str
    """The key of the request's stream; empty: it is bound to no request."""


class Names:
    """The names.

    Args:
        room: where they count.
        limits: of a tenant.
        clock: gives seconds.
        runs: whether there is a stream with this key that runs.
    """

    def __init__(self, room: Room, limits: Limits, clock: Callable[[], float], runs: Callable[[str], bool]) -> None:
        self._room = room
        self._limits = limits
        self._clock = clock
        self._runs = runs
        self.idle: Shelf[Bound] = Shelf("names", room, clock, on_take=self._note_taken)
        self.held: Shelf[Bound] = Shelf("held_names", room, clock, on_take=self._note_taken)
        """Not to be evicted."""
        self._of_streams: dict[str, set[str]] = {}
        """The names that are bound to the request of each stream."""
        self._claimed_until: dict[str, float] = {}
        """By stream, the one that was claimed last at the end."""

    def find(self, key: str) -> Binding | None:
        """What a name is bound to."""
        entry = self._entry(key)
        return None if entry is None else entry.value.binding

    def bind(
        self, tenant: str, key: str, binding: Binding, ttl_s: float, expected: bytes | None, stream: str
    ) -> tuple[bool, Binding]:
        """Bind a name; see `Backend`."""
        entry = self._entry(key)
        now = Binding(b"") if entry is None else entry.value.binding
        if expected is not None and now.target not in (expected, binding.target):
            return False, now
        if stream:  # a mark for which there is no room says nevertheless that its request is not done
            self._claimed_until.pop(stream, None)
            self._claimed_until[stream] = self._clock() + CLAIMED_S
            self.settle(stream)
        size_bytes = ENTRY_BYTES + len(binding.target) + len(binding.note) + (_INDEX_BYTES if stream else 0)
        growth_bytes = size_bytes - (0 if entry is None else entry.size_bytes)
        if growth_bytes > 0 and self._room.tally(tenant).size_bytes + growth_bytes > self._limits.tenant_bytes:
            raise over_quota()
        former = self._take(key)  # its room is for the new one
        if not self._room.make(size_bytes):
            if former is not None:
                self._put(key, former.value, former.size_bytes, former.tenant, former.expires_at - self._clock())
            raise full()
        self._put(key, Bound(binding, stream), size_bytes, tenant, ttl_s)
        return True, binding

    def touch(self, key: str, ttl_s: float) -> Binding | None:
        """What a name is bound to; its time begins again."""
        entry = self._entry(key)
        if entry is None:
            return None
        (self.held if key in self.held else self.idle).grow(key, 0, ttl_s)
        return entry.value.binding

    def unbind(self, key: str, target: bytes | None) -> bool:
        """Forget a name, if it is bound to this target (None: to any); whether it was."""
        entry = self._entry(key)
        if entry is None or target not in (None, entry.value.binding.target):
            return False
        self._take(key)
        return True

    def settle(self, stream: str) -> None:
        """Hold the names of a stream, or let them be evicted: whether it runs may have changed."""
        source, target = (self.idle, self.held) if self._is_held(stream) else (self.held, self.idle)
        for key in tuple(self._of_streams.get(stream, ())):
            entry = source.find(key)
            if entry is not None:
                target.put(key, entry.value, entry.size_bytes, entry.tenant, entry.expires_at - self._clock())
                source.take(key)

    def expire(self) -> None:
        """Forget what has expired, and let what was claimed too long ago be evicted."""
        now = self._clock()
        while self._claimed_until:
            stream, until = next(iter(self._claimed_until.items()))
            if until > now:
                break
            del self._claimed_until[stream]
            self.settle(stream)
        self.idle.expire()
        self.held.expire()

    def _entry(self, key: str) -> Entry[Bound] | None:
        return self.held.find(key) or self.idle.find(key)

    def _take(self, key: str) -> Entry[Bound] | None:
        return self.held.take(key) or self.idle.take(key)

    def _put(self, key: str, bound: Bound, size_bytes: int, tenant: str, ttl_s: float) -> None:
        (self.held if self._is_held(bound.stream) else self.idle).put(key, bound, size_bytes, tenant, ttl_s)
        if bound.stream:
            self._of_streams.setdefault(bound.stream, set()).add(key)

    def _is_held(self, stream: str) -> bool:
        return self._runs(stream) or stream in self._claimed_until

    def _note_taken(self, key: str, entry: Entry[Bound]) -> None:
        stream = entry.value.stream
        if not stream or key in self.held or key in self.idle:  # it has only moved
            return
        keys = self._of_streams[stream]
        keys.discard(key)
        if not keys:
            del self._of_streams[stream]
