"""The gRPC health service of a process. It needs no key and says nothing but whether services are served.

It asks for each answer, so that there is no copy of the state to keep up to date. That is why grpcio-health-checking's
own servicer is not used: it has to be given each change. Like `state_channel`, it is for services that have gRPC among
their dependencies: this package has not.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

MAX_WATCHES = 64
"""Watches at a time; each takes one of the server's calls for as long as its client likes."""
_WATCH_EVERY_S = 0.25


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
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
        self._watches = 0
        self.draining = False
        """The process ends: nothing is SERVING any more, and watches end, because it waits for its calls."""

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service now."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """The state of a service now and after every change; RESOURCE_EXHAUSTED beyond `MAX_WATCHES`."""
        if self._watches >= MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health watches")
        self._watches += 1
        try:
            await self._watch(request.service, context)
        finally:
            self._watches -= 1

    async def _watch(self, service: str, context: grpc.aio.ServicerContext) -> None:
        last_sent = None
        while True:
            changed = self._changed()
            is_last, status = self.draining, self._status(service)
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
