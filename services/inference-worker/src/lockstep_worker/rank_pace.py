"""What a step of each rank took over the last seconds, for displays: metrics have the sums of all time.

The engine's statuses count in each epoch from 0. A few of them are kept; it costs nothing per token.
"""

from collections import deque
from typing import NamedTuple

from lockstep_engine import EngineStatus

WINDOW_S = 5.0
"""Long enough that a pause of one rank's core does not make it a slow one, short enough to watch."""
_SAMPLE_S = 0.25


class Pace(NamedTuple):
    """Means of one rank's steps."""

    compute_s: float
    """In the forward pass, without its collectives."""
    collective_s: float
    """In these: transfer, and waiting for slower ranks."""


NO_STEPS = Pace(0.0, 0.0)


class _Sums(NamedTuple):
    steps: int
    forward_s: float
    collective_s: float


class RankPaces:
    """The paces of a worker's ranks."""

    def __init__(self) -> None:
        self._epoch = -1
        self._samples: deque[tuple[float, dict[int, _Sums]]] = deque()

    def of(self, status: EngineStatus, now: float) -> dict[int, Pace]:
        """The pace of each rank in the `WINDOW_S` before `now`, by its number; NO_STEPS if it ran none.

        Args:
            status: the engine's status at `now`.
            now: on a clock that never goes back.
        """
        if status.epoch != self._epoch:
            self._epoch = status.epoch
            self._samples.clear()
        sums = {each.rank: _Sums(each.steps, each.forward_s, each.collective_s) for each in status.ranks}
        # Of those that are older than the window, the newest is where it begins.
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, sums))
        begin = self._samples[0][1]
        return {rank: _pace(begin[rank], each) for rank, each in sums.items() if rank in begin}


def _pace(begin: _Sums, end: _Sums) -> Pace:
    steps = end.steps - begin.steps
    if steps <= 0:
        return NO_STEPS
    forward_s, collective_s = end.forward_s - begin.forward_s, end.collective_s - begin.collective_s
    return Pace(max(0.0, forward_s - collective_s) / steps, max(0.0, collective_s) / steps)
