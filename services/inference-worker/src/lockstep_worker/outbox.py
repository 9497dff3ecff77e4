"""The queue of frames to one router, oldest first. Putting never waits: for a slow router the queue overflows."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from lockstep_api.v1 import worker_pb2


class Outbox:
    """A bounded queue of frames. A Status that waits is replaced at its place by a newer one of its epoch and state.

    Keeping the place prevents that a backlog delays the heartbeat. A Status of another epoch is appended, so that it
    never overtakes the Hello of its epoch; and so is one of another state, so that the loss of the ranks never
    overtakes the news of what they ran.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._cells: deque[list[worker_pb2.WorkerFrame]] = deque()  # each cell holds one frame, which can be replaced
        self._status: list[worker_pb2.WorkerFrame] | None = None
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
        self._append([frame])

    def put_status(self, frame: worker_pb2.WorkerFrame) -> None:
        """Append a Status, or replace the one of the same epoch that still waits."""
        if self._status is not None and _kind(self._status[0]) == _kind(frame):
            self._status[0] = frame
        else:
            self._status = [frame]
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
                if cell is self._status:
                    self._status = None
                yield cell[0]
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()

    def _append(self, cell: list[worker_pb2.WorkerFrame]) -> None:
        if self._closed or self.overflowed.is_set():
            return
        if len(self._cells) >= self._limit:
            self._cells.clear()
            self.overflowed.set()
            return
        self._cells.append(cell)
        self._wake.set()


def _kind(frame: worker_pb2.WorkerFrame) -> tuple[int, worker_pb2.WorkerState]:
    return frame.epoch, frame.status.state
