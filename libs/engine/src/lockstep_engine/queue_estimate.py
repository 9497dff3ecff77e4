"""Estimates how long one more request would wait before it runs, from how long the last requests ran.

It is given the times at which requests start and end, and nothing about tokens, blocks or plans.
"""

from collections.abc import Iterable

_WEIGHT = 0.2
"""Weight of the last request in the moving mean."""


class QueueEstimate:
    """Follows the running requests of one engine. All times are in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._mean_s = 0.0
        """Mean time that a request runs; 0 while none has ended."""

    def start(self, request_id: str, now: float) -> None:
        """A request runs. When it starts again after a preemption, its first start counts."""
        self._started.setdefault(request_id, now)

    def end(self, request_id: str, now: float) -> None:
        """A request has all its tokens."""
        started = self._started.pop(request_id, None)
        if started is not None:
            ran_s = now - started
            self._mean_s += (_WEIGHT if self._mean_s else 1.0) * (ran_s - self._mean_s)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that were cancelled or have failed: their time is not measured."""
        for request_id in request_ids:
            self._started.pop(request_id, None)

    def clear(self) -> None:
        """Forget all running requests. The measured mean stays."""
        self._started.clear()

    def waits(self, *, queued: int, running: int, free: int, now: float) -> tuple[float, float]:
        """The wait of one more request, and what each further request adds to it.

        A running request is expected to end after the mean time, and each of the others then takes the place of the one
        that ends first. Both are 0 while nothing has been measured.

        Args:
            queued: number of requests that wait.
            running: number of requests that run.
            free: number of requests that could start now.
            now: the current time.
        """
        ran_s = [now - started for started in self._started.values()]
        mean_s = self._mean_s or (sum(ran_s) / len(ran_s) if ran_s else 0.0)
        places = max(1, running + free)
        if free > 0 or not running:
            return 0.0, mean_s / places
        left_s = sorted(max(0.0, mean_s - each) for each in ran_s[:running]) or [mean_s]
        rounds, place = divmod(queued, len(left_s))
        return left_s[place] + rounds * mean_s, mean_s / places
