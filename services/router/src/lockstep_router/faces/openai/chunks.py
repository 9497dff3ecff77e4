"""An answer that is read from a journal: as chunks of OpenAI's API from any position on, or in one piece."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from pydantic_core import to_json

from lockstep_router.faces.openai.format import Body, Format, Pieces, format_of, inexact_mark, usage_body
from lockstep_router.faces.openai.responses.chunks import response_events
from lockstep_router.faces.openai.responses.format import ResponsesFormat, response_format_of
from lockstep_router.resumption import Event, Reading, event_id


class Chunk(NamedTuple):
    """One chunk, or one event of a response."""

    event_id: str
    """Names what the client has with it."""
    data: bytes
    """JSON."""
    type: str = ""
    """Of an event of a response."""


def has_end_mark(reading: Reading) -> bool:
    """Whether a stream of chunks ends with a mark of its own; a response ends with its last event."""
    return reading.record.style.kind != "responses"


async def chunks_of(reading: Reading) -> AsyncIterator[list[Chunk]]:
    """What the client does not have yet.

    Raises:
        LockstepError: the stream has failed; everything before that has been yielded.
    """
    request_id = reading.record.request_id
    if reading.record.style.kind == "responses":
        async for events in response_events(reading, response_format_of(reading.record)):
            yield [Chunk(event_id(request_id, position), event.data, event.type) for position, event in events]
        return
    async for chunks in _chunks_of(reading, format_of(reading.record, reading.tokenizer)):
        yield chunks


async def complete_body_of(reading: Reading) -> Pieces:
    """The answer as JSON, when it is complete.

    Raises:
        LockstepError: the stream has failed.
    """
    record = reading.record
    answer_format: Format | ResponsesFormat
    answer_format = (
        response_format_of(record) if record.style.kind == "responses" else format_of(record, reading.tokenizer)
    )
    async for events in reading.events():
        for each in events:
            answer_format.add(each.delta)
    return answer_format.complete_body(reading.usage, inexact_mark(is_inexact=bool(reading.inexact_choices)))


async def _chunks_of(reading: Reading, answer_format: Format) -> AsyncIterator[list[Chunk]]:
    request_id = reading.record.request_id
    opening = [
        Chunk(event_id(request_id, reading.open_choice(index)), to_json(body))
        for index in reading.position.unopened
        for body in answer_format.opening((index,))
    ]
    async for events in reading.events():
        data = [
            Chunk(event_id(request_id, each.position), answer_format.chunk(each.delta, _extras(each, reading)))
            for each in events
        ]
        yield opening + data
        opening = []
    if reading.record.style.include_usage and not reading.position.has_usage:
        body = to_json(answer_format.usage_chunk(reading.usage))
        yield [Chunk(event_id(request_id, reading.give_usage()), body)]


def _extras(event: Event, reading: Reading) -> Body:
    """Fields of a chunk that OpenAI's API does not have."""
    if event.delta.finish_reason is None:
        return {}
    extras = inexact_mark(is_inexact=event.delta.index in reading.inexact_choices)
    if reading.record.style.include_usage and all(event.position.finished):
        # A client that loses its router here has the usage already.
        extras = {"lockstep": {**extras.get("lockstep", {}), "usage": usage_body(reading.usage)}}
    return extras
