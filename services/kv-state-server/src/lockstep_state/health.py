"""The gRPC health service: `""` says that the process answers, the services' names that the store can be used."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep_state.backend import Backend

SERVICES = ("lockstep.v1.Journal", "lockstep.v1.Sessions", "lockstep.v1.Leases", "lockstep.v1.Kv")
_WATCH_EVERY_S = 0.25


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """A store that cannot be used is no reason to send calls elsewhere: all replicas have the same one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.draining = False

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
        """The state of a service now and after every change."""
        last_sent = None
        while True:
            is_last, status = self.draining, self._status(request.service)
            if status != last_sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_sent = status
            if is_last:
                return  # the process ends when its calls have
            await asyncio.sleep(_WATCH_EVERY_S)

    def _status(self, service: str) -> int:
        if service not in ("", *SERVICES):
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self.draining or (service and self._backend.unready is not None):
            return int(health_pb2.HealthCheckResponse.NOT_SERVING)
        return int(health_pb2.HealthCheckResponse.SERVING)
