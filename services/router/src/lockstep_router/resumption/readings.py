"""Counts the readings of resumable streams, so that the readings of one owner do not keep others from theirs.

The only reading of a stream that runs has room of its own: it is as much a part of the request as the generation is.
Further readings, and those of streams that have ended, share the rest. It never looks at what is read.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.tenants import Account

MAX_OF_STREAM = 16
"""Readings of one stream at a time."""
_SHARED_BY_ALL = 3 / 4
"""Beyond this part of the further readings, owners with the most get no more."""
_RESERVE = 5 / 4
"""Streams that have ended may still be read, so there can be more readings of own streams than `max_streams`."""


@dataclass
class _Pool:
    """Readings of one kind, by their owners."""

    fair_until: float
    """From here on, owners with the most get no more."""
    limit: float
    held: Counter[str] = field(default_factory=Counter)
    count: int = 0

    def check(self, owner: str) -> None:
        if self.count >= self.limit or (
            self.count >= self.fair_until and self.held[owner] >= max(self.held.values(), default=0)
        ):
            raise LockstepError(ErrorCode.OVERLOADED, "too many clients read streams of this router", retry_after_s=1)


class Readings:
    """The readings of one router.

    Args:
        max_streams: of the router.
        on_change: called when the number of readings has changed.
    """

    def __init__(self, max_streams: int, on_change: Callable[[], None]) -> None:
        self._own = _Pool(max_streams, max_streams * _RESERVE)
        self._further = _Pool(max_streams * _SHARED_BY_ALL, max_streams)
        self._on_change = on_change
        self._of_stream: Counter[str] = Counter()
        self._readings: dict[Hashable, tuple[_Pool, str, str]] = {}

    @property
    def count(self) -> int:
        """Readings now."""
        return len(self._readings)

    def add(self, reading: Hashable, stream: str, owner: str, account: Account, *, is_own: bool) -> None:
        """Count a reading until it is removed.

        Args:
            reading: names it.
            stream: what is read.
            owner: names whose stream it is.
            account: of the request.
            is_own: it is the only one of a stream that runs, or of the request that starts the stream.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED, the tenant has too many; OVERLOADED, the stream or the router has.
        """
        pool = self._own if is_own else self._further
        if not is_own and self._of_stream[stream] >= MAX_OF_STREAM:
            sentence = f"{MAX_OF_STREAM} clients read this stream already"
            raise LockstepError(ErrorCode.OVERLOADED, sentence, retry_after_s=1)
        account.check_readings(pool.held[owner])
        pool.check(owner)
        self._readings[reading] = (pool, stream, owner)
        self._of_stream[stream] += 1
        self._change(pool, owner, 1)

    def remove(self, reading: Hashable) -> None:
        """A reading has ended."""
        pool, stream, owner = self._readings.pop(reading)
        self._of_stream[stream] -= 1
        if not self._of_stream[stream]:
            del self._of_stream[stream]
        self._change(pool, owner, -1)

    def _change(self, pool: _Pool, owner: str, by: int) -> None:
        pool.count += by
        pool.held[owner] += by
        if not pool.held[owner]:
            del pool.held[owner]
        self._on_change()
