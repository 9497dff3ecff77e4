"""Frames on their way to one router, oldest first. Putting never waits: a router that reads too slowly overflows it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from lockstep_api.v1 import worker_pb2


class Outbox:
    """A bounded queue of frames in which at most one Status of an epoch waits: the newest, in the oldest one's place.

    A Status keeps its place so that a backlog cannot starve the heartbeat; across epochs it does not, so that it never
    overtakes the Hello of its epoch.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._cells: deque[list[worker_pb2.WorkerFrame]] = deque()  # of one frame each
        self._status: list[worker_pb2.WorkerFrame] | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self.overflowed = asyncio.Event()
        """Set for good when a frame did not fit; all that waited is dropped then, since a gap is worse than an end."""

    def put(self, frame: worker_pb2.WorkerFrame) -> None:
        """Append a frame."""
        self._append([frame])

    def put_status(self, frame: worker_pb2.WorkerFrame) -> None:
        """Append a Status, or replace the one of the same epoch that still waits."""
        if self._status is not None and self._status[0].epoch == frame.epoch:
            self._status[0] = frame
        else:
            self._status = [frame]
            self._append(self._status)

    def close(self) -> None:
        """Let `frames` end after what is in it now."""
        self._closed = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[worker_pb2.WorkerFrame]:
        """Take the frames out, waiting for more until the outbox is closed."""
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
