"""Reads the message of a call: within limits of time and of memory, which all calls share.

gRPC has the whole message before the service sees any of it, so messages that are arriving are limited in number, and
complete ones count in the budget for bodies. Nothing of a message is read before its caller is known.
"""

import asyncio

import grpc
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.faces.bodies import BodyBudget, Reservation, overloaded

PATIENCE_S = 1.0
"""A message that takes longer than this makes room for others: most are here at once."""


class Inbound:
    """The messages of one server that are arriving.

    Args:
        budget: where complete messages count until they are released.
        max_messages: arriving at a time.
        timeout_s: for each.
    """

    def __init__(self, budget: BodyBudget, max_messages: int, timeout_s: float) -> None:
        self._budget = budget
        self._max_messages = max_messages
        self._timeout_s = timeout_s
        self._arriving: dict[asyncio.Timeout, float] = {}
        """By the time limit of each, when it began; the oldest first."""
        self._left = asyncio.Event()

    async def read(self, context: grpc.aio.ServicerContext) -> tuple[bytes, Reservation]:
        """The call's message, and its share of the budget, which the caller releases.

        Raises:
            LockstepError: INVALID_REQUEST, it has not arrived in time, or there is none; OVERLOADED, there is no room.
        """
        await self._make_room()
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(self._timeout_s)
        began = self._arriving[limit] = loop.time()
        try:
            async with limit:
                message = await context.read()
        except TimeoutError:
            if loop.time() - began < self._timeout_s:
                raise overloaded() from None
            raise LockstepError(
                ErrorCode.INVALID_REQUEST, f"the message did not arrive within {self._timeout_s:g} seconds"
            ) from None
        finally:
            self._arriving.pop(limit, None)
            self._left.set()
        if message is grpc.aio.EOF:
            raise LockstepError(ErrorCode.INVALID_REQUEST, "the call has no message")
        reservation = self._budget.reserve()
        try:
            reservation.grow_to(len(message))
        except LockstepError:
            reservation.release()
            raise
        reservation.complete()
        return message, reservation

    async def _make_room(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._arriving) >= self._max_messages:
            oldest, began = next(iter(self._arriving.items()))
            wait_s = began + PATIENCE_S - loop.time()
            if wait_s <= 0:
                del self._arriving[oldest]
                oldest.reschedule(loop.time())
                return
            self._left.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._left.wait()
            except TimeoutError:
                continue
