"""The `lockstep.v1.Worker` gRPC service: reads routers' frames, writes their outboxes, turns errors into gRPC statuses.

It handles neither streams nor the engine; `Worker` does.
"""

import asyncio
import logging
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from lockstep_api.v1 import worker_pb2, worker_pb2_grpc
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_decoding import decoded

from lockstep_worker.router_connection import RouterConnection
from lockstep_worker.worker import Worker

logger = logging.getLogger("lockstep.worker")

_HELLO_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 30.0
"""The longest wait for a router to read what precedes the status of its call."""
_MAX_ROUTER_ID_CHARS = 128  # the id is only used in logs
_FRAMES_AT_ONCE = 32
"""Of one message, which may have millions. After each so many the event loop serves others."""


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Implements the RPCs that routers call."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Serve(  # noqa: N802
        self, _frames: object, context: grpc.aio.ServicerContext
    ) -> None:
        """Serve one router until either side ends the RPC."""
        try:
            router_id = await _read_hello(context)
            # With the first frame they would be sent again with a status that interrupts it. gRPC refuses that, and the
            # router would never learn that its stream has ended.
            await context.send_initial_metadata(())
            connection = self._worker.connect(router_id)
            try:
                await self._serve(connection, context)
            finally:
                self._worker.disconnect(connection)
        except LockstepError as error:
            await _abort(context, error)

    async def Tokenizer(  # noqa: N802
        self, request: worker_pb2.TokenizerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.TokenizerFiles:
        """The tokenizer files with a digest."""
        try:
            if decoded(request).digest != self._worker.tokenizer.digest:
                raise LockstepError(ErrorCode.NOT_FOUND, "no tokenizer of this digest")
        except LockstepError as error:
            await _abort(context, error)
        return self._worker.tokenizer

    async def _serve(self, connection: RouterConnection, context: grpc.aio.ServicerContext) -> None:
        """Read and write until the router ends its side.

        Raises:
            LockstepError: the worker ends the RPC, because the router breaks the protocol or reads too slowly, or
                because the worker's process ends.
        """
        reader = asyncio.create_task(self._read(connection, context))
        writer = asyncio.create_task(_write(connection, context))
        overflow = asyncio.create_task(connection.outbox.overflowed.wait())
        tasks = (reader, writer, overflow)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if connection.outbox.overflowed.is_set():
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

    async def _read(self, connection: RouterConnection, context: grpc.aio.ServicerContext) -> None:
        while (message := await _read_message(context)) is not grpc.aio.EOF:
            frames = message.several.frames if message.HasField("several") else (message,)
            for number, frame in enumerate(frames, start=1):
                self._take(connection, frame)
                if number % _FRAMES_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _take(self, connection: RouterConnection, frame: worker_pb2.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "submit":
                self._worker.submit(connection, frame.submit)
            case "cancel":
                self._worker.cancel(connection, frame.cancel)
            case "prefix_watch":
                self._worker.watch_prefixes(connection, frame.prefix_watch)
            case "hello":
                raise LockstepError(ErrorCode.INVALID_REQUEST, "RouterHello must be the first frame and comes once")
            # A frame of a kind that this version does not know is ignored.


async def _read_hello(context: grpc.aio.ServicerContext) -> str:
    """The router's id from its first frame."""
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await _read_message(context)
    except TimeoutError:
        raise LockstepError(ErrorCode.DEADLINE_EXCEEDED, f"no RouterHello within {_HELLO_TIMEOUT_S:g} s") from None
    if first is grpc.aio.EOF or not first.HasField("hello"):
        raise LockstepError(ErrorCode.INVALID_REQUEST, "the first frame must be RouterHello")
    router_id: str = first.hello.router_id[:_MAX_ROUTER_ID_CHARS]
    return router_id


async def _read_message(context: grpc.aio.ServicerContext) -> Any:
    """The router's next message; EOF if none will come. gRPC's own status for one that cannot be decoded is UNKNOWN, as
    if the worker had failed, and it logs an error.
    """
    try:
        return await context.read()
    except DecodeError:
        raise LockstepError(ErrorCode.INVALID_REQUEST, "the message cannot be decoded") from None


async def _write(connection: RouterConnection, context: grpc.aio.ServicerContext) -> bool:
    """Write frames; True if the outbox was closed and everything is written, False if the router is gone."""
    async for frame in connection.outbox.frames():
        try:
            await context.write(frame)
        except Exception as error:  # gRPC raises errors of several types for a write to an ended RPC
            logger.debug("write failed", extra={"router": connection.router_id, "error": repr(error)})
            return False
    return True


async def _abort(context: grpc.aio.ServicerContext, error: LockstepError) -> None:
    """End a call with an error. The status is sent after the waiting frames, which the router may not read: the wait
    needs a deadline. gRPC still sends the status if the router reads on, and takes no answer of the call any more.
    """
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await context.abort(grpc.StatusCode[error.meaning.grpc_status], error.message)
    except TimeoutError:
        logger.warning(
            "a router did not read the end of its call within %g s: %s",
            ABORT_TIMEOUT_S,
            error.message,
            extra={"peer": context.peer()},
        )
