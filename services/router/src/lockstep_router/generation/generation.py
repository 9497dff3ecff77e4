"""Runs one request's streams, one for each choice of each prompt, and merges their deltas into one sequence."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import LockstepError

from lockstep_router.generation.choices import Choice, Delta
from lockstep_router.generation.preparation import BYTES_OF_AN_ID, Prepared
from lockstep_router.lanes import Lane, Outlet
from lockstep_router.settings import RouterSettings
from lockstep_router.streams import Stream
from lockstep_router.workers import Workers

_STARTED_AT_ONCE = 8
"""Streams that are started without a pause: other requests have their turn before the next ones."""

_BYTES_OF_A_LOGPROB = 150
"""Memory of one token's log probability, about: as a message before it is taken, or as JSON in a whole answer."""

_RESTORED_AT_ONCE = 256
"""Tokens of a continued stream that are turned into text without a pause."""

Observer = Callable[[Choice, Sequence[worker_pb2.StreamTokens], Sequence[Delta]], None]
"""Called with what a choice was fed at once, and with the deltas that this gave."""


class Sink(Protocol):
    """Takes deltas at once, in the call that brings a stream's tokens: no task is woken for them."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes the next delta."""

    def take(self, delta: Delta) -> None:
        """Take a delta. What it raises ends the generation."""

    @property
    def is_caught_up(self) -> bool:
        """Whether everything that it took has been sent."""

    def outlet(self) -> Outlet | None:
        """Where the texts of an only choice's tokens may be sent past `take`, while it is ready and caught up; None:
        nowhere.
        """


class _Taking:
    """A sink that is always ready."""

    is_ready = is_caught_up = True

    def __init__(self, take: Callable[[Delta], None]) -> None:
        self.take = take

    def outlet(self) -> None:
        """There is no client to write to."""


@dataclass(slots=True)
class Usage:
    """Tokens that a request took. Not changed after construction; not frozen, for speed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """Those of the completion tokens that are reasoning."""


class Generation:
    """Runs the streams of a request while its context is entered. Leaving the context cancels running streams."""

    _sink: Sink | None = None
    """Takes deltas now; None: they wait for `deltas`."""
    _lane: Lane | None = None
    _collecting: asyncio.Task[Any] | None = None
    """The task of `collect`, while the only stream runs in it and is wanted."""
    _failure: BaseException | None = None
    _failed: tuple[tuple[int, BaseException], ...] = ()
    """The streams that have failed, and with what."""

    def __init__(
        self,
        prepared: Prepared,
        workers: Workers,
        settings: RouterSettings,
        *,
        is_collected: bool = False,
        observe: Observer | None = None,
    ) -> None:
        self.prepared = prepared
        self._loop = workers.loop
        self._is_collected = is_collected
        self._observe = observe
        self._arrival = asyncio.Event()
        self._choices = [
            Choice(
                index,
                prepared.tokenizer,
                prepared.stops,
                prepared.parsing,
                journal.stream_id,
                preceding=journal.prompt_ids if prepared.continues_prompts else (),
                min_tokens=journal.sampling.min_tokens,
            )
            for index, journal in enumerate(prepared.journals)
        ]
        self._streams = [
            Stream(journal, workers, settings, self._arrival.set, partial(self._give, index))
            for index, journal in enumerate(prepared.journals)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self.runs_alone = is_collected and len(self._streams) == 1
        """Whether its only stream runs in the task of `collect`: then there is nothing to enter or to leave."""

    async def __aenter__(self) -> Self:
        if self.runs_alone:
            return self
        try:
            await self._restore()
            for stream, choice in zip(self._streams, self._choices, strict=True):
                task = asyncio.create_task(_nothing() if choice.is_finished else stream.run())
                task.add_done_callback(partial(self._note_end, choice.index))
                self._tasks.append(task)
                if len(self._tasks) % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            await self.__aexit__()
            raise
        return self

    async def _restore(self) -> None:
        """Bring the choices to where another router has left them."""
        for choice, begun in zip(self._choices, self.prepared.begun or (), strict=False):
            tokens, count = begun.ids, len(begun.ids)
            for first in range(0, count or bool(begun.finish), _RESTORED_AT_ONCE):
                end = min(first + _RESTORED_AT_ONCE, count)
                choice.feed(
                    worker_pb2.StreamTokens(
                        ids=tokens[first:end],
                        logprobs=begun.logprobs[first:end],
                        finish=begun.finish if end == count else 0,  # type: ignore[arg-type]
                        cached_tokens=begun.cached_tokens,
                    )
                )
                await asyncio.sleep(0)
            if choice.is_finished and self._observe is not None:
                self._observe(choice, (), ())

    async def __aexit__(self, *_: object) -> None:
        if not self._tasks:
            return
        running = [task for task in self._tasks if not task.done()]
        if running:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._lane = None  # it refers to this object: only the garbage collector would free both

    @property
    def journal_bytes(self) -> int:
        """Approximate memory of what grows with its tokens: the ids in its journals, prompts that are echoed, and log
        probabilities that wait for the client. The choices of a prompt share its ids.
        """
        emitted = sum(len(journal.emitted_ids) for journal in self.prepared.journals)
        waiting = emitted if self._is_collected else sum(stream.unread_tokens for stream in self._streams)
        logprobs = waiting * self.prepared.journals[0].logprobs_per_token
        return self.prepared.prompt_bytes + BYTES_OF_AN_ID * emitted + _BYTES_OF_A_LOGPROB * logprobs

    @property
    def failovers(self) -> int:
        """Number of times that one of the streams moved to another worker."""
        streams = self._streams
        return streams[0].failovers if len(streams) == 1 else sum([stream.failovers for stream in streams])

    @property
    def inexact_choices(self) -> frozenset[int]:
        """The choices that were continued with other, or unknown, numerics than they began with."""
        return frozenset([index for index, stream in enumerate(self._streams) if stream.journal.is_inexact])

    @property
    def is_finished(self) -> bool:
        """Whether all choices have their finish."""
        choices = self._choices
        return choices[0].is_finished if len(choices) == 1 else all(choice.is_finished for choice in choices)

    @property
    def best_choices(self) -> list[int]:
        """Of each prompt the choices that the answer keeps, those first whose tokens were the most likely ones on
        average.
        """
        each, best = self.prepared.choices_per_prompt, []
        for first in range(0, len(self._choices), each):
            ranked = sorted(self._choices[first : first + each], key=lambda choice: -choice.mean_logprob)
            best += [choice.index for choice in ranked[: self.prepared.kept_per_prompt]]
        return best

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far, also those that their client has not read yet."""
        if len(self._choices) == 1:
            return self._tokens_of(0)
        return sum([self._tokens_of(index) for index in range(len(self._choices))])

    def _tokens_of(self, index: int) -> int:
        choice = self._choices[index]
        if choice.is_finished:  # what its worker has generated beyond a stop string is not the client's
            return choice.tokens
        return max(choice.tokens, len(self.prepared.journals[index].emitted_ids))

    @property
    def usage(self) -> Usage:
        """The tokens used so far. Each prompt counts once, whatever its number of choices."""
        if len(self._choices) == 1:
            (only,) = self._choices
            return Usage(
                self.prepared.prompt_tokens, self._tokens_of(0), only.cached_tokens or 0, only.reasoning_tokens
            )
        firsts = range(0, len(self._streams), self.prepared.choices_per_prompt)
        return Usage(
            prompt_tokens=self.prepared.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=sum([self._choices[index].cached_tokens or 0 for index in firsts]),
            reasoning_tokens=sum([choice.reasoning_tokens for choice in self._choices]),
        )

    async def collect(self, take: Callable[[Delta], None]) -> None:
        """Call `take` with all deltas of an answer that is collected; `deltas` is for the others.

        Raises:
            LockstepError: one of the streams cannot continue.
        """
        sink = _Taking(take)
        if self.runs_alone:
            await self._collect_alone(sink)
            return
        async for deltas in self.deltas(sink):
            for delta in deltas:
                take(delta)

    async def _collect_alone(self, sink: Sink) -> None:
        task = self._collecting = asyncio.current_task(self._loop)
        assert task is not None
        self._sink = sink
        try:
            await self._streams[0].run()
        except asyncio.CancelledError:
            if self._collecting is not None or task.uncancel():
                raise
        finally:
            self._sink = self._collecting = None
        if self._failure is not None:
            raise self._failure

    def _complete(self, index: int) -> None:
        """End a stream whose choice is finished. The worker does not know stop strings and would continue."""
        self._streams[index].is_complete = True
        self._stop(index)

    def _stop(self, index: int) -> None:
        """End a stream of which no more is wanted."""
        if not self.runs_alone:
            self._tasks[index].cancel()
        elif self._collecting is not None:
            task, self._collecting = self._collecting, None
            task.cancel()

    async def deltas(self, sink: Sink | None = None) -> AsyncIterator[list[Delta]]:
        """The deltas of all choices, as they arrive.

        Args:
            sink: while all that was yielded is used, it gets further deltas, and they are not yielded. What arrives
                while it is not ready is yielded again, before the sink gets more.

        Raises:
            LockstepError: one of the streams cannot continue, and its choice is not finished; its deltas have been
                yielded before.
        """
        while not self.is_finished:
            self._sink = sink
            try:
                await self._arrival.wait()
            finally:
                self._sink = None
                if self._lane is not None:
                    self._lane.close()
            self._arrival.clear()
            # Read before the updates are taken, so that a stream's last deltas are yielded before its failure.
            failure, failed = self._failure, self._failed
            gained = [delta for index in range(len(self._streams)) for delta in self._advance(index)]
            if gained:
                yield gained
            # A client that read slowly may have a stop string among the last deltas: what came after it is not wanted.
            needed = (error for index, error in failed if not self._choices[index].is_finished)
            if (error := failure or next(needed, None)) is not None:
                raise error

    def fail(self, error: LockstepError) -> None:
        """End it: what reads it gets the error, after the deltas that have arrived."""
        self._note_failure(error)
        if self.runs_alone:
            self._stop(0)

    def _note_end(self, index: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed += ((index, error),)
            self._arrival.set()

    def _give(self, index: int, update: worker_pb2.StreamTokens) -> bool:
        """Feed an update that has just arrived to its choice and the sink; False if it has to wait for `deltas`."""
        sink = self._sink
        if sink is None or self._arrival.is_set() or not sink.is_ready:
            return False
        choice = self._choices[index]
        try:
            delta = choice.feed(update)
            if delta is not None:
                sink.take(delta)
        except Exception as error:
            self._streams[index].failure = error
            self._note_failure(error)
            if self.runs_alone:
                self._stop(index)
            return True
        if choice.is_finished:
            if not update.finish:
                self._complete(index)
            if self.is_finished:
                self._arrival.set()
        elif len(self._choices) == 1 and choice.is_plain and sink.is_caught_up:
            self._open_lane(sink)
        return True

    def _open_lane(self, sink: Sink) -> None:
        """Let a lane take the only choice's next tokens, if the sink has a place for it."""
        (choice,), (stream,) = self._choices, self._streams
        if self._lane is None:
            outlet = sink.outlet()
            if outlet is None:
                return
            emitted_ids, pieces = stream.journal.emitted_ids, self.prepared.tokenizer.pieces
            self._lane = Lane(emitted_ids, pieces, outlet, on_close=self._note_pushed, on_failure=self._note_failure)
        if choice.tokens == len(stream.journal.emitted_ids):
            stream.open_lane(self._lane)

    def _note_pushed(self) -> None:
        """Note what the lane has taken."""
        (choice,), (stream,) = self._choices, self._streams
        assert self._lane is not None
        tokens = len(stream.journal.emitted_ids)
        if tokens > choice.tokens:
            choice.skip_to(tokens)
            stream.note_pushed(self._lane.at)

    def _note_failure(self, error: Exception) -> None:
        # It was raised in a call of the worker's link, which other streams share. `deltas` raises it.
        self._failure = self._failure or error
        self._arrival.set()

    def _advance(self, index: int) -> list[Delta]:
        choice, stream = self._choices[index], self._streams[index]
        updates = stream.take()
        try:
            deltas = [delta for update in updates if (delta := choice.feed(update)) is not None]
        except Exception as error:
            stream.failure = error
            raise
        if self._observe is not None:
            self._observe(choice, updates, deltas)
        if choice.is_finished:
            self._complete(index)
        return deltas


async def _nothing() -> None:
    """In the place of a stream that has all its tokens."""
