"""The gRPC health service of a process. It needs no key and says nothing but whether services are served.

It asks for each answer, so that there is no copy of the state to keep up to date. That is why grpcio-health-checking's
own servicer is not used: it has to be given each change. Like `state_channel`, it is for services that have gRPC among
their dependencies: this package has not.

gRPC waits without end for the message of a plain call, and each such call is one of the server's. So calls here read
their message themselves, within a time. On the wire that is the same.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from lockstep_common.call_bounds import CallBounds, address_of
from lockstep_common.errors import ErrorCode, LockstepError

SERVICE = "grpc.health.v1.Health"
MAX_CHECKS = 64
"""Calls of `Check` at a time. Most take a moment; one of a client that reads nothing takes as long as the client likes.
Of this and of `MAX_WATCHES` one client has at most half."""
MAX_WATCHES = 128
"""Watches at a time; each takes one of the server's calls for as long as its client likes."""
MESSAGE_S = 5.0
"""Longest wait for the message of a call."""
_WATCH_EVERY_S = 0.25

Behaviour = Callable[[health_pb2.HealthCheckRequest, grpc.aio.ServicerContext], Awaitable[None]]


class Health:
    """Answers health checks.

    Args:
        services: by the name of each service, says whether it is SERVING; `""` is the name of the process as a whole.
        changed: the event that the next change will set, so that watches see a state that lasts for a moment only. They
            look four times a second, too, and without it only then.
    """

    def __init__(
        self,
        services: Mapping[str, Callable[[], bool]],
        changed: Callable[[], asyncio.Event] = asyncio.Event,
    ) -> None:
        self._services = services
        self._changed = changed
        self._checks = CallBounds("health checks", MAX_CHECKS // 2, MAX_CHECKS)
        self._watches = CallBounds("health watches", MAX_WATCHES // 2, MAX_WATCHES)
        self.draining = False
        """The process ends: nothing is SERVING any more, and watches end, because it waits for its calls."""

    @property
    def calls(self) -> Mapping[str, tuple[CallBounds, Behaviour]]:
        """The calls by name: each takes from its bounds, then has its behaviour."""
        return {"Check": (self._checks, self.check), "Watch": (self._watches, self.watch)}

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls of a server that has no more rules for them. They count while their message is awaited, too."""
        return health_handler({name: partial(_serve, *call) for name, call in self.calls.items()})

    async def check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Say the state of a service now."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        await context.write(health_pb2.HealthCheckResponse(status=status))

    async def watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Say the state of a service now and after every change."""
        last_sent = None
        while True:
            changed = self._changed()
            is_last, status = self.draining, self._status(request.service)
            if status != last_sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_sent = status
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_EVERY_S):
                    await changed.wait()

    def _status(self, service: str) -> int:
        is_served = self._services.get(service)
        if is_served is None:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self.draining or not is_served():
            return int(health_pb2.HealthCheckResponse.NOT_SERVING)
        return int(health_pb2.HealthCheckResponse.SERVING)


def health_handler(
    calls: Mapping[str, Callable[[object, grpc.aio.ServicerContext], Awaitable[None]]],
) -> grpc.GenericRpcHandler:
    """The service of calls, by name, that read and write by the context."""
    serialize = health_pb2.HealthCheckResponse.SerializeToString
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(serve, response_serializer=serialize)
        for name, serve in calls.items()
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def parse_check(raw: bytes) -> health_pb2.HealthCheckRequest:
    """The message of a call.

    Raises:
        LockstepError: INVALID_REQUEST, it is none.
    """
    try:
        return health_pb2.HealthCheckRequest.FromString(raw)
    except DecodeError:
        raise LockstepError(ErrorCode.INVALID_REQUEST, "this is not a valid HealthCheckRequest") from None


async def _serve(bounds: CallBounds, behaviour: Behaviour, _: object, context: grpc.aio.ServicerContext) -> None:
    try:
        bounds.take(address_of(context.peer()), context)
        request = await _read(context)
    except LockstepError as error:
        await context.abort(grpc.StatusCode[error.meaning.grpc_status], error.message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # the client has gone
    else:
        await behaviour(request, context)


async def _read(context: grpc.aio.ServicerContext) -> health_pb2.HealthCheckRequest:
    try:
        async with asyncio.timeout(MESSAGE_S):
            raw = await context.read()
    except TimeoutError:
        sentence = f"the message did not arrive within {MESSAGE_S:g} seconds"
        raise LockstepError(ErrorCode.INVALID_REQUEST, sentence) from None
    if raw is grpc.aio.EOF:
        raise LockstepError(ErrorCode.INVALID_REQUEST, "the call has no message")
    return parse_check(raw)
