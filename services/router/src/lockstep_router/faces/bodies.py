"""Request bodies in memory: each is bounded in bytes and time, and all together in bytes.

A body counts from its first byte until its prompts are token ids, which count in the journals' budget. The module
never looks into a body.
"""

import asyncio
import itertools
import math
from collections.abc import Callable

from lockstep_common.errors import ErrorCode, LockstepError
from starlette.requests import ClientDisconnect, Request

from lockstep_router.memory import MemoryTrimmer

_order = itertools.count()
_SMALL_BYTES = 64 << 10
"""Bytes of a body that are read without pacing."""
_SMALL_SHARE = 8
"""One part in so many of the budget is for bodies within `_SMALL_BYTES`."""
_STALLED_S = 5.0
"""A body that has been too slow to arrive in time for this long makes room for others."""
_MIN_BYTES_PER_S = 1 << 10
"""A body that arrives more slowly is too slow, however long it may take."""
_LARGE_BYTES = 256 << 10
"""Bodies above this trigger `malloc_trim`."""
_MIN_WAIT_S = 0.002


class BodyBudget:
    """The bytes that all bodies together may take.

    When the budget is used up, a large body is refused before it is read, unless another one has stalled: for five
    seconds it has arrived too slowly to be complete in time. Of those, the one of which the smallest share has arrived
    is refused. For a small body, the largest one that is still arriving is refused instead: stalled uploads cannot
    block other requests. A part of the budget is for small bodies alone: neither can large bodies that are complete and
    wait for their turn.
    """

    def __init__(self, max_bytes: int, bytes_per_s: int, memory: MemoryTrimmer) -> None:
        self._memory = memory
        self.pace = ReadingPace(bytes_per_s)
        self._max_bytes = max_bytes
        self.used_bytes = 0
        self._arriving: set[Reservation] = set()

    def reserve(self, on_refused: Callable[[], None] = lambda: None) -> "Reservation":
        """A reservation of nothing, for a body that is about to arrive.

        Args:
            on_refused: called if the body is refused for the sake of others while it arrives.
        """
        reservation = Reservation(self, on_refused, asyncio.get_running_loop().time())
        self._arriving.add(reservation)
        return reservation

    def take(self, size_bytes: int, *, max_bytes: int) -> "Reservation":
        """A reservation for a body that has arrived in one piece.

        Raises:
            LockstepError: PAYLOAD_TOO_LARGE, or OVERLOADED if there is no room for it.
        """
        if size_bytes > max_bytes:
            raise _too_large(max_bytes)
        reservation = Reservation(self, _nothing, 0.0)
        self.grow(reservation, size_bytes)
        return reservation

    def claim(self, reservation: "Reservation", size_bytes: int) -> None:
        """Count a large body whose size has been declared, before it is read.

        Raises:
            LockstepError: OVERLOADED, there is no room and no body that has stalled.
        """
        now = asyncio.get_running_loop().time()
        while self.used_bytes + size_bytes > self._limit(size_bytes):
            stalled = [each for each in self._arriving if each.size_bytes and now - each.progressed_at > _STALLED_S]
            if not stalled:
                raise overloaded()
            min(stalled, key=lambda each: (each.arrived_bytes / each.size_bytes, -each.size_bytes)).refuse()
        self.used_bytes += size_bytes
        reservation.size_bytes = size_bytes

    def grow(self, reservation: "Reservation", count: int) -> None:
        """Count more bytes of a body.

        Raises:
            LockstepError: OVERLOADED, there is no room and no larger body to refuse.
        """
        while self.used_bytes + count > self._limit(reservation.size_bytes + count):
            largest = max(self._arriving, key=lambda each: (each.size_bytes, -each.order), default=reservation)
            if largest is reservation or largest.size_bytes <= reservation.size_bytes + count:
                raise overloaded()
            largest.refuse()
        self.used_bytes += count
        reservation.size_bytes += count

    def arrived(self, reservation: "Reservation") -> None:
        """Mark a body as complete: it is no longer refused."""
        self._arriving.discard(reservation)

    def release(self, reservation: "Reservation") -> None:
        """Return a body's bytes to the budget. A second call does nothing."""
        self.arrived(reservation)
        self.used_bytes -= reservation.size_bytes
        if reservation.size_bytes > _LARGE_BYTES:
            self._memory.trim_soon()
        reservation.size_bytes = 0

    def _limit(self, size_bytes: int) -> int:
        """What may be used in all for the sake of a body of this size."""
        return self._max_bytes if size_bytes <= _SMALL_BYTES else self._max_bytes - self._max_bytes // _SMALL_SHARE


class ReadingPace:
    """Limits the rate at which all large bodies together are read.

    Reading them takes time of the event loop; a few hundred at once would leave none for streams. Their connections are
    not read meanwhile, so the clients wait.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def wait(self, count: int) -> None:
        """Wait until the next bytes may be read."""
        wait_s = self.take(count)
        if wait_s:
            await asyncio.sleep(wait_s)

    def take(self, count: int) -> float:
        """Count bytes that will be read next; the seconds to wait before."""
        now = asyncio.get_running_loop().time()
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._bytes_per_s
        return begin - now if begin - now > _MIN_WAIT_S else 0.0


class Reservation:
    """The part of the budget that one body has."""

    size_bytes = 0
    arrived_bytes = 0
    is_refused = False
    _timer: asyncio.Timeout | None = None
    _progressed_bytes = 0
    _timeout_s = math.inf

    def __init__(self, budget: BodyBudget, on_refused: Callable[[], None], now: float) -> None:
        self.order = next(_order)
        self.progressed_at = now
        """When the body last had all that its rate demands."""
        self._budget = budget
        self._on_refused = on_refused

    def grow_to(self, size_bytes: int) -> None:
        """Count a body of which this much has arrived.

        Raises:
            LockstepError: OVERLOADED, there is no room and no larger body to refuse.
        """
        if size_bytes > self.size_bytes:
            self._progress(size_bytes)
            self._budget.grow(self, size_bytes - self.size_bytes)

    def _progress(self, arrived_bytes: int) -> None:
        """Note what has arrived. It is progress once it makes up for the time since the last progress."""
        self.arrived_bytes = arrived_bytes
        now = asyncio.get_running_loop().time()
        bytes_per_s = max(_MIN_BYTES_PER_S, self.size_bytes / self._timeout_s)
        if arrived_bytes - self._progressed_bytes >= bytes_per_s * (now - self.progressed_at):
            self.progressed_at, self._progressed_bytes = now, arrived_bytes

    def complete(self) -> None:
        """Mark the body as complete: it is no longer refused."""
        self._budget.arrived(self)

    async def read(self, request: Request, *, max_bytes: int, timeout_s: float) -> bytearray:
        """The whole body.

        Raises:
            LockstepError: PAYLOAD_TOO_LARGE as soon as that is known, INVALID_REQUEST if it does not arrive in time,
                OVERLOADED if there is no room for it, CANCELLED if the client has disconnected.
        """
        body, self._timeout_s = _Pieces(), timeout_s
        try:
            await self._read(request, max_bytes, body)
        except BaseException as error:
            # At once, though the error refers to the body: its answer may take long to reach the client.
            body.clear()
            self.release()
            if isinstance(error, ClientDisconnect):
                raise LockstepError(ErrorCode.CANCELLED, "the client has gone") from error
            if not isinstance(error, TimeoutError):
                raise
            if self.is_refused:
                raise overloaded() from error
            message = f"the body did not arrive within {timeout_s:g} seconds"
            raise LockstepError(ErrorCode.INVALID_REQUEST, message) from error
        finally:
            self._timer = None  # one that has ended cannot be rescheduled
        self._budget.arrived(self)
        return body.joined()

    async def _read(self, request: Request, max_bytes: int, body: "_Pieces") -> None:
        given = request.headers.get("content-length", "0")
        # The server has checked the header's form, and the bytes that arrive are counted below in any case.
        declared = int(given[:20]) if given.isascii() and given.isdigit() else 0
        if declared > max_bytes:
            raise _too_large(max_bytes)
        if declared > _SMALL_BYTES:
            self._budget.claim(self, declared)
        async with asyncio.timeout(self._timeout_s) as self._timer:
            async for chunk in request.stream():
                if body.size_bytes + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                body.add(chunk)
                self._progress(body.size_bytes)
                if body.size_bytes > self.size_bytes:
                    self._budget.grow(self, body.size_bytes - self.size_bytes)
                if body.size_bytes > _SMALL_BYTES:
                    await self._budget.pace.wait(len(chunk))

    def refuse(self) -> None:
        """Make `read` fail with OVERLOADED."""
        self.release()
        self.is_refused = True
        self._on_refused()
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Return the bytes to the budget."""
        self._budget.release(self)


def _nothing() -> None:
    """Do nothing: there is no one to inform."""


class _Pieces:
    """What has arrived of a body. One array would be copied again and again while it grows."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._complete: list[bytearray] = []
        self._last = bytearray()

    def add(self, chunk: bytes) -> None:
        """Add what comes next. Small chunks share a piece: an object for each would take more memory than they."""
        self.size_bytes += len(chunk)
        self._last += chunk
        if len(self._last) > _SMALL_BYTES:
            self._complete.append(self._last)
            self._last = bytearray()

    def clear(self) -> None:
        """Free the memory."""
        self._complete.clear()
        self._last.clear()

    def joined(self) -> bytearray:
        """The body."""
        return bytearray().join([*self._complete, self._last]) if self._complete else self._last


def overloaded() -> LockstepError:
    """The error for a body that there is no room for."""
    return LockstepError(ErrorCode.OVERLOADED, "this router holds too many request bodies", retry_after_s=1)


def _too_large(max_bytes: int) -> LockstepError:
    return LockstepError(ErrorCode.PAYLOAD_TOO_LARGE, f"the body is larger than {max_bytes} bytes")
