"""Suspects a worker whose heartbeats are late, long before the hard deadline declares it silent.

This is a phi accrual failure detector (Hayashibara, Défago, Yared and Katayama, 2004). The level of suspicion after a
silence of t seconds is phi = -log10(P(a healthy worker is silent for longer than t)), with a normal distribution
whose mean and variance follow the measured intervals. A worker with irregular heartbeats is given more time.

Times are those of the awake clock. So a router that was stopped suspects no worker, and heartbeats that it reads
together after a pause count as one.
"""

import math
from statistics import NormalDist

_WEIGHT = 0.02
"""Weight of a new interval in mean and variance: a change is learnt in about 50 heartbeats, 5 s by default."""

_WARM_UP = 10
"""Intervals before anything is suspected; until then all have equal weight."""

_MIN_DEVIATION = 0.25
"""Least standard deviation, as a share of the mean."""

_CLEARING = 3
"""Heartbeats in time that end a suspicion: one late heartbeat among regular ones makes one change of state, not two."""

_MAX_PHI = 300.0


class Suspicion:
    """The suspicion of one connection to a worker.

    Args:
        threshold_phi: level of suspicion from which on the worker is suspected; 0: never.
        tick_s: resolution of the clock in seconds.
        longest_s: longer intervals count as this one: the hard deadline.
    """

    def __init__(self, threshold_phi: float, tick_s: float, longest_s: float) -> None:
        self._deviations = -NormalDist().inv_cdf(10**-threshold_phi) if threshold_phi else math.inf
        self._tick_s = tick_s
        self._longest_s = longest_s
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Forget everything: a new connection begins."""
        self.is_suspected = False
        self._beat_at = self._heard_at = now
        self._intervals = 0
        self._mean_s = self._variance = 0.0
        self._in_time = 0

    @property
    def deviation_s(self) -> float:
        """Standard deviation of the intervals, no less than the clock can measure."""
        return max(math.sqrt(self._variance), _MIN_DEVIATION * self._mean_s, self._tick_s)

    @property
    def patience_s(self) -> float:
        """Silence after which the worker is suspected."""
        if self._intervals < _WARM_UP:
            return math.inf
        return self._mean_s + self._deviations * self.deviation_s

    def phi(self, now: float) -> float:
        """The level of suspicion: 1 is a probability of 10 % that the worker is healthy, 2 is 1 %, and so on."""
        if self._intervals < _WARM_UP:
            return 0.0
        tail = 0.5 * math.erfc((now - self._heard_at - self._mean_s) / self.deviation_s / math.sqrt(2))
        return min(-math.log10(tail), _MAX_PHI) if tail else _MAX_PHI

    def note_frame(self, now: float) -> None:
        """Note any frame: a worker that sends tokens lives, though its heartbeats be late."""
        self._heard_at = now

    def note_heartbeat(self, now: float) -> None:
        """Learn from a heartbeat. Several within one tick of the clock count as one."""
        interval_s = min(now - self._beat_at, self._longest_s)
        self._heard_at = now
        if interval_s <= 0:
            return
        is_late = interval_s > self.patience_s
        self._in_time = 0 if is_late else self._in_time + 1
        if self._in_time >= _CLEARING:
            self.is_suspected = False
        self._beat_at = now
        self._intervals += 1
        weight = max(_WEIGHT, 1 / self._intervals)
        difference = interval_s - self._mean_s
        self._mean_s += weight * difference
        # The variance of the exponentially weighted intervals (Welford's recurrence with a constant weight).
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)

    def check(self, now: float) -> None:
        """Suspect the worker if it has been silent for too long; called at every tick."""
        if not self.is_suspected and now - self._heard_at > self.patience_s:
            self.is_suspected = True
            self._in_time = 0
