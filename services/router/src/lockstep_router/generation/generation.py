"""Runs one request's streams, one for each choice of each prompt, and merges their deltas into one sequence."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from lockstep_api.v1 import worker_pb2

from lockstep_router.generation.choices import Choice, Delta
from lockstep_router.generation.preparation import BYTES_OF_AN_ID, Prepared
from lockstep_router.settings import RouterSettings
from lockstep_router.streams import Stream
from lockstep_router.workers import Workers

_STARTED_AT_ONCE = 8
"""Streams that are started without a pause: other requests have their turn before the next ones."""

_BYTES_OF_A_LOGPROB = 150
"""Memory of one token's log probability, about: as a message before it is taken, or as JSON in a whole answer."""

Observer = Callable[[Choice, Sequence[worker_pb2.StreamTokens], Sequence[Delta]], None]
"""Called with what a choice was fed at once, and with the deltas that this gave."""


class Sink(Protocol):
    """Takes deltas at once, in the call that brings a stream's tokens: no task is woken for them."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes the next delta."""

    def take(self, delta: Delta) -> None:
        """Take a delta. What it raises ends the generation."""


@dataclass(frozen=True)
class Usage:
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """Those of the completion tokens that are reasoning."""


class Generation:
    """Runs the streams of a request while its context is entered. Leaving the context cancels running streams."""

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
        self._is_collected = is_collected
        self._observe = observe
        self._arrival = asyncio.Event()
        self._choices = [
            Choice(index, prepared.tokenizer, prepared.stops, prepared.parsing, journal.stream_id)
            for index, journal in enumerate(prepared.journals)
        ]
        self._streams = [
            Stream(journal, workers, settings, self._arrival.set, partial(self._give, index))
            for index, journal in enumerate(prepared.journals)
        ]
        self._sink: Sink | None = None
        """Takes deltas now; None: they wait for `deltas`."""
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        try:
            for stream in self._streams:
                task = asyncio.create_task(stream.run())
                task.add_done_callback(self._note_end)
                self._tasks.append(task)
                if len(self._tasks) % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        return sum(stream.failovers for stream in self._streams)

    @property
    def inexact_choices(self) -> frozenset[int]:
        """The choices that were continued with other, or unknown, numerics than they began with."""
        return frozenset(index for index, stream in enumerate(self._streams) if stream.journal.is_inexact)

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
    def usage(self) -> Usage:
        """The tokens used so far. Each prompt counts once, whatever its number of choices."""
        firsts = range(0, len(self._streams), self.prepared.choices_per_prompt)
        return Usage(
            prompt_tokens=self.prepared.prompt_tokens,
            completion_tokens=sum(choice.tokens for choice in self._choices),
            cached_tokens=sum(self._choices[index].cached_tokens or 0 for index in firsts),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices),
        )

    async def deltas(self, sink: Sink | None = None) -> AsyncIterator[list[Delta]]:
        """The deltas of all choices, as they arrive.

        Args:
            sink: while all that was yielded is used, it gets further deltas, and they are not yielded. What arrives
                while it is not ready is yielded again, before the sink gets more.

        Raises:
            LockstepError: one of the streams cannot continue; its deltas have been yielded before.
        """
        while not all(choice.is_finished for choice in self._choices):
            self._sink = sink
            try:
                await self._arrival.wait()
            finally:
                self._sink = None
            self._arrival.clear()
            # Read before the updates are taken, so that a stream's last deltas are yielded before its failure.
            failure = self._failure
            gained = [delta for index in range(len(self._streams)) for delta in self._advance(index)]
            if gained:
                yield gained
            if failure is not None:
                raise failure

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
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
            # The caller is the worker's link, which other streams share. `deltas` raises it.
            self._failure = self._failure or error
            self._arrival.set()
            return True
        if choice.is_finished:
            if not update.finish:
                # The worker does not know stop strings and would continue.
                self._tasks[index].cancel()
            if all(each.is_finished for each in self._choices):
                self._arrival.set()
        return True

    def _advance(self, index: int) -> list[Delta]:
        choice = self._choices[index]
        updates = self._streams[index].take()
        deltas = [delta for update in updates if (delta := choice.feed(update)) is not None]
        if self._observe is not None:
            self._observe(choice, updates, deltas)
        if choice.is_finished:
            # The worker does not know stop strings and would continue.
            self._tasks[index].cancel()
        return deltas
