"""Messages that cannot be decoded get a typed status, too: gRPC's own is UNKNOWN, as if the server had failed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from google.protobuf.message import DecodeError

from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_handlers import HandlerChange

Message = TypeVar("Message")


@dataclass(frozen=True)
class Undecodable:
    """In the place of a message that is none."""


def decoding(calls: str) -> HandlerChange:
    """Gives handlers `Undecodable` for what cannot be decoded. They pass it to `decoded`.

    Args:
        calls: how the names of these handlers' calls begin, as `/lockstep.v1.`.
    """
    return HandlerChange(
        calls, lambda handler: {"request_deserializer": partial(_decode, handler.request_deserializer)}
    )


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
