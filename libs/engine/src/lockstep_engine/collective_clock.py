"""The time that a rank's device spends in collectives, by its own clock: transfer, and waiting for slower ranks.

The host of a GPU launches a collective and goes on, and does not even launch one that is recorded. So the device itself
reads its clock before and after a collective and adds the difference to a sum in its memory; the sum is copied to the
host at the end of each step. The rank that waits least is the slowest one.

Each reading is a kernel of about a microsecond. The first `_EXACT` collectives of a step, or of its recorded part, are
timed; after them one in `_EACH`, in the middle of those that it stands for, which are alike as layers are.
"""

from abc import ABC, abstractmethod

_EXACT = 8
_EACH = 8
WEIGHTS = (-_EACH, -1, 1, _EACH)
"""What a reading is multiplied by."""


class ClockStream(ABC):
    """Work of a device that is done in the order in which it is queued. None of the first two waits for the device."""

    @abstractmethod
    def add_time(self, weight: int) -> None:
        """Queue: add the time in ns, times `weight`, to the sum. Can be recorded."""

    @abstractmethod
    def publish(self) -> None:
        """Queue: copy the sum to where the host reads it."""

    @abstractmethod
    def published_ns(self) -> int:
        """The sum that was copied last: int64, which may have overflowed."""


class CollectiveClock:
    """What a device spends in the collectives of its steps.

    Args:
        stream: where the readings are queued.
    """

    def __init__(self, stream: ClockStream) -> None:
        self._stream = stream
        self._entered = 0
        self._weight = 0
        self._told_ns = 0

    def begin(self) -> None:
        """A step's work is launched from here on, or its recorded part."""
        self._entered = 0

    def enter(self) -> None:
        """A collective is launched next."""
        self._weight = _weight(self._entered)
        self._entered += 1
        if self._weight:
            self._stream.add_time(-self._weight)

    def leave(self) -> None:
        """It has been launched."""
        if self._weight:
            self._stream.add_time(self._weight)

    def end_step(self) -> None:
        """All of a step's work has been launched."""
        self._stream.publish()

    def spent_us(self) -> int:
        """Microseconds in the collectives of the steps that have ended since the last call."""
        now_ns = self._stream.published_ns()
        spent_us = _wrapped(now_ns - self._told_ns) // 1000
        self._told_ns = now_ns
        return max(0, spent_us)


def _weight(index: int) -> int:
    """The number of collectives that one stands for; 0: it is not timed."""
    if index < _EXACT:
        return 1
    return _EACH if (index - _EXACT) % _EACH == _EACH // 2 else 0


def _wrapped(difference: int) -> int:
    """The difference of two int64 that may have overflowed."""
    return (difference + 2**63) % 2**64 - 2**63
