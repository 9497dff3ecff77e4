"""The gRPC health service: `""` is liveness, `lockstep.v1.Worker` is readiness.

It reads the worker's state for each answer, so a slow watcher delays nothing else.
"""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep_worker.worker import Worker

LIVENESS = ""
READINESS = "lockstep.v1.Worker"


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Liveness is SERVING while the process answers; readiness is SERVING while the worker accepts requests."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service now."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:128]}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """The state of a service now and after every change."""
        last_sent = None
        while True:
            changed = self._worker.changed
            status = self._status(request.service)
            if status != last_sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_sent = status
            await changed.wait()

    def _status(self, service: str) -> int:
        if service == LIVENESS or (service == READINESS and self._worker.ready):
            return int(health_pb2.HealthCheckResponse.SERVING)
        if service == READINESS:
            return int(health_pb2.HealthCheckResponse.NOT_SERVING)
        return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
