"""The block pool: which blocks of KV cache are in use, cached or empty. Numbers only; the ranks own the tensors.

A block is in exactly one state:
- in use: `_references` > 0;
- empty: in `_empty`;
- cached: in `_cached` or `_evict_first`, least recently used first. Its contents stay valid until it is evicted. Blocks
  in `_evict_first` are evicted before those in `_cached`.

A digest in `_by_digest` always names a block whose contents are that chain of tokens.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import msgspec
import numpy as np
from lockstep_common.prefix_keys import block_digest, root_digest

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.prefix_log import PrefixLog


class HostSizes(msgspec.Struct, array_like=True, frozen=True):
    """Size of the prefix cache's tier in host memory, on one rank."""

    slots: int = 0
    """0: there is no such tier."""
    slot_bytes: int = 0
    """A cold block takes one slot; without a cold pool, a hot one does."""
    hot_slots: int = 1
    """Slots that a hot block takes."""
    step_slots: int = 0
    """How many slots one step reads at most if it computes other sequences, too; a rank copies so many at once."""
    hot_bytes: int = 0
    """Bytes of a hot block, which may leave the end of its last slot unused."""
    units: int = 1
    """Parts of a block, of equally many neighbouring heads, that lie one after the other in its slots."""


class PoolSizes(msgspec.Struct, array_like=True, frozen=True):
    """Number of blocks in each pool of the KV cache, and the size of the tier in host memory."""

    hot: int
    cold: int = 0
    host: HostSizes = HostSizes()


class Needs(NamedTuple):
    """Numbers of blocks, for each pool."""

    hot: int
    cold: int

    def __str__(self) -> str:
        return f"{self.hot} hot and {self.cold} cold blocks" if self.cold else f"{self.hot} blocks"

    def fit(self, room: "Needs") -> bool:
        """Whether `room` has that many blocks of both pools."""
        return self.hot <= room.hot and self.cold <= room.cold


@dataclass(frozen=True)
class BlockKey:
    """Identifies the contents of a full block: its tokens and, by the parent's digest, all tokens before them."""

    digest: bytes
    parent: bytes
    tokens: bytes
    """int32, little endian. Compared on a hit, so that a collision of digests is a miss."""


def extend_keys(keys: list[BlockKey], tokens: Sequence[int], tenant: str) -> None:
    """Append to `keys` the keys of those full blocks of `tokens` that it lacks."""
    parent = keys[-1].digest if keys else root_digest(tenant)
    for index in range(len(keys), len(tokens) // BLOCK_SIZE):
        block = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        data = np.asarray(block, dtype="<i4").tobytes()
        digest = block_digest(parent, data)
        keys.append(BlockKey(digest, parent, data))
        parent = digest


class BlockPool:
    """Allocates block numbers in O(1), and keeps the contents of freed full blocks: the least recently used block is
    evicted first.

    Args:
        total: number of blocks.
        log: notes the blocks that become known by their keys, and that are evicted, unless the tier below has them too.
        on_evict: called before a block with a key is evicted, with its number, its key and whether it was not among
            those that are evicted first. `owner` says whose it is.
        is_below: whether the tier below has the block with a digest, after `on_evict` also one that it will get.
        on_change: called with the digest of a block that becomes known or is evicted, and of a known one that begins or
            ceases to be used.
    """

    def __init__(
        self,
        total: int,
        log: PrefixLog | None = None,
        on_evict: Callable[[int, BlockKey, bool], None] = lambda *_: None,
        is_below: Callable[[bytes], bool] = lambda _: False,
        on_change: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self.total = total
        self._on_evict = on_evict
        self._is_below = is_below
        self._on_change = on_change
        self._log = log or PrefixLog()
        self._references = [0] * total
        self._keys: list[BlockKey | None] = [None] * total
        self._by_digest: dict[bytes, int] = {}
        self._empty: deque[int] = deque(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._evict_first: OrderedDict[int, None] = OrderedDict()
        self._owners = [""] * total
        self._used: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._empty) + len(self._cached) + len(self._evict_first)

    def used_by(self, owner: str) -> int:
        """Number of blocks in use that were allocated for `owner`."""
        return self._used[owner]

    def owner(self, block: int) -> str:
        """For whom a block was allocated last."""
        return self._owners[block]

    def allocate(self, owner: str = "") -> int:
        """Take a block, and evict a cached one if none is empty. `free` must be above 0."""
        if self._empty:
            block = self._empty.popleft()
        else:
            is_wanted = not self._evict_first
            block, _ = (self._evict_first or self._cached).popitem(last=False)
            self._evict(block, is_wanted)
        self._owners[block] = owner
        self._use(block)
        return block

    def find(self, key: BlockKey) -> int | None:
        """The block that holds the contents of `key`, if any. Changes nothing."""
        block = self._by_digest.get(key.digest)
        return None if block is None or self._keys[block] != key else block

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks that hold the contents of `keys`, up to the first miss. Changes nothing."""
        found: list[int] = []
        for key in keys:
            block = self.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, block: int) -> bool:
        """Whether the block is not in use, so that sharing it lowers `free`."""
        return self._references[block] == 0

    def share(self, block: int) -> None:
        """Use a block found by `match` or `find`."""
        if self._references[block] == 0:
            del (self._evict_first if block in self._evict_first else self._cached)[block]
        self._use(block)

    def remember(self, block: int, key: BlockKey) -> None:
        """Make a full block in use known under its key. If several blocks have equal contents, only the first is
        known.
        """
        if key.digest not in self._by_digest and self._keys[block] is None:
            self._by_digest[key.digest] = block
            self._keys[block] = key
            self._note(key.digest)
            self._on_change(key.digest)

    def forget(self, block: int) -> None:
        """Remove a block from the prefix index, so that no other sequence begins with its contents."""
        key = self._keys[block]
        if key is None:
            return
        if self._references[block] == 0:
            del (self._evict_first if block in self._evict_first else self._cached)[block]
            self._empty.append(block)
        del self._by_digest[key.digest]
        self._keys[block] = None
        self._note(key.digest)
        self._on_change(key.digest)

    def holds(self, digest: bytes) -> bool:
        """Whether a block has the contents with this digest."""
        return digest in self._by_digest

    def newest(self, in_use: Sequence[bytes], limit: int) -> list[bytes]:
        """Digests of at most `limit` blocks: those of `in_use` that are known here, then those of cached blocks, the
        one that is evicted last first.
        """
        found = list(dict.fromkeys(filter(self.holds, in_use)))
        cached = islice(chain(reversed(self._cached), reversed(self._evict_first)), max(0, limit - len(found)))
        return found[:limit] + [key.digest for key in map(self._keys.__getitem__, cached) if key is not None]

    def release(self, blocks: Sequence[int], *, evict_first: bool = False) -> None:
        """Give back a sequence's blocks. The last of them are evicted first, because the beginning of a text is shared
        most.

        Args:
            blocks: in order of position.
            evict_first: evict these before all other cached blocks.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._disuse(self._owners[block])
                key = self._keys[block]
                if key is None:
                    self._empty.append(block)
                else:
                    (self._evict_first if evict_first else self._cached)[block] = None
                    self._on_change(key.digest)

    def _use(self, block: int) -> None:
        if self._references[block] == 0:
            self._used[self._owners[block]] += 1
            key = self._keys[block]
            if key is not None:
                self._on_change(key.digest)
        self._references[block] += 1

    def _disuse(self, owner: str) -> None:
        self._used[owner] -= 1
        if self._used[owner] == 0:
            del self._used[owner]

    def _evict(self, block: int, is_wanted: bool) -> None:
        key = self._keys[block]
        if key is not None:
            self._on_evict(block, key, is_wanted)
            del self._by_digest[key.digest]
            self._keys[block] = None
            self._note(key.digest)
            self._on_change(key.digest)

    def _note(self, digest: bytes) -> None:
        # What moves between the tiers stays in the cache: followers of the log have nothing to learn.
        if not self._is_below(digest):
            self._log.note(digest)

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        used = sum(1 for count in self._references if count > 0)
        assert used + len(self._empty) + len(self._cached) + len(self._evict_first) == self.total
        assert used == sum(self._used.values())
        assert all(count >= 0 for count in self._references)
        assert all(self._references[block] == 0 for block in (*self._empty, *self._cached, *self._evict_first))
        assert all(self._keys[block] is None for block in self._empty)
        for digest, block in self._by_digest.items():
            key = self._keys[block]
            assert key is not None
            assert key.digest == digest
