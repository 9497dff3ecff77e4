"""Decides when a worker counts as slow and when no longer: with hysteresis, and with a second chance.

A slow worker gets few streams, so it is hardly measured. Without measurements it is tried after a time that doubles
whenever it turns out to be slow still. One stream at a time tries it, so that no other waits for it.
"""

import random

_CONFIRMATIONS = 3
"""Judgements in a row that change the state; there is one a second."""

_RECOVERED = 0.6
"""Share of the factor below which a slow worker is no longer slow."""

_TRIAL_S = 30.0
"""A trial that has not been judged by then ends well: its streams were too short to be measured."""

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
        self.is_on_trial = False
        """It was slow, and one stream at a time tries whether it still is."""
        self.ratio: float | None = None
        """The last one known."""
        self._found: bool | None = None
        """What was found last: it is slow, it is not, or it is between the two."""
        self._in_a_row = 0
        self._avoid_s = 0.0
        self._until = 0.0

    @property
    def is_impaired(self) -> bool:
        """Whether it is slow, or was and has not shown yet that it no longer is."""
        return self.is_slow or self.is_on_trial

    def judge(self, ratio: float | None, now: float) -> bool:
        """Take the worker's present ratio to the others, None if it cannot be measured; True if a trial begins.

        Called once a second.
        """
        self.ratio = self.ratio if ratio is None else ratio
        if not self._factor:
            return False
        if self.is_on_trial and now >= self._until:
            self._clear(now)
        if ratio is None:
            self._in_a_row = 0
            if self.is_slow and now >= self._until:
                self.is_slow, self.is_on_trial = False, True
                self._until = now + _TRIAL_S
                return True
            return False
        found = True if ratio >= self._factor else False if ratio <= _RECOVERED * self._factor else None
        self._in_a_row = self._in_a_row + 1 if found == self._found else 1
        self._found = found
        if self._in_a_row >= _CONFIRMATIONS:
            if found and not self.is_slow:
                self._set(now)
            elif found is False and self.is_impaired:
                self._clear(now)
        return False

    def _set(self, now: float) -> None:
        is_repeated = self._avoid_s and now - self._until <= _FORGIVEN_AFTER * self._avoid_s
        avoid_s = min(2 * self._avoid_s, _MAX_AVOID_S) if is_repeated else _AVOID_S
        self._avoid_s = avoid_s * self._random.uniform(1.0, 1.0 + _JITTER)
        self.is_slow, self.is_on_trial, self._in_a_row = True, False, 0
        self._until = now + self._avoid_s

    def _clear(self, now: float) -> None:
        self.is_slow, self.is_on_trial, self._in_a_row = False, False, 0
        self._until = now
