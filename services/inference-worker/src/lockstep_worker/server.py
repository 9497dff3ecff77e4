"""The worker's process: from settings to an exit code.

It listens before the ranks are ready, so that probes and routers are answered from the first second.
"""

import asyncio
import contextlib
import logging

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from lockstep_api.v1 import worker_pb2_grpc
from lockstep_common import lifecycle, telemetry
from lockstep_common.errors import LockstepError
from lockstep_common.settings import fail
from lockstep_common.termination import leave_message
from lockstep_engine import AsyncEngine

from lockstep_worker import address
from lockstep_worker.chronicle import Notice
from lockstep_worker.engine import EngineFactory
from lockstep_worker.health import READINESS, Health
from lockstep_worker.metrics import serve_metrics
from lockstep_worker.posting import posting
from lockstep_worker.service import WorkerService
from lockstep_worker.settings import WorkerSettings
from lockstep_worker.shared_memory import check_shared_memory
from lockstep_worker.worker import Worker

MAX_MESSAGE_BYTES = 64 * 2**20

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 128),
    # With port reuse a second worker would share the port in silence instead of being refused.
    ("grpc.so_reuseport", 0),
    # Routers may ping often, also when idle.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A router that vanished without closing its connection keeps its streams' blocks for no longer than this.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)

_FLUSH_TIMEOUT_S = 2.0
_STOP_GRACE_S = 0.2  # for the statuses of RPCs that have just been ended
_CLOSE_TIMEOUT_S = 10.0
_CLIENT_ERROR_STATUSES = range(400, 500)

logger = logging.getLogger("lockstep.worker")


def main(arguments: list[str] | None = None, engine_factory: EngineFactory = AsyncEngine) -> int:
    """Run a worker until a signal or a failure ends it.

    Returns:
        The exit code: 0 after a signal, 1 for a failure that another start may mend. What no start can mend ends the
        process here with exit code 2 and one sentence on stderr.
    """
    settings = WorkerSettings.load("lockstep-worker", arguments)
    lifecycle.name_process(f"worker {settings.worker_id}")
    telemetry.setup(f"worker {settings.worker_id}", level=settings.log_level)
    try:
        check_shared_memory(settings)
        return uvloop.run(_until_signal(settings, engine_factory))
    except LockstepError as error:
        fail(error.message, settings.termination_log)
    except Exception as error:
        leave_message(f"the worker has a defect: {type(error).__name__}; its log has more", settings.termination_log)
        raise


async def _until_signal(settings: WorkerSettings, engine_factory: EngineFactory) -> int:
    return await run(settings, lifecycle.stop_event(), engine_factory)


async def run(settings: WorkerSettings, stop: asyncio.Event, engine_factory: EngineFactory) -> int:
    """Serve until `stop` is set or the engine fails for good.

    Returns:
        0 when stopped and drained, 1 when the engine failed and another start may help.

    Raises:
        LockstepError: for what another start can't mend: the model, the split, a taken address.
    """
    async with contextlib.AsyncExitStack() as stack:
        tell = await stack.enter_async_context(posting(settings)) if settings.kubernetes_events else _ignore
        worker = Worker(settings, engine_factory, tell)
        stack.callback(serve_metrics(settings.metrics_port))
        server = _listen(worker, settings.listen)
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_S)
        stack.push_async_callback(_close, worker)
        logger.info("listening", extra={"address": settings.listen, "model": worker.engine.model.name})
        await _serve(worker, stop)
        await worker.hang_up(_FLUSH_TIMEOUT_S)
    if stop.is_set() or worker.failure is None:
        return 0
    if worker.failure.meaning.http_status in _CLIENT_ERROR_STATUSES:
        raise worker.failure
    logger.error("the engine failed: %s", worker.failure.message)
    leave_message(worker.failure.message, settings.termination_log)
    return 1


def _ignore(_: Notice) -> None:
    """Nobody wants to know."""


async def _serve(worker: Worker, stop: asyncio.Event) -> None:
    """Return when `stop` has been set and the worker is drained, or when its engine has failed."""
    start, beat, stopped, failed = tasks = [
        asyncio.create_task(work) for work in (worker.start(), worker.beat(), stop.wait(), worker.failed.wait())
    ]
    try:
        await asyncio.wait((beat, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if beat.done():
            beat.result()
        if stopped.done():
            await worker.drain()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(start, beat, return_exceptions=True)


async def _close(worker: Worker) -> None:
    """Whatever goes wrong here, the ranks die with this process."""
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await worker.engine.close()
    except Exception:
        logger.exception("the engine did not close")


def _listen(worker: Worker, listen: str) -> grpc.aio.Server:
    address.claim(listen)
    server = grpc.aio.server(options=_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(worker), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(Health(worker), server)
    names = (READINESS, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        server.add_insecure_port(listen)
    except RuntimeError:
        raise address.unusable(listen, "gRPC cannot bind it") from None
    return server
