"""The events of a response that is read from a journal, from any event on.

They are made again from the beginning, because an item that is complete repeats all of its text; those that the client
has are left out. Each token is taken by itself, so that the events' numbers do not depend on how tokens arrived.
"""

import asyncio
from collections.abc import AsyncIterator

from lockstep_common.errors import LockstepError

from lockstep_router.faces.openai.format import inexact_mark
from lockstep_router.faces.openai.responses.format import ResponseEvent, ResponsesFormat
from lockstep_router.resumption import Position, Reading, no_position

_DELTAS_AT_ONCE = 256
"""Deltas that are counted without a pause."""

Numbered = tuple[Position, ResponseEvent]
"""An event, and what a client has that got it and everything before."""


async def response_events(reading: Reading, answer_format: ResponsesFormat) -> AsyncIterator[list[Numbered]]:
    """What the client does not have yet.

    Raises:
        LockstepError: the stream has failed; everything before that has been yielded, and if anything was, the events
            that report the failure, with the position before them. INVALID_REQUEST, the client has named an event that
            the stream does not have.
    """
    await reading.catch_up()
    given = _Given(reading, answer_format)
    try:
        async for events in reading.events():
            # Not before: a position may be ahead of what is in the journal yet.
            new = await given.begin()
            new += [each for event in events for each in given.next(answer_format.events(event.delta), event.position)]
            if new:
                yield new
        await given.begin()
        if not reading.position.has_usage:
            mark = inexact_mark(is_inexact=bool(reading.inexact_choices))
            usage = reading.usage
            yield given.next(answer_format.closing(usage, mark), reading.give_usage())
        given.check_end()
    except LockstepError as error:
        if given.has_begun:
            position = given.position
            yield [(position, event) for event in answer_format.failure(error, reading.usage)]
        raise


class _Given:
    """What the client has, event by event."""

    def __init__(self, reading: Reading, answer_format: ResponsesFormat) -> None:
        self._reading = reading
        self.has_begun = False
        """Whether the client has been given something new."""
        self._format = answer_format
        self._start = reading.position
        self._whole = self._start
        """After the last token whose events the client has all."""
        self._opened = reading.open_choice(0) if self._start.unopened else None
        self._is_counted = False
        self._counted = self._had = -1
        """The number of the last event so far, and of the last one that the client had before."""

    async def begin(self) -> list[Numbered]:
        """Count the events of the tokens that the client has, if that was not done before; what precedes the first
        token, if the client does not have that.

        Raises:
            LockstepError: INVALID_REQUEST, as in `response_events`.
        """
        if self._is_counted:
            return []
        self._is_counted = True
        if self._opened is not None:
            self._had = -1 if self._start.number is None else self._start.number
            return self.next(self._format.opening(), self._opened)
        self._format.opening()
        for count, delta in enumerate(self._reading.take_skipped(), 1):
            self._format.count(delta)
            if count % _DELTAS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if self._start.has_usage:
            self._format.closing(self._reading.usage, {})
        self._counted = self._format.number - 1
        self._had = self._counted if self._start.number is None else self._start.number
        if self._had < self._counted:
            raise self._no_event()
        return []

    @property
    def position(self) -> Position:
        """Of the last event so far."""
        return self._whole.numbered(self._counted)

    def next(self, events: list[ResponseEvent], after: Position) -> list[Numbered]:
        """The new ones of a token's events; the client has reached `after` with the last of them."""
        before, self._whole = self._whole, after
        if not events:
            return []
        last = self._counted = events[-1].number
        if self._had >= last:
            # It would have come with the position after this token.
            raise self._no_event()
        new = [
            ((after if event.number == last else before).numbered(event.number), event)
            for event in events
            if event.number > self._had
        ]
        self.has_begun |= bool(new)
        return new

    def check_end(self) -> None:
        """Check that the client did not have more than the whole answer."""
        if self._had > self._counted:
            raise self._no_event()

    def _no_event(self) -> LockstepError:
        after = self._reading.after
        assert after is not None
        return no_position(after.field)
