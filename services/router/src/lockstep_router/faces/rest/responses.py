"""Runs a request of the Responses API and writes its answer to the client."""

import time
from collections.abc import AsyncIterator, Iterable

from lockstep_common.errors import LockstepError

from lockstep_router.faces.openai.format import Body, inexact_mark
from lockstep_router.faces.openai.responses.format import ResponseEvent, ResponsesFormat
from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.replies import Client, named_event
from lockstep_router.generation.generation import Generation
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.router import Router


async def answer_response(
    router: Router, request: GenerationRequest, style: Style, record: Record, client: Client
) -> None:
    """Generate the response, and write it while it is generated (streamed) or afterwards.

    Raises:
        LockstepError: nothing has been written yet.
    """
    if style.stream:
        client.expect_events()
    answer_format = ResponsesFormat(style.options, record.request_id, request.model, int(time.time()))
    with router.admitted(record.account):
        prepared = await router.prepare(request, record.account)
        # The conversation's text is not needed any more, only the options that the answer repeats.
        del request
        record.release_body()
        async with router.run(prepared, record.account, is_collected=not style.stream) as generation:
            record.prompt_tokens = generation.usage.prompt_tokens
            try:
                if style.stream:
                    await client.reply_events(_events(generation, answer_format, record), end=bytes)
                    return
                await generation.collect(answer_format.add)
            finally:
                record.completion_tokens = generation.usage.completion_tokens
                record.failovers = generation.failovers
        body = answer_format.complete_body(generation.usage, _mark(generation))
        with router.holding(body):
            await client.reply_json(body)


async def _events(generation: Generation, answer_format: ResponsesFormat, record: Record) -> AsyncIterator[bytes]:
    """The response as server-sent events. Once it has begun, a failure is an event of it."""
    opening = answer_format.opening()
    try:
        async for deltas in generation.deltas():
            yield _written(opening) + b"".join(_written(answer_format.events(delta)) for delta in deltas)
            opening = []
    except LockstepError as error:
        if opening:
            raise
        record.status = error.meaning.http_status
        yield _written(answer_format.failure(error, generation.usage))
        return
    yield _written(answer_format.closing(generation.usage, _mark(generation)))


def _written(events: Iterable[ResponseEvent]) -> bytes:
    """Events without ids: no client can come back to them."""
    return b"".join(named_event(event.type, "", event.data) for event in events)


def _mark(generation: Generation) -> Body:
    return inexact_mark(is_inexact=bool(generation.inexact_choices))
