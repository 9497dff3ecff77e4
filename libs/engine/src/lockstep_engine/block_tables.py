"""Which blocks each running sequence has: hot ones, and cold ones for positions that have left the hot window.

This module owns both pools and the rows of block ids that plans copy; it decides which hot blocks the ranks compress,
and in which step. Numbers only. Between plans, a sequence has each of its computed blocks in exactly the version that
its next query sees. Of a model with a window in every layer it has no block that lies wholly before the window at the
beginning of its last block: it drops them when it enters a block.

Ranks execute plans in order, one after the other, late moves included. Therefore what a plan writes is there for the
next plan, and a block that is released when a plan is made can be allocated for the next plan, however many plans are
in flight.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import partial
from itertools import chain, islice, zip_longest
from typing import NamedTuple

import numpy as np
from lockstep_common.prefix_keys import compressed_key, key_of, keys_of
from numpy.typing import NDArray

from lockstep_engine.blocks import BlockKey, BlockPool, Needs, PoolSizes
from lockstep_engine.config import BLOCK_SIZE, HotWindow, SlidingWindow
from lockstep_engine.host_tier import HostTier
from lockstep_engine.matches import Hits, Match, Matches
from lockstep_engine.prefix_log import PrefixChanges, PrefixLog
from lockstep_engine.sequence import Sequence
from lockstep_engine.shared_slots import SharedSlots

_NONE = -1
_NO_MOVES = np.empty((0, 2), dtype=np.int32)


class Parts(NamedTuple):
    """The blocks that a query sees, by their indices in its sequence, in each version."""

    hot: Items[int]
    cold: Items[int]


class BlockTables:
    """The blocks of all running sequences.

    Args:
        sizes: sizes of the pools, and of the tier in host memory.
        hot_window: decides which version of a block a query sees; None: all blocks are hot.
        max_seqs: most sequences that run at once.
        context_length: most tokens of a sequence.
        tenant_share: part of each pool that one tenant's running sequences may hold, and part of the tier in host
            memory beyond which a tenant's blocks are evicted before those of others.
        logs: note which blocks the two pools gain and lose, and the tier.
        shared: slots of host memory that the driver itself uses; None: it uses none.
        window: what a query sees at all; None: all blocks. It reaches further back than the hot window.
        copies: cold blocks have the bits of the hot ones. Then a step's queries see all blocks hot that were hot before
            the step, and cold ones are made after it.
    """

    def __init__(
        self,
        sizes: PoolSizes,
        hot_window: HotWindow | None,
        max_seqs: int,
        context_length: int,
        tenant_share: float = 1.0,
        logs: tuple[PrefixLog, PrefixLog] | None = None,
        shared: SharedSlots | None = None,
        window: SlidingWindow | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self._logs = logs or (PrefixLog(), PrefixLog())
        self.sizes = sizes
        self.matches = Matches()
        """Of requests that wait for blocks."""
        changed = self.matches.changed
        self.host = HostTier(sizes.host, self._logs, self._is_pooled, shared, changed, tenant_share)
        has_below = [partial(self.host.holds, cold=version) for version in (False, True)]
        self.hot = BlockPool(sizes.hot, self._logs[0], self._on_evict_hot, has_below[0], changed)
        self.cold = BlockPool(sizes.cold, self._logs[1], self._on_evict_cold, has_below[1], changed)
        self.compressed = 0
        """Blocks that have been compressed since the start."""
        self._hot_window = hot_window
        self._window = window
        self._copies = copies
        self._first_cold = sizes.hot + 1
        self._rows = np.full((max_seqs, -(-context_length // BLOCK_SIZE)), _NONE, dtype=np.int32)
        self._has_shares = tenant_share < 1
        self._budget = Needs(int(sizes.hot * tenant_share), int(sizes.cold * tenant_share))
        self._moves: dict[int, int] = {}
        self._late_moves: dict[int, int] = {}
        self._both: list[tuple[Sequence, range]] = []
        """Blocks that some queries of the step being planned see hot and others cold."""

    @property
    def free(self) -> int:
        """Number of blocks of both pools that can be allocated."""
        return self.hot.free + self.cold.free

    @property
    def total(self) -> int:
        """Number of blocks of both pools."""
        return self.hot.total + self.cold.total

    @property
    def budget(self) -> Needs:
        """Blocks that one tenant may hold."""
        return self._budget

    def check(self) -> None:
        """Raise AssertionError unless both pools and the tier in host memory are consistent."""
        self.hot.check()
        self.cold.check()
        self.host.check()

    def take_changes(self) -> PrefixChanges:
        """What the pools and the tier in host memory have gained and lost since the last call."""
        host = self.host
        hot = self._logs[0].take(lambda each: self.hot.holds(each) or host.holds(each, cold=False), key_of)
        cold = self._logs[1].take(lambda each: self.cold.holds(each) or host.holds(each, cold=True), _cold_key_of)
        return PrefixChanges(hot.added + cold.added, hot.removed + cold.removed, hot.is_complete and cold.is_complete)

    def newest(self, running: Iterable[Sequence], limit: int) -> list[int]:
        """Keys of the blocks that are known by their digests: those in use, then those that are evicted last.

        The blocks before each of them are among them, unless `limit` cuts the two pools at different places.
        """
        in_use = [
            key.digest for key in islice(chain.from_iterable(each.keys[: each.remembered] for each in running), limit)
        ]
        hot, cold = (keys_of(self._newest(in_use, limit, cold=version)) for version in (False, True))
        if not cold:
            return hot
        in_turn = zip_longest(hot, map(compressed_key, cold))
        return [key for pair in in_turn for key in pair if key is not None][:limit]

    def needs(self, tokens: int) -> Needs:
        """Most blocks that a sequence holds until it has `tokens` tokens. The last token needs no KV."""
        hot_window, window = self._hot_window, self._window
        hot, cold = -(-tokens // BLOCK_SIZE), 0
        if window is not None:
            hot = min(hot, window.blocks_before + 1)
        if hot_window is not None:
            hot = min(hot, hot_window.blocks)
            cold = hot_window.first_hot((tokens - 1) // BLOCK_SIZE) - hot_window.sink
            if window is not None:
                # One more than a query sees: blocks are dropped after the step in which the next one is compressed.
                cold = min(cold, window.blocks_before - hot_window.size + 1)
        return Needs(hot, cold)

    def needs_of(self, sequence: Sequence) -> Needs:
        """Most blocks that a sequence holds until all of its tokens have KV. One that generates has one more token
        then.
        """
        return self.needs(len(sequence.tokens) + (not sequence.request.embeds))

    @property
    def room_of_all(self) -> Needs:
        """Blocks that can be allocated now, for any tenant."""
        return Needs(self.hot.free, self.cold.free)

    def room(self, tenant: str) -> Needs:
        """Blocks that can be allocated now for a tenant's sequences."""
        free, own = self.room_of_all, self._own_room(tenant)
        return Needs(min(free.hot, own.hot), min(free.cold, own.cold))

    def is_at_limit(self, tenant: str, takes: Needs) -> bool:
        """Whether a tenant's share does not allow it so many more blocks, however many are free. Only blocks that it
        gives back help then. Without shares no tenant is at its limit.
        """
        return self._has_shares and not takes.fit(self._own_room(tenant))

    def match(self, keys: Items[BlockKey]) -> Hits:
        """How many of the blocks with these keys the pools or the tier in host memory hold."""
        hot_window = self._hot_window
        if self._window is not None:
            return self._match_window(keys, self._window)
        if hot_window is None:
            found = len(self.hot.match(keys))
            while found < len(keys) and self.has(keys[found], cold=False):
                found += 1
            return Hits(found, found)
        usable = hot_run = 0
        cold_end, known = hot_window.sink, len(keys)
        for index, key in enumerate(keys):
            hot, cold = self.has(key, cold=False), self.has(key, cold=True)
            if not hot and (not cold or index < hot_window.sink):
                known = index
                break
            hot_run = hot_run + 1 if hot else 0
            cold_end += cold_end == index and cold
            first = hot_window.first_hot(index + 1)
            if cold_end >= first and hot_run >= index + 1 - first:
                usable = index + 1
        return Hits(usable, known)

    def _match_window(self, keys: Items[BlockKey], window: SlidingWindow) -> Hits:
        """`match` for a model with a window: what lies before the window of the next query may be gone."""
        hot_window = self._hot_window
        sink = 0 if hot_window is None else hot_window.sink
        hot = [self.has(key, cold=False) for key in keys]
        cold = hot if hot_window is None else [self.has(key, cold=True) for key in keys]
        usable = hot_run = 0
        checked, last_gap = sink, _NONE  # of blocks before the hot window: how many were checked, which is missing last
        for index, is_hot in enumerate(hot):
            hot_run = hot_run + 1 if is_hot else 0
            if index < sink and not is_hot:
                last_gap = index
            first = 0 if hot_window is None else hot_window.first_hot(index + 1)
            while checked < first:
                last_gap = last_gap if cold[checked] else checked
                checked += 1
            seen = window.first_seen((index + 1) * BLOCK_SIZE)
            if last_gap < seen and hot_run >= index + 1 - max(first, seen):
                usable = index + 1
        known = usable
        while known < len(keys) and (hot[known] or cold[known]):
            known += 1
        return Hits(usable, known)

    def look_up(self, sequence: Sequence, keys: list[BlockKey]) -> Match:
        """What the tiers have of a waiting sequence's blocks."""
        hits = self.match(keys)
        return Match(keys, len(sequence.tokens), hits, self.admits(sequence, keys, hits))

    def has(self, key: BlockKey, *, cold: bool) -> bool:
        """Whether the version of a block is in its pool or in host memory."""
        return (self.cold if cold else self.hot).find(key) is not None or self.host.has(key, cold=cold)

    def stage(self, key: BlockKey, *, cold: bool) -> bool:
        """Have the version of a block in host memory, if a pool has it; False if it is not there and will not be."""
        pool = self.cold if cold else self.hot
        block = pool.find(key)
        if block is None:
            return self.host.has(key, cold=cold)
        tenant = pool.owner(block)
        return self.host.stage(block + (self._first_cold if cold else 0), key, cold=cold, tenant=tenant)

    def admits(self, sequence: Sequence, keys: Items[BlockKey], hits: Hits) -> Needs:
        """Blocks that a sequence takes from the free ones if it starts after its hits and gets KV for all of its tokens
        (see `needs_of`).
        """
        needs, parts = self.needs_of(sequence), self.parts(hits.usable)
        hot = [self.hot.find(keys[index]) for index in parts.hot]
        cold = [self.cold.find(keys[index]) for index in parts.cold]
        shared = Needs(
            sum(block is not None and not self.hot.is_idle(block) for block in hot),
            sum(block is not None and not self.cold.is_idle(block) for block in cold),
        )
        if self._window is None:
            return Needs(needs.hot - shared.hot, needs.cold - shared.cold)
        # Shared blocks are dropped on the way, and then others hold them alone.
        further = -(-(len(sequence.tokens) + 1) // BLOCK_SIZE) - hits.usable
        return Needs(
            min(needs.hot, len(hot) - shared.hot + further), min(needs.cold, len(cold) - shared.cold + further)
        )

    def start(self, sequence: Sequence, keys: Items[BlockKey], hits: Hits) -> None:
        """Give a sequence, which has its sampling row already, the cached blocks that it starts after. Those that only
        host memory has are loaded; `is_loading` says whether plans still have to do that.
        """
        parts = self.parts(hits.usable)
        sequence.hot, sequence.cold = [_NONE] * hits.usable, [_NONE] * hits.usable
        sequence.dropped = self.first_seen(hits.usable * BLOCK_SIZE)
        sequence.fork = hits.known
        sequence.remembered = hits.usable
        versions = (
            (False, self.hot, sequence.hot, parts.hot),
            (True, self.cold, sequence.cold, parts.cold),
        )
        # Before a block is allocated, which may evict any that is not in use and not pinned.
        for cold, pool, own, indices in versions:
            for index in indices:
                block = pool.find(keys[index])
                if block is not None:
                    pool.share(block)
                    own[index] = block
            self.host.pin((keys[index] for index in reversed(indices) if own[index] == _NONE), cold=cold)
        is_loaded = any(own[index] == _NONE for _, _, own, indices in versions for index in indices)
        self.host.note_hit(is_loaded and sequence.cached_tokens is None)  # not once more after a preemption
        row, sequence.loads_end = self._rows[sequence.sampling_row], 0
        for cold, pool, own, indices in versions:
            for index in indices:
                shift = self._first_cold if cold else 0
                if own[index] == _NONE:
                    own[index] = pool.allocate(sequence.request.tenant)
                    pool.remember(own[index], keys[index])
                    self.host.load(shift + own[index], keys[index], cold=cold)
                row[index] = shift + own[index]
                sequence.loads_end = max(sequence.loads_end, self.host.wait_for(shift + own[index]))

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a sequence has blocks that a later plan loads, so that this one must not compute it."""
        return not self.host.is_done(sequence.loads_end)

    def hurry(self, running: Iterable[Sequence]) -> bool:
        """Have the plan being made load all that the first sequence needs that is loading; False if none is."""
        end = min((each.loads_end for each in running if self.is_loading(each)), default=0)
        self.host.hurry(end)
        return end > 0

    @staticmethod
    def has_all(sequence: Sequence, count: int) -> bool:
        """Whether the next `count` tokens need no further block: they begin and end within the last one."""
        start, end = sequence.computed, sequence.computed + count
        return end < len(sequence.hot) * BLOCK_SIZE and start // BLOCK_SIZE == end // BLOCK_SIZE

    def fitting(self, sequence: Sequence, count: int) -> int:
        """How many of a sequence's next `count` tokens there is room for; `count` if there is room for none.

        A prompt's blocks are hot while they are computed, even if most of them leave the hot window in the same step.
        With few free hot blocks, therefore, a prompt is computed in smaller chunks. Without compression and without a
        window a smaller chunk would not help, because it frees no block.
        """
        hot_window = self._hot_window
        if hot_window is None and self._window is None:
            return count
        start, room = sequence.computed, self.room(sequence.request.tenant)
        end = min(start + count, (len(sequence.hot) + room.hot) * BLOCK_SIZE)
        if hot_window is not None:
            cold_end = (hot_window.first_hot(start // BLOCK_SIZE) + room.cold + hot_window.size + 1) * BLOCK_SIZE - 1
            cold_end += self._next_query(sequence, cold_end + 1) == cold_end
            end = min(end, cold_end)
        return end - start if end > start else count

    def missing(self, sequence: Sequence, count: int) -> Needs:
        """Blocks that the next `count` tokens take from the free ones."""
        end = sequence.computed + count
        now, late = self._leaving(sequence, end)
        return Needs(
            max(0, -(-end // BLOCK_SIZE) - len(sequence.hot)),
            sum(self._takes_cold(sequence, index) for index in (*now, *late)),
        )

    def grow(self, sequence: Sequence, count: int) -> None:
        """Give a sequence hot blocks for its next `count` tokens, and cold ones for blocks that leave the window."""
        end, tenant = sequence.computed + count, sequence.request.tenant
        row = self._rows[sequence.sampling_row]
        for index in range(len(sequence.hot), -(-end // BLOCK_SIZE)):
            row[index] = block = self.hot.allocate(tenant)
            sequence.hot.append(block)
            sequence.cold.append(_NONE)
        now, late = self._leaving(sequence, end)
        for index in now:
            row[index] = self._first_cold + self._cool(sequence, index, self._moves)
        for index in late:
            self._cool(sequence, index, self._late_moves)
        if now:
            self._both.append((sequence, now))

    def commit(self, sequence: Sequence, start: int, keys: Items[BlockKey]) -> None:
        """After the plan that computes the sequence's tokens from `start` up to `sequence.computed`: make its full
        blocks known under `keys`, and release the hot version of blocks that have left the hot window, and blocks that
        no later query sees.
        """
        self.remember(sequence, keys)
        next_query = self._next_query(sequence, sequence.computed)
        self._release_hot(sequence, start, next_query, keys)
        if self._window is not None:
            self._drop(sequence, self._window, next_query)

    def _release_hot(self, sequence: Sequence, start: int, next_query: int, keys: Items[BlockKey]) -> None:
        """Release the hot version of blocks that a query at `start` sees hot, and that at `next_query` cold."""
        if self._hot_window is None:
            return
        row = self._rows[sequence.sampling_row]
        first = self._hot_window.first_hot(next_query // BLOCK_SIZE)
        for index in range(self._hot_window.first_hot(start // BLOCK_SIZE), first):
            row[index] = self._first_cold + sequence.cold[index]
            if index < sequence.remembered:
                self.cold.remember(sequence.cold[index], keys[index])
            # A later request that diverges at the same place needs these blocks hot; any other needs them cold.
            at_fork = sequence.fork - self._hot_window.size <= index < sequence.fork
            self.hot.release([sequence.hot[index]], evict_first=not at_fork)
            sequence.hot[index] = _NONE

    def _drop(self, sequence: Sequence, window: SlidingWindow, next_query: int) -> None:
        """Release what no later query sees. The prefix cache keeps it for other texts until its room is needed."""
        row, end = self._rows[sequence.sampling_row], window.first_seen(next_query)
        for index in range(sequence.dropped, end):
            # A later request that diverges at the same place needs these blocks.
            at_fork = sequence.fork - window.blocks_before <= index < sequence.fork
            for pool, own in ((self.hot, sequence.hot), (self.cold, sequence.cold)):
                if own[index] != _NONE:
                    pool.release([own[index]], evict_first=not at_fork)
                    own[index] = _NONE
            row[index] = _NONE
        sequence.dropped = max(sequence.dropped, end)

    def remember(self, sequence: Sequence, keys: Items[BlockKey]) -> None:
        """Make the sequence's full blocks known under their keys. A block with a token in flight has no key yet."""
        full = min(sequence.computed // BLOCK_SIZE, len(keys))
        for index in range(sequence.remembered, full):
            if sequence.hot[index] != _NONE:
                self.hot.remember(sequence.hot[index], keys[index])
            elif sequence.cold[index] != _NONE:  # it left the hot window before its key was known
                self.cold.remember(sequence.cold[index], keys[index])
        sequence.remembered = max(sequence.remembered, full)

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache: their contents may be damaged, so no other sequence may
        begin with them, and they must not be stored. This includes the blocks that it had before it was preempted,
        and copies in host memory. Releases none.
        """
        sequence.remembered = 0
        for cold, pool, shift in ((False, self.hot, 0), (True, self.cold, self._first_cold)):
            for key in sequence.keys:
                block = pool.find(key)
                # A block whose load a later plan executes keeps its key, by which its next owner cancels the load.
                if block is not None and not self.host.wait_for(shift + block):
                    pool.forget(block)
            self.host.forget(sequence.keys, cold=cold)

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence and clear its row."""
        self.hot.release([block for block in sequence.hot if block != _NONE])
        self.cold.release([block for block in sequence.cold if block != _NONE])
        sequence.hot, sequence.cold = [], []
        self._rows[sequence.sampling_row] = _NONE

    def tables(self, rows: list[int], width: int) -> NDArray[np.int32]:
        """Ids of the blocks of the sequences that have these sampling rows: [sequences, width]."""
        tables: NDArray[np.int32] = self._rows[rows, :width]
        return tables

    def take_hot_tables(self, rows: list[int], tables: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Ids of the hot blocks of the sequences for which `tables` has been made, if a block is seen in both versions
        in this step; else None. Call it once for each plan.
        """
        if not self._both:
            return None
        hot: NDArray[np.int32] = np.where(tables < self._first_cold, tables, np.int32(_NONE))
        for sequence, blocks in self._both:
            both = slice(blocks.start, blocks.stop)
            hot[rows.index(sequence.sampling_row), both] = sequence.hot[both]
        self._both = []
        return hot

    def take_moves(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Hot blocks and the cold ones to be made of them, each [n, 2]: within the step that is being planned, and
        after it. Call it once for each plan.
        """
        if not self._moves and not self._late_moves:
            return _NO_MOVES, _NO_MOVES
        moves, late_moves = (
            np.array(list(each.items()), dtype=np.int32).reshape(-1, 2) for each in (self._moves, self._late_moves)
        )
        self.compressed += 0 if self._copies else len(moves) + len(late_moves)
        self._moves, self._late_moves = {}, {}
        return moves, late_moves

    def first_seen(self, position: int) -> int:
        """The first block that a query at `position`, or a later one, sees."""
        return 0 if self._window is None else self._window.first_seen(position)

    def parts(self, blocks: int) -> Parts:
        """What the query after a sequence's first `blocks` blocks sees of them."""
        seen = self.first_seen(blocks * BLOCK_SIZE)
        if self._hot_window is None:
            return Parts(range(seen, blocks), range(0))
        sink = min(self._hot_window.sink, blocks)
        first = max(sink, self._hot_window.first_hot(blocks)) if blocks > sink else sink
        hot = [*range(seen, sink), *range(max(first, seen), blocks)]
        return Parts(hot, range(max(sink, seen), first))

    def _own_room(self, tenant: str) -> Needs:
        """Blocks that a tenant's share still allows it."""
        most = self._budget
        return Needs(most.hot - self.hot.used_by(tenant), most.cold - self.cold.used_by(tenant))

    @staticmethod
    def _next_query(sequence: Sequence, end: int) -> int:
        """Position of the query after a sequence's first `end` tokens; of the last one's if none follows, because an
        embedding is complete.
        """
        return end - (sequence.request.embeds and end == len(sequence.tokens))

    def _leaving(self, sequence: Sequence, end: int) -> tuple[range, range]:
        """Blocks of which a cold version is needed when tokens up to `end` are computed: by queries of this step, and
        by the query after it.
        """
        if self._hot_window is None:
            return range(0), range(0)
        begin, now, late = (
            self._hot_window.first_hot(position // BLOCK_SIZE)
            for position in (sequence.computed, end - 1, self._next_query(sequence, end))
        )
        return (range(0), range(begin, late)) if self._copies else (range(begin, now), range(now, late))

    def _known_cold(self, sequence: Sequence, index: int) -> int | None:
        """The cold version of a sequence's block, if it exists or is made in this step."""
        if index < len(sequence.hot):
            hot = sequence.hot[index]
            moving = self._moves.get(hot, self._late_moves.get(hot))
            if moving is not None:
                return moving
        return self.cold.find(sequence.keys[index]) if index < len(sequence.keys) else None

    def _takes_cold(self, sequence: Sequence, index: int) -> bool:
        cold = self._known_cold(sequence, index)
        return cold is None or self.cold.is_idle(cold)

    def _cool(self, sequence: Sequence, index: int, moves: dict[int, int]) -> int:
        """The cold version of a hot block; if there is none yet, it is allocated and added to `moves`."""
        hot, cold = sequence.hot[index], self._known_cold(sequence, index)
        if cold is None:
            cold = moves[hot] = self.cold.allocate(sequence.request.tenant)
        else:
            self.cold.share(cold)
            # Its load may have been left to a later plan, but this sequence reads it from the plan being made on.
            self.host.hurry(self.host.wait_for(self._first_cold + cold))
            if moves is self._moves and hot in self._late_moves:  # a query of this step needs it
                self._moves[hot] = self._late_moves.pop(hot)
        sequence.cold[index] = cold
        return cold

    def _newest(self, in_use: Items[bytes], limit: int, *, cold: bool) -> list[bytes]:
        pool = self.cold if cold else self.hot
        found = pool.newest(in_use, limit)
        return found + self.host.newest(limit - len(found), cold=cold, but_not=pool.holds)

    def _is_pooled(self, cold: bool, digest: bytes) -> bool:
        return (self.cold if cold else self.hot).holds(digest)

    def _on_evict_hot(self, block: int, key: BlockKey, is_wanted: bool) -> None:
        self.host.evicted(block, key, cold=False, is_wanted=is_wanted, tenant=self.hot.owner(block))

    def _on_evict_cold(self, block: int, key: BlockKey, is_wanted: bool) -> None:
        tenant = self.cold.owner(block)
        self.host.evicted(self._first_cold + block, key, cold=True, is_wanted=is_wanted, tenant=tenant)


def _cold_key_of(digest: bytes) -> int:
    return compressed_key(key_of(digest))
