"""Frames that wait to be written to a worker. Those that wait at one time go out in one message.

A message costs gRPC about as much as everything else that a small request costs the link.
"""

import asyncio
from collections import deque

from lockstep_router.workers.wire import several_frames

_MAX_FRAMES = 64
_MAX_BYTES = 256 << 10
"""Frames are added to a message until they have so many bytes; the worker decodes a message in one piece."""


class Outbox:
    """The frames for one worker, as bytes and in their order. One task takes them.

    Args:
        max_frames: as many may wait.
    """

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._frames: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        """Of the task that waits for a frame."""

    def put(self, frame: bytes) -> bool:
        """Add a frame; False if there is no room."""
        if len(self._frames) >= self._max_frames:
            return False
        self._frames.append(frame)
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)
        return True

    async def take(self, *, several: bool) -> bytes:
        """The next message, as soon as there is one.

        Args:
            several: the worker understands messages of several frames.
        """
        frames = self._frames
        while not frames:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        first = frames.popleft()
        if not several or not frames:
            return first
        taken, size_bytes = [first], len(first)
        while frames and len(taken) < _MAX_FRAMES and size_bytes < _MAX_BYTES:
            taken.append(frames.popleft())
            size_bytes += len(taken[-1])
        return several_frames(taken)

    def clear(self) -> None:
        """Forget all frames."""
        self._frames.clear()
