"""One client's way through the answer of a resumable request, from any position to the end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.generation.choices import Delta
from lockstep_router.generation.generation import Usage
from lockstep_router.journals import ChoiceLog, Outcome, RequestRecord, StoredStream
from lockstep_router.resumption.position import After, Position, no_position
from lockstep_router.resumption.replay import Replay
from lockstep_router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Event:
    """A piece of one choice, and what a client has that got it and everything before."""

    delta: Delta
    position: Position


class Source(Protocol):
    """A stream that is read: one that runs, or one from a store."""

    @property
    def logs(self) -> Sequence[ChoiceLog]:
        """The choices so far."""

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None: it runs."""


class Reading:
    """Reads one stream for one client. Several clients may read a stream at once, each at its own pace.

    Reading too slowly takes no memory: the journal holds everything in any case. `close` ends it.
    """

    def __init__(
        self,
        record: RequestRecord,
        source: Source,
        tokenizer: Tokenizer,
        *,
        arrival: asyncio.Event,
        on_close: Callable[[], None],
        is_resumed: bool,
        may_be_ahead: bool = False,
        count_failovers: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin at the start of the answer.

        Args:
            record: the request.
            source: the stream.
            tokenizer: of its model.
            arrival: set whenever there is more, and when the stream ends.
            on_close: called once, when the reading ends.
            is_resumed: whether an earlier request started the stream.
            may_be_ahead: the client may have had tokens from another router that are generated again here.
            count_failovers: how often the stream has moved to another worker in this router.
        """
        self.record = record
        self.tokenizer = tokenizer
        self.is_resumed = is_resumed
        self.position = Position.start(len(record.choices))
        """What the client has when it has got all events so far."""
        self._source = source
        self._replay = Replay(record, source.logs, tokenizer)
        self._arrival = arrival
        self._on_close: Callable[[], None] | None = on_close
        self.after: After | None = None
        """The event that the client has named as the last one it has."""
        self._skipped_tokens = 0
        self._may_be_ahead = may_be_ahead
        self._count_failovers = count_failovers
        self._failovers_before = count_failovers() if is_resumed else 0
        self._awaited_field: str | None = None
        """The name of the field with a position that the stream has yet to reach again; None: it has."""

    def close(self) -> None:
        """End the reading: the client has everything, or it has gone."""
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()

    async def skip(self, after: After) -> None:
        """Go to the position after an event, before anything is read.

        Raises:
            LockstepError: INVALID_REQUEST, the stream has no such event yet.
        """
        position = position_of(after, self.record)
        self.after = after
        if self._may_be_ahead and self._replay.is_behind(position):
            # `events` waits for it: that may take long, and the client gets comments meanwhile.
            self.position, self._awaited_field = position, after.field
        else:
            await self._skip(position, after.field)

    async def _skip(self, position: Position, field: str) -> None:
        await self._replay.skip(position, field)
        self.position = position
        self._skipped_tokens = self._replay.completion_tokens

    async def catch_up(self) -> None:
        """Wait until the stream has reached the client's position again. `events` does so, too.

        Raises:
            LockstepError: INVALID_REQUEST, it has ended before; or the stream's own failure.
        """
        field = self._awaited_field
        if field is None:
            return
        while True:
            self._arrival.clear()
            outcome = self._source.outcome
            if not self._replay.is_behind(self.position):
                break
            if outcome is not None:
                raise outcome.error() or no_position(field)
            await self._arrival.wait()
        await self._skip(self.position, field)
        self._awaited_field = None

    def take_skipped(self) -> list[Delta]:
        """The deltas before the position, once, of an answer whose events have to be counted."""
        skipped, self._replay.skipped = self._replay.skipped, []
        return skipped

    def open_choice(self, index: int) -> Position:
        """Note that the client gets what precedes a choice's first token."""
        self.position = self.position.opened(index)
        return self.position

    def give_usage(self) -> Position:
        """Note that the client gets the usage."""
        self.position = self.position.with_usage()
        return self.position

    def ids(self, index: int, begin: int, end: int) -> Sequence[int]:
        """Token ids of a choice, by their positions."""
        return self._source.logs[index].ids[begin:end]

    @property
    def delivered_tokens(self) -> int:
        """Tokens that this reading has given."""
        return self._replay.completion_tokens - self._skipped_tokens

    @property
    def failovers(self) -> int:
        """Number of times that the stream moved to another worker while it was read."""
        return self._count_failovers() - self._failovers_before

    @property
    def inexact_choices(self) -> frozenset[int]:
        """The choices that were continued with other, or unknown, numerics than they began with."""
        return frozenset(index for index, log in enumerate(self._source.logs) if log.is_inexact)

    @property
    def usage(self) -> Usage:
        """The tokens up to here. Each prompt counts once, whatever its number of choices."""
        firsts = self._source.logs[:: self.record.choices_per_prompt]
        return Usage(
            prompt_tokens=self.record.prompt_tokens,
            completion_tokens=self._replay.completion_tokens,
            cached_tokens=sum(log.cached_tokens for log in firsts),
            reasoning_tokens=self._replay.reasoning_tokens,
        )

    async def events(self) -> AsyncIterator[list[Event]]:
        """What comes after the position, as it arrives, to the end of the answer.

        Raises:
            LockstepError: the stream has failed; everything before that has been yielded. INVALID_REQUEST: it has ended
                before the client's position.
        """
        await self.catch_up()
        while True:
            self._arrival.clear()
            # Read before the logs are, so that a stream's last tokens are yielded before its failure.
            outcome = self._source.outcome
            if events := [self._event(delta) for delta in self._replay.take()]:
                yield events
            if self._replay.is_complete:
                return
            if self._replay.has_more:
                await asyncio.sleep(0)
            elif outcome is not None:
                raise outcome.error() or LockstepError(ErrorCode.INTERNAL, "the stream ended without its finish")
            else:
                await self._arrival.wait()

    def _event(self, delta: Delta) -> Event:
        self.position = self.position.after(delta)
        return Event(delta, self.position)


def position_of(after: After, record: RequestRecord) -> Position:
    """The position after an event of an answer.

    Raises:
        LockstepError: INVALID_REQUEST, this answer never has such an event.
    """
    position = Position.parse(after.position, len(record.choices), after.field)
    limits = [each.sampling.max_tokens for each in record.choices]
    is_possible = all(tokens <= limit for tokens, limit in zip(position.tokens, limits, strict=True))
    is_numbered = position.number is not None and record.style.kind != "responses"
    if not record.style.stream or is_numbered or not is_possible:
        raise no_position(after.field)
    return position


def check_position(after: After, copy: StoredStream) -> Position:
    """The position after an event that a stream can have, of whose end the copy may lack something.

    Raises:
        LockstepError: INVALID_REQUEST, it cannot have it.
    """
    position = position_of(after, copy.record)
    for tokens, has_finish, log in zip(position.tokens, position.finished, copy.logs, strict=True):
        if log.finish and (tokens > len(log.ids) or (has_finish and tokens < len(log.ids))):
            raise no_position(after.field)
    return position
