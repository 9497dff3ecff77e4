"""How records, tokens and outcomes look in the state server: messages of `state.proto`, and JSON for what is only the
router's. What another version of the router, or a defect, has written and this one cannot read counts as absent.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_common.errors import LockstepError, parse_code
from lockstep_common.trace_context import parse_traceparent
from pydantic import TypeAdapter, ValidationError

from lockstep_router.generation.parsing import Parsing
from lockstep_router.generation.style import Style
from lockstep_router.journals.records import ChoiceLog, ChoiceRecord, Outcome, Piece, RequestRecord, StoredStream

SCHEMA = 1
_NOBODY = "-"
"""The state server's tenant of clients without an API key: no tenant and no hash of a key has this name."""
PREPARING = "-preparing"
"""The routers' own tenant there, for marks that a client's tenant has no room for. No tenant has this name either."""


@dataclass(frozen=True)
class Key:
    """The idempotency key of a stream."""

    scope: str
    """The key, and whose it is."""
    fingerprint: str
    """Of the request, in hexadecimal."""


@dataclass(frozen=True)
class _Request:
    """The parts of a record that `StreamRecord` has no field for."""

    owner: str
    created: int
    style: Style
    stops: tuple[str, ...]
    prefixes: tuple[str, ...]
    tenant: str
    session: str
    parsing: Parsing | None
    deadline_at: float | None
    key: Key | None
    traceparent: str = ""


@dataclass(frozen=True)
class _Ending:
    """How a stream ended."""

    is_removed: bool = False
    code: str = ""
    """Of the error; empty without one."""
    message: str = ""
    field: str | None = None
    retry_after_s: float | None = None


_REQUEST = TypeAdapter(_Request)
_ENDING = TypeAdapter(_Ending)

REMOVED = _ENDING.dump_json(_Ending(is_removed=True))
"""The ending of a stream that its client has ended: it is gone, and a router that still runs it must stop."""

TAKEN_TO_END = "-ends"
"""In place of a router's name: of one that takes a stream only to end it, and writes `REMOVED` a moment later."""


@dataclass(frozen=True)
class Found:
    """A stream as the state server has it."""

    stream: StoredStream
    key: Key | None
    epoch: int


def tenant_of(owner: str) -> str:
    """The state server's tenant of an owner."""
    return owner or _NOBODY


def tenant_of_scope(scope: str) -> str:
    """The state server's tenant of an idempotency key."""
    return tenant_of(scope.partition("/")[0])


def to_message(record: RequestRecord, key: Key | None) -> state_pb2.StreamRecord:
    """The record of a stream.

    Args:
        record: the stream.
        key: its key, if this router began it; else what was read has it.
    """
    if record.written is not None:
        message = state_pb2.StreamRecord.FromString(record.written)
        message.prompts.extend(_prompts(record))
        return message
    request = _Request(
        owner=record.owner,
        created=record.created,
        style=record.style,
        stops=record.stops,
        prefixes=record.prefixes,
        tenant=record.tenant,
        session=record.session,
        parsing=record.parsing,
        deadline_at=record.deadline_at,
        key=key,
        traceparent=record.traceparent,
    )
    return state_pb2.StreamRecord(
        schema=SCHEMA,
        model=record.model,
        model_digest=record.digest,
        tokenizer_digest=record.tokenizer_digest,
        prompts=_prompts(record),
        choices=[state_pb2.StreamChoice(stream_id=each.stream_id, sampling=each.sampling) for each in record.choices],
        request=_REQUEST.dump_json(request),
    )


def _prompts(record: RequestRecord) -> list[inference_pb2.TokenIds]:
    return [inference_pb2.TokenIds(ids=ids) for ids in record.prompts]


def _without_prompts(message: state_pb2.StreamRecord) -> bytes:
    """They are in the record as numbers already, and may be long."""
    rest = state_pb2.StreamRecord()
    rest.CopyFrom(message)
    del rest.prompts[:]
    return rest.SerializeToString()


def from_response(request_id: str, response: state_pb2.ReadResponse) -> Found | None:
    """A stream that was read; None if it was removed, or cannot be used."""
    message = response.record
    try:
        request = _REQUEST.validate_json(message.request)
        ending = _ENDING.validate_json(response.seal.outcome) if response.HasField("seal") else None
    except ValidationError:
        return None
    choices, prompts = message.choices, message.prompts
    is_whole = choices and prompts and len(choices) % len(prompts) == 0 and len(response.logs) == len(choices)
    if not is_whole or message.schema != SCHEMA or (ending is not None and ending.is_removed):
        return None
    record = RequestRecord(
        request_id=request_id,
        owner=request.owner,
        model=message.model,
        digest=message.model_digest,
        tokenizer_digest=message.tokenizer_digest,
        created=request.created,
        style=request.style,
        stops=request.stops,
        prompts=tuple(array("I", prompt.ids) for prompt in prompts),
        prefixes=request.prefixes,
        choices=tuple(ChoiceRecord(each.stream_id, each.sampling) for each in choices),
        tenant=request.tenant,
        session=request.session,
        parsing=request.parsing,
        deadline_at=_deadline_at(request.deadline_at, response),
        traceparent=parse_traceparent(request.traceparent),
        written=_without_prompts(message),
    )
    stream = StoredStream(record, [_log(each) for each in response.logs], None if ending is None else _outcome(ending))
    return Found(stream, request.key, response.epoch)


def _deadline_at(written: float | None, response: state_pb2.ReadResponse) -> float | None:
    """When a client's own timeout ends, by this router's clock: the one that has written it may be ahead or behind. A
    state server of an older version does not say how much is left.
    """
    now = time.time()
    if written is None or not response.HasField("left_s") or (not response.left_s and written <= now):
        return written
    return now + response.left_s


def was_removed(response: state_pb2.ReadResponse) -> bool:
    """Whether a stream that was read has been ended by its client."""
    try:
        return response.HasField("seal") and _ENDING.validate_json(response.seal.outcome).is_removed
    except ValidationError:
        return False


def _log(message: state_pb2.ChoiceLog) -> ChoiceLog:
    log = ChoiceLog()
    log.add(
        Piece(
            0,
            0,
            array("I", message.ids),
            list(message.logprobs),
            message.finish,
            message.cached_tokens,
            message.inexact,
            message.numerics,
            message.unproven,
        )
    )
    return log


def to_piece(index: int, log: ChoiceLog, begin: int, end: int) -> state_pb2.Piece:
    """The tokens of a choice between two positions, and its finish if they are the last ones."""
    return state_pb2.Piece(
        choice=index,
        position=begin,
        ids=log.ids[begin:end],
        logprobs=log.logprobs[begin:end],
        finish=log.finish if end == len(log.ids) else 0,  # type: ignore[arg-type]
        cached_tokens=log.cached_tokens,
        inexact=log.is_inexact,
        numerics=log.numerics,
        unproven=log.is_unproven,
    )


def pieces_of(logs: Sequence[ChoiceLog]) -> list[Piece]:
    """What logs have, as pieces that make the same logs again."""
    return [
        Piece(
            index,
            0,
            log.ids,
            log.logprobs,
            log.finish,
            log.cached_tokens,
            log.is_inexact,
            log.numerics,
            log.is_unproven,
        )
        for index, log in enumerate(logs)
    ]


def to_ending(outcome: Outcome) -> bytes:
    """The outcome of a stream."""
    failure = outcome.failure
    if failure is None:
        return _ENDING.dump_json(_Ending())
    return _ENDING.dump_json(_Ending(False, str(failure.code), failure.message, failure.field, failure.retry_after_s))


def _outcome(ending: _Ending) -> Outcome:
    if not ending.code:
        return Outcome()
    code = parse_code(ending.code)
    return Outcome(LockstepError(code, ending.message, field=ending.field, retry_after_s=ending.retry_after_s))
