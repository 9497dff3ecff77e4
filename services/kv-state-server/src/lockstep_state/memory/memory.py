"""The backend in memory. Its operations run in the event loop without a pause, which makes them atomic."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

from lockstep_api.v1 import state_pb2

from lockstep_state import metrics
from lockstep_state.backend import Binding, Block, Lease, Limits, StoredStream, Take, Write
from lockstep_state.memory.journals import Journals
from lockstep_state.memory.leases import Leases
from lockstep_state.memory.names import Names
from lockstep_state.memory.shelf import ENTRY_BYTES, Room, Shelf

_EXPIRE_EVERY_S = 1.0


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryBackend:
    """Everything in memory. Blocks are evicted first, then streams that have ended, names (not the idempotency keys of
    requests that run), and tombstones of streams; then calls are refused. For a block, blocks alone are evicted. A
    taken stream leaves a tombstone when it is evicted.

    Args:
        max_bytes: of everything together, about.
        limits: of a stream and of a tenant.
        clock: gives seconds.
        wall_ms: gives milliseconds since 1970.
    """

    def __init__(
        self,
        max_bytes: int,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = _wall_ms,
    ) -> None:
        self._limits = limits
        self._room = Room(max_bytes)
        metrics.MEMORY_LIMIT_BYTES.set(max_bytes)
        self._journals = Journals(self._room, limits, clock, on_change=self._settle)
        self._leases = Leases(self._room, clock, wall_ms)
        self._blocks: Shelf[bytes] = Shelf("blocks", self._room, clock)
        self._names = Names(self._room, limits, clock, runs=self._journals.running.__contains__)
        evictable = (self._blocks, self._journals.ended, self._names.idle, self._journals.tombstones)
        self._room.evict_from(cast("Sequence[Shelf[object]]", evictable))

    @property
    def unready(self) -> str | None:
        """Never."""
        return None

    @property
    def used_bytes(self) -> int:
        """Approximate memory of everything."""
        return self._room.used_bytes

    async def append(self, writes: Sequence[Write]) -> list[state_pb2.WriteResult]:
        """See `Backend`."""
        return [self._journals.append(write) for write in writes]

    async def read(self, key: str, take: Take | None = None) -> StoredStream | None:
        """See `Backend`."""
        return self._journals.read(key, take)

    async def head(self, key: str) -> StoredStream | None:
        """See `Backend`."""
        return self._journals.read(key, None)

    async def trim(self, tenant: str, keys: Sequence[str], tombstone_ttl_s: float) -> int:  # noqa: ARG002
        """See `Backend`."""
        return sum(self._journals.trim(key, tombstone_ttl_s) for key in keys)

    async def bind(
        self, tenant: str, key: str, binding: Binding, ttl_s: float, expected: bytes | None, stream: str = ""
    ) -> tuple[bool, Binding]:
        """See `Backend`."""
        return self._names.bind(tenant, key, binding, ttl_s, expected, stream)

    async def bound(self, key: str) -> Binding | None:
        """See `Backend`."""
        return self._names.find(key)

    async def touch(self, tenant: str, key: str, ttl_s: float) -> Binding | None:  # noqa: ARG002
        """See `Backend`."""
        return self._names.touch(key, ttl_s)

    async def unbind(self, tenant: str, key: str, target: bytes | None) -> bool:  # noqa: ARG002
        """See `Backend`."""
        return self._names.unbind(key, target)

    async def acquire(self, key: str, owner: str, ttl_s: float) -> tuple[bool, Lease]:
        """See `Backend`."""
        return self._leases.acquire(key, owner, ttl_s)

    async def renew(self, key: str, owner: str, epoch: int, ttl_s: float) -> tuple[bool, Lease]:
        """See `Backend`."""
        return self._leases.renew(key, owner, epoch, ttl_s)

    async def release(self, key: str, owner: str, epoch: int) -> tuple[bool, Lease]:
        """See `Backend`."""
        return self._leases.release(key, owner, epoch)

    async def lease(self, key: str) -> Lease:
        """See `Backend`."""
        return self._leases.look_up(key)

    async def put(self, blocks: Sequence[Block]) -> list[bool]:
        """See `Backend`."""
        return [self._put(block) for block in blocks]

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Backend`."""
        entries = map(self._blocks.find, keys)
        return [None if entry is None else entry.value for entry in entries]

    async def sizes(self, keys: Sequence[str]) -> list[int]:
        """See `Backend`."""
        entries = map(self._blocks.find, keys)
        return [0 if entry is None else len(entry.value) for entry in entries]

    async def discard(self, tenant: str, keys: Sequence[str]) -> None:  # noqa: ARG002
        """See `Backend`."""
        for key in keys:
            self._blocks.take(key)

    async def run(self) -> None:
        """Forget what has expired, once a second."""
        while True:
            self.expire()
            await asyncio.sleep(_EXPIRE_EVERY_S)

    def expire(self) -> None:
        """Forget what has expired."""
        journals = self._journals
        expiring = (
            journals.running,
            journals.ended,
            journals.tombstones,
            self._blocks,
            self._names,
            self._leases.shelf,
        )
        for each in expiring:
            each.expire()
        names = (self._names.idle, self._names.held)
        for shelf in (journals.running, journals.ended, journals.tombstones, self._blocks, *names, self._leases.shelf):
            metrics.ENTRIES.labels(shelf.name).set(len(shelf))
        metrics.MEMORY_BYTES.set(self._room.used_bytes)
        metrics.BLOCK_MEMORY_BYTES.set(self._blocks.size_bytes)

    async def close(self) -> None:
        """There is nothing to close."""

    def _settle(self, stream: str) -> None:
        self._names.settle(stream)  # streams and names need each other: the names are made later

    def _put(self, block: Block) -> bool:
        size_bytes = ENTRY_BYTES + len(block.value)
        counted_for = f"{block.tenant}:blocks"  # apart from the tenant's streams, whose room they do not take
        old = self._blocks.find(block.key)
        others = self._room.tally(counted_for).size_bytes - (old.size_bytes if old else 0)
        if others + size_bytes > self._limits.tenant_block_bytes:
            return False
        shelves = cast("Sequence[Shelf[object]]", (self._blocks,))
        if not self._room.can_make(size_bytes, shelves):
            return False
        self._blocks.take(block.key)
        self._room.make(size_bytes, shelves)
        self._blocks.put(block.key, block.value, size_bytes, counted_for, block.ttl_s)
        return True
