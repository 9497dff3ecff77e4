"""One generation of a resumable request, its record, and what it needs of the router."""

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.generation.generation import Generation, Observer
from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.journals import ChoiceLog, ChoiceRecord, Outcome, RequestRecord
from lockstep_router.resumption.endings import taken
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import Account
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.traces import RequestTrace

_ID_BYTES = 16


class Host(Protocol):
    """What runs need of the router."""

    settings: RouterSettings

    @property
    def draining(self) -> bool:
        """Whether no new requests are accepted."""

    def admitted(self, account: Account) -> AbstractContextManager[None]:
        """Count a request for tokens as in progress."""

    async def prepare(self, request: GenerationRequest, account: Account) -> Prepared:
        """Turn a request into streams that are ready to run."""

    def has_one_numerics(self, model: str, digest: str) -> bool:
        """Whether it does not matter for a stream's tokens which worker has begun it."""

    def reserved(self, streams: int, prompt_bytes: int, account: Account) -> AbstractContextManager[None]:
        """Keep room for the streams of a request that is about to run."""

    def run(
        self, prepared: Prepared, account: Account, *, observe: Observer | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Run a request's streams."""

    def tokenizer(self, digest: str) -> Tokenizer:
        """A model's tokenizer."""


class Run:
    """One generation that runs, or is being prepared."""

    def __init__(
        self, owner: str, style: Style, request_id: str | None = None, is_known: Callable[[], bool] = lambda: False
    ) -> None:
        self.is_known = is_known
        """Whether a client has its id by now, and so may come back to it before it is prepared."""
        self.request_id = request_id or f"r-{secrets.token_hex(_ID_BYTES)}"
        self.owner = owner
        self.style = style
        self.is_taken = request_id is not None
        """It goes on after an earlier run, whose clients may have had more than the store knows."""
        self.is_kept = False
        """The store has it, as one that runs here."""
        self.failed: Outcome | None = None
        """How it had failed here, if it goes on after that."""
        self.record: RequestRecord | None = None
        self.tokenizer: Tokenizer | None = None
        self.unproven: frozenset[int] = frozenset()
        """Choices that began again here, because the numerics of an earlier run are unknown."""
        self.logs: list[ChoiceLog] = []
        self.generation: Generation | None = None
        """While it runs."""
        self.trace: RequestTrace | None = None
        """Of its streams; None: they have none, or do not run yet."""
        self._failovers = 0
        self.outcome: Outcome | None = None
        self.prepared = asyncio.Event()
        """Set when there is a record, or an outcome without one."""
        self.ended = asyncio.Event()
        self.readers: dict[asyncio.Event, float] = {}
        """Its readers, and when they came, in the event loop's time."""
        self.owned_at: float | None = None
        """When it was last known to be this router's, if another one has taken it."""
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False
        self.end: LockstepError | None = None
        """Why it is being ended; it can no longer be read then."""
        self.is_ending = False
        self.timer: asyncio.TimerHandle | None = None

    @property
    def failovers(self) -> int:
        """Number of times that one of its streams moved to another worker."""
        return self._failovers if self.generation is None else self.generation.failovers

    @property
    def has_left_nothing(self) -> bool:
        """Whether it ends before it has run, so that no other router can have it."""
        is_cancelled = self.end is not None and self.end.code is ErrorCode.CANCELLED
        return is_cancelled and self.record is None and not self.is_taken

    def end_generation(self) -> None:
        """Drop the generation, which holds its prompts, and keep what readers may still ask for."""
        self._failovers, self.generation = self.failovers, None

    def outcome_for(self, arrival: asyncio.Event) -> Outcome | None:
        """How it ended for one of its readers; None: it runs."""
        came_at = self.readers.get(arrival)
        if self.outcome is None or self.owned_at is None or came_at is None or came_at <= self.owned_at:
            return self.outcome
        failure = self.outcome.failure
        return Outcome(taken()) if failure is not None and failure.code is ErrorCode.STREAM_MOVED else self.outcome

    def wake(self) -> None:
        """Wake all readers: there is more."""
        for arrival in self.readers:
            arrival.set()

    def cancel(self, reason: LockstepError) -> None:
        """End the generation; its readers get the reason."""
        if self.end is None and not self.is_ending:
            self.end = reason
            # A task that has not begun would never run its clean-up; it looks at `end` first.
            if self.task is not None and self.has_begun:
                self.task.cancel()


def record_of(run: Run, prepared: Prepared, style: Style, session: str, deadline_at: float | None) -> RequestRecord:
    """What is kept of a request; `deadline_at` is the end of its own timeout, in seconds since 1970."""
    return RequestRecord(
        request_id=run.request_id,
        owner=run.owner,
        model=prepared.card.name,
        digest=prepared.card.digest,
        tokenizer_digest=prepared.card.tokenizer_digest,
        created=int(time.time()),
        style=style,
        stops=prepared.stops,
        prompts=tuple(array("I", prompt.ids) for prompt in prepared.prompts),
        prefixes=tuple(prompt.text for prompt in prepared.prompts),
        choices=tuple(ChoiceRecord(journal.stream_id, journal.sampling) for journal in prepared.journals),
        tenant=prepared.journals[0].tenant,
        session=session,
        parsing=prepared.parsing,
        deadline_at=deadline_at,
        traceparent=prepared.journals[0].context,
    )
