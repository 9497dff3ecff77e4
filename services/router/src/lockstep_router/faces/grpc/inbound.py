"""Reads the message of a call: within limits of time and of memory, which all calls share.

gRPC has the whole message before the service sees any of it, so messages that are arriving are limited in number, and
complete ones count in the budget for bodies. Nothing of a message is read before its caller is known.

Most messages are there as soon as they are read. So a call for which there is no room is only refused if its message is
not: calls without a message, however many, hold up no others.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

import grpc
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.faces.bodies import BodyBudget, Reservation, overloaded

PATIENCE_S = 1.0
"""A message that takes longer than this makes room for others, and a call waits this long for room."""
FAIR_PATIENCE_S = 0.1
"""The same for the messages of a sender that has more of them on their way than the one that waits."""
GLANCE_S = 0.02
"""A call without room is read for this long: too short for gRPC to gather much of a message."""
_TURNS = 4
"""Turns of the event loop after that: a busy loop learns late of messages that are there."""
MAX_WAITING = 128
"""Calls of one sender that wait for room; further ones are read without."""


@dataclass(frozen=True)
class _Arriving:
    sender: str
    began: float


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
        self._arriving: dict[asyncio.Timeout, _Arriving] = {}
        """By the time limit of each; the oldest first."""
        self._waiting: Counter[str] = Counter()
        """By the sender."""
        self._left = asyncio.Event()

    async def read(
        self, context: grpc.aio.ServicerContext, sender: str, *, is_short: bool = False
    ) -> tuple[bytes, Reservation]:
        """The call's message, and its share of the budget, which the caller releases.

        Args:
            context: of the call.
            sender: names its sender: a tenant, or an address.
            is_short: the message has a few bytes, so it needs not wait for room.

        Raises:
            LockstepError: INVALID_REQUEST, it has not arrived in time, or there is none; OVERLOADED, there is no room.
        """
        has_room = await self._make_room(sender, is_short=is_short)
        message = await (self._receive(context, sender) if has_room else self._glance(context))
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

    async def _receive(self, context: grpc.aio.ServicerContext, sender: str) -> bytes:
        """The message, which counts as arriving until it is there."""
        loop = asyncio.get_running_loop()
        limit, began = asyncio.timeout(self._timeout_s), loop.time()
        self._arriving[limit] = _Arriving(sender, began)
        try:
            async with limit:
                message: bytes = await context.read()
        except TimeoutError:
            if loop.time() - began < self._timeout_s:
                raise overloaded() from None
            raise LockstepError(
                ErrorCode.INVALID_REQUEST, f"the message did not arrive within {self._timeout_s:g} seconds"
            ) from None
        finally:
            self._arriving.pop(limit, None)
            self._left.set()
        return message

    async def _glance(self, context: grpc.aio.ServicerContext) -> bytes:
        """The message, if it is there already."""
        reading: asyncio.Task[bytes] = asyncio.create_task(context.read())
        try:
            await asyncio.wait((reading,), timeout=GLANCE_S)
            for _ in range(_TURNS):
                if not reading.done():
                    await asyncio.sleep(0)
            if not reading.done():
                raise overloaded()
            return reading.result()
        finally:
            reading.cancel()

    async def _make_room(self, sender: str, *, is_short: bool) -> bool:
        """Wait until one more message may arrive, but not long; whether it may."""
        if len(self._arriving) < self._max_messages:
            return True
        if is_short or self._waiting[sender] >= MAX_WAITING:
            return False
        self._waiting[sender] += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self._arriving) >= self._max_messages:
                    await self._wait_or_evict(sender)
        except TimeoutError:
            return False
        finally:
            self._waiting[sender] -= 1
            if not self._waiting[sender]:
                del self._waiting[sender]
        return True

    async def _wait_or_evict(self, sender: str) -> None:
        """Wait until a message is there, or until one has taken so long that it makes room."""
        loop = asyncio.get_running_loop()
        oldest, due_at = self._next_to_go(sender)
        if due_at <= loop.time():
            del self._arriving[oldest]
            if not oldest.expired():  # else its own time is over in this turn of the event loop, and it leaves
                oldest.reschedule(loop.time())
            return
        self._left.clear()
        try:
            async with asyncio.timeout_at(due_at):
                await self._left.wait()
        except TimeoutError:
            return

    def _next_to_go(self, sender: str) -> tuple[asyncio.Timeout, float]:
        """The message that makes room for one of the sender, and when."""
        limit, oldest = next(iter(self._arriving.items()))
        due_at = oldest.began + PATIENCE_S
        held = Counter(each.sender for each in self._arriving.values())
        most = max(held, key=lambda each: held[each])
        if held[most] > held[sender] + 1:
            theirs, each = next((limit, each) for limit, each in self._arriving.items() if each.sender == most)
            if each.began + FAIR_PATIENCE_S < due_at:
                return theirs, each.began + FAIR_PATIENCE_S
        return limit, due_at
