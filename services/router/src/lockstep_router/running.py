"""What is in progress in a router: its requests for tokens, from their admission to their end, and what they take up.

Requests are written as classes: a context manager of `contextlib` costs a few microseconds, and each request has
several.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.tracing import Tracing

from lockstep_router import metrics
from lockstep_router.generation.embedding import Embedding
from lockstep_router.generation.generation import Generation
from lockstep_router.generation.preparation import Prepared, bytes_of
from lockstep_router.generation.prompts import Prompt
from lockstep_router.journals import JournalStore
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import Account
from lockstep_router.traces import Takeover, begin_takeover

_MEASURE_EVERY_S = 0.1
"""Interval for measuring the journals of all streams; between two measurements new prompts are added."""


class InProgress:
    """Counts requests, streams and the memory of journals and unsent answers, and refuses what does not fit."""

    def __init__(
        self,
        settings: RouterSettings,
        journals: JournalStore,
        now: Callable[[], float],
        on_requests: Callable[[], None],
    ) -> None:
        """Begin with none.

        Args:
            settings: the router's, with the limits.
            journals: keeps the journals of resumable requests.
            now: the event loop's time.
            on_requests: called when there is a request again, or none any more.
        """
        self._settings = settings
        self._journals = journals
        self._now = now
        self._on_requests = on_requests
        self.draining = False
        """No new requests are accepted."""
        self.has_ended = False
        """Those that have outlasted the drain have been ended."""
        self.requests = 0
        """Requests for tokens in progress."""
        self.streams = 0
        """Streams in progress: one for each choice of each request."""
        self.generations: set[Generation | Embedding] = set()
        self.preparations: set[Preparation] = set()
        self.other_bytes = 0
        """Prompts that are token ids already, of requests that are not, and whole answers that are being sent."""
        self._journals_bytes = 0
        self._journals_measured_at = 0.0
        """In the event loop's time, like all deadlines."""

    def check_request(self) -> None:
        """Refuse another request.

        Raises:
            LockstepError: DRAINING or OVERLOADED.
        """
        if self.draining:
            raise shutting_down()
        if self.requests >= self._settings.max_streams:
            raise self._overloaded()

    def end(self) -> None:
        """End everything with the error DRAINING, also what is being prepared and has no stream yet."""
        self.has_ended = True
        for preparation in self.preparations:
            preparation.end()
        for generation in list(self.generations):
            generation.fail(shutting_down())

    def check_end(self) -> None:
        """Raise DRAINING if everything has been ended: what has not begun yet does not begin any more."""
        if self.has_ended:
            raise shutting_down()

    def add_request(self) -> None:
        """Count one more request."""
        self.requests += 1
        if self.requests == 1:
            self._on_requests()

    def remove_request(self) -> None:
        """Count one request less."""
        self.requests -= 1
        if not self.requests:
            self._on_requests()

    def add_streams(self, streams: int) -> None:
        """Count more streams, or fewer if the number is negative.

        Raises:
            LockstepError: OVERLOADED, there are too many.
        """
        if streams > 0 and self.streams + streams > self._settings.max_streams:
            raise self._overloaded()
        self.streams += streams
        metrics.STREAMS.value = self.streams

    def add_prompts(self, size_bytes: int) -> None:
        """Count the prompts of streams that run until the journals are measured again."""
        self._journals_bytes += size_bytes

    def check_room(self, wanted_bytes: int) -> None:
        """Raise OVERLOADED if the journals have no room for more bytes."""
        now = self._now()
        if now - self._journals_measured_at > _MEASURE_EVERY_S:
            self._journals_measured_at = now
            self._journals_bytes = sum(generation.journal_bytes for generation in self.generations)
        others = self._journals_bytes + self.other_bytes + wanted_bytes
        excess = others + self._journals.size_bytes - self._settings.max_journals_bytes
        if excess <= 0:
            return
        self._journals.shrink(excess)
        if others + self._journals.size_bytes > self._settings.max_journals_bytes:
            raise _no_room()

    def check_answers(self) -> None:
        """Raise OVERLOADED if answers that are being sent have taken all the room."""
        if self.other_bytes > self._settings.max_journals_bytes:
            raise _no_room()

    def _overloaded(self) -> LockstepError:
        return LockstepError(
            ErrorCode.OVERLOADED, f"this router runs {self._settings.max_streams} streams already", retry_after_s=1
        )


def shutting_down() -> LockstepError:
    """The error of requests that come while the router drains, and of those that outlast it."""
    return LockstepError(ErrorCode.DRAINING, "this router is shutting down", retry_after_s=1)


def _no_room() -> LockstepError:
    return LockstepError(
        ErrorCode.OVERLOADED,
        "the journals and unsent answers of this router take all their memory (max_journals_bytes)",
        retry_after_s=1,
    )


class Admission:
    """A request for tokens in progress."""

    def __init__(self, in_progress: InProgress, account: Account) -> None:
        self._in_progress = in_progress
        self._account = account

    def __enter__(self) -> None:
        self._in_progress.check_request()
        self._account.hold(1)
        self._in_progress.add_request()

    def __exit__(self, *_: object) -> None:
        self._in_progress.remove_request()
        self._account.give_back(1)


class UnsentAnswer:
    """A whole answer that is kept until it is sent."""

    def __init__(self, in_progress: InProgress, answer: Iterable[bytes | bytearray]) -> None:
        self._in_progress = in_progress
        # Choices share the JSON of an echoed prompt.
        self._size_bytes = sum(map(len, {id(piece): piece for piece in answer}.values()))

    def __enter__(self) -> None:
        self._in_progress.other_bytes += self._size_bytes

    def __exit__(self, *_: object) -> None:
        self._in_progress.other_bytes -= self._size_bytes


class Preparation:
    """A request that is being prepared, while the context is entered: it may wait for a worker or a tokenizer.

    Raises:
        LockstepError: DRAINING, on entering or on leaving: what was in progress has been ended.
    """

    def __init__(self, in_progress: InProgress) -> None:
        self._in_progress = in_progress
        self._counted = 0
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        self._in_progress.check_end()
        await self._limit.__aenter__()
        self._in_progress.preparations.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._in_progress.preparations.discard(self)
        self._in_progress.other_bytes -= self._counted
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise shutting_down() from None

    def end(self) -> None:
        """End it with DRAINING."""
        self._limit.reschedule(0.0)

    def count(self, prompt: Prompt) -> None:
        """Count the memory of a prompt that is token ids already."""
        size = bytes_of(prompt)
        self._in_progress.check_room(size)
        self._counted += size
        self._in_progress.other_bytes += size


class RunningRequest:
    """A request's streams, which run while the context is entered."""

    def __init__(
        self,
        in_progress: InProgress,
        prepared: Prepared,
        account: Account,
        make: Callable[[], Generation],
        tracing: Tracing | None,
    ) -> None:
        """Args: `make` makes the generation of `prepared`; `tracing` makes traces, None: there are none."""
        self._in_progress = in_progress
        self._prepared = prepared
        self._account = account
        self._make = make
        self._tracing = tracing
        self._generation: Generation | None = None
        self._takeover: Takeover | None = None

    async def __aenter__(self) -> Generation:
        in_progress, prepared, account = self._in_progress, self._prepared, self._account
        in_progress.check_room(prepared.prompt_bytes)
        streams = len(prepared.journals)
        in_progress.add_streams(streams)
        try:
            account.hold(streams - 1)  # the request itself holds one stream already
            try:
                if prepared.begun is not None:  # another router has counted its prompts
                    self._join_trace()
                else:
                    # Last of all: a request that is refused costs its tenant no tokens.
                    if account.tenant.tokens_per_minute is not None:
                        await account.charge_prompts(prepared.prompt_tokens)
                    metrics.PROMPT_TOKENS.inc(prepared.prompt_tokens)
                in_progress.check_end()
                in_progress.add_prompts(prepared.prompt_bytes)
                generation = self._make()
                if not generation.runs_alone:
                    await generation.__aenter__()
            except BaseException:
                account.give_back(streams - 1)
                self._leave_trace()
                raise
        except BaseException:
            in_progress.add_streams(-streams)
            raise
        self._generation = generation
        in_progress.generations.add(generation)
        return generation

    def _join_trace(self) -> None:
        """Join the trace that another router began."""
        journals = self._prepared.journals
        self._takeover = begin_takeover(self._tracing, journals[0].traceparent)
        for journal in journals:
            journal.trace = self._takeover

    def _leave_trace(self) -> None:
        if self._takeover is not None:
            self._takeover.close()

    async def __aexit__(self, *error: object) -> None:
        in_progress, generation = self._in_progress, self._generation
        assert generation is not None
        streams = len(self._prepared.journals)
        try:
            in_progress.generations.discard(generation)
            if self._account.tenant.tokens_per_minute is not None:
                # The router that began it has charged for what it gave.
                begun = sum(len(log.ids) for log in self._prepared.begun or ())
                self._account.charge_answers(max(0, generation.completion_tokens - begun))
            if not generation.runs_alone:
                await generation.__aexit__(*error)
        finally:
            self._leave_trace()
            self._account.give_back(streams - 1)
            in_progress.add_streams(-streams)
