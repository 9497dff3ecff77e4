"""What each tenant has in Redis: a reservation for each stream, name and block. It may be more than there is, not much
less.

Blocks are counted apart from all else, so that a tenant that is full of blocks still opens streams.

A stream and its tenant are in different slots of a cluster, so one follows the other: reservations are made before
anything is stored, and end by themselves when their time is over.
"""

from collections.abc import Sequence
from typing import Any

from lockstep_state.backend import Limits
from lockstep_state.redis_backend import scripts
from lockstep_state.redis_backend.store import Command, Store

Item = tuple[str, str, str, int, float]
"""`s` for a stream, `n` for a name, `b` for a block or `m` for the tombstone of a trimmed stream, tenant, key, bytes
(-1: it is gone), seconds."""

_LASTS = 1.5
"""Reservations last longer than what they are for: those of streams are renewed in half of its time."""


class Ledger:
    """The reservations.

    Args:
        store: where they are.
        limits: of each tenant.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    async def reserve(self, items: Sequence[Item]) -> list[Any]:
        """Whether there is room for each item, or a `LockstepError`."""
        return await self._store.many("reserve", [self.command(item) for item in items])

    def command(self, item: Item) -> Command:
        """What reserves room for an item; the answer is 1, or 0 if there is none."""
        max_bytes = self._limits.tenant_block_bytes if item[0] == "b" else self._limits.tenant_bytes
        return self._command(item, (max_bytes, self._limits.tenant_streams))

    async def note(self, items: Sequence[Item]) -> None:
        """Note what is there already. If this fails, the reservation that is there ends later."""
        await self._store.many("reserve", [self._command(item, ("", "")) for item in items])

    async def forget(self, kind: str, tenant: str, keys: Sequence[str]) -> None:
        """Note that these are gone."""
        await self.note([(kind, tenant, key, -1, 0.0) for key in keys])

    def _command(self, item: Item, limits: tuple[int | str, int | str]) -> Command:
        kind, tenant, key, size_bytes, ttl_s = item
        part = ":block-" if kind == "b" else ":"
        keys = (self._store.key("tenant", tenant, f"{part}ends"), self._store.key("tenant", tenant, f"{part}bytes"))
        return Command(keys, (f"{kind}:{key}", size_bytes, int(ttl_s * 1000 * _LASTS), *limits), scripts.LEDGER)
