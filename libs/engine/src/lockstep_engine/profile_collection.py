"""The driver's side of a profile: it orders the ranks to profile some steps and gathers what they give.

It never holds a step up. Each of its waits is bounded, whatever the ranks do.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_engine.control import MAX_PROFILE_BYTES, ProfileEnded, StartProfile, StopProfile

MAX_PROFILED_STEPS = 200
PROFILE_ALLOWANCE_S = 10.0
"""Added to the deadlines of steps while ranks profile: to start and to stop torch's profiler takes a rank time between
two steps, up to a second on a busy machine. It must not look as if the rank hung."""
PROFILE_S = 45.0
"""Longest time of a profile."""

FIRST_STEP_S = 10.0
RECORD_S = 20.0
"""The ranks stop after 10 s by themselves, if a step ends then."""
POLL_S = 0.1

Send = Callable[[StartProfile | StopProfile], Sequence[int]]
"""Sends an order to all ranks; returns those that do not take it."""


def check_steps(steps: int) -> None:
    """Refuse a number of steps that is out of bounds.

    Raises:
        LockstepError: INVALID_REQUEST.
    """
    if not 1 <= steps <= MAX_PROFILED_STEPS:
        raise invalid("steps", f"must be from 1 to {MAX_PROFILED_STEPS}")


class ProfileCollection:
    """One profile. `take` and `fail` are called by the group.

    Args:
        number: of the profile; ranks repeat it, so that a late answer is not taken for one of the next profile.
        ranks: how many ranks give a part.
    """

    def __init__(self, number: int, ranks: int) -> None:
        self._number = number
        self._parts: dict[int, bytes] = {}
        self._ranks = ranks
        self._reason = ""
        self._changed = asyncio.Event()

    def take(self, rank: int, message: ProfileEnded, descriptors: Sequence[int]) -> None:
        """A rank's answer. The descriptors stay the caller's to close."""
        if message.number != self._number:
            return
        if message.error or not descriptors:
            self.fail(f"rank {rank}: {message.error or 'it has sent no profile'}")
            return
        size = os.fstat(descriptors[0]).st_size
        if size > MAX_PROFILE_BYTES:
            self.fail(f"rank {rank}: its profile has {size} bytes; ask for fewer steps")
            return
        self._parts[rank] = os.pread(descriptors[0], size, 0)
        self._changed.set()

    def fail(self, reason: str) -> None:
        """There will be no profile."""
        self._reason = self._reason or reason
        self._changed.set()

    async def run(self, steps: int, send: Send, finished: Callable[[], int]) -> list[bytes]:
        """The ranks' profiles, in the order of ranks.

        Args:
            steps: how many to profile.
            send: see `Send`.
            finished: the steps that every rank has finished in this epoch.

        Raises:
            LockstepError: UNAVAILABLE, there is no profile; it says why, and what to do.
        """
        if deaf := send(StartProfile(self._number, steps)):
            send(StopProfile(self._number))
            raise _failed(f"rank {deaf[0]} takes no orders; `lockstep debug` shows where it is")
        before, began, is_stopped = finished(), time.monotonic(), False
        try:
            while len(self._parts) < self._ranks:
                self._changed.clear()
                if self._reason:
                    raise _failed(self._reason)
                passed_s = time.monotonic() - began
                if passed_s > FIRST_STEP_S and finished() - before < 2:
                    raise _failed(f"no steps ran within {FIRST_STEP_S:g} s; send requests meanwhile")
                if passed_s > RECORD_S and not is_stopped:
                    is_stopped = True
                    send(StopProfile(self._number))
                if passed_s > PROFILE_S:
                    late = min(set(range(self._ranks)) - self._parts.keys())
                    raise _failed(
                        f"rank {late} has given no profile within {PROFILE_S:g} s; `lockstep debug` shows where it is"
                    )
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        except BaseException:
            send(StopProfile(self._number))
            raise
        return [self._parts[rank] for rank in range(self._ranks)]


def _failed(reason: str) -> LockstepError:
    return LockstepError(ErrorCode.UNAVAILABLE, f"no profile: {reason}")
