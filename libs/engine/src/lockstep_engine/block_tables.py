"""Which blocks each running sequence has: hot ones, and cold ones in place of those that its queries have left behind.

It owns both pools and the rows of ids that plans copy; it decides which hot blocks the ranks make cold, and when.
Numbers only. Between plans a sequence has, of the blocks of its computed tokens, exactly those versions that its next
query sees.

Ranks execute plans in order and one after the other, late moves included. So what a plan writes is there for the next
one, and what is given back once a plan is made can be given out by the next, however many are in flight.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep_engine.blocks import BlockKey, BlockPool
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.plan import PoolSizes
from lockstep_engine.sequence import Sequence

_NONE = -1


class Hits(NamedTuple):
    """What the pools hold of a text."""

    usable: int
    """A sequence can begin behind so many of its blocks: they are there in the versions that it will see."""
    known: int
    """So many are there in any version."""


class Needs(NamedTuple):
    """Blocks of each pool."""

    hot: int
    cold: int

    def __str__(self) -> str:
        return f"{self.hot} hot and {self.cold} cold blocks" if self.cold else f"{self.hot} blocks"

    def fit(self, room: "Needs") -> bool:
        """Whether there is room for them."""
        return self.hot <= room.hot and self.cold <= room.cold


class BlockTables:
    """The blocks of all running sequences.

    Args:
        sizes: of the pools.
        rule: which version of a block a query sees; None: all hot.
        slots: sequences that can run at once.
        context_length: tokens of the longest of them.
        tenant_share: part of each pool that one tenant's running sequences may hold.
    """

    def __init__(
        self, sizes: PoolSizes, rule: HotWindow | None, slots: int, context_length: int, tenant_share: float = 1.0
    ) -> None:
        self.hot = BlockPool(sizes.hot)
        self.cold = BlockPool(sizes.cold)
        self.compressed = 0
        """Blocks that were made cold so far."""
        self._rule = rule
        self._first_cold = sizes.hot + 1
        self._rows = np.full((slots, -(-context_length // BLOCK_SIZE)), _NONE, dtype=np.int32)
        self._budget = Needs(int(sizes.hot * tenant_share), int(sizes.cold * tenant_share))
        self._moves: dict[int, int] = {}
        self._late_moves: dict[int, int] = {}
        self._both: list[tuple[Sequence, range]] = []
        """Blocks that the step which is being planned sees both hot and cold."""

    @property
    def free(self) -> int:
        """Blocks of both pools that can be given out."""
        return self.hot.free + self.cold.free

    @property
    def total(self) -> int:
        """Blocks of both pools."""
        return self.hot.total + self.cold.total

    @property
    def budget(self) -> Needs:
        """What one tenant may hold."""
        return self._budget

    def check(self) -> None:
        """Raise AssertionError unless the pools are consistent (tests, idle checks)."""
        self.hot.check()
        self.cold.check()

    def needs(self, tokens: int) -> Needs:
        """The most that a sequence of so many tokens ever needs for itself. The last one's KV is never needed."""
        blocks = -(-tokens // BLOCK_SIZE)
        if self._rule is None:
            return Needs(blocks, 0)
        return Needs(min(blocks, self._rule.blocks), self._rule.first_hot((tokens - 1) // BLOCK_SIZE) - self._rule.sink)

    @property
    def room_of_all(self) -> Needs:
        """What sequences can be given now, whosever they are."""
        return Needs(self.hot.free, self.cold.free)

    def room(self, tenant: str) -> Needs:
        """What a tenant's sequences can be given now."""
        free, most = self.room_of_all, self._budget
        return Needs(
            min(free.hot, most.hot - self.hot.used_by(tenant)), min(free.cold, most.cold - self.cold.used_by(tenant))
        )

    def match(self, keys: Items[BlockKey]) -> Hits:
        """What there is of a text."""
        rule = self._rule
        if rule is None:
            found = len(self.hot.match(keys))
            return Hits(found, found)
        usable = hot_run = 0
        cold_end, known = rule.sink, len(keys)
        for index, key in enumerate(keys):
            hot, cold = self.hot.find(key), self.cold.find(key)
            if hot is None and (cold is None or index < rule.sink):
                known = index
                break
            hot_run = hot_run + 1 if hot is not None else 0
            cold_end += cold_end == index and cold is not None
            first = rule.first_hot(index + 1)
            if cold_end >= first and hot_run >= index + 1 - first:
                usable = index + 1
        return Hits(usable, known)

    def admits(self, sequence: Sequence, keys: Items[BlockKey], hits: Hits) -> Needs:
        """What a sequence takes of the room if it begins behind its hits and gets KV for all of its tokens and one
        more.
        """
        needs = self.needs(len(sequence.tokens) + 1)
        first, sink = self._hot_part(hits.usable)
        hot = [self._found(self.hot, keys[index]) for index in (*range(sink), *range(first, hits.usable))]
        cold = [self._found(self.cold, keys[index]) for index in range(sink, first)]
        return Needs(
            needs.hot - sum(not self.hot.is_idle(block) for block in hot),
            needs.cold - sum(not self.cold.is_idle(block) for block in cold),
        )

    def start(self, sequence: Sequence, keys: Items[BlockKey], hits: Hits) -> None:
        """Give a sequence that has got its slot the blocks that it begins behind."""
        first, sink = self._hot_part(hits.usable)
        sequence.hot, sequence.cold = [_NONE] * hits.usable, [_NONE] * hits.usable
        sequence.fork = hits.known
        sequence.remembered = hits.usable
        row = self._rows[sequence.slot]
        for index in range(hits.usable):
            if sink <= index < first:
                block = self._found(self.cold, keys[index])
                self.cold.share(block)
                sequence.cold[index] = block
                row[index] = self._first_cold + block
            else:
                block = self._found(self.hot, keys[index])
                self.hot.share(block)
                sequence.hot[index] = row[index] = block

    @staticmethod
    def has_all(sequence: Sequence, count: int) -> bool:
        """The next `count` tokens need nothing: they begin and end within the sequence's last block."""
        start, end = sequence.computed, sequence.computed + count
        return end < len(sequence.hot) * BLOCK_SIZE and start // BLOCK_SIZE == end // BLOCK_SIZE

    def fitting(self, sequence: Sequence, count: int) -> int:
        """As many of a sequence's next `count` tokens as there is room for, if that is any number; else `count`.

        A prompt's blocks are hot while they are computed, even if most of them leave the window at once: with few hot
        blocks left it is computed in smaller pieces. Without compression all or nothing is right: nothing will be
        given back.
        """
        rule = self._rule
        if rule is None:
            return count
        start, room = sequence.computed, self.room(sequence.request.tenant)
        hot_end = (len(sequence.hot) + room.hot) * BLOCK_SIZE
        cold_end = (rule.first_hot(start // BLOCK_SIZE) + room.cold + rule.size + 1) * BLOCK_SIZE - 1
        end = min(start + count, hot_end, cold_end)
        return end - start if end > start else count

    def missing(self, sequence: Sequence, count: int) -> Needs:
        """What the next `count` tokens take of the room."""
        end = sequence.computed + count
        now, late = self._leaving(sequence, end)
        return Needs(
            max(0, -(-end // BLOCK_SIZE) - len(sequence.hot)),
            sum(self._takes_cold(sequence, index) for index in (*now, *late)),
        )

    def grow(self, sequence: Sequence, count: int) -> None:
        """Give a sequence the blocks for its next `count` tokens, and cold ones for those that leave the window."""
        end, tenant = sequence.computed + count, sequence.request.tenant
        row = self._rows[sequence.slot]
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
        """The plan that computes the sequence's tokens from `start` to before `sequence.computed` is made: its full
        blocks can be found by their keys (as far as there are any), and those that have left the window are cold from
        now on.
        """
        self.remember(sequence, keys)
        if self._rule is None:
            return
        row, first = self._rows[sequence.slot], self._rule.first_hot(sequence.computed // BLOCK_SIZE)
        for index in range(self._rule.first_hot(start // BLOCK_SIZE), first):
            row[index] = self._first_cold + sequence.cold[index]
            if index < sequence.remembered:
                self.cold.remember(sequence.cold[index], keys[index])
            # Texts that part where others have parted before will want these again; others hardly.
            wanted = sequence.fork - self._rule.size <= index < sequence.fork
            self.hot.release([sequence.hot[index]], passing=not wanted)
            sequence.hot[index] = _NONE

    def remember(self, sequence: Sequence, keys: Items[BlockKey]) -> None:
        """The sequence's full blocks can be found by their keys, as far as there are any: there is none yet for a block
        with a token that only the ranks know.
        """
        full = min(sequence.computed // BLOCK_SIZE, len(keys))
        for index in range(sequence.remembered, full):
            if sequence.hot[index] != _NONE:
                self.hot.remember(sequence.hot[index], keys[index])
            else:  # it has left the window before its key was known
                self.cold.remember(sequence.cold[index], keys[index])
        sequence.remembered = max(sequence.remembered, full)

    def leave(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence, and its row."""
        self.hot.release([block for block in sequence.hot if block != _NONE])
        self.cold.release([block for block in sequence.cold if block != _NONE])
        sequence.hot, sequence.cold = [], []
        self._rows[sequence.slot] = _NONE

    def rows(self, slots: list[int], width: int) -> NDArray[np.int32]:
        """Ids of the blocks of the sequences in `slots`: [sequences, width]."""
        rows: NDArray[np.int32] = self._rows[slots, :width]
        return rows

    def take_hot_rows(self, slots: list[int], rows: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Ids of the hot blocks, as `rows` gave those of all, for a step in which a block is seen in both versions;
        None: none is. Once for each plan.
        """
        if not self._both:
            return None
        hot: NDArray[np.int32] = np.where(rows < self._first_cold, rows, np.int32(_NONE))
        for sequence, blocks in self._both:
            hot[slots.index(sequence.slot), blocks.start : blocks.stop] = sequence.hot[blocks.start : blocks.stop]
        self._both = []
        return hot

    def take_moves(self) -> tuple[list[int], list[int]]:
        """Hot blocks, and after each the cold one that is to be made of it: within the step that is being planned, and
        after it. Once for each plan.
        """
        if not self._moves and not self._late_moves:
            return [], []
        pairs = [[block for move in moves.items() for block in move] for moves in (self._moves, self._late_moves)]
        self.compressed += len(self._moves) + len(self._late_moves)
        self._moves, self._late_moves = {}, {}
        return pairs[0], pairs[1]

    def _hot_part(self, blocks: int) -> tuple[int, int]:
        """Of a sequence's first `blocks` blocks, as the query after them sees them: the first hot one behind the sink,
        and the end of the sink.
        """
        if self._rule is None:
            return 0, 0
        sink = min(self._rule.sink, blocks)
        return max(sink, self._rule.first_hot(blocks)) if blocks > sink else sink, sink

    def _leaving(self, sequence: Sequence, end: int) -> tuple[range, range]:
        """Blocks of which a cold version is needed when tokens up to `end` are computed: by queries among them, and by
        the query after them.
        """
        if self._rule is None:
            return range(0), range(0)
        begin, now, late = (
            self._rule.first_hot(position // BLOCK_SIZE) for position in (sequence.computed, end - 1, end)
        )
        return range(begin, now), range(now, late)

    def _known_cold(self, sequence: Sequence, index: int) -> int | None:
        """A cold version of a sequence's block, made already or in this step."""
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
        """Get a cold block for a hot one; it is made in `moves` unless it exists."""
        hot, cold = sequence.hot[index], self._known_cold(sequence, index)
        if cold is None:
            cold = moves[hot] = self.cold.allocate(sequence.request.tenant)
        else:
            self.cold.share(cold)
            if moves is self._moves and hot in self._late_moves:  # somebody needs it sooner
                self._moves[hot] = self._late_moves.pop(hot)
        sequence.cold[index] = cold
        return cold

    @staticmethod
    def _found(pool: BlockPool, key: BlockKey) -> int:
        block = pool.find(key)
        assert block is not None
        return block
