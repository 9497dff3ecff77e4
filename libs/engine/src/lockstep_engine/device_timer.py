"""Timestamps of a rank's work, on the clock of the device that does it: a GPU reaches a point later than the host."""

import time
from abc import ABC, abstractmethod
from typing import Self

import torch


class Timestamp(ABC):
    """A point in the device's work, after everything that the host launched before the timestamp was taken."""

    @abstractmethod
    def reached(self) -> bool:
        """Whether the device has done the work before it."""

    @abstractmethod
    def us_since(self, earlier: Self) -> float:
        """Microseconds from `earlier` to this point. Both must have been reached."""


class DeviceTimer:
    """Takes timestamps on one device."""

    def __init__(self, device: torch.device) -> None:
        self._kind = _CudaTimestamp if device.type == "cuda" else _HostTimestamp

    def now(self) -> Timestamp:
        """A timestamp after all work that has been launched."""
        return self._kind()


class _HostTimestamp(Timestamp):
    """The CPU has done work when the call that asks for it returns."""

    def __init__(self) -> None:
        self._ns = time.perf_counter_ns()

    def reached(self) -> bool:
        return True

    def us_since(self, earlier: Self) -> float:
        return (self._ns - earlier._ns) / 1000


class _CudaTimestamp(Timestamp):
    """An event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def us_since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) * 1000
