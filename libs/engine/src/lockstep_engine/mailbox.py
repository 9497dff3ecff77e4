"""The shared segment between a driver and its ranks: plans down, results and progress up. Anonymous memory: nothing
to leak.

Bytes move here; the doorbell that says "there is something" is a socket, so that both sides can sleep in the kernel.
Plans alternate between two places, so a rank that is slow to read one is not overtaken by the next.
"""

import mmap
import os
import struct

import numpy as np

_PROGRESS_BYTES = 64  # a cache line a rank
_LENGTH = struct.Struct("<Q")


class Mailbox:
    """Maps the segment. Both sides construct it with the same sizes.

    Args:
        fd: from `create`.
        tp: ranks.
        plan_bytes, result_bytes: most that one message may take.
    """

    def __init__(self, fd: int, tp: int, plan_bytes: int, result_bytes: int) -> None:
        self._plan_bytes = plan_bytes
        self._result_bytes = result_bytes
        self._memory = mmap.mmap(fd, self.segment_bytes(tp, plan_bytes, result_bytes))
        progress = np.frombuffer(self._memory, dtype=np.int64, count=tp * _PROGRESS_BYTES // 8)
        self.steps = progress[:: _PROGRESS_BYTES // 8]
        """[tp]: steps finished by each rank in this epoch."""
        self.collectives = progress[1 :: _PROGRESS_BYTES // 8]
        """[tp]: collectives entered by each rank. In a hang the rank with the fewest is the one the others wait for."""
        self._plans = tp * _PROGRESS_BYTES
        self._result = self._plans + 2 * (_LENGTH.size + plan_bytes)

    @staticmethod
    def segment_bytes(tp: int, plan_bytes: int, result_bytes: int) -> int:
        """Size of the segment."""
        return tp * _PROGRESS_BYTES + 2 * (_LENGTH.size + plan_bytes) + _LENGTH.size + result_bytes

    @staticmethod
    def create(size: int, name: str) -> int:
        """A file descriptor of anonymous shared memory, zeroed."""
        fd = os.memfd_create(f"lockstep-{name}")
        os.ftruncate(fd, size)
        return fd

    def put_plan(self, step: int, data: bytes) -> None:
        """Driver: place the plan of `step`."""
        self._put(self._plan_offset(step), self._plan_bytes, data)

    def get_plan(self, step: int) -> bytes:
        """Rank: the plan of `step`."""
        return self._get(self._plan_offset(step))

    def put_result(self, data: bytes) -> None:
        """Rank 0: place the result of the step in flight."""
        self._put(self._result, self._result_bytes, data)

    def get_result(self) -> bytes:
        """Driver: the result of the step in flight."""
        return self._get(self._result)

    def _plan_offset(self, step: int) -> int:
        return self._plans + (step % 2) * (_LENGTH.size + self._plan_bytes)

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
