"""A request for tokens in progress: what it counts for in its router, from its admission to its end.

Written as classes: a context manager of `contextlib` costs a few microseconds, and each request has several.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.generation.generation import Generation, Observer
from lockstep_router.generation.preparation import Prepared, bytes_of
from lockstep_router.generation.prompts import Prompt
from lockstep_router.tenants import Account
from lockstep_router.traces import Takeover, begin_takeover

if TYPE_CHECKING:
    from lockstep_router.router import Router


class Admission:
    """A request for tokens in progress."""

    def __init__(self, router: "Router", account: Account) -> None:
        self._router = router
        self._account = account

    def __enter__(self) -> None:
        router = self._router
        if router.draining:
            raise LockstepError(ErrorCode.DRAINING, "this router is shutting down", retry_after_s=1)
        if router.requests >= router.settings.max_streams:
            raise router._overloaded()
        self._account.hold(1)
        router.requests += 1
        if router.requests == 1:
            router._note_requests()

    def __exit__(self, *_: object) -> None:
        self._router.requests -= 1
        if not self._router.requests:
            self._router._note_requests()
        self._account.give_back(1)


class UnsentAnswer:
    """A whole answer that is kept until it is sent."""

    def __init__(self, router: "Router", answer: Iterable[bytes | bytearray]) -> None:
        self._router = router
        # Choices share the JSON of an echoed prompt.
        self._size_bytes = sum(map(len, {id(piece): piece for piece in answer}.values()))

    def __enter__(self) -> None:
        self._router._other_bytes += self._size_bytes

    def __exit__(self, *_: object) -> None:
        self._router._other_bytes -= self._size_bytes


class CountingPrompts:
    """Counts prompts that are token ids already, of a request that is not prepared yet."""

    def __init__(self, router: "Router") -> None:
        self._router = router
        self._counted = 0

    def add(self, prompt: Prompt) -> None:
        """Count one."""
        size = bytes_of(prompt)
        self._router._check_room(size)
        self._counted += size
        self._router._other_bytes += size

    def end(self) -> None:
        """The request is prepared, or never will be."""
        self._router._other_bytes -= self._counted


class RunningRequest:
    """A request's streams, which run while the context is entered."""

    def __init__(
        self, router: "Router", prepared: Prepared, account: Account, *, is_collected: bool, observe: Observer | None
    ) -> None:
        self._router = router
        self._prepared = prepared
        self._account = account
        self._is_collected = is_collected
        self._observe = observe
        self._generation: Generation | None = None
        self._takeover: Takeover | None = None

    async def __aenter__(self) -> Generation:
        router, prepared, account = self._router, self._prepared, self._account
        router._check_room(prepared.prompt_bytes)
        streams = len(prepared.journals)
        router._count(streams)
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
                router._journals_bytes += prepared.prompt_bytes
                generation = Generation(
                    prepared, router.workers, router.settings, is_collected=self._is_collected, observe=self._observe
                )
                if not generation.runs_alone:
                    await generation.__aenter__()
            except BaseException:
                account.give_back(streams - 1)
                self._leave_trace()
                raise
        except BaseException:
            router._count(-streams)
            raise
        self._generation = generation
        router._generations.add(generation)
        return generation

    def _join_trace(self) -> None:
        """Join the trace that another router began."""
        journals = self._prepared.journals
        self._takeover = begin_takeover(self._router.tracing, journals[0].traceparent)
        for journal in journals:
            journal.trace = self._takeover

    def _leave_trace(self) -> None:
        if self._takeover is not None:
            self._takeover.close()

    async def __aexit__(self, *error: object) -> None:
        router, generation = self._router, self._generation
        assert generation is not None
        streams = len(self._prepared.journals)
        try:
            router._generations.discard(generation)
            if self._account.tenant.tokens_per_minute is not None:
                # The router that began it has charged for what it gave.
                begun = sum(len(log.ids) for log in self._prepared.begun or ())
                self._account.charge_answers(max(0, generation.completion_tokens - begun))
            if not generation.runs_alone:
                await generation.__aexit__(*error)
        finally:
            self._leave_trace()
            self._account.give_back(streams - 1)
            router._count(-streams)
