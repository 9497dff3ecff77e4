"""How long the steps of an engine take, and how many tokens they give: figures for its status."""

import time
from collections import deque

from lockstep_engine.plan import Result

_RATE_WINDOW_S = 5.0


class StepTiming:
    """Running means of the time of a step and of the waits in it."""

    def __init__(self) -> None:
        self.step_us = 0.0
        self.driver_us = 0.0
        self.collective_us = 0.0
        self._idle = True
        self._first_step = 0
        """First step after an idle time. Its wait for a request is not counted."""
        self._last_ns = 0

    def plan(self, step: int) -> None:
        """A plan is sent while no step is in flight."""
        if self._idle:
            self._idle, self._first_step = False, step

    def result(self, result: Result) -> None:
        """The result of a step has come."""
        now = time.perf_counter_ns()
        if result.step > self._first_step:
            self.step_us = _moving_mean(self.step_us, (now - self._last_ns) / 1000)
            self.driver_us = _moving_mean(self.driver_us, result.waited_us)
        self._last_ns = now
        self.collective_us = _moving_mean(self.collective_us, result.collective_us)

    def idle(self) -> None:
        """No step is in flight, and there is nothing to compute."""
        self._idle = True


class TokenRate:
    """Rate of generated tokens over the last seconds."""

    def __init__(self) -> None:
        self._emitted: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> None:
        """A step has given so many tokens."""
        self._emitted.append((time.monotonic(), tokens))
        self._drop_old()

    def per_s(self) -> float:
        """Tokens per second."""
        self._drop_old()
        return sum(tokens for _, tokens in self._emitted) / _RATE_WINDOW_S

    def _drop_old(self) -> None:
        now = time.monotonic()
        while self._emitted and now - self._emitted[0][0] > _RATE_WINDOW_S:
            self._emitted.popleft()


def _moving_mean(mean: float, value: float) -> float:
    return mean + 0.05 * (value - mean) if mean else value
