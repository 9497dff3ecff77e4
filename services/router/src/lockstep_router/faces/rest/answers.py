"""Runs a request and writes its answer to the client, in one piece or as server-sent events."""

from collections.abc import AsyncIterator, Iterable
from functools import partial

from lockstep_common.errors import LockstepError
from pydantic_core import to_json

from lockstep_router.faces.openai.format import Body, Format, inexact_mark, make_format
from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.replies import DONE, Client, json_reply, named_event
from lockstep_router.generation.choices import Delta
from lockstep_router.generation.generation import Generation
from lockstep_router.generation.request import GenerationRequest, PromptSource
from lockstep_router.generation.style import Style
from lockstep_router.lanes import Outlet
from lockstep_router.router import Router


async def answer(
    router: Router,
    request: GenerationRequest,
    style: Style,
    record: Record,
    client: Client,
    *,
    has_event_ids: bool = False,
) -> None:
    """Generate the answer, and write it while it is generated (streamed) or afterwards.

    Args:
        router: generates it.
        request: of the client.
        style: how the answer is written.
        record: of the request.
        client: gets the answer.
        has_event_ids: whether the events of a stream have ids. No client can come back to it, so few want them.

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
            record.prompt_tokens = prepared.prompt_tokens
            answer_format = make_format(style, record.request_id, prepared)
            try:
                if style.stream:
                    events = _Events(generation, answer_format, record.request_id if has_event_ids else "", client)
                    end = partial(events.end, include_usage=style.include_usage)
                    await client.reply_events(_written(generation, events), end=end)
                    return
                await generation.collect(answer_format.add)
            finally:
                record.completion_tokens = generation.completion_tokens
                record.failovers = generation.failovers
        if prepared.kept_per_prompt is not None:
            answer_format.keep(generation.best_choices)
        more = inexact_mark(is_inexact=bool(generation.inexact_choices))
        body = answer_format.complete_body(generation.usage, more)
        with router.holding(body):
            await client.reply_json(body)


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


_NO_MARK: Body = {}


class _Events:
    """An answer as server-sent events. No client can come back to it, so by default events have no ids, like those of
    other servers of this API: some of their clients take nothing but data. If the client asked for ids, an event's id
    is the request's id and its choice's number of tokens so far.

    As the sink of a generation it writes events to a client that keeps up. It holds the last one back for what ends the
    answer: they come from one frame, so they are one write.
    """

    _last = b""
    """The event of the last finish, until it is written."""

    def __init__(self, generation: Generation, answer_format: Format, request_id: str, client: Client) -> None:
        self._generation = generation
        self._format = answer_format
        self._request_id = request_id
        """Empty: events have no ids."""
        self._id = b"id: %b:" % request_id.encode() if request_id else b""
        """How each event begins that has an id."""
        self._client = client
        indices = range(len(generation.prepared.journals))
        self._opening = b"".join(self._other_event(0, body) for body in answer_format.opening(indices))
        """What precedes the first delta."""

    @property
    def is_ready(self) -> bool:
        """Whether the client takes the next event now."""
        return self._client.takes_events

    def take(self, delta: Delta) -> None:
        """Write a delta to the client."""
        data = self._event(delta)
        if self._opening:
            data, self._opening = self._opening + data, b""
        if delta.finish_reason is not None and self._generation.is_finished:
            self._last = data
        else:
            self._client.write_events(data)

    @property
    def is_caught_up(self) -> bool:
        """Whether the client's connection has taken all events, what precedes the first delta included."""
        return not self._opening and self._client.is_caught_up

    def outlet(self) -> Outlet | None:
        """The way of events with nothing but text to the client."""
        before, after = self._format.text_ends(0)
        if self._id:
            return self._client.outlet(self._id, b"\ndata: " + before, after + b"\n\n")
        return self._client.outlet(b"data: " + before, None, after + b"\n\n")

    def of(self, deltas: Iterable[Delta]) -> bytes:
        """The next deltas as events; none if they are the last ones."""
        data = b"".join([self._event(delta) for delta in deltas])
        opening, self._opening = self._opening, b""
        if self._generation.is_finished:
            self._last, opening, data = opening + data, b"", b""
        return opening + data

    def take_last(self) -> bytes:
        """The last events, which have not been written."""
        last, self._last = self._last, b""
        return last

    def end(self, *, include_usage: bool) -> bytes:
        """What ends an answer: its last events, its usage, and the end mark."""
        usage = self._generation.usage
        usage_event = (
            self._other_event(usage.completion_tokens, self._format.usage_chunk(usage)) if include_usage else b""
        )
        return self.take_last() + usage_event + DONE

    def _event(self, delta: Delta) -> bytes:
        mark = _NO_MARK
        if delta.finish_reason is not None:
            mark = inexact_mark(is_inexact=delta.index in self._generation.inexact_choices)
        chunk = self._format.chunk(delta, mark)
        if self._id:
            return b"%b%d\ndata: %b\n\n" % (self._id, delta.tokens, chunk)
        return b"data: %b\n\n" % chunk

    def _other_event(self, tokens: int, body: Body) -> bytes:
        return named_event("", f"{self._request_id}:{tokens}" if self._request_id else "", to_json(body))


async def _written(generation: Generation, events: _Events) -> AsyncIterator[bytes]:
    """The events that are not written as soon as their tokens arrive, without those that end the answer."""
    try:
        async for deltas in generation.deltas(events):
            # All deltas that have arrived go out in one write: a client that keeps up gets each token separately.
            if data := events.of(deltas):
                yield data
    except LockstepError:
        if last := events.take_last():
            yield last
        raise
