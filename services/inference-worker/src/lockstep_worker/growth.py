"""Counters that follow a count which may begin again at 0."""

from collections.abc import Callable


class Growth:
    """Makes a counter grow as another count does. A count that has fallen has begun at 0 again: the engine sets its
    counts back some time after the new epoch or the new process shows, so neither of these can be used instead.
    """

    def __init__(self, grow: Callable[[float], None]) -> None:
        self._grow = grow
        self._last = 0.0

    def begin(self, count: float) -> None:
        """What has been counted so far does not belong to the counter."""
        self._last = count

    def observe(self, count: float) -> None:
        """Take the present count."""
        self._grow(count - self._last if count >= self._last else count)
        self._last = count
