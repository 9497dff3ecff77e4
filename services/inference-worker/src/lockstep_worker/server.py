"""The worker's process: it reads the settings, serves until a signal or a failure, and returns an exit code.

It listens before the ranks are ready, so that probes and routers are answered from the first second.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator
from functools import partial

import grpc
import uvloop
from grpc_reflection.v1alpha import reflection
from lockstep_api.v1 import worker_pb2_grpc
from lockstep_common import lifecycle, telemetry
from lockstep_common.errors import LockstepError, cannot_listen
from lockstep_common.garbage import spare_existing_objects
from lockstep_common.grpc_decoding import decoding
from lockstep_common.grpc_tls import server_credentials
from lockstep_common.health_service import SERVICE as HEALTH
from lockstep_common.health_service import Health
from lockstep_common.listening import claim
from lockstep_common.log_level import LOG_LEVEL
from lockstep_common.management import Reports, managed
from lockstep_common.protocol import MAX_MESSAGE_BYTES
from lockstep_common.settings import fail
from lockstep_common.termination import leave_message
from lockstep_common.tls import Certificates, management_context
from lockstep_common.tracing import setup_tracing
from lockstep_common.watched_files import watched
from lockstep_engine import AsyncEngine

from lockstep_worker import gpu_health
from lockstep_worker.engine import EngineFactory
from lockstep_worker.kv_store import KvStore, StoreOptions
from lockstep_worker.notices import Notice, posting
from lockstep_worker.profile import profile_archive
from lockstep_worker.service import WorkerService
from lockstep_worker.settings import WorkerSettings
from lockstep_worker.shared_memory import check_shared_memory
from lockstep_worker.tls import check_peers, load_certificates, state_dial
from lockstep_worker.worker import Worker

_SERVICE = "lockstep.v1.Worker"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 128),
    # With port reuse a second worker would share the port without an error.
    ("grpc.so_reuseport", 0),
    # Routers may ping often, also when idle.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # The blocks of a router that vanished without closing its connection are freed after these 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)

SHUTDOWN_S = 15.0
"""For all that comes after `drain_timeout_s`; the grace period of a pod has this much for it."""
_LAST_STEPS_S = 5.0
"""Of it, for what comes after the engine's end: RPCs, traces and Events, which have bounds of their own."""
CLOSE_TIMEOUT_S = 10.0  # for the engine, if that much is left
_FLUSH_TIMEOUT_S = 2.0
_STORE_TIMEOUT_S = 1.0  # besides what streams have left of the drain: blocks are stored all the time
_STOP_GRACE_S = 0.2  # time to send the statuses of RPCs that have just ended
_CLIENT_ERROR_STATUSES = range(400, 500)

logger = logging.getLogger("lockstep.worker")


def main(arguments: list[str] | None = None, engine_factory: EngineFactory = AsyncEngine) -> int:
    """Run a worker until a signal or a failure ends it.

    Returns:
        The exit code: 0 after a signal, 1 for a failure that another start may fix. A failure that no start can fix
        ends the process here with exit code 2 and one sentence on stderr.
    """
    settings = WorkerSettings.load("lockstep-worker", arguments)
    lifecycle.name_process(f"worker {settings.worker_id}")
    telemetry.setup(f"worker {settings.worker_id}", level=settings.log_level, pod=settings.pod_name)
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
    """Serve until `stop` is set or the engine fails permanently.

    Returns:
        0 when stopped and drained, 1 when the engine failed and another start may help.

    Raises:
        LockstepError: another start cannot help: the model or `tp` cannot be served, or the address is in use.
    """
    async with contextlib.AsyncExitStack() as stack:
        notify = await stack.enter_async_context(posting(settings)) if settings.kubernetes_events else _ignore
        tracing = setup_tracing("worker", settings.worker_id, settings)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        certificates = load_certificates(settings)
        if certificates is not None:
            await stack.enter_async_context(watched(certificates))
        store = await stack.enter_async_context(_store(settings, certificates)) if settings.state_server else None
        worker = Worker(settings, engine_factory, notify, tracing, store)
        management_port = await stack.enter_async_context(_managed(worker, settings, certificates))
        server = _listen(worker, settings, certificates)
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_S)
        shutdown = _Shutdown(settings.drain_timeout_s)
        stack.push_async_callback(_close, worker, shutdown)
        stack.enter_context(_level_of_ranks(worker))
        if settings.device == "cuda":
            stack.enter_context(gpu_health.watching(settings.tp))
        fields = {"address": settings.listen, "management_port": management_port, "model": worker.engine.model.name}
        logger.info("listening", extra=fields)
        await _serve(worker, store, stop, shutdown)
        await worker.hang_up(_FLUSH_TIMEOUT_S)
    if stop.is_set() or worker.failure is None:
        return 0
    if worker.failure.meaning.http_status in _CLIENT_ERROR_STATUSES:
        raise worker.failure
    logger.error("the engine failed: %s", worker.failure.message)
    leave_message(worker.failure.message, settings.termination_log)
    return 1


def _store(settings: WorkerSettings, certificates: Certificates | None) -> KvStore:
    options = StoreOptions(
        target=settings.state_server,
        timeout_s=settings.state_timeout_s,
        fetch_timeout_s=settings.state_fetch_timeout_s,
        queue_bytes=settings.state_queue_bytes,
        ttl_s=settings.state_block_ttl_s,
        name=settings.worker_id,
        tenant_share=settings.kv_tenant_share,
        identity=settings.state_identity or "",
    )
    return KvStore(options, state_dial(settings, certificates))


def _managed(
    worker: Worker, settings: WorkerSettings, certificates: Certificates | None
) -> contextlib.AbstractAsyncContextManager[int]:
    return managed(
        settings.management_host,
        settings.management_port,
        Reports(
            unready=lambda: None if worker.ready else "the worker takes no requests",
            stacks={"engine": worker.engine.view_ranks},
            settings=settings.shown(),
            has_native_histograms=settings.native_histograms,
            profile=partial(profile_archive, worker.engine),
        ),
        liveness_timeout_s=settings.liveness_timeout_s,
        tls=management_context(certificates if settings.management_tls else None),
    )


@contextlib.contextmanager
def _level_of_ranks(worker: Worker) -> Iterator[None]:
    """Let the ranks follow the process's log level."""
    loop = asyncio.get_running_loop()

    def follow(level: str) -> None:  # in the thread that changes it
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(worker.engine.set_log_level, level)

    LOG_LEVEL.subscribe(follow)
    try:
        yield
    finally:
        LOG_LEVEL.unsubscribe(follow)


def _ignore(_: Notice) -> None:
    """Drop a notice: Events are not enabled."""


class _Shutdown:
    """When the process has to have ended, once its end has begun."""

    def __init__(self, drain_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._ends_at = math.inf

    def begin(self, *, drains: bool) -> None:
        """The end begins, with time for running streams or without."""
        self._ends_at = time.monotonic() + SHUTDOWN_S + (self._drain_timeout_s if drains else 0.0)

    @property
    def close_timeout_s(self) -> float:
        """How long the engine may take to close."""
        return min(CLOSE_TIMEOUT_S, max(0.0, self._ends_at - time.monotonic() - _LAST_STEPS_S))


async def _serve(worker: Worker, store: KvStore | None, stop: asyncio.Event, shutdown: _Shutdown) -> None:
    """Return when `stop` is set, the worker is drained and its KV blocks are stored, or when the engine has failed.

    Routers get heartbeats until then: a worker that is silent for long counts as dead.
    """
    start, beat, stopped, failed = tasks = [
        asyncio.create_task(work) for work in (_start(worker), worker.beat(), stop.wait(), worker.failed.wait())
    ]
    try:
        await asyncio.wait((beat, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if beat.done():
            beat.result()
        shutdown.begin(drains=stopped.done())
        if stopped.done():
            left_s = await worker.drain()
            if store is not None:
                await store.flush(left_s + _STORE_TIMEOUT_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(start, beat, return_exceptions=True)


async def _start(worker: Worker) -> None:
    await worker.start()
    spare_existing_objects()


async def _close(worker: Worker, shutdown: _Shutdown) -> None:
    """Close the engine. If that fails, the ranks still die with this process."""
    try:
        async with asyncio.timeout(shutdown.close_timeout_s):
            await worker.engine.close()
    except Exception:
        logger.exception("the engine did not close")


def _listen(worker: Worker, settings: WorkerSettings, certificates: Certificates | None) -> grpc.aio.Server:
    listen = settings.listen
    claim(listen)
    checks = () if certificates is None else (check_peers(settings),)
    server = grpc.aio.server(options=_OPTIONS, interceptors=(*checks, decoding(f"/{_SERVICE}/Tokenizer")))
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(worker), server)  # type: ignore[no-untyped-call]
    served = {"": lambda: True, _SERVICE: lambda: worker.ready}  # liveness and readiness
    server.add_generic_rpc_handlers((Health(served, lambda: worker.changed).handler(),))
    names = (_SERVICE, HEALTH, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        if certificates is None:
            server.add_insecure_port(listen)
        else:
            server.add_secure_port(listen, server_credentials(certificates))
    except RuntimeError:
        raise cannot_listen("listen", listen, "gRPC cannot bind it") from None
    return server
