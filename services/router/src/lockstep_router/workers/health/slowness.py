"""Decides when a worker counts as slow and when no longer: with hysteresis, and with a second chance.

A slow worker gets few streams, so it is hardly measured. Without measurements it is tried again after a time that
doubles whenever it turns out to be slow still.
"""

import random

_CONFIRMATIONS = 3
"""Judgements in a row that change the state; there is one a second."""

_RECOVERED = 0.6
"""Share of the factor below which a slow worker is no longer slow."""

_AVOID_S = 15.0
_MAX_AVOID_S = 300.0
_JITTER = 0.25

_FORGIVEN_AFTER = 3.0
"""After this many times the last avoidance without being slow, the next one is short again."""


class Slowness:
    """Whether one worker is slow.

    Args:
        factor: multiple of the other workers' times from which on it is slow; 0: never.
        rng: for jitter.
    """

    def __init__(self, factor: float, rng: random.Random) -> None:
        self._factor = factor
        self._random = rng
        self.is_slow = False
        self.ratio: float | None = None
        """The last one known."""
        self._against = 0
        """Judgements in a row against the present state."""
        self._avoid_s = 0.0
        self._until = 0.0

    def judge(self, ratio: float | None, now: float) -> bool:
        """Take the worker's present ratio to the others, None if it cannot be measured; True if it is to be tried.

        Called once a second.
        """
        self.ratio = self.ratio if ratio is None else ratio
        if not self._factor:
            return False
        if ratio is None:
            self._against = 0
            if self.is_slow and now >= self._until:
                self._clear(now)
                return True
            return False
        is_against = ratio <= _RECOVERED * self._factor if self.is_slow else ratio >= self._factor
        self._against = self._against + 1 if is_against else 0
        if self._against >= _CONFIRMATIONS:
            if self.is_slow:
                self._clear(now)
            else:
                self._set(now)
        return False

    def _set(self, now: float) -> None:
        is_repeated = self._avoid_s and now - self._until <= _FORGIVEN_AFTER * self._avoid_s
        avoid_s = min(2 * self._avoid_s, _MAX_AVOID_S) if is_repeated else _AVOID_S
        self._avoid_s = avoid_s * self._random.uniform(1.0, 1.0 + _JITTER)
        self.is_slow, self._against = True, 0
        self._until = now + self._avoid_s

    def _clear(self, now: float) -> None:
        self.is_slow, self._against = False, 0
        self._until = now
