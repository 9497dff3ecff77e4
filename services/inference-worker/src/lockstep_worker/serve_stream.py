"""The Serve RPC of one router: reads its frames, writes what is put into its outbox, ends when either side does."""

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_worker.outbox import Outbox

if TYPE_CHECKING:
    from lockstep_worker.worker import Worker

logger = logging.getLogger("lockstep.worker")


class ServeStream:
    """One connected router. Only its own reading and writing waits for it; nobody else does."""

    def __init__(self, connection: int, router_id: str, outgoing_frames: int) -> None:
        self.connection = connection
        """Numbers the RPCs of this process: a router that comes back is another connection."""
        self.router_id = router_id
        self.outbox = Outbox(outgoing_frames)

    async def run(self, worker: "Worker", context: grpc.aio.ServicerContext) -> None:
        """Serve until the router ends its side.

        Raises:
            LockstepError: when the worker ends it, because the router breaks the protocol or reads too slowly, or
                because the worker itself ends.
        """
        reader = asyncio.create_task(self._read(worker, context))
        writer = asyncio.create_task(self._write(context))
        overflow = asyncio.create_task(self.outbox.overflowed.wait())
        tasks = (reader, writer, overflow)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.outbox.overflowed.is_set():
                raise LockstepError(
                    ErrorCode.RESOURCE_EXHAUSTED, "the router reads too slowly: the frames waiting for it overflowed"
                )
            if reader.done():
                reader.result()
            elif writer.done() and writer.result():
                raise LockstepError(ErrorCode.UNAVAILABLE, "the worker ends")
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, worker: "Worker", context: grpc.aio.ServicerContext) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            kind = frame.WhichOneof("frame")
            if kind == "submit":
                worker.submit(self, frame.submit)
            elif kind == "cancel":
                worker.cancel(self, frame.cancel)
            elif kind == "hello":
                raise LockstepError(ErrorCode.INVALID_REQUEST, "RouterHello is the first frame and no other")
            # Anything else is a kind of frame that this version does not know.

    async def _write(self, context: grpc.aio.ServicerContext) -> bool:
        """True when all has been written, False when the router has gone."""
        async for frame in self.outbox.frames():
            try:
                await context.write(frame)
            except Exception as error:  # gRPC has no common type for writing to an RPC that has ended
                logger.debug("write failed", extra={"router": self.router_id, "error": repr(error)})
                return False
        return True
