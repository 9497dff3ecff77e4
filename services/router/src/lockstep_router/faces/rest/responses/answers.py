"""Runs a request of the Responses API and writes its answer to the client."""

from collections.abc import AsyncIterator

from lockstep_common.errors import LockstepError

from lockstep_router.faces.rest.record import Record
from lockstep_router.faces.rest.replies import Client, json_reply
from lockstep_router.faces.rest.responses.format import Body, ResponsesFormat
from lockstep_router.faces.rest.responses.schemas import ResponsesRequest
from lockstep_router.generation.generation import Generation
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.router import Router


async def answer_response(
    router: Router, request: GenerationRequest, body: ResponsesRequest, record: Record, client: Client
) -> None:
    """Generate the response, and write it while it is generated (streamed) or afterwards.

    Raises:
        LockstepError: nothing has been written yet.
    """
    is_streamed = bool(body.stream)
    if is_streamed:
        client.expect_events()
    answer_format = ResponsesFormat(body, record.request_id, request.model)
    with router.admitted(record.account):
        prepared = await router.prepare(request, record.account)
        # The conversation's text is not needed any more, only the options that the answer repeats.
        del request, body
        record.release_body()
        async with router.run(prepared, record.account, is_collected=not is_streamed) as generation:
            record.prompt_tokens = generation.usage.prompt_tokens
            try:
                if is_streamed:
                    await client.reply_events(_events(generation, answer_format, record), end=b"")
                    return
                async for deltas in generation.deltas():
                    for delta in deltas:
                        answer_format.add(delta)
            finally:
                record.completion_tokens = generation.usage.completion_tokens
                record.failovers = generation.failovers
        await client.reply(json_reply(answer_format.whole(generation.usage, _mark(generation))))


async def _events(generation: Generation, answer_format: ResponsesFormat, record: Record) -> AsyncIterator[bytes]:
    """The response as server-sent events. Once it has begun, a failure is an event of it."""
    opening = answer_format.opening()
    try:
        async for deltas in generation.deltas():
            yield opening + b"".join(map(answer_format.events, deltas))
            opening = b""
    except LockstepError as error:
        if opening:
            raise
        record.status = error.meaning.http_status
        yield answer_format.failure(error, generation.usage)
        return
    yield answer_format.closing(generation.usage, _mark(generation))


def _mark(generation: Generation) -> Body:
    """Extra fields of an answer that was continued inexactly; see the setting `exact_failover`."""
    return {"lockstep": {"inexact": True}} if generation.inexact_choices else {}
