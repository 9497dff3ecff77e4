"""A bounded queue for what tenants wait for, in which none of them holds up or pushes out the others."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

MAX_TENANTS = 1024


class TenantQueues(Generic[Item]):
    """A queue for each tenant.

    Args:
        most: items of all tenants together. Beyond it the oldest item of the tenant that has the most is dropped.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()
        """By tenant, the one whose turn it is first; none is empty."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """The tenants that have items, in their turn."""
        return iter(self._queues)

    def add(self, tenant: str, item: Item) -> None:
        """Add an item at the end of a tenant's queue. It is dropped if too many other tenants have one."""
        if tenant not in self._queues and len(self._queues) >= MAX_TENANTS:
            return
        self._queues.setdefault(tenant, deque()).append(item)
        self._count += 1
        if self._count > self._most:
            self.pop(max(self._queues, key=lambda each: len(self._queues[each])))

    def first(self, tenant: str) -> Item | None:
        """A tenant's oldest item; None: it has none."""
        queue = self._queues.get(tenant)
        return queue[0] if queue else None

    def pop(self, tenant: str) -> Item:
        """Take the oldest item of a tenant that has one."""
        item = self._queues[tenant].popleft()
        self._count -= 1
        if not self._queues[tenant]:
            del self._queues[tenant]
        return item

    def end_turn(self, tenant: str) -> None:
        """A tenant's next turn is after that of all others."""
        if tenant in self._queues:
            self._queues.move_to_end(tenant)
