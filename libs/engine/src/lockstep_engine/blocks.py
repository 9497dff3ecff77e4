"""The block pool: which blocks of KV cache are free, in use, or kept for their contents. Numbers only; the tensors
are the ranks'.

A block is in exactly one state:
- in use: `references` > 0;
- free and empty: in `_empty`;
- free but remembered: in `_remembered` or `_passing` (oldest first), its contents valid until it is taken for something
  else. Those in `_passing` are taken first.
A hash in `_by_hash` always points at a block whose contents are that chain of tokens.
"""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep_engine.config import BLOCK_SIZE


@dataclass(frozen=True)
class BlockKey:
    """Names the contents of a full block: its tokens and, through the parent's digest, all tokens before them."""

    digest: bytes
    parent: bytes
    tokens: bytes
    """int32, little endian; compared on a hit, so that a collision of digests gives a miss."""


def root_digest(tenant: str) -> bytes:
    """Where a tenant's chains begin: tenants never hit each other's blocks."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"lockstep-prefix").digest()


def extend_keys(keys: list[BlockKey], tokens: Sequence[int], tenant: str) -> None:
    """Append to `keys` those of the full blocks of `tokens` that it does not cover yet."""
    parent = keys[-1].digest if keys else root_digest(tenant)
    for index in range(len(keys), len(tokens) // BLOCK_SIZE):
        block = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        data = np.asarray(block, dtype="<i4").tobytes()
        digest = hashlib.blake2b(parent + data, digest_size=16).digest()
        keys.append(BlockKey(digest, parent, data))
        parent = digest


class BlockPool:
    """Hands out block numbers in O(1) and remembers the contents of freed full blocks, least recently used last out."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._keys: list[BlockKey | None] = [None] * total
        self._by_digest: dict[bytes, int] = {}
        self._empty: deque[int] = deque(range(total))
        self._remembered: OrderedDict[int, None] = OrderedDict()
        self._passing: OrderedDict[int, None] = OrderedDict()
        self._owners = [""] * total
        self._used: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._empty) + len(self._remembered) + len(self._passing)

    def used_by(self, owner: str) -> int:
        """Blocks in use that were allocated for `owner`."""
        return self._used[owner]

    def allocate(self, owner: str = "") -> int:
        """Take a block, forgetting the oldest remembered one if no empty one is left. Only when `free` > 0."""
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = (self._passing or self._remembered).popitem(last=False)
            self._forget(block)
        self._owners[block] = owner
        self._use(block)
        return block

    def find(self, key: BlockKey) -> int | None:
        """The block that holds what `key` names. Takes nothing."""
        block = self._by_digest.get(key.digest)
        return None if block is None or self._keys[block] != key else block

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The longest run of blocks that hold the contents named by `keys`, from the first on. Takes nothing."""
        found: list[int] = []
        for key in keys:
            block = self.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, block: int) -> bool:
        """Nobody uses the block, so that sharing it takes one from `free`."""
        return self._references[block] == 0

    def share(self, block: int) -> None:
        """Use a block found by `match` or `find`."""
        if self._references[block] == 0:
            del (self._passing if block in self._passing else self._remembered)[block]
        self._use(block)

    def remember(self, block: int, key: BlockKey) -> None:
        """The block in use is full and holds `key`. The first block with these contents is the one that is found."""
        if key.digest not in self._by_digest and self._keys[block] is None:
            self._by_digest[key.digest] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[int], *, passing: bool = False) -> None:
        """Give back a sequence's blocks. The last are the first to be forgotten: the beginning of a text is shared
        most. Passing ones are forgotten before all others.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._disuse(self._owners[block])
                if self._keys[block] is None:
                    self._empty.append(block)
                else:
                    (self._passing if passing else self._remembered)[block] = None

    def _use(self, block: int) -> None:
        if self._references[block] == 0:
            self._used[self._owners[block]] += 1
        self._references[block] += 1

    def _disuse(self, owner: str) -> None:
        self._used[owner] -= 1
        if self._used[owner] == 0:
            del self._used[owner]

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_digest[key.digest]
            self._keys[block] = None

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state (tests, idle checks)."""
        used = sum(1 for count in self._references if count > 0)
        assert used + len(self._empty) + len(self._remembered) + len(self._passing) == self.total
        assert used == sum(self._used.values())
        assert all(count >= 0 for count in self._references)
        assert all(self._references[block] == 0 for block in (*self._empty, *self._remembered, *self._passing))
        assert all(self._keys[block] is None for block in self._empty)
        for digest, block in self._by_digest.items():
            key = self._keys[block]
            assert key is not None
            assert key.digest == digest
