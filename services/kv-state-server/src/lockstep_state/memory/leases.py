"""Leases in memory. An epoch is at least the wall clock's milliseconds, so it grows over the end of the process."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep_state.backend import Lease
from lockstep_state.errors import full
from lockstep_state.memory.shelf import ENTRY_BYTES, Room, Shelf

KEEP_S = 3600.0
"""A lease is remembered for so long after its end."""


@dataclass
class _Held:
    owner: str
    epoch: int
    until: float


class Leases:
    """The leases.

    Args:
        room: where they count.
        clock: gives seconds.
        wall_ms: gives milliseconds since 1970.
    """

    def __init__(self, room: Room, clock: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        self._clock = clock
        self._wall_ms = wall_ms
        self._room = room
        self.shelf: Shelf[_Held] = Shelf("leases", room, clock)

    def look_up(self, key: str) -> Lease:
        """A lease now."""
        entry = self.shelf.find(key)
        if entry is None:
            return Lease("", 0, 0.0)
        left_s = max(0.0, entry.value.until - self._clock())
        return Lease(entry.value.owner if left_s else "", entry.value.epoch, left_s)

    def acquire(self, key: str, owner: str, ttl_s: float) -> tuple[bool, Lease]:
        """Take a lease that no other owner holds.

        Raises:
            LockstepError: OVERLOADED, there is no room.
        """
        now = self.look_up(key)
        if now.owner not in ("", owner):
            return False, now
        if key not in self.shelf and not self._room.make(ENTRY_BYTES):
            raise full()
        self._set(key, owner, max(now.epoch + 1, self._wall_ms()), ttl_s)
        return True, self.look_up(key)

    def renew(self, key: str, owner: str, epoch: int, ttl_s: float) -> tuple[bool, Lease]:
        """Hold a lease for longer."""
        now = self.look_up(key)
        if (now.owner, now.epoch) != (owner, epoch):
            return False, now
        self._set(key, owner, epoch, ttl_s)
        return True, self.look_up(key)

    def release(self, key: str, owner: str, epoch: int) -> tuple[bool, Lease]:
        """Give a lease back."""
        now = self.look_up(key)
        if (now.owner, now.epoch) != (owner, epoch):
            return False, now
        self._set(key, "", epoch, 0.0)
        return True, self.look_up(key)

    def _set(self, key: str, owner: str, epoch: int, ttl_s: float) -> None:
        held = _Held(owner, epoch, self._clock() + ttl_s)
        self.shelf.put(key, held, ENTRY_BYTES, "", ttl_s + KEEP_S)
