"""Limits retries to a share of the requests, so that refusals under overload do not multiply the load.

It is a token bucket: every new stream adds a fraction of a token, time adds a few, every retry takes one. Streams that
leave a dead or draining worker take none: each of them moves once for each such worker.

Streams that find no token wait in one order, that of workers' queues, and none overtakes another.
"""

from bisect import bisect_left, insort

Turn = tuple[float, str]
"""A stream's place among those that wait: what `seniority.turn_at` gives, and its id."""

_RESERVE = 10.0
"""Tokens that time alone can refill: the burst of retries without any new stream."""

_PER_S = 1.0
"""Tokens per second that time adds."""

_MAX_TOKENS = 200.0


class RetryBudget:
    """The retries that one router may make now.

    Args:
        share: tokens that one new stream adds.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = _RESERVE
        self._at = 0.0
        self._waiting: list[Turn] = []
        """Sorted."""

    def deposit(self) -> None:
        """Count a new stream."""
        self._tokens = min(self._tokens + self._share, _MAX_TOKENS)

    def withdraw(self, now: float, turn: Turn) -> bool:
        """Take one retry; False if there is none now for this stream. Then it waits until it takes one or leaves.

        Args:
            now: the event loop's time.
            turn: the stream's place.
        """
        self._refill(now)
        self.leave(turn)
        if self._tokens < 1 + self._before(turn):
            insort(self._waiting, turn)
            return False
        self._tokens -= 1
        return True

    def leave(self, turn: Turn) -> None:
        """Note that a stream no longer waits."""
        at = self._before(turn)
        if self._waiting[at : at + 1] == [turn]:
            del self._waiting[at]

    def wait_s(self, turn: Turn) -> float:
        """Seconds until there is a token for a stream that waits, if no new stream adds any and those before it take
        theirs.
        """
        return max(0.0, 1 + self._before(turn) - self._tokens) / _PER_S

    def _before(self, turn: Turn) -> int:
        return bisect_left(self._waiting, turn)

    def _refill(self, now: float) -> None:
        if self._tokens < _RESERVE:
            self._tokens = min(self._tokens + (now - self._at) * _PER_S, _RESERVE)
        self._at = now
