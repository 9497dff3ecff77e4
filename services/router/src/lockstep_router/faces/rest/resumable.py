"""Answers that clients can come back to: started, joined or resumed, and written from any position."""

from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from lockstep_common.errors import LockstepError, invalid

from lockstep_router.faces.idempotency import idempotency_key
from lockstep_router.faces.identity import Origin, owner_of
from lockstep_router.faces.openai.chunks import chunks_of, complete_body_of, has_end_mark
from lockstep_router.faces.openai.responses.schemas import ResponsesRequest
from lockstep_router.faces.openai.schemas import SamplingFields
from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.replies import DONE, Client, named_event
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.resumption import After, IdempotencyKey, Reading
from lockstep_router.router import Router

RESUMABLE_HEADER = "X-Lockstep-Resumable"
EVENT_IDS_HEADER = "X-Lockstep-Event-IDs"
KEY_HEADER = "Idempotency-Key"
LAST_EVENT_HEADER = "Last-Event-ID"
RESUMABLE_NAME, KEY_NAME, _LAST_EVENT_NAME = map(str.lower, (RESUMABLE_HEADER, KEY_HEADER, LAST_EVENT_HEADER))
"""As in mappings of headers."""
_EVENT_IDS_NAME = EVENT_IDS_HEADER.lower()
LAST_EVENT_QUERY = "last_event_id"
STREAM_HEADER = "X-Lockstep-Stream-ID"

_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Return:
    """How a client may come back to its answer."""

    owner: str
    key: IdempotencyKey | None = None
    after: After | None = None


def wanted_return(body: SamplingFields | ResponsesRequest, kind: str, origin: Origin) -> Return | None:
    """Whether the client may come back, and how; None: its request ends when it leaves.

    Raises:
        LockstepError: INVALID_REQUEST, a header cannot be used.
    """
    headers = origin.headers
    flag, key = headers.get(RESUMABLE_NAME), headers.get(KEY_NAME)
    is_wanted = False if flag is None else _flag(flag, RESUMABLE_HEADER)
    if key is None:
        return Return(owner_of(origin)) if body.resumable or is_wanted else None
    return Return(owner_of(origin), idempotency_key(key, KEY_HEADER, origin, body, kind), last_event(headers, {}))


def wants_event_ids(headers: Mapping[str, str]) -> bool:
    """Whether the client wants ids of events also in a stream that it cannot come back to.

    Raises:
        LockstepError: INVALID_REQUEST, the header cannot be used.
    """
    flag = headers.get(_EVENT_IDS_NAME)
    return False if flag is None else _flag(flag, EVENT_IDS_HEADER)


def _flag(given: str, header: str) -> bool:
    value = _FLAGS.get(given.lower())
    if value is None:
        raise invalid(header, "must be true or false")
    return value


def last_event(headers: Mapping[str, str], query: Mapping[str, str]) -> After | None:
    """The last event that the client has; None: it has none.

    Raises:
        LockstepError: INVALID_REQUEST, naming the header or the parameter.
    """
    if given := headers.get(_LAST_EVENT_NAME):
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

    def on_stream(request_id: str, _: bool) -> None:
        # Not sooner: a head that leaves with the first comment has the stream's id, too.
        if style.stream:
            client.expect_events({STREAM_HEADER: request_id})

    starting = router.runs.start(
        request,
        record.account,
        style,
        owner=coming_back.owner,
        key=coming_back.key,
        after=coming_back.after,
        on_stream=on_stream,
        is_told=lambda: client.has_begun,
    )
    del request
    reading = await starting
    record.release_body()
    await _write(router, reading, record, client)


async def answer_resumed(
    router: Router, request_id: str, owner: str, after: After | None, record: Record, client: Client
) -> None:
    """Write the answer of a stream that an earlier request started, after the last event that the client has.

    Raises:
        LockstepError: nothing has been written yet, or the stream has failed.
    """

    def on_run(style: Style) -> None:
        # It may wait for its model's first worker, and its client would be without a comment until then.
        if style.stream:
            client.expect_events({STREAM_HEADER: request_id})

    reading = await router.runs.resume(request_id, owner, record.account, after, on_run)
    await _write(router, reading, record, client)


async def _write(router: Router, reading: Reading, record: Record, client: Client) -> None:
    style, record.resumed = reading.record.style, reading.is_resumed
    if not reading.is_resumed:
        record.prompt_tokens = reading.record.prompt_tokens
    headers = {STREAM_HEADER: reading.record.request_id}
    with closing(reading):
        try:
            if style.stream:
                client.expect_events(headers)
                end = DONE if has_end_mark(reading) else b""
                await client.reply_events(_events(reading, record), end=lambda: end)
            else:
                if reading.is_resumed:
                    # Each client that comes back has a copy made, which costs it nothing.
                    router.check_answers()
                body = await complete_body_of(reading)
                with router.holding(body):
                    await client.reply_json(body, headers)
        finally:
            record.completion_tokens = reading.delivered_tokens
            record.failovers = reading.failovers


async def _events(reading: Reading, record: Record) -> AsyncIterator[bytes]:
    has_begun = False
    try:
        async for chunks in chunks_of(reading):
            yield b"".join(named_event(each.type, each.event_id, each.data) for each in chunks)
            has_begun = True
    except LockstepError as error:
        if has_end_mark(reading) or not has_begun:
            raise
        # The failure of a response that has begun is an event of it.
        record.status = error.meaning.http_status
