"""Messages that cannot be decoded get a typed status, too: gRPC's own is UNKNOWN, as if the server had failed."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from lockstep_common.errors import ErrorCode, LockstepError

Message = TypeVar("Message")


@dataclass(frozen=True)
class Undecodable:
    """In the place of a message that is none."""


class Decoding(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Gives handlers `Undecodable` for what cannot be decoded. They pass it to `decoded`.

    Args:
        calls: how the names of these handlers' calls begin, as `/lockstep.v1.`.
    """

    def __init__(self, calls: str) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler of a call."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._calls):
            return handler
        return handler._replace(request_deserializer=partial(_decode, handler.request_deserializer))


def decoded(message: Message) -> Message:
    """The message.

    Raises:
        LockstepError: INVALID_REQUEST, it could not be decoded.
    """
    if isinstance(message, Undecodable):
        raise LockstepError(ErrorCode.INVALID_REQUEST, "the message cannot be decoded")
    return message


def _decode(decode: Callable[[bytes], object], raw: bytes) -> object:
    try:
        return decode(raw)
    except DecodeError:
        return cast("object", Undecodable())
