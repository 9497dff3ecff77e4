"""How many calls move blocks at a time, and how many bytes of blocks they have in memory."""

import asyncio
import collections
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_state import metrics

_WAIT_S = 5.0
"""Longest wait for others' blocks to be moved: a worker has soon computed what it waits for."""


class Transfers:
    """The calls that move blocks, and the room for their blocks.

    Args:
        most: calls at a time; more are refused at once.
        most_bytes: of blocks at a time. A block that is larger is moved alone.
        wait_s: longest wait for room.
    """

    def __init__(self, most: int, most_bytes: int, wait_s: float = _WAIT_S) -> None:
        self._most = most
        self._count = 0
        self._most_bytes = most_bytes
        self._wait_s = wait_s
        self._used_bytes = 0
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """While it is entered, one more call moves blocks.

        Raises:
            LockstepError: OVERLOADED, there are as many as there may be.
        """
        if self._count >= self._most:
            raise LockstepError(ErrorCode.OVERLOADED, "too many calls move blocks (max_transfers)", retry_after_s=1)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    @asynccontextmanager
    async def room(self, size_bytes: int) -> AsyncIterator[None]:
        """While it is entered, blocks of so many bytes are moved. Who holds room must not ask for more.

        Raises:
            LockstepError: OVERLOADED, it was not free in time. Those that wait get it in their order.
        """
        taken_bytes = min(size_bytes, self._most_bytes)
        if taken_bytes and (self._waiting or self._used_bytes + taken_bytes > self._most_bytes):
            await self._wait(taken_bytes)
        else:
            self._add(taken_bytes)
        try:
            yield
        finally:
            self._add(-taken_bytes)
            self._admit()

    async def _wait(self, taken_bytes: int) -> None:
        mine = taken_bytes, asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            async with asyncio.timeout(self._wait_s):
                await mine[1]
        except BaseException as error:
            if mine in self._waiting:
                self._waiting.remove(mine)
            elif not mine[1].cancelled():  # it was admitted in the same moment
                self._add(-taken_bytes)
            self._admit()
            if isinstance(error, TimeoutError):
                reason = "too many bytes of blocks are moved (max_transfer_bytes)"
                raise LockstepError(ErrorCode.OVERLOADED, reason, retry_after_s=1) from None
            raise

    def _admit(self) -> None:
        while self._waiting and self._used_bytes + self._waiting[0][0] <= self._most_bytes:
            taken_bytes, admitted = self._waiting.popleft()
            if not admitted.done():
                self._add(taken_bytes)
                admitted.set_result(None)

    def _add(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes
        metrics.TRANSFER_BYTES.set(self._used_bytes)
