"""The calls of `grpc.health.v1.Health`. They need no key, so they read and write within limits of their own.

gRPC waits without end for the message of a plain call, and for a client to read its answer, and each such call is one
of the server's. So calls here read their message themselves, as those of `Inference` do.
"""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.health_service import Health

from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.grpc.caller import abort, address_of
from lockstep_router.faces.grpc.inbound import Inbound

SERVICE = "grpc.health.v1.Health"
MAX_SILENT = 64
"""Calls at a time whose message is awaited; of further ones it has to be there."""
_MESSAGE_S = 5.0
MAX_ANSWERS = 64
"""Answers to `Check` at a time. Most take a moment; of a client that reads nothing it takes as long as its call."""

_Behaviour = Callable[[health_pb2.HealthCheckRequest, grpc.aio.ServicerContext], Awaitable[None]]


class HealthCalls:
    """The service's behaviours.

    Args:
        health: gives the answers.
        bodies: where messages count.
        router_id: for errors.
    """

    def __init__(self, health: Health, bodies: BodyBudget, router_id: str) -> None:
        self._health = health
        self._inbound = Inbound(bodies, MAX_SILENT, _MESSAGE_S)
        self._router_id = router_id
        self._answers = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls by name."""
        behaviours = {"Check": self._check, "Watch": self._health.Watch}
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: self._handler_of(behaviour) for name, behaviour in behaviours.items()}
        )

    def _handler_of(self, behaviour: _Behaviour) -> grpc.RpcMethodHandler:
        async def serve(_: object, context: grpc.aio.ServicerContext) -> None:
            try:
                request = await self._read(context)
            except LockstepError as error:
                await abort(context, error, self._router_id)
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None  # the client has gone
            else:
                await behaviour(request, context)

        return grpc.stream_stream_rpc_method_handler(
            serve, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
        )

    async def _read(self, context: grpc.aio.ServicerContext) -> health_pb2.HealthCheckRequest:
        """The call's message.

        Raises:
            LockstepError: INVALID_REQUEST, it is none, or does not arrive in time; OVERLOADED, it is not there and too
                many are awaited.
        """
        raw, reservation = await self._inbound.read(context, address_of(context.peer()), is_short=True)
        reservation.release()
        try:
            return health_pb2.HealthCheckRequest.FromString(raw)
        except DecodeError:
            raise LockstepError(ErrorCode.INVALID_REQUEST, "this is not a valid HealthCheckRequest") from None

    async def _check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        if self._answers >= MAX_ANSWERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health checks")
        self._answers += 1
        try:
            await context.write(await self._health.Check(request, context))
        finally:
            self._answers -= 1
