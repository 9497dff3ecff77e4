"""The gRPC server: its port, its limits of connections, and its end.

The limits of calls are in `service` and `inbound`. Everything but health needs a key, if the router has keys.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection
from lockstep_common.errors import cannot_listen
from lockstep_common.health_service import SERVICE as HEALTH
from lockstep_common.health_service import Health

from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.body_turns import BodyTurns
from lockstep_router.faces.grpc.health import HealthCalls
from lockstep_router.faces.grpc.inbound import Inbound
from lockstep_router.faces.grpc.service import SERVICE, Inference
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings

_OTHER_CALLS = 384
"""Calls at a time that run no stream: health, reflection, and those that will be refused."""
_IDLE_MS = 30_000
"""A connection without calls is closed, since idle ones count in `max_connections`; clients connect again."""
_KEEPALIVE_TIMEOUT_MS = 20_000
_MIN_PING_INTERVAL_MS = 10_000
_AGE_GRACE_MS = 600_000
"""A call may last this much longer than the greatest age of its connection. Then it is cut, and can be resumed."""
_MIN_ARRIVING = 4


class GrpcServer:
    """Listens on its port from the beginning, and serves from `start` to `stop`.

    Args:
        router: the router.
        bodies: where messages count.
        turns: in which messages are parsed.
        credentials: of TLS; None: plain text.

    Raises:
        LockstepError: INVALID_REQUEST, the port cannot be used.
    """

    def __init__(
        self, router: Router, bodies: BodyBudget, turns: BodyTurns, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        settings = router.settings
        arriving = max(_MIN_ARRIVING, settings.max_bodies_bytes // settings.max_body_bytes)
        # Streams, further readings of streams, and the rest.
        max_calls = 2 * settings.max_streams + _OTHER_CALLS
        inbound = Inbound(bodies, arriving, settings.body_timeout_s)
        inference = Inference(router, inbound, turns, max_calls_each=max_calls // 2)
        self._server = grpc.aio.server(
            interceptors=(_Interceptor(inference),),
            options=_options(settings),
            maximum_concurrent_rpcs=max_calls,
        )
        self._server.add_generic_rpc_handlers((inference.handler(),))
        self._health = Health(dict.fromkeys(("", SERVICE), lambda: router.unready is None and not router.draining))
        self._server.add_generic_rpc_handlers((HealthCalls(self._health, bodies, settings.router_id).handler(),))
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)
        self.port = self._listen(settings, credentials)

    def _listen(self, settings: RouterSettings, credentials: grpc.ServerCredentials | None) -> int:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.grpc_port}"
        try:
            if credentials is None:
                port: int = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise cannot_listen("grpc_port", address, "the address is in use, or not of this machine") from error
        return port

    async def start(self) -> None:
        """Accept connections."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and wait for those in progress; after the grace they are cut. Health watches end."""
        self._health.draining = True
        await self._server.stop(grace_s)


def _options(settings: RouterSettings) -> tuple[tuple[str, Any], ...]:
    age_s = settings.grpc_max_connection_age_s
    ages = (
        ("grpc.max_connection_age_ms", int(age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS),
    )
    return (
        ("grpc.so_reuseport", int(settings.processes > 1)),
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
        ("grpc.max_concurrent_streams", settings.grpc_max_calls_per_connection),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", int(settings.header_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        # The router finds clients that have vanished, and refuses those that ping often.
        ("grpc.keepalive_time_ms", int(settings.keepalive_interval_s * 1000) or 0x7FFFFFFF),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        # Windows do not grow, so that data which no call reads takes little memory.
        ("grpc.http2.bdp_probe", 0),
        *(ages if age_s else ()),
    )


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets `Inference` serve every call but those of health: it refuses calls without a valid key before anything is
    read of them, and reports each.
    """

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The call's handler."""
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.removeprefix("/").partition("/")[0]
        if service == HEALTH or (service == SERVICE and handler is not None):
            return handler
        return self._inference.unknown() if handler is None else self._inference.describing(handler)
