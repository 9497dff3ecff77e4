"""Answers that clients can come back to: started, joined or resumed, and written from any position."""

import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from lockstep_common.errors import invalid
from pydantic_core import to_json

from lockstep_router.faces.rest import identity
from lockstep_router.faces.rest.answers import inexact_mark
from lockstep_router.faces.rest.identity import Origin
from lockstep_router.faces.rest.openai_format import Format, format_of
from lockstep_router.faces.rest.record import Record
from lockstep_router.faces.rest.replies import Client, event, json_reply
from lockstep_router.faces.rest.schemas import SamplingFields
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.resumption import After, IdempotencyKey, Reading, event_id
from lockstep_router.router import Router

RESUMABLE_HEADER = "X-Lockstep-Resumable"
KEY_HEADER = "Idempotency-Key"
LAST_EVENT_HEADER = "Last-Event-ID"
LAST_EVENT_QUERY = "last_event_id"
STREAM_HEADER = "X-Lockstep-Stream-ID"

_KEY = re.compile(r"[!-~]{1,255}")
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Return:
    """How a client may come back to its answer."""

    owner: str
    key: IdempotencyKey | None = None
    after: After | None = None


def wanted_return(body: SamplingFields, kind: str, origin: Origin) -> Return | None:
    """Whether the client may come back, and how; None: its request ends when it leaves.

    Raises:
        LockstepError: INVALID_REQUEST, a header cannot be used.
    """
    headers = origin.headers
    flag, key = headers.get(RESUMABLE_HEADER), headers.get(KEY_HEADER)
    if flag is not None and flag.lower() not in _FLAGS:
        raise invalid(RESUMABLE_HEADER, "must be true or false")
    if key is None:
        is_wanted = bool(body.resumable) or (flag is not None and _FLAGS[flag.lower()])
        return Return(owner_of(origin)) if is_wanted else None
    if not _KEY.fullmatch(key):
        raise invalid(KEY_HEADER, "must be 1 to 255 visible ASCII characters")
    fingerprint = hashlib.blake2b(body.model_dump_json().encode(), digest_size=32, person=b"body")
    fingerprint.update(kind.encode())
    # Clients without an API key have no tenant to share keys in, so their address separates them.
    scope = f"{owner_of(origin) or identity.anonymous_tenant(origin.address)}/{key}"
    return Return(owner_of(origin), IdempotencyKey(scope, fingerprint.digest(), KEY_HEADER), last_event(headers, {}))


def owner_of(origin: Origin) -> str:
    """Names who may resume a stream: the tenant; empty for clients without an API key, whom the unguessable id tells
    apart, so that they may come back from another address.
    """
    return origin.tenant or identity.tenant(origin.headers)


def last_event(headers: Mapping[str, str], query: Mapping[str, str]) -> After | None:
    """The last event that the client has; None: it has none.

    Raises:
        LockstepError: INVALID_REQUEST, naming the header or the parameter.
    """
    if given := headers.get(LAST_EVENT_HEADER):
        return After.parse(given, LAST_EVENT_HEADER)
    if given := query.get(LAST_EVENT_QUERY):
        return After.parse(given, LAST_EVENT_QUERY)
    return None


async def answer_resumable(
    router: Router, request: GenerationRequest, style: Style, coming_back: Return, record: Record, client: Client
) -> None:
    """Start a generation that goes on without its client, or join the one with its idempotency key; write its answer.

    Raises:
        LockstepError: nothing has been written yet, or a stream has failed.
    """
    if request.kept_per_prompt is not None:
        # Journals keep tokens without their log probabilities, so the best answers could not be chosen again.
        raise invalid("best_of", "cannot be more than n in a request that is resumable or has an idempotency key")
    if style.stream:
        client.expect_events()
    starting = router.runs.start(
        request, record.account, style, owner=coming_back.owner, key=coming_back.key, after=coming_back.after
    )
    del request
    reading = await starting
    record.release_body()
    await _write(reading, record, client)


async def answer_resumed(
    router: Router, request_id: str, owner: str, after: After | None, record: Record, client: Client
) -> None:
    """Write the answer of a stream that an earlier request started, after the last event that the client has.

    Raises:
        LockstepError: nothing has been written yet, or the stream has failed.
    """
    await _write(await router.runs.resume(request_id, owner, after), record, client)


async def _write(reading: Reading, record: Record, client: Client) -> None:
    style, record.resumed = reading.record.style, reading.is_resumed
    if not reading.is_resumed:
        record.prompt_tokens = reading.record.prompt_tokens
    headers = {STREAM_HEADER: reading.record.request_id}
    with closing(reading):
        answer_format = format_of(reading.record, reading.tokenizer)
        try:
            if style.stream:
                client.expect_events()
                await client.reply_events(_events(reading, answer_format), headers)
            else:
                body = await _whole(reading, answer_format)
                await client.reply(json_reply(body, headers=headers))
        finally:
            record.completion_tokens = reading.delivered_tokens


async def _whole(reading: Reading, answer_format: Format) -> bytes:
    async for events in reading.events():
        for each in events:
            answer_format.add(each.delta)
    return answer_format.whole(reading.usage, inexact_mark(is_inexact=bool(reading.inexact_choices)))


async def _events(reading: Reading, answer_format: Format) -> AsyncIterator[bytes]:
    async for chunks in chunks_of(reading, answer_format):
        yield b"".join(event(each_id, data) for each_id, data in chunks)


async def chunks_of(reading: Reading, answer_format: Format) -> AsyncIterator[list[tuple[str, bytes]]]:
    """What the client does not have yet, as chunks of OpenAI's API: each with the id of its event, which names what the
    client has with it.

    Raises:
        LockstepError: the stream has failed; everything before that has been yielded.
    """
    request_id = reading.record.request_id
    opening = [
        (event_id(request_id, reading.open_choice(index)), to_json(body))
        for index in reading.position.unopened
        for body in answer_format.opening((index,))
    ]
    async for events in reading.events():
        inexact = reading.inexact_choices
        data = [
            (
                event_id(request_id, each.position),
                answer_format.chunk(
                    each.delta,
                    inexact_mark(is_inexact=bool(each.delta.finish_reason) and each.delta.index in inexact),
                ),
            )
            for each in events
        ]
        yield opening + data
        opening = []
    if reading.record.style.include_usage and not reading.position.has_usage:
        body = to_json(answer_format.usage_chunk(reading.usage))
        yield [(event_id(request_id, reading.give_usage()), body)]
