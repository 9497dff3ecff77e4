"""Which blocks of a pool of the prefix cache have come and gone, for callers that choose an engine by them.

It is off until it is asked for. Then each block that becomes known under its key, or is evicted, costs an entry of a
dictionary; what has become of it is looked up when the changes are taken, outside the steps.
"""

from collections.abc import Callable
from typing import NamedTuple


class PrefixChanges(NamedTuple):
    """Keys (`lockstep_common.prefix_keys`) of the blocks that the prefix cache has gained and lost, parents before
    their children.
    """

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_complete: bool = True
    """False: changes were lost. Forget what was known before, and ask for all blocks again."""


class PrefixLog:
    """The digests that have been touched since the last `take`; at most `limit`, beyond which they count as lost."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._touched: dict[bytes, None] = {}
        self._is_on = False
        self._has_lost = False

    def turn(self, *, on: bool) -> None:
        """Begin or stop to note."""
        self._is_on, self._has_lost = on, False
        self._touched = {}

    def note(self, digest: bytes) -> None:
        """A block with this digest has become known, or has been evicted."""
        if self._is_on:
            self._touched[digest] = None
            if len(self._touched) > self._limit:
                self.lose()

    def lose(self) -> None:
        """Forget the changes: they are too many, or the cache has begun again, empty."""
        self._touched = {}
        self._has_lost = True

    def take(self, holds: Callable[[bytes], bool], key: Callable[[bytes], int]) -> PrefixChanges:
        """The changes since the last call.

        Args:
            holds: whether the pool has a block with a digest now.
            key: of a digest.
        """
        if self._has_lost:
            self.turn(on=self._is_on)
            return PrefixChanges(is_complete=False)
        if not self._touched:
            return PrefixChanges()
        touched, self._touched = self._touched, {}
        held = {key(digest): holds(digest) for digest in touched}
        return PrefixChanges(
            tuple(each for each, is_held in held.items() if is_held),
            tuple(each for each, is_held in held.items() if not is_held),
        )
