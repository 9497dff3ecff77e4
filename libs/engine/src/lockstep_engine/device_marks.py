"""Marks in the work of a rank's device: how far it has come, written to shared memory by the device itself.

The host of a GPU launches work and goes on, so a count that it keeps itself says nothing about a device that stands
still. A mark is a copy of 8 bytes that is queued among the work: from a small tensor of numbers on the device to the
rank's word in the mailbox. The driver reads the words when a step is late.

A mark's number is that of its step times `MARKS_PER_STEP`, plus its place in the step. When a step begins, the device
adds `MARKS_PER_STEP` to all numbers of the tensor, so a recorded step writes new numbers at each replay. Marks of
recorded work have the places from `_RECORDED` on, whatever came before it in the step.
"""

import logging
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.collective_clock import CollectiveClock
from lockstep_engine.mailbox import Mailbox

logger = logging.getLogger("lockstep.engine")

MARKS_PER_STEP = 4096
"""Numbers of a step. Collectives after the last place repeat it."""
_RECORDED = 16
"""The first place of recorded marks: a step has fewer collectives before its recorded part."""
_PORTABLE = 1
"""`cudaHostRegisterPortable`"""
_END = MARKS_PER_STEP - 1


class MarkStream(ABC):
    """Work of a device that is done in the order in which it is queued. Neither method waits for the device."""

    @abstractmethod
    def advance(self) -> None:
        """Queue: add `MARKS_PER_STEP` to all numbers."""

    @abstractmethod
    def write(self, place: int) -> None:
        """Queue: write the number of a place. Can be recorded."""


class Marks:
    """Marks of a device that does its work when it is launched, as a CPU: there is nothing to mark."""

    def begin_step(self) -> None:
        """A step's work is launched from here on."""

    def enter(self) -> None:
        """A collective is launched next."""

    def leave(self) -> None:
        """It has been launched."""

    def end_step(self) -> None:
        """All of a step's work has been launched."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the launches of a step that is recorded; all of these have equally many collectives."""
        yield

    def replayed(self) -> None:
        """Recorded work has been launched again."""

    def spent_us(self, by_host_us: int) -> int:
        """Microseconds in the collectives of the steps that have ended since the last call.

        Args:
            by_host_us: what the host has spent in the calls.
        """
        return by_host_us


class DeviceMarks(Marks):
    """Marks of a device that works behind its host.

    Args:
        stream: where they are queued.
        launched: [1], int64, in shared memory: the last mark that this host has launched.
    """

    def __init__(self, stream: MarkStream, launched: NDArray[np.int64]) -> None:
        self._stream = stream
        self._launched = launched
        self.clock: CollectiveClock | None = None
        """Times collectives from when it is set."""
        self._step = 1  # 0 says that there are no marks
        self._place = 0
        self._last_recorded = _RECORDED
        self.begin_step()

    def begin_step(self) -> None:
        """See `Marks.begin_step`."""
        self._step += 1
        self._stream.advance()
        self._mark(0)
        if self.clock is not None:
            self.clock.begin()

    def enter(self) -> None:
        """See `Marks.enter`."""
        self._mark(min(self._place + 1, _END - 1))
        if self.clock is not None:
            self.clock.enter()

    def leave(self) -> None:
        """See `Marks.leave`."""
        if self.clock is not None:
            self.clock.leave()

    def end_step(self) -> None:
        """See `Marks.end_step`."""
        self._mark(_END)
        if self.clock is not None:
            self.clock.end_step()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """See `Marks.recorded`."""
        self._place = _RECORDED
        if self.clock is not None:
            self.clock.begin()
        yield
        self._last_recorded = self._place

    def replayed(self) -> None:
        """See `Marks.replayed`."""
        self._tell(self._last_recorded)

    def spent_us(self, by_host_us: int) -> int:
        """See `Marks.spent_us`: by the device's clock, if it is read."""
        return by_host_us if self.clock is None else self.clock.spent_us()

    def _mark(self, place: int) -> None:
        self._stream.write(place)
        self._tell(place)  # not earlier: what is not queued has not been launched

    def _tell(self, place: int) -> None:
        self._place = place
        self._launched[0] = self._step * MARKS_PER_STEP + place


class TorchMarkStream(MarkStream):
    """The current stream of a device.

    Args:
        word: [1], int64, in shared memory: the last mark that the device has reached. A GPU can write there only if the
            memory has been registered.
        device: the rank's.
    """

    def __init__(self, word: NDArray[np.int64], device: torch.device) -> None:
        self._word = torch.from_numpy(word)
        self._numbers = torch.arange(MARKS_PER_STEP, 2 * MARKS_PER_STEP, dtype=torch.int64, device=device)
        self._places = self._numbers.view(-1, 1).unbind()  # no operation for a view at each mark

    def advance(self) -> None:
        """See `MarkStream.advance`."""
        self._numbers.add_(MARKS_PER_STEP)

    def write(self, place: int) -> None:
        """See `MarkStream.write`."""
        self._word.copy_(self._places[place], non_blocking=True)


def marks_of(device: torch.device, mailbox: Mailbox, rank: int) -> Marks:
    """The marks of a rank. Without them, where memory cannot be registered, a hang is blamed on the rank whose host has
    entered the fewest collectives.

    Args:
        device: the rank's.
        mailbox: the rank's mapping.
        rank: its number.
    """
    if device.type != "cuda":
        return Marks()
    word, launched = mailbox.reached[rank : rank + 1], mailbox.launched[rank : rank + 1]
    problem = _register(word)
    if problem:
        logger.warning(
            "marks of the device cannot be written, so a hang may be blamed on rank 0: CUDA error %d", problem
        )
        _forget_error(device)
        return Marks()
    return DeviceMarks(TorchMarkStream(word, device), launched)


def _register(word: NDArray[np.int64]) -> int:
    """Let the GPU write to the pages that hold the word, until the process ends. Returns CUDA's error; 0: none."""
    begin, end = word.ctypes.data, word.ctypes.data + word.nbytes
    first = begin - begin % mmap.PAGESIZE
    size = -(-(end - first) // mmap.PAGESIZE) * mmap.PAGESIZE
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(first, size, _PORTABLE))


def _forget_error(device: torch.device) -> None:
    """The runtime keeps the last error, and the next launch would be blamed for it."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
