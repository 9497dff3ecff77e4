"""gRPC's health service: `""` and `lockstep.v1.Inference` say, as /readyz, whether requests for tokens are served."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep_router.faces.grpc.service import SERVICE
from lockstep_router.router import Router

_WATCH_EVERY_S = 0.5
_SERVICES = ("", SERVICE)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Load balancers send no keys, so it needs none; it tells nothing but whether the router serves."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service now."""
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """The state of a service now and after every change."""
        last_sent = None
        while True:
            status = self._status(request.service)
            if status != last_sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_sent = status
            await asyncio.sleep(_WATCH_EVERY_S)

    def _status(self, service: str) -> int:
        if service not in _SERVICES:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self._router.unready is None and not self._router.draining:
            return int(health_pb2.HealthCheckResponse.SERVING)
        return int(health_pb2.HealthCheckResponse.NOT_SERVING)
