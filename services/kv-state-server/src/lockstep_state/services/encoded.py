"""Streams as answers, in the form of the wire: joined from the bytes that are stored, without parsing them.

A long stream has tens of thousands of messages. To parse and serialize them would take so long that nobody else is
served meanwhile; so they are joined, some at a time, and the event loop serves others in between.
"""

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller

from google.protobuf.message import Message
from lockstep_api.v1 import state_pb2
from lockstep_common.grpc_handlers import HandlerChange
from lockstep_common.wire import varint

from lockstep_state.backend import StoredStream
from lockstep_state.logs import Log

_TURN_TOKENS = 2048
"""Tokens joined at a time, some 0.5 ms."""
_LENGTH_DELIMITED = 2
"""The wire type of messages and bytes."""
_CACHED_PREFIXES = 4096


@dataclass(frozen=True)
class Encoded:
    """In the place of a message that is answered: its serialized form."""

    content: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 - as messages have it
        """The form of the wire."""
        return self.content


def encoding(calls: str) -> HandlerChange:
    """Lets handlers answer with `Encoded`.

    Args:
        calls: how the names of these handlers' calls begin, as `/lockstep.v1.`.
    """
    return HandlerChange(calls, lambda _: {"response_serializer": methodcaller("SerializeToString")})


@dataclass(frozen=True)
class _Span:
    """The tokens of a log that are answered. Tokens are only added to a log, so these stay the same meanwhile."""

    log: Log
    begin: int
    end: int
    rest: bytes
    """All of the message but its tokens."""


async def encode(stored: StoredStream, positions: Sequence[int]) -> Encoded:
    """A `ReadResponse`: a stream as it is now, of each choice the tokens from its position on.

    Args:
        stored: the stream.
        positions: 0 for those not given.
    """
    froms = [*positions, *[0] * len(stored.logs)]
    spans = [_span(log, position) for log, position in zip(stored.logs, froms, strict=False)]
    answer, tokens = [encode_head(stored).content], 0
    for span in spans:
        parts = [span.rest]
        for begin in range(span.begin, span.end, _TURN_TOKENS):
            end = min(span.end, begin + _TURN_TOKENS)
            parts.append(_tokens(span.log, begin, end))
            tokens += end - begin
            if tokens >= _TURN_TOKENS:
                tokens = 0
                await asyncio.sleep(0)
        answer += (_prefix(_LOGS, sum(map(len, parts))), *parts)
    return Encoded(b"".join(answer))


def encode_head(stored: StoredStream) -> Encoded:
    """A `ReadResponse` without logs."""
    response = state_pb2.ReadResponse(epoch=stored.epoch, owner=stored.owner)
    if stored.left_s is not None:
        response.left_s = stored.left_s
    if stored.seal is not None:
        response.seal.ParseFromString(stored.seal)
    return Encoded(b"".join((_prefix(_RECORD, len(stored.record)), stored.record, response.SerializeToString())))


def _span(log: Log, position: int) -> _Span:
    begin = min(position, len(log.ids))
    rest = state_pb2.ChoiceLog(
        position=begin,
        finish=log.finish,  # type: ignore[arg-type]
        cached_tokens=log.cached_tokens,
        inexact=log.inexact,
        numerics=log.numerics,
        unproven=log.unproven,
    )
    return _Span(log, begin, len(log.ids), rest.SerializeToString())


def _tokens(log: Log, begin: int, end: int) -> bytes:
    parts = [state_pb2.ChoiceLog(ids=log.ids[begin:end]).SerializeToString()]
    for each in log.logprobs[begin:end]:
        parts += (_prefix(_LOGPROBS, len(each)), each)
    return b"".join(parts)


def _number(message: type[Message], field: str) -> int:
    return message.DESCRIPTOR.fields_by_name[field].number


_RECORD, _LOGS = (_number(state_pb2.ReadResponse, name) for name in ("record", "logs"))
_LOGPROBS = _number(state_pb2.ChoiceLog, "logprobs")


@functools.lru_cache(_CACHED_PREFIXES)
def _prefix(field: int, length: int) -> bytes:
    """What precedes the bytes of a field: its number with the wire type, and their length."""
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(length)
