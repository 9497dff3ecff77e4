"""The steps in flight, and the deadline of the oldest one. The deadline of a start runs here too, before any step."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from lockstep_engine.profile_collection import PROFILE_ALLOWANCE_S

_SLOW_STEP = "has not finished its step"
PAUSED_S = 1.0
"""A deadline that is noticed so much later shows that the process has not run."""


class StepDeadlines:
    """At most one deadline runs at a time.

    Args:
        on_late: called when one has passed, with what was not done and since when (monotonic clock).
    """

    def __init__(self, on_late: Callable[[str, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None
        self._in_flight: deque[tuple[int, float]] = deque()
        """Steps whose results have not come, each with its deadline in seconds."""
        self._step_since = 0.0
        self._is_profiling = False
        self._profiled_until = 0.0
        """Until then steps have the deadline of profiled ones."""
        self._allowed_step = -1
        """The last step that has that deadline."""

    @property
    def in_flight(self) -> int:
        """Steps whose results have not come."""
        return len(self._in_flight)

    @property
    def step_since(self) -> float:
        """When the oldest step in flight began, on the monotonic clock; 0: none is in flight."""
        return self._step_since if self._in_flight else 0.0

    @property
    def step_deadline_s(self) -> float:
        """Its deadline; 0: none is in flight."""
        return self._in_flight[0][1] if self._in_flight else 0.0

    def begin_epoch(self) -> None:
        """New ranks begin, which are not profiled."""
        self._profiled_until, self._allowed_step = 0.0, -1

    def add(self, step: int, seconds: float) -> None:
        """A step is in flight. Its deadline is counted from the end of the step before it."""
        if self._is_profiling or time.monotonic() < self._profiled_until:
            seconds += PROFILE_ALLOWANCE_S
            self._allowed_step = step
        self._in_flight.append((step, seconds))
        if len(self._in_flight) == 1:
            self._arm_step()

    def finish(self, step: int) -> None:
        """The oldest step in flight is done."""
        self.disarm()
        first, _ = self._in_flight.popleft()
        assert step == first
        if self._in_flight:
            self._arm_step()

    def arm(self, seconds: float, what: str) -> None:
        """Start a deadline. `what`: what counts as not done when it has passed."""
        self._arm(seconds, what, time.monotonic())

    def call_later(self, seconds: float, work: Callable[..., None], *arguments: object) -> None:
        """Have something called in the place of a deadline, unless that ends before."""
        self.disarm()
        self._timer = self._loop.call_later(seconds, work, *arguments)

    def disarm(self) -> None:
        """End the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def clear(self) -> None:
        """Nothing is in flight any more."""
        self.disarm()
        self._in_flight.clear()

    def begin_profile(self) -> None:
        """Give the steps in flight the deadline that later ones get: a GPU still computes them when its rank reads the
        order, and their results wait until the profiler has started. A step gets it once, or profiles one after the
        other would hide a rank that hangs.
        """
        self._is_profiling = True
        now, first = time.monotonic(), self._in_flight[0] if self._in_flight else None
        is_late = first is not None and now >= self._step_since + first[1]
        for index, (step, seconds) in enumerate(self._in_flight):
            if step > self._allowed_step and not is_late:
                self._in_flight[index] = (step, seconds + PROFILE_ALLOWANCE_S)
        if self._in_flight and self._in_flight[0] != first:
            self._arm(self._step_since + self._in_flight[0][1] - now, _SLOW_STEP, self._step_since)
        self._allowed_step = max([self._allowed_step, *(step for step, _ in self._in_flight)])

    def end_profile(self) -> None:
        """The ranks have the order to stop profiling; they stop before a later step."""
        self._is_profiling = False
        self._profiled_until = time.monotonic() + PROFILE_ALLOWANCE_S

    def _arm_step(self) -> None:
        self._step_since = time.monotonic()
        self.arm(self._in_flight[0][1], _SLOW_STEP)

    def _arm(self, seconds: float, what: str, since: float, *, may_repeat: bool = True) -> None:
        self.call_later(seconds, self._fire, time.monotonic() + seconds, seconds, what, since, may_repeat)

    def _fire(self, due: float, seconds: float, what: str, since: float, may_repeat: bool) -> None:
        """A deadline has passed. One that is noticed late passed while this process stood still, as in a paused
        container, and so did its ranks: they get the time once more.
        """
        if may_repeat and time.monotonic() - due > PAUSED_S:
            self._arm(seconds, what, since, may_repeat=False)
        else:
            self._on_late(what, since)
