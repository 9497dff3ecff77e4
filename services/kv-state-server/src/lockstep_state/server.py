"""The state server's process: it reads the settings, serves until a signal, drains and exits."""

import asyncio
import contextlib
import logging
import socket

import grpc
import uvloop
from grpc_reflection.v1alpha import reflection
from lockstep_api.v1 import state_pb2_grpc
from lockstep_common import lifecycle, telemetry
from lockstep_common.errors import LockstepError, cannot_listen
from lockstep_common.garbage import spare_existing_objects
from lockstep_common.grpc_decoding import decoding
from lockstep_common.grpc_tls import PeerInterceptor, server_credentials
from lockstep_common.health_service import SERVICE as HEALTH
from lockstep_common.health_service import Health
from lockstep_common.listening import claim
from lockstep_common.management import Reports, managed
from lockstep_common.settings import fail
from lockstep_common.termination import leave_message
from lockstep_common.tls import Certificates, TlsFiles, management_context
from lockstep_common.tracing import Tracing, setup_tracing
from lockstep_common.watched_files import watched

from lockstep_state import metrics
from lockstep_state.backend import Backend
from lockstep_state.memory import MemoryBackend
from lockstep_state.redis_backend import RedisBackend, RedisOptions
from lockstep_state.secrets import read_keys, read_password
from lockstep_state.services.call_traces import CallTraces
from lockstep_state.services.calls import Running, is_news
from lockstep_state.services.encoded import encoding
from lockstep_state.services.journal import Journal
from lockstep_state.services.kv import Kv
from lockstep_state.services.names import Leases, Sessions
from lockstep_state.settings import MEMORY, StateSettings
from lockstep_state.values import Values

SERVICES = ("lockstep.v1.Journal", "lockstep.v1.Sessions", "lockstep.v1.Leases", "lockstep.v1.Kv")
_OURS = "/lockstep.v1."
_MAX_MESSAGE_BYTES = 16 << 20
"""A batch of journals is one message; blocks come in many."""
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # a stream's journal is limited by itself
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)
MAX_AGE_S = 300.0
"""A connection that is older, give or take a tenth, takes no new calls: its caller connects again, and a Service may
choose another pod. So new pods get calls, and callers spread over the pods after some were away."""
_AGE_MARGIN_S = 10.0
_UNCOUNTED_FROM = 2
"""gRPC refuses from so many times `max_calls` on, for almost nothing, and counts nothing."""

logger = logging.getLogger("lockstep.state")


def main(arguments: list[str] | None = None) -> int:
    """Run a state server until a signal ends it.

    Returns:
        The exit code, 0. Settings that cannot be used end the process here with exit code 2 and one sentence on stderr.
    """
    settings = StateSettings.load("lockstep-state", arguments)
    lifecycle.name_process("state")
    telemetry.setup("state", level=settings.log_level, pod=settings.pod_name)
    try:
        uvloop.run(_until_signal(settings))
    except LockstepError as error:
        fail(error.message, settings.termination_log)
    except Exception as error:
        message = f"the state server has a defect: {type(error).__name__}; its log has more"
        leave_message(message, settings.termination_log)
        raise
    return 0


async def _until_signal(settings: StateSettings) -> None:
    await run(settings, lifecycle.stop_event())
    lifecycle.end_soon()


async def run(settings: StateSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then until the calls have ended or the time for that is over.

    Raises:
        LockstepError: INVALID_REQUEST, a file or an address in the settings cannot be used.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(is_news)
    tracing = setup_tracing("state", settings.pod_name or socket.gethostname(), settings)
    backend = make_backend(settings)
    health = health_of(backend)
    async with contextlib.AsyncExitStack() as stack:
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
            if settings.store != MEMORY:
                stack.enter_context(_traced_redis())
        stack.push_async_callback(backend.close)
        certificates = _certificates(settings)
        if certificates is not None:
            await stack.enter_async_context(watched(certificates))
        reports = Reports(
            unready=lambda: "the process ends" if health.draining else None,
            settings=settings.shown(),
            has_native_histograms=settings.native_histograms,
        )
        management = managed(
            settings.management_host,
            settings.management_port,
            reports,
            liveness_timeout_s=settings.liveness_timeout_s,
            tls=management_context(certificates if settings.management_tls else None),
        )
        management_port = await stack.enter_async_context(management)
        server = _listen(backend, health, settings, certificates, tracing)
        await server.start()
        spare_existing_objects()
        running = asyncio.create_task(backend.run())
        stopped = asyncio.create_task(stop.wait())
        logger.info("listening", extra={"address": settings.listen, "management_port": management_port})
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        health.draining = True
        await server.stop(settings.drain_timeout_s)
        for task in (running, stopped):
            task.cancel()
        results = await asyncio.gather(running, stopped, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
    logger.info("stopped")


def _traced_redis() -> contextlib.AbstractContextManager[None]:
    from lockstep_state.redis_backend.traces import traced_redis  # noqa: PLC0415 - the SDK only if traces are on

    return traced_redis()


def make_backend(settings: StateSettings) -> Backend:
    """The backend that the settings name.

    Raises:
        LockstepError: INVALID_REQUEST, a file cannot be used.
    """
    limits = settings.limits
    if settings.store == MEMORY:
        return MemoryBackend(settings.max_memory_bytes, limits)
    options = RedisOptions(
        address=settings.store,
        username=settings.store_username,
        password=read_password("store_password_file", settings.store_password_file),
        sentinel_password=read_password("store_sentinel_password_file", settings.store_sentinel_password_file),
        ca=settings.store_ca,
        cert=settings.store_cert,
        key=settings.store_key,
        prefix=settings.store_prefix,
        timeout_s=settings.store_timeout_s,
        batch_timeout_s=settings.store_batch_timeout_s,
        connections=settings.store_connections,
        max_block_share=settings.max_block_share,
    )
    return RedisBackend(options, Values(read_keys("encryption_key_file", settings.encryption_key_file)), limits)


def _options(settings: StateSettings) -> tuple[tuple[str, int], ...]:
    """Calls in progress outlive the age of their connection. Only a caller that watches the health begins again."""
    longest_s = max(settings.call_timeout_s, settings.transfer_timeout_s) + _AGE_MARGIN_S
    return (
        *_OPTIONS,
        ("grpc.max_connection_age_ms", int(MAX_AGE_S * 1000)),
        ("grpc.max_connection_age_grace_ms", int(longest_s * 1000)),
    )


def _certificates(settings: StateSettings) -> Certificates | None:
    if not settings.tls_cert or not settings.tls_key:
        return None
    names = {"cert": "tls_cert", "key": "tls_key", "ca": "tls_ca"}
    return Certificates("state", TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca), names)


def health_of(backend: Backend) -> Health:
    """`""` says that the process answers, the services' names that the store can be used: a store that cannot be used
    is no reason to send calls elsewhere, because all replicas have the same one.
    """
    return Health({"": lambda: True, **dict.fromkeys(SERVICES, lambda: backend.unready is None)})


def _listen(
    backend: Backend,
    health: Health,
    settings: StateSettings,
    certificates: Certificates | None,
    tracing: Tracing | None,
) -> grpc.aio.Server:
    claim(settings.listen)
    identities = [each for each in (settings.peer_identity, settings.worker_identity) if each]
    refusal = "the certificate is not for a router or a worker of this state server"
    checks = [] if certificates is None else [PeerInterceptor(identities, refusal, metrics.STRANGERS.inc)]
    traces = [] if tracing is None else [CallTraces(tracing)]
    interceptors = (*checks, decoding(_OURS), encoding(_OURS), *traces)
    most = _UNCOUNTED_FROM * settings.max_calls
    server = grpc.aio.server(options=_options(settings), interceptors=interceptors, maximum_concurrent_rpcs=most)
    running = Running(settings.max_calls)
    state_pb2_grpc.add_JournalServicer_to_server(Journal(backend, settings, running), server)  # type: ignore[no-untyped-call]
    state_pb2_grpc.add_SessionsServicer_to_server(Sessions(backend, settings, running), server)  # type: ignore[no-untyped-call]
    state_pb2_grpc.add_LeasesServicer_to_server(Leases(backend, settings, running), server)  # type: ignore[no-untyped-call]
    state_pb2_grpc.add_KvServicer_to_server(Kv(backend, settings, running), server)  # type: ignore[no-untyped-call]
    server.add_generic_rpc_handlers((health.handler(),))
    names = (*SERVICES, HEALTH, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        if certificates is None:
            server.add_insecure_port(settings.listen)
        else:
            server.add_secure_port(settings.listen, server_credentials(certificates))
    except RuntimeError:
        raise cannot_listen("listen", settings.listen, "gRPC cannot bind it") from None
    return server
