"""The circuit breaker: after failures in a row Redis is not asked, so nobody waits for it. Probes close it again."""

import time
from collections.abc import Callable


class Breaker:
    """Open while the store does not answer.

    Args:
        failures: so many in a row open it.
        on_change: called with the new state.
        clock: gives seconds.
    """

    def __init__(
        self, failures: int, on_change: Callable[[bool], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = failures
        self._on_change = on_change
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls are refused; a probe may still be made."""
        return self._opened_at is not None

    @property
    def open_s(self) -> float:
        """For how long it has been open."""
        return 0.0 if self._opened_at is None else self._clock() - self._opened_at

    def succeed(self) -> None:
        """Note an answer. Only a probe's closes an open breaker; answers to older calls may be late ones."""
        if self._opened_at is None:
            self._failures = 0

    def fail(self) -> None:
        """Note a failure."""
        self._failures += 1
        if self._opened_at is None and self._failures >= self._limit:
            self._opened_at = self._clock()
            self._on_change(True)

    def close(self) -> None:
        """Note that a probe succeeded."""
        self._failures = 0
        if self._opened_at is not None:
            self._opened_at = None
            self._on_change(False)
