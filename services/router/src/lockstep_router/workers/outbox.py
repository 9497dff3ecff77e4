"""Frames that wait to be written to a worker. Those that wait at one time go out in one message.

A message costs gRPC about as much as everything else that a small request costs the link.
"""

import asyncio

from lockstep_api.v1 import worker_pb2

_MAX_FRAMES = 64
_MAX_BYTES = 256 << 10
"""Frames are added to a message until they have so many bytes; the worker decodes a message in one piece."""


class Outbox:
    """The frames for one worker, in their order.

    Args:
        max_frames: as many may wait.
    """

    def __init__(self, max_frames: int) -> None:
        self._frames: asyncio.Queue[worker_pb2.RouterFrame] = asyncio.Queue(max_frames)

    def put(self, frame: worker_pb2.RouterFrame) -> bool:
        """Add a frame; False if there is no room."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            return False
        return True

    async def take(self, *, several: bool) -> worker_pb2.RouterFrame:
        """The next message, as soon as there is one.

        Args:
            several: the worker understands messages of several frames.
        """
        first = await self._frames.get()
        if not several or self._frames.empty():
            return first
        frames, size_bytes = [first], first.ByteSize()
        while not self._frames.empty() and len(frames) < _MAX_FRAMES and size_bytes < _MAX_BYTES:
            frames.append(self._frames.get_nowait())
            size_bytes += frames[-1].ByteSize()
        return worker_pb2.RouterFrame(several=worker_pb2.RouterFrames(frames=frames))

    def clear(self) -> None:
        """Forget all frames."""
        while not self._frames.empty():
            self._frames.get_nowait()
