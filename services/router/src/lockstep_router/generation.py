"""One request's streams together: a stream for each choice of each prompt, their deltas in one sequence."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

from lockstep_api.v1 import inference_pb2

from lockstep_router.choices import Choice, Delta
from lockstep_router.journal import Journal
from lockstep_router.settings import RouterSettings
from lockstep_router.streams import Stream
from lockstep_router.tokenizer import Tokenizer
from lockstep_router.workers import Workers


@dataclass(frozen=True)
class Usage:
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Runs the streams of a request as long as its context is entered: leaving it cancels what still runs."""

    def __init__(
        self,
        journals: Sequence[Journal],
        *,
        choices_per_prompt: int,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        workers: Workers,
        settings: RouterSettings,
    ) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._arrival = asyncio.Event()
        self._choices = [Choice(index, tokenizer, stops) for index in range(len(journals))]
        self._streams = [Stream(journal, workers, settings, self._arrival.set) for journal in journals]
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(stream.run()) for stream in self._streams]
        for task in self._tasks:
            task.add_done_callback(self._note_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def failovers(self) -> int:
        """Times that any of the streams went to another worker."""
        return sum(stream.failovers for stream in self._streams)

    @property
    def usage(self) -> Usage:
        """What has been used so far; each prompt counts once however many choices it has."""
        firsts = range(0, len(self._streams), self._choices_per_prompt)
        return Usage(
            prompt_tokens=sum(len(self._streams[index].journal.prompt_ids) for index in firsts),
            completion_tokens=sum(choice.tokens for choice in self._choices),
            cached_tokens=sum(self._choices[index].cached_tokens or 0 for index in firsts),
        )

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What the choices gain, whenever there is something.

        Raises:
            LockstepError: one of the streams cannot go on; all that it had has been given before.
        """
        while not all(choice.is_finished for choice in self._choices):
            await self._arrival.wait()
            self._arrival.clear()
            # Looked at before taking, so that a stream's last frames are given before its failure.
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

    def _advance(self, index: int) -> list[Delta]:
        choice = self._choices[index]
        frames = self._streams[index].take()
        deltas = [delta for frame in frames if (delta := choice.feed(frame)) is not None]
        if choice.is_finished:
            # After a stop string the worker would go on.
            self._tasks[index].cancel()
        return deltas


def derive_seed(seed: int, index: int) -> int:
    """The seed of the choice `index`: the first has the request's own, the others are mixed from both (SplitMix64)."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def with_seed(sampling: inference_pb2.Sampling, seed: int) -> inference_pb2.Sampling:
    """A copy of the sampling with another seed."""
    copy = inference_pb2.Sampling()
    copy.CopyFrom(sampling)
    copy.seed = seed
    return copy
