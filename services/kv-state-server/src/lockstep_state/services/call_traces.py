"""Begins the span of each call that comes with a trace's context; `calls.call` ends it."""

from collections.abc import Awaitable, Callable

import grpc
from lockstep_common.tracing import Tracing
from lockstep_common.tracing.calls import begin_called

_OURS = "/lockstep.v1."


class CallTraces(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Makes spans of calls, in the task that serves each. It has to be the innermost interceptor."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler of a call, which is not changed."""
        handler = await continuation(handler_call_details)
        if handler is not None and handler_call_details.method.startswith(_OURS):
            method = handler_call_details.method.removeprefix(_OURS).replace("/", ".")
            begin_called(self._tracing, method, handler_call_details.invocation_metadata or ())
        return handler
