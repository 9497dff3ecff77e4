"""How many log lines may be written: so many in a burst, then so many a second. What is more is counted."""

import time


class Allowance:
    """A token bucket.

    Args:
        burst: most lines at once.
        per_s: lines a second after that.
    """

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._at = time.monotonic()
        self.dropped = 0
        """Lines refused since this was last set to 0."""

    def take(self) -> bool:
        """Whether one more line may be written; if not, it is counted."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            self.dropped += 1
            return False
        self._left -= 1
        return True
