"""The shared segment between a driver and its ranks: plans in one direction, results and progress in the other.

The segment is anonymous memory, so that nothing remains when the processes end. Only bytes are moved here; doorbells go
over sockets, so that both sides can sleep in the kernel.

There is one place for a plan, and one for a result, for each step that may be in flight. A step's place is reused by
the step that is sent after its result has been read. By then every rank has read its plan, because no rank finishes a
step that another has not begun: they meet in its collectives.
"""

import mmap
import os
import struct
from typing import NamedTuple

import numpy as np
from lockstep_common.hang import Progress

MAX_IN_FLIGHT = 2
"""Most steps that may be sent before the result of the first of them has been read."""

_PROGRESS_BYTES = 64  # one cache line for each rank
_LENGTH = struct.Struct("<Q")


class RankTimes(NamedTuple):
    """What a rank has done in some time, over all requests."""

    steps: int
    busy_s: float
    """In steps, on the clock of the rank's device."""
    forward_s: float
    """The part of it in forward passes, collectives included. Rank 0 samples after them, so up to there all ranks have
    equal work."""
    collective_s: float
    """In the collectives of these steps: transfer, and waiting for other ranks. On a GPU by its own clock
    (`collective_clock`), or without our kernels the host's time, in which recorded steps count none."""
    waited_s: float
    """Between steps, when the device had nothing to do."""

    def __sub__(self, earlier: "RankTimes") -> "RankTimes":
        """What it has done since then."""
        return RankTimes(
            self.steps - earlier.steps,
            self.busy_s - earlier.busy_s,
            self.forward_s - earlier.forward_s,
            self.collective_s - earlier.collective_s,
            self.waited_s - earlier.waited_s,
        )


NOTHING_DONE = RankTimes(0, 0.0, 0.0, 0.0, 0.0)


class Mailbox:
    """A mapping of the segment. Both sides construct it with the same sizes.

    Args:
        fd: a descriptor from `create`.
        tp: number of ranks.
        plan_bytes, result_bytes: size of the largest plan and of the largest result.
    """

    def __init__(self, fd: int, tp: int, plan_bytes: int, result_bytes: int) -> None:
        self._plan_bytes = plan_bytes
        self._result_bytes = result_bytes
        self._memory = mmap.mmap(fd, self.segment_bytes(tp, plan_bytes, result_bytes))
        progress = np.frombuffer(self._memory, dtype=np.int64, count=tp * _PROGRESS_BYTES // 8)
        self.steps = progress[:: _PROGRESS_BYTES // 8]
        """[tp], int64: steps finished by each rank in this epoch."""
        self.collectives = progress[1 :: _PROGRESS_BYTES // 8]
        """[tp], int64: collectives entered by each rank's host. In a hang on the CPU the others wait for the rank with
        the fewest."""
        self._times = [progress[index :: _PROGRESS_BYTES // 8] for index in (2, 3, 4, 5)]
        """The times of `RankTimes`, each [tp], int64, in µs of this epoch."""
        self.device_bytes = progress[6 :: _PROGRESS_BYTES // 8]
        """[tp], int64: memory of its GPU that each rank has reserved; 0: it has none."""
        self.launched = progress[7 :: _PROGRESS_BYTES // 8]
        """[tp], int64: the last mark that each rank's host has launched (see `device_marks`); 0: it has none."""
        marks = np.frombuffer(
            self._memory, dtype=np.int64, count=tp * _PROGRESS_BYTES // 8, offset=tp * _PROGRESS_BYTES
        )
        self.reached = marks[:: _PROGRESS_BYTES // 8]
        """[tp], int64: the last mark that each rank's device has reached. The device writes it: the host never does."""
        self._plans = 2 * tp * _PROGRESS_BYTES
        self._results = self._plans + MAX_IN_FLIGHT * (_LENGTH.size + plan_bytes)

    def note_step(self, rank: int, busy_us: int, forward_us: int, collective_us: int, waited_us: int) -> None:
        """Rank: count a step that the device has finished, and its times."""
        self.steps[rank] += 1
        for total, spent_us in zip(self._times, (busy_us, forward_us, collective_us, waited_us), strict=True):
            total[rank] += spent_us

    def progress(self, rank: int) -> Progress:
        """Driver: how far a rank has come."""
        return Progress(int(self.collectives[rank]), int(self.launched[rank]), int(self.reached[rank]))

    def times(self) -> tuple[RankTimes, ...]:
        """Driver: what each rank has done in this epoch so far."""
        return tuple(map(RankTimes, self.steps.tolist(), *((each / 1e6).tolist() for each in self._times)))

    @staticmethod
    def segment_bytes(tp: int, plan_bytes: int, result_bytes: int) -> int:
        """Size of the segment."""
        return 2 * tp * _PROGRESS_BYTES + MAX_IN_FLIGHT * (2 * _LENGTH.size + plan_bytes + result_bytes)

    @staticmethod
    def create(size: int, name: str) -> int:
        """A file descriptor of anonymous shared memory, zeroed."""
        fd = os.memfd_create(f"lockstep-{name}")
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        return fd

    def put_plan(self, step: int, data: bytes) -> None:
        """Driver: write the plan of `step`."""
        self._put(self._offset(self._plans, self._plan_bytes, step), self._plan_bytes, data)

    def get_plan(self, step: int) -> bytes:
        """Rank: read the plan of `step`."""
        return self._get(self._offset(self._plans, self._plan_bytes, step))

    def put_result(self, step: int, data: bytes) -> None:
        """Rank 0: write the result of `step`."""
        self._put(self._offset(self._results, self._result_bytes, step), self._result_bytes, data)

    def get_result(self, step: int) -> bytes:
        """Driver: read the result of `step`."""
        return self._get(self._offset(self._results, self._result_bytes, step))

    @staticmethod
    def _offset(first: int, capacity: int, step: int) -> int:
        return first + step % MAX_IN_FLIGHT * (_LENGTH.size + capacity)

    def _put(self, offset: int, capacity: int, data: bytes) -> None:
        if len(data) > capacity:
            raise ValueError(f"message of {len(data)} bytes in a place for {capacity}")
        start = offset + _LENGTH.size
        self._memory[start : start + len(data)] = data
        _LENGTH.pack_into(self._memory, offset, len(data))

    def _get(self, offset: int) -> bytes:
        (length,) = _LENGTH.unpack_from(self._memory, offset)
        start = offset + _LENGTH.size
        return self._memory[start : start + length]
