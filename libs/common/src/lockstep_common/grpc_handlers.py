"""An interceptor that changes the handlers of a server's own calls."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc


class HandlerChange(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Changes handlers of calls.

    Args:
        calls: how the names of these calls begin, as `/lockstep.v1.`.
        change: returns the fields of a handler that are others, by name.
    """

    def __init__(self, calls: str, change: Callable[[Any], dict[str, Any]]) -> None:
        self._calls = calls
        self._change = change

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler of a call."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._calls):
            return handler
        return handler._replace(**self._change(handler))
