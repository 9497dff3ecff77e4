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
"""

from collections import OrderedDict
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
    capacity_bytes: int = 0
    """Bytes of all slots on one rank; 0: there is no such tier."""
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
    """

    def __init__(
        self,
        sizes: HostSizes,
        logs: tuple[PrefixLog, PrefixLog],
        is_pooled: Callable[[bool, bytes], bool] = lambda *_: False,
        shared: SharedSlots | None = None,
        on_change: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._sizes = sizes
        self._logs = logs
        self._is_pooled = is_pooled
        self._shared = shared
        self._on_change = on_change
        self._held: OrderedDict[tuple[bool, bytes], _Held] = OrderedDict()
        """By version and digest, least recently used first."""
        self._free: list[int] = []
        self._unused = 0
        """The first slot that has never been used."""
        if shared is not None and shared.filling and sizes.slots:
            self._unused = max(shared.filling) + 1
            self._free = [slot for slot in range(self._unused) if slot not in shared.filling]
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
        size = self._sizes.slot_bytes
        return HostUsage(
            blocks=len(self._held),
            used_bytes=(self._unused - len(self._free)) * size,
            capacity_bytes=self._sizes.slots * size,
            hits=self._hits,
            copied_in=self._copied_in,
            copied_out=self._copied_out,
            dropped=self._dropped,
        )

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

    def evicted(self, block: int, key: BlockKey, *, cold: bool, is_wanted: bool) -> None:
        """A block of the pools gets a new owner: spill it, unless it is here or is not wanted.

        Args:
            block: its id.
            key: its key.
            cold: its version.
            is_wanted: whether a later prompt is likely to need this version.
        """
        load = self._loads.pop(block, None)
        if load is not None:  # it never got its contents, which are here
            load.held.pins -= 1
        elif self.holds(key.digest, cold=cold):
            self._held.move_to_end((cold, key.digest))
        elif is_wanted and self._sizes.slots and not self._spill(block, key, cold):
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
            self._held.move_to_end((cold, key.digest))

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

    def stage(self, block: int, key: BlockKey, *, cold: bool) -> bool:
        """Order that a block is copied here that stays in the pools, too; nothing if it is here. False: no room."""
        return self.holds(key.digest, cold=cold) or self._spill(block, key, cold)

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
            self._held.move_to_end((cold, key.digest), last=False)

    def keep(self, keys: Iterable[BlockKey], *, cold: bool) -> None:
        """Evict those of these blocks last that the tier has; the first of all after the others."""
        for key in keys:
            if self.has(key, cold=cold):
                self._held.move_to_end((cold, key.digest))

    def fillable(self, *, cold: bool) -> int:
        """For how many blocks `reserve` would give slots at most."""
        if self._shared is None:
            return 0
        return max(0, self._sizes.slots // 2 - len(self._shared.filling)) // (1 if cold else self._sizes.hot_slots)

    def reserve(self, count: int, *, cold: bool) -> list[tuple[int, ...]]:
        """Slots for at most `count` blocks, which the driver may fill now, until `adopt` and `give_back`. It never
        fills more than half of the tier.
        """
        if self._shared is None:
            return []
        busy, filling, each = self._shared.busy(), self._shared.filling, 1 if cold else self._sizes.hot_slots
        quiet = [slot for slot in self._free if slot not in busy]
        self._free = [slot for slot in self._free if slot in busy]
        found: list[tuple[int, ...]] = []
        while len(found) < count and len(filling) + each <= self._sizes.slots // 2:
            while len(quiet) < each and self._unused < self._sizes.slots:
                # After the tier was forgotten, plans in flight may use slots that it has not.
                (self._free if self._unused in busy else quiet).append(self._unused)
                self._unused += 1
            while len(quiet) < each and (evicted := self._evict_oldest()):
                for slot in evicted:
                    (self._free if slot in busy else quiet).append(slot)
            if len(quiet) < each:
                break
            found.append(tuple(sorted(quiet.pop() for _ in range(each))))
            filling.update(found[-1])
        self._free.extend(quiet)
        return found

    def adopt(self, key: BlockKey, slots: tuple[int, ...], *, cold: bool) -> None:
        """Reserved slots have the contents of a block: it belongs to the tier now."""
        if self.holds(key.digest, cold=cold):
            self.give_back(slots)
            return
        if self._shared is not None:
            self._shared.filling.difference_update(slots)
        self._held[cold, key.digest] = _Held(key, slots)
        self._on_change(key.digest)
        if not self._is_pooled(cold, key.digest):
            self._logs[cold].note(key.digest)

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Reserved slots are not filled any more."""
        if self._shared is not None:
            self._shared.filling.difference_update(slots)
        self._free.extend(slots)

    def check(self) -> None:
        """Raise AssertionError unless every slot has at most one use."""
        used = [slot for held in self._held.values() for slot in held.slots]
        used += () if self._shared is None else self._shared.filling
        assert sorted([*used, *self._free]) == list(range(self._unused))
        assert self._unused <= self._sizes.slots
        copies = [*self._spills.values(), *(load.held for load in self._loads.values())]
        assert all(held.pins == sum(each is held for each in copies) for held in self._held.values())
        assert all(self._held[cold, held.key.digest] is held for (cold, _), held in self._held.items())
        assert {id(each) for each in copies} <= {id(each) for each in self._held.values()}

    def _spill(self, block: int, key: BlockKey, cold: bool) -> bool:
        count = 1 if cold else self._sizes.hot_slots
        if not self._make_room(count):
            return False
        held = _Held(key, tuple(self._take_slot() for _ in range(count)), pins=1)
        self._held[cold, key.digest] = held
        self._on_change(key.digest)
        self._spills[block] = held
        return True

    def _make_room(self, count: int) -> bool:
        """Evict blocks until `count` slots are free; False if the oldest block is pinned."""
        while len(self._free) + self._sizes.slots - self._unused < count:
            evicted = self._evict_oldest()
            if not evicted:
                return False
            self._free.extend(evicted)
        return True

    def _evict_oldest(self) -> tuple[int, ...]:
        """The slots of the block that is evicted; none if the oldest is pinned."""
        oldest = next(iter(self._held), None)
        if oldest is None or self._held[oldest].pins:
            return ()
        cold, digest = oldest
        slots = self._held.pop(oldest).slots
        self._on_change(digest)
        if not self._is_pooled(cold, digest):
            self._logs[cold].note(digest)
        return slots

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
