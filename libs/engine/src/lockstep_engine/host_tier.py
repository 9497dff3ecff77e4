"""The driver's part of the prefix cache's second tier, in host memory: which slots hold which blocks, and which copies
the next plan orders. Numbers only; `host_memory` has the memory of a rank.

A block that the pools evict is copied to slots before it gets a new owner (a spill); a prompt that begins with it gets
it back in a block of the pools (a load). A plan's spills come first, then its loads, then the step. Loads can wait for
a later plan. Spills cannot, and none is left out: the text after a missing block could not be found any more. They are
at most the blocks that a plan allocates, for its tokens and for the loads that are ordered with it. The driver decides
both, as it decides block numbers: all ranks hold the same blocks in the same slots.

Invariant: a slot that a plan reads has been written by an earlier plan or by a spill of the same plan, and nothing else
has been written to it since. Therefore a block is pinned, and its slots are not used again, from the spill or the load
that is ordered until the plan that executes it.

Tenants share the tier as they share the pools: none has more than its share at the cost of others. A tenant
may use room that no other tenant needs. Once the tier is full, a tenant beyond its share loses blocks first, and one
that would go beyond it makes room with its own.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lockstep_engine.blocks import BlockKey, HostSizes
from lockstep_engine.prefix_log import PrefixLog
from lockstep_engine.shared_slots import SharedSlots


@dataclass(frozen=True)
class HostUsage:
    """What the tier in host memory holds and has done in this epoch."""

    blocks: int = 0
    """Blocks, hot and cold, in their slots."""
    used_bytes: int = 0
    """Bytes of these slots on one rank."""
    hits: int = 0
    """Requests that have started after blocks of this tier."""
    copied_in: int = 0
    """Blocks that have been copied back to the pools."""
    copied_out: int = 0
    """Blocks that have been copied to host memory."""
    dropped: int = 0
    """Evicted blocks that have not been copied, because all slots were pinned."""


@dataclass(eq=False)
class _Held:
    """A block in the tier."""

    key: BlockKey
    slots: tuple[int, ...]
    tenant: str = ""
    pins: int = 0
    """Copies from or to its slots that no plan has executed yet."""


@dataclass(frozen=True)
class _Load:
    """A block that a plan copies back."""

    held: _Held
    end: int
    """Slots of all loads ordered in this epoch, up to this one."""


class HostTier:
    """Blocks in host memory. The least recently used one is evicted first.

    Versions of a block are told apart by `cold`. A block of the pools is named by its id in the tables of plans.

    Args:
        sizes: size of the tier.
        logs: note which hot and which cold blocks the tier loses, unless the pools have them.
        is_pooled: whether the pool of a version has the block with a digest.
        shared: slots that the driver itself uses; None: it uses none.
        on_change: called with the digest of a block that the tier gains or loses.
        tenant_share: part of the slots that a tenant may have at the cost of others.
    """

    def __init__(
        self,
        sizes: HostSizes,
        logs: tuple[PrefixLog, PrefixLog],
        is_pooled: Callable[[bool, bytes], bool] = lambda *_: False,
        shared: SharedSlots | None = None,
        on_change: Callable[[bytes], None] = lambda _: None,
        tenant_share: float = 1.0,
    ) -> None:
        self._sizes = sizes
        self._logs = logs
        self._is_pooled = is_pooled
        self._shared = shared
        self._on_change = on_change
        self._held: OrderedDict[tuple[bool, bytes], _Held] = OrderedDict()
        """By version and digest, least recently used first."""
        self._orders: dict[str, OrderedDict[tuple[bool, bytes], None]] = {}
        """The same for each tenant that has blocks here."""
        self._share = max(sizes.hot_slots, int(sizes.slots * tenant_share))
        self._used: Counter[str] = Counter()
        """Slots of each tenant's blocks, and those that the driver fills for it."""
        self._beyond: set[str] = set()
        """Tenants with more than their share; few, as the shares of all of them together fit the tier."""
        self._free: list[int] = []
        self._unused = 0
        """The first slot that has never been used."""
        if shared is not None and shared.filling and sizes.slots:
            self._unused = max(shared.filling) + 1
            self._free = [slot for slot in range(self._unused) if slot not in shared.filling]
            for tenant in shared.fillers.values():
                self._count(tenant, 1)
        self._spills: dict[int, _Held] = {}
        """By id of the block; those of the plan that is being made."""
        self._loads: OrderedDict[int, _Load] = OrderedDict()
        """By id of the block, in the order in which plans execute them."""
        self._ordered = 0
        """`_Load.end` of the last load."""
        self._reach = sizes.step_slots
        """The plan that is being made executes loads up to this `end`."""
        self._hits = self._copied_in = self._copied_out = self._dropped = 0

    @property
    def usage(self) -> HostUsage:
        """What the tier holds and has done."""
        return HostUsage(
            blocks=len(self._held),
            used_bytes=(self._unused - len(self._free)) * self._sizes.slot_bytes,
            hits=self._hits,
            copied_in=self._copied_in,
            copied_out=self._copied_out,
            dropped=self._dropped,
        )

    def used_by(self, tenant: str) -> int:
        """Slots that a tenant's blocks have, and that the driver fills for it."""
        return self._used[tenant]

    def has(self, key: BlockKey, *, cold: bool) -> bool:
        """Whether the tier has this version of the block."""
        held = self._held.get((cold, key.digest))
        return held is not None and held.key == key

    def holds(self, digest: bytes, *, cold: bool) -> bool:
        """Whether the tier has this version of a block with this digest."""
        return (cold, digest) in self._held

    def newest(self, limit: int, *, cold: bool, but_not: Callable[[bytes], bool]) -> list[bytes]:
        """Digests of at most `limit` blocks, the one that is evicted last first, without those of which `but_not` is
        true.
        """
        return list(islice((each for kind, each in reversed(self._held) if kind == cold and not but_not(each)), limit))

    def evicted(self, block: int, key: BlockKey, *, cold: bool, is_wanted: bool, tenant: str = "") -> None:
        """A block of the pools gets a new owner: spill it, unless it is here or is not wanted.

        Args:
            block: its id.
            key: its key.
            cold: its version.
            is_wanted: whether a later prompt is likely to need this version.
            tenant: whose it is.
        """
        load = self._loads.pop(block, None)
        if load is not None:  # it never got its contents, which are here
            load.held.pins -= 1
        elif self.holds(key.digest, cold=cold):
            self._touch((cold, key.digest))
        elif is_wanted and self._sizes.slots and not self._spill(block, key, cold, tenant):
            self._dropped += 1
        if self._shared is not None and self.holds(key.digest, cold=cold):
            self._shared.spilled.append((cold, key))

    def pin(self, keys: Iterable[BlockKey], *, cold: bool) -> None:
        """Keep blocks that the tier has until `load` has been called for each of them and a plan has executed it.

        Args:
            keys: the first one will be evicted first.
            cold: their version.
        """
        for key in keys:
            self._held[cold, key.digest].pins += 1
            self._touch((cold, key.digest))

    def load(self, block: int, key: BlockKey, *, cold: bool) -> None:
        """Order that a pinned block is copied back to a block of the pools, which was allocated for it."""
        held = self._held[cold, key.digest]
        self._ordered += len(held.slots)
        self._loads[block] = _Load(held, self._ordered)

    def note_hit(self, is_hit: bool) -> None:
        """Count a request if it has started after blocks of this tier."""
        self._hits += is_hit

    def wait_for(self, block: int) -> int:
        """What `is_done` takes for a block of the pools."""
        load = self._loads.get(block)
        return 0 if load is None else load.end

    def is_done(self, end: int) -> bool:
        """Whether the plan being made, or an earlier one, executes all loads up to this end."""
        return end <= self._reach

    def hurry(self, end: int) -> None:
        """Have the plan being made execute all loads up to this end, however many they are."""
        self._reach = max(self._reach, end)

    def take(self) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """The spills and loads of the plan that is being made (see `Plan`). Call it once for each plan."""
        if not self._spills and not self._loads:
            self._reach = self._ordered + self._sizes.step_slots
            if self._shared is not None:
                self._shared.planned(())
            return None, None
        spills, self._spills = self._spills, {}
        loads: dict[int, _Held] = {}
        while self._loads and (load := next(iter(self._loads.values()))).end <= self._reach:
            block, _ = self._loads.popitem(last=False)
            loads[block] = load.held
        self._reach = (self._reach if self._loads else self._ordered) + self._sizes.step_slots
        for held in (*spills.values(), *loads.values()):
            held.pins -= 1
        if self._shared is not None:
            self._shared.planned(slot for held in (*spills.values(), *loads.values()) for slot in held.slots)
        self._copied_out += len(spills)
        self._copied_in += len(loads)
        return self._rows(spills), self._rows(loads)

    @property
    def has_spills(self) -> bool:
        """Whether the next plan spills a block."""
        return bool(self._spills)

    def stage(self, block: int, key: BlockKey, *, cold: bool, tenant: str = "") -> bool:
        """Order that a tenant's block is copied here that stays in the pools, too; nothing if it is here. False: no
        room.
        """
        return self.holds(key.digest, cold=cold) or self._spill(block, key, cold, tenant)

    def slots_of(self, key: BlockKey, *, cold: bool) -> tuple[int, ...] | None:
        """The slots of a block, whose contents the driver may read now; None: there are none. Empty: a plan is still to
        copy from or to them.
        """
        held = self._held.get((cold, key.digest))
        if held is None or held.key != key or self._shared is None:
            return None
        return () if held.pins or not self._shared.busy().isdisjoint(held.slots) else held.slots

    def demote(self, key: BlockKey, *, cold: bool) -> None:
        """Evict a block first that the pools have too: it was here to be read by the driver."""
        if self.has(key, cold=cold) and self._is_pooled(cold, key.digest) and not self._held[cold, key.digest].pins:
            self._touch((cold, key.digest), last=False)

    def keep(self, keys: Iterable[BlockKey], *, cold: bool) -> None:
        """Evict those of these blocks last that the tier has; the first of all after the others."""
        for key in keys:
            if self.has(key, cold=cold):
                self._touch((cold, key.digest))

    def forget(self, keys: Iterable[BlockKey], *, cold: bool) -> None:
        """Remove these blocks from the tier, so that no request begins with their contents. Blocks that are being
        copied stay.
        """
        for key in keys:
            if self.has(key, cold=cold):
                self._free.extend(self._evict((cold, key.digest)))

    def fillable(self, *, cold: bool, tenant: str = "") -> int:
        """For how many blocks of a tenant `reserve` would give slots at most."""
        if self._shared is None:
            return 0
        fillers = self._shared.fillers
        empty = len(self._free) + self._sizes.slots - self._unused
        # Beyond its share a tenant gets what is empty, what its own blocks have, and the rest of the last one evicted.
        most = max(self._share, self._used[tenant] + empty) + self._sizes.hot_slots - 1
        own = most - sum(each == tenant for each in fillers.values())
        return max(0, min(self._sizes.slots // 2 - len(fillers), own)) // (1 if cold else self._sizes.hot_slots)

    def reserve(self, count: int, *, cold: bool, tenant: str = "") -> list[tuple[int, ...]]:
        """Slots for at most `count` blocks of a tenant, which the driver may fill now, until `adopt` and `give_back`.
        It never fills more than half of the tier.
        """
        if self._shared is None:
            return []
        busy, fillers, each = self._shared.busy(), self._shared.fillers, 1 if cold else self._sizes.hot_slots
        quiet = [slot for slot in self._free if slot not in busy]
        self._free = [slot for slot in self._free if slot in busy]
        found: list[tuple[int, ...]] = []
        while len(found) < count and len(fillers) + each <= self._sizes.slots // 2:
            while len(quiet) < each and self._unused < self._sizes.slots:
                # After the tier was forgotten, plans in flight may use slots that it has not.
                (self._free if self._unused in busy else quiet).append(self._unused)
                self._unused += 1
            while len(quiet) < each and (evicted := self._evict_for(tenant, each)):
                for slot in evicted:
                    (self._free if slot in busy else quiet).append(slot)
            if len(quiet) < each:
                break
            found.append(tuple(sorted(quiet.pop() for _ in range(each))))
            fillers.update(dict.fromkeys(found[-1], tenant))
            self._count(tenant, each)
        self._free.extend(quiet)
        return found

    def adopt(self, key: BlockKey, slots: tuple[int, ...], *, cold: bool) -> None:
        """Reserved slots have the contents of a block: it belongs to the tier now."""
        if self.holds(key.digest, cold=cold):
            self.give_back(slots)
            return
        tenant = self._filled(slots)
        self._hold((cold, key.digest), _Held(key, slots, tenant))
        if not self._is_pooled(cold, key.digest):
            self._logs[cold].note(key.digest)

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Reserved slots are not filled any more."""
        self._filled(slots)
        self._free.extend(slots)

    def check(self) -> None:
        """Raise AssertionError unless every slot has at most one use."""
        used = [slot for held in self._held.values() for slot in held.slots]
        used += () if self._shared is None else self._shared.filling
        assert sorted([*used, *self._free]) == list(range(self._unused))
        assert self._unused <= self._sizes.slots
        owners = [held.tenant for held in self._held.values() for _ in held.slots]
        assert self._used == Counter(owners + ([] if self._shared is None else list(self._shared.fillers.values())))
        assert self._beyond == {tenant for tenant, count in self._used.items() if count > self._share}
        for tenant, order in self._orders.items():
            assert list(order) == [each for each, held in self._held.items() if held.tenant == tenant]
        assert sum(map(len, self._orders.values())) == len(self._held)
        copies = [*self._spills.values(), *(load.held for load in self._loads.values())]
        assert all(held.pins == sum(each is held for each in copies) for held in self._held.values())
        assert all(self._held[cold, held.key.digest] is held for (cold, _), held in self._held.items())
        assert {id(each) for each in copies} <= {id(each) for each in self._held.values()}

    def _spill(self, block: int, key: BlockKey, cold: bool, tenant: str) -> bool:
        count = 1 if cold else self._sizes.hot_slots
        if not self._make_room(count, tenant):
            return False
        held = _Held(key, tuple(self._take_slot() for _ in range(count)), tenant, pins=1)
        self._hold((cold, key.digest), held)
        self._spills[block] = held
        return True

    def _make_room(self, count: int, tenant: str) -> bool:
        """Evict blocks until `count` slots are free for a tenant; False if what would be evicted is pinned."""
        while len(self._free) + self._sizes.slots - self._unused < count:
            evicted = self._evict_for(tenant, count)
            if not evicted:
                return False
            self._free.extend(evicted)
        return True

    def _evict_for(self, tenant: str, count: int) -> tuple[int, ...]:
        """The slots of a block that is evicted, for a tenant that needs so many; none if it is pinned.

        It is the tenant's own oldest one if the tenant would have more than its share, else the oldest one of the
        tenant that is furthest beyond its share, else the oldest of all.
        """
        if self._used[tenant] + count > self._share:
            return self._evict(next(iter(self._orders.get(tenant, ())), None))
        if self._beyond:
            furthest = max(self._beyond, key=lambda each: (self._used[each], each))
            if evicted := self._evict(next(iter(self._orders.get(furthest, ())), None)):
                return evicted
        return self._evict(next(iter(self._held), None))

    def _evict(self, oldest: tuple[bool, bytes] | None) -> tuple[int, ...]:
        if oldest is None or self._held[oldest].pins:
            return ()
        cold, digest = oldest
        held = self._held.pop(oldest)
        self._on_change(digest)
        order = self._orders[held.tenant]
        del order[oldest]
        if not order:
            del self._orders[held.tenant]
        self._count(held.tenant, -len(held.slots))
        if not self._is_pooled(cold, digest):
            self._logs[cold].note(digest)
        return held.slots

    def _hold(self, name: tuple[bool, bytes], held: _Held) -> None:
        self._held[name] = held
        self._on_change(name[1])
        self._orders.setdefault(held.tenant, OrderedDict())[name] = None
        self._count(held.tenant, len(held.slots))

    def _touch(self, name: tuple[bool, bytes], *, last: bool = True) -> None:
        """Evict a block last, or first."""
        self._held.move_to_end(name, last=last)
        self._orders[self._held[name].tenant].move_to_end(name, last=last)

    def _filled(self, slots: tuple[int, ...]) -> str:
        """The driver does not fill these slots any more; for whom it did."""
        tenant = ""
        if self._shared is not None:
            for slot in slots:
                tenant = self._shared.fillers.pop(slot)
                self._count(tenant, -1)
        return tenant

    def _count(self, tenant: str, slots: int) -> None:
        """A tenant has so many slots more."""
        self._used[tenant] += slots
        if not self._used[tenant]:
            del self._used[tenant]
        if self._used[tenant] > self._share:
            self._beyond.add(tenant)
        else:
            self._beyond.discard(tenant)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._unused += 1
        return self._unused - 1

    def _rows(self, copies: dict[int, _Held]) -> NDArray[np.int32] | None:
        if not copies:
            return None
        rows = np.full((len(copies), 1 + self._sizes.hot_slots), -1, dtype=np.int32)
        for row, (block, held) in zip(rows, copies.items(), strict=True):
            row[0] = block
            row[1 : 1 + len(held.slots)] = held.slots
        return rows
