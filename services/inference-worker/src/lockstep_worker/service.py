"""The `lockstep.v1.Worker` gRPC service: takes calls in and turns errors into statuses."""

import asyncio

import grpc
from lockstep_api.v1 import worker_pb2, worker_pb2_grpc
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_worker.worker import Worker

_HELLO_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 30.0
_MAX_ROUTER_ID_CHARS = 128  # it is for logs alone


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The worker as routers see it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Serve(  # noqa: N802
        self, _frames: object, context: grpc.aio.ServicerContext
    ) -> None:
        """Everything between one router and this worker."""
        try:
            await self._serve(context)
        except LockstepError as error:
            await _abort(context, error)

    async def Tokenizer(  # noqa: N802
        self, request: worker_pb2.TokenizerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.TokenizerFiles:
        """The files behind a tokenizer digest."""
        if request.digest != self._worker.tokenizer.digest:
            await _abort(context, LockstepError(ErrorCode.NOT_FOUND, "no tokenizer of this digest"))
        return self._worker.tokenizer

    async def _serve(self, context: grpc.aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise LockstepError(ErrorCode.DEADLINE_EXCEEDED, f"no RouterHello within {_HELLO_TIMEOUT_S:g} s") from None
        if first is grpc.aio.EOF or not first.HasField("hello"):
            raise LockstepError(ErrorCode.INVALID_REQUEST, "the first frame must be RouterHello")
        router = self._worker.connect(first.hello.router_id[:_MAX_ROUTER_ID_CHARS])
        try:
            await router.run(self._worker, context)
        finally:
            self._worker.disconnect(router)


async def _abort(context: grpc.aio.ServicerContext, error: LockstepError) -> None:
    # The status waits behind frames that a router does not read; with the deadline this waits no longer than that.
    async with asyncio.timeout(_ABORT_TIMEOUT_S):
        await context.abort(grpc.StatusCode[error.meaning.grpc_status], error.message)
