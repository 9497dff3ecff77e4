"""Slots of host memory that the driver reads and writes itself, beside the copies that plans order.

Ranks execute plans later than the driver makes them, and the driver's own accesses happen at once. Therefore the
driver leaves a slot alone while a plan in flight copies from or to it, and no plan gets a slot that the driver is
filling. This module knows which slots these are. It lives as long as the memory does, which is an epoch of the ranks:
blocks of a tier may be forgotten in between, what is being written is not.
"""

from collections import deque
from collections.abc import Iterable, Set

from lockstep_engine.blocks import BlockKey

_MAX_SPILLED = 4096


class SharedSlots:
    """Which slots the plans in flight use, and which ones the driver fills.

    Attributes:
        fillers: by slot that the driver is filling, the tenant whose block it will hold. It belongs to no block yet.
        spilled: versions and keys of blocks that the pools have evicted to host memory, the oldest first; bounded.
    """

    def __init__(self) -> None:
        self.fillers: dict[int, str] = {}
        self.spilled: deque[tuple[bool, BlockKey]] = deque(maxlen=_MAX_SPILLED)
        self._plans: deque[frozenset[int]] = deque()
        """The slots of each plan in flight."""

    @property
    def filling(self) -> Set[int]:
        """The slots that the driver is filling."""
        return self.fillers.keys()

    def planned(self, slots: Iterable[int]) -> None:
        """A plan was made that copies from or to these slots. To be called for each plan."""
        self._plans.append(frozenset(slots))

    def executed(self) -> None:
        """All ranks have executed the oldest plan in flight."""
        self._plans.popleft()

    def forget(self, in_flight: int) -> None:
        """Only the first plans have reached the ranks."""
        while len(self._plans) > in_flight:
            self._plans.pop()

    def busy(self) -> frozenset[int]:
        """The slots that plans in flight use."""
        return frozenset().union(*self._plans)
