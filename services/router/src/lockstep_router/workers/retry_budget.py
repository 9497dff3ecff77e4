"""Limits retries to a share of the requests, so that refusals under overload do not multiply the load.

It is a token bucket: every new stream adds a fraction of a token, time adds a few, every retry takes one. Streams that
leave a dead or draining worker take none: each of them moves once for each such worker.
"""

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

    def deposit(self) -> None:
        """Count a new stream."""
        self._tokens = min(self._tokens + self._share, _MAX_TOKENS)

    def withdraw(self, now: float) -> bool:
        """Take one retry; False if there is none now.

        Args:
            now: the event loop's time.
        """
        if self._tokens < _RESERVE:
            self._tokens = min(self._tokens + (now - self._at) * _PER_S, _RESERVE)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
