"""Runs a request and writes its answer to the client, in one piece or as server-sent events."""

from collections.abc import AsyncIterator

from pydantic_core import to_json

from lockstep_router.faces.rest.openai_format import Body, Format, make_format
from lockstep_router.faces.rest.record import Record
from lockstep_router.faces.rest.replies import Client, event, json_reply
from lockstep_router.generation.generation import Generation
from lockstep_router.generation.request import GenerationRequest, PromptSource
from lockstep_router.generation.style import Style
from lockstep_router.router import Router


async def answer(router: Router, request: GenerationRequest, style: Style, record: Record, client: Client) -> None:
    """Generate the answer, and write it while it is generated (streamed) or afterwards.

    Raises:
        LockstepError: nothing has been written yet.
    """
    if style.stream:
        client.expect_events()
    with router.admitted(record.account):
        prepared = await router.prepare(request, record.account)
        # Prompts are token ids now: their text is freed, and its share of the budget for bodies with it.
        del request
        record.release_body()
        async with router.run(prepared, record.account, is_collected=not style.stream) as generation:
            record.prompt_tokens = generation.usage.prompt_tokens
            answer_format = make_format(style, record.request_id, prepared)
            try:
                if style.stream:
                    await client.reply_events(_events(generation, answer_format, style, record.request_id))
                    return
                async for deltas in generation.deltas():
                    for delta in deltas:
                        answer_format.add(delta)
            finally:
                record.completion_tokens = generation.usage.completion_tokens
                record.failovers = generation.failovers
        if prepared.kept_per_prompt is not None:
            answer_format.keep(generation.best_choices)
        more = inexact_mark(is_inexact=bool(generation.inexact_choices))
        await client.reply(json_reply(answer_format.whole(generation.usage, more)))


async def answer_ids(router: Router, model: str, source: PromptSource, record: Record, client: Client) -> None:
    """Turn a prompt into token ids.

    Raises:
        LockstepError: nothing has been written yet.
    """
    with router.admitted(record.account):
        ids, card = await router.tokenize(model, source)
        del source
        record.release_body()
        await client.reply(json_reply({"tokens": ids, "count": len(ids), "max_model_len": card.context_length}))


async def answer_text(router: Router, model: str, ids: list[int], record: Record, client: Client) -> None:
    """Turn token ids into text.

    Raises:
        LockstepError: nothing has been written yet.
    """
    with router.admitted(record.account):
        text = await router.detokenize(model, ids, "tokens")
        del ids
        record.release_body()
        await client.reply(json_reply({"prompt": text}))


async def _events(generation: Generation, answer_format: Format, style: Style, request_id: str) -> AsyncIterator[bytes]:
    """The answer as server-sent events. An event's id is the request's id and its choice's number of tokens so far."""
    indices = range(len(generation.prepared.journals))
    opening = b"".join(event(f"{request_id}:0", to_json(body)) for body in answer_format.opening(indices))
    async for deltas in generation.deltas():
        # All deltas that have arrived go out in one write: a client that keeps up gets each token separately.
        inexact = generation.inexact_choices
        data = b"".join(
            event(
                f"{request_id}:{delta.tokens}",
                answer_format.chunk(
                    delta, inexact_mark(is_inexact=bool(delta.finish_reason) and delta.index in inexact)
                ),
            )
            for delta in deltas
        )
        yield opening + data
        opening = b""
    if style.include_usage:
        usage = generation.usage
        yield event(f"{request_id}:{usage.completion_tokens}", to_json(answer_format.usage_chunk(usage)))


def inexact_mark(*, is_inexact: bool) -> Body:
    """Extra fields of an answer that was continued inexactly; see the setting `exact_failover`."""
    return {"lockstep": {"inexact": True}} if is_inexact else {}
