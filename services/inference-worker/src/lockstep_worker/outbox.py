"""The queue of frames to one router, oldest first. Putting never waits: for a slow router the queue overflows."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from lockstep_api.v1 import worker_pb2

MAX_BYTES = 64 << 20
"""Of the frames that wait, as they are sent. A frame of log probabilities takes five times as much memory."""


class Outbox:
    """A bounded queue of frames. A Status that waits is replaced at its place by a newer one of its epoch and state.

    Keeping the place prevents that a backlog delays the heartbeat. A Status of another epoch is appended, so that it
    never overtakes the Hello of its epoch; and so is one of another state, so that the loss of the ranks never
    overtakes the news of what they ran.

    Args:
        limit: the most frames that wait.
        max_bytes: the most bytes of them, beside one that does not wait for others.
    """

    def __init__(self, limit: int, max_bytes: int = MAX_BYTES) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._cells: deque[_Cell] = deque()
        self._bytes = 0
        self._status: _Cell | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self.overflowed = asyncio.Event()
        """Set when a frame does not fit, and never cleared. All waiting frames are dropped then and the connection
        ends, because a router must never see a gap.
        """

    @property
    def waiting(self) -> int:
        """Number of frames that wait."""
        return len(self._cells)

    def put(self, frame: worker_pb2.WorkerFrame) -> None:
        """Append a frame."""
        self._append(_Cell(frame))

    def put_status(self, frame: worker_pb2.WorkerFrame) -> None:
        """Append a Status, or replace the one of the same epoch that still waits."""
        if self._status is not None and _kind(self._status.frame) == _kind(frame):
            self._status.frame = frame
        else:
            self._status = _Cell(frame)
            self._append(self._status)

    def close(self) -> None:
        """Make `frames` end after the frames that are queued now."""
        self._closed = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[worker_pb2.WorkerFrame]:
        """Remove and yield frames, waiting for more until the outbox is closed."""
        while True:
            while self._cells:
                cell = self._cells.popleft()
                self._bytes -= cell.size
                if cell is self._status:
                    self._status = None
                yield cell.frame
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()

    def _append(self, cell: "_Cell") -> None:
        if self._closed or self.overflowed.is_set():
            return
        if self._cells:  # what is written at once needs no size, which takes as long as to serialize it
            cell.size = cell.frame.ByteSize()
        if len(self._cells) >= self._limit or self._bytes + cell.size > self._max_bytes:
            self._cells.clear()
            self.overflowed.set()
            return
        self._bytes += cell.size
        self._cells.append(cell)
        self._wake.set()


@dataclass(eq=False, slots=True)
class _Cell:
    """The place of one frame, which can be replaced."""

    frame: worker_pb2.WorkerFrame
    size: int = 0
    """Of its first frame, if that waited for others."""


def _kind(frame: worker_pb2.WorkerFrame) -> tuple[int, worker_pb2.WorkerState]:
    return frame.epoch, frame.status.state
