"""Moments in a rank's work, on the clock of the device that does it: a GPU comes to them later than the host."""

import time
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """Set after all work that the host has asked for so far."""

    def reached(self) -> bool:
        """Whether that work is done."""
        ...

    def us_since(self, earlier: Self) -> float:
        """Microseconds from `earlier` to this one; both have been reached."""
        ...


class HostMark:
    """On the CPU what is asked for is done at once."""

    def __init__(self) -> None:
        self._ns = time.perf_counter_ns()

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return True

    def us_since(self, earlier: Self) -> float:
        """See `Mark.us_since`."""
        return (self._ns - earlier._ns) / 1000


class CudaMark:
    """An event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def us_since(self, earlier: Self) -> float:
        """See `Mark.us_since`."""
        return float(earlier._event.elapsed_time(self._event)) * 1000
