"""The calls of `grpc.health.v1.Health`. They need no key, so they read and write within limits of their own."""

import asyncio
from functools import partial

import grpc
from grpc_health.v1 import health_pb2
from lockstep_common.call_bounds import CallBounds, address_of
from lockstep_common.errors import LockstepError
from lockstep_common.health_service import MESSAGE_S, Behaviour, Health, health_handler, parse_check

from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.grpc.caller import abort
from lockstep_router.faces.grpc.inbound import Inbound

MAX_SILENT = 64
"""Calls at a time whose message is awaited; of further ones it has to be there."""


class HealthCalls:
    """The service's behaviours.

    Args:
        health: gives the answers.
        bodies: where messages count.
        router_id: for errors.
    """

    def __init__(self, health: Health, bodies: BodyBudget, router_id: str) -> None:
        self._health = health
        self._inbound = Inbound(bodies, MAX_SILENT, MESSAGE_S)
        self._router_id = router_id

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls by name."""
        return health_handler({name: partial(self._serve, *call) for name, call in self._health.calls.items()})

    async def _serve(
        self, bounds: CallBounds, behaviour: Behaviour, _: object, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            request = await self._read(context)
            bounds.take(address_of(context.peer()), context)
        except LockstepError as error:
            await abort(context, error, self._router_id)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None  # the client has gone
        else:
            await behaviour(request, context)

    async def _read(self, context: grpc.aio.ServicerContext) -> health_pb2.HealthCheckRequest:
        """The call's message.

        Raises:
            LockstepError: INVALID_REQUEST, it is none, or does not arrive in time; OVERLOADED, it is not there and too
                many are awaited.
        """
        raw, reservation = await self._inbound.read(context, address_of(context.peer()), is_short=True)
        reservation.release()
        return parse_check(raw)
