"""The router itself: its workers, its models, its requests in progress, and whether it accepts new ones.

Faces use only this module and `generation`. They never reach into the workers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from random import Random
from typing import Self

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.grpc_tls import Dial, dial_plain
from lockstep_common.tracing import Tracing
from lockstep_common.watched_files import watched

from lockstep_router import metrics
from lockstep_router.discovery import Discovery, choose_discovery
from lockstep_router.generation.embedding import (
    Embedding,
    EmbeddingRequest,
    PreparedEmbedding,
    prepare_embedding,
)
from lockstep_router.generation.generation import Generation, Observer
from lockstep_router.generation.preparation import Prepared, prepare
from lockstep_router.generation.prompts import PromptEncoder, check_ids
from lockstep_router.generation.request import GenerationRequest, PromptSource
from lockstep_router.journals import JournalStore, MemoryJournalStore, MirroredJournalStore
from lockstep_router.memory import MemoryTrimmer
from lockstep_router.output import ModelFormats
from lockstep_router.resumption import Runs
from lockstep_router.running import Admission, InProgress, Preparation, RunningRequest, UnsentAnswer
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import Account, KeyFile, TenantLimits
from lockstep_router.tenants.shared_storage import open_storage
from lockstep_router.text.threads import TextThreads
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.workers import Workers, model_not_found

logger = logging.getLogger("lockstep.router")

FAREWELL_S = 1.0
"""Longest wait until clients have got the error of streams that have outlasted the drain."""

_MAX_EMBEDDING_STREAMS = 16
"""Most texts of one request that are computed at a time: the workers' queues are for all clients."""


class Router:
    """One router. Entering the context connects to the workers, leaving it disconnects."""

    def __init__(
        self,
        settings: RouterSettings,
        discovery: Discovery | None = None,
        dial: Dial = dial_plain,
        rng: Random | None = None,
        journals: JournalStore | None = None,
        dial_state: Dial = dial_plain,
        tracing: Tracing | None = None,
    ) -> None:
        """Make a router.

        Args:
            settings: its settings.
            discovery: where it finds workers; None: as the settings say.
            dial: opens a channel to a worker.
            rng: its source of randomness; None: the system's.
            journals: keeps the journals of resumable requests; None: this process's memory, and the state server if the
                settings name one.
            dial_state: opens a channel to the state server.
            tracing: makes the traces of requests; None: there are none.

        Raises:
            LockstepError: INVALID_REQUEST, the file of API keys, of a password or of authorities cannot be used.
        """
        self.settings = settings
        self.tracing = tracing
        self.keys = None if settings.keys_file is None else KeyFile(settings.keys_file)
        """The API keys of clients; None: everyone is served."""
        self.storage = open_storage(
            settings.limits_storage,
            settings.limits_storage_password_file,
            settings.limits_storage_timeout_s,
            ca=settings.limits_storage_ca,
        )
        self.limits = TenantLimits(self.storage)
        self.workers = Workers(settings, discovery or choose_discovery(settings), dial, rng)
        self.memory = MemoryTrimmer()
        self._threads = TextThreads(settings.text_threads, self.memory)
        formats = ModelFormats(settings.model_tool_formats, settings.model_reasoning_formats)
        self.encoder = PromptEncoder(
            self._threads, control_tokens=settings.allow_control_tokens_in_text, formats=formats
        )
        self.leaving = False
        """The router will drain soon (lame duck)."""
        self._began_at = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching = AsyncExitStack()
        own = MemoryJournalStore(settings.max_resumable_streams, settings.max_resumable_bytes)
        self.mirrored = None if journals is not None else _mirrored(own, settings, dial_state)
        """The journals, if they are mirrored in a state server; None: they are not."""
        self.journals: JournalStore = journals or self.mirrored or own
        self.in_progress = InProgress(settings, self.journals, lambda: self.loop_time, self._note_requests)
        self.runs = Runs(self, self.journals, self._note_requests)
        """Resumable requests: faces start, resume and cancel them here."""

    async def __aenter__(self) -> Self:
        if self.keys is not None:
            await self._watching.enter_async_context(watched(self.keys))
        self.workers.start()
        if self.mirrored is not None:
            self.mirrored.start()
        self.runs.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watching.aclose()
        await self.runs.stop()
        if self.mirrored is not None:
            await self.mirrored.close()
        await self.workers.stop()
        self._threads.stop()
        self.memory.stop()
        if self.storage is not None:
            await self.storage.close()

    @property
    def draining(self) -> bool:
        """Whether no new requests are accepted."""
        return self.in_progress.draining

    @property
    def requests(self) -> int:
        """Requests for tokens in progress."""
        return self.in_progress.requests

    @property
    def streams(self) -> int:
        """Streams in progress: one for each choice of each request."""
        return self.in_progress.streams

    @property
    def uptime_s(self) -> float:
        """Seconds since this router was created."""
        return time.monotonic() - self._began_at

    @property
    def loop_time(self) -> float:
        """The time in which its records are: that of the running event loop."""
        return self.workers.loop.time()

    @property
    def failovers(self) -> int:
        """Number of times that a stream moved to another worker."""
        return self.workers.failovers

    @property
    def unready(self) -> str | None:
        """Why no requests for tokens should be sent here; None if they would be served or, because there is no worker
        at all, wait for one.

        Models may be scaled to zero: if no router were ready then, no request would arrive to wait, to be counted, and
        to be a reason to start a worker.
        """
        if self.leaving:
            return "draining"
        return None if self.workers.ready() or self.workers.report.lists_none else "no worker is ready"

    def models(self) -> list[worker_pb2.ModelCard]:
        """Every model that a worker has reported, also while its workers are away."""
        return list(self.workers.models.values())

    def model(self, name: str) -> worker_pb2.ModelCard:
        """One of these models.

        Raises:
            LockstepError: MODEL_NOT_FOUND.
        """
        card = self.workers.models.get(name)
        if card is None:
            raise model_not_found(name)
        return card

    def tokenizer(self, digest: str) -> Tokenizer:
        """A tokenizer that a worker has brought.

        Raises:
            LockstepError: UNAVAILABLE.
        """
        tokenizer = self.workers.tokenizers.get(digest)
        if tokenizer is None:
            raise LockstepError(ErrorCode.UNAVAILABLE, "no worker has brought the tokenizer yet", retry_after_s=1)
        return tokenizer

    async def tokenize(self, model: str, source: PromptSource) -> tuple[list[int], worker_pb2.ModelCard]:
        """A prompt's token ids, and the model that they are for.

        Raises:
            LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED, naming the prompt's field; MODEL_NOT_FOUND;
                UNAVAILABLE; OVERLOADED, too much text waits for a thread.
        """
        card, tokenizer = await self.workers.find_version(model, "")
        (prompt,) = await self.encoder.encode_all((source,), tokenizer, card)
        return prompt.ids, card

    async def detokenize(self, model: str, ids: list[int], field: str) -> str:
        """The text of token ids.

        Args:
            model: the model's name.
            ids: the token ids.
            field: the ids' name in errors.

        Raises:
            LockstepError: INVALID_REQUEST for an id outside the vocabulary; MODEL_NOT_FOUND; UNAVAILABLE; OVERLOADED,
                too much text waits for a thread.
        """
        card, tokenizer = await self.workers.find_version(model, "")
        check_ids(ids, card, field)
        return await self.encoder.decode(ids, tokenizer)

    async def prepare(self, request: GenerationRequest, account: Account) -> Prepared:
        """Turn a request into streams that are ready to run. The request itself is not needed afterwards.

        Raises:
            LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED, the request does not fit this router or its
                model; RATE_LIMIT_EXCEEDED or RESOURCE_EXHAUSTED, or its tenant; MODEL_NOT_FOUND; UNAVAILABLE; DRAINING,
                the drain is over.
        """
        streams = len(request.prompts) * request.choices_per_prompt
        if streams > self.settings.max_streams_per_request:
            limit = self.settings.max_streams_per_request
            field = "n" if request.kept_per_prompt is None else "best_of"
            raise invalid(field, f"times the number of prompts is {streams}; a request may have {limit} answers")
        account.expect(streams)
        async with Preparation(self.in_progress) as preparation:
            prepared = await prepare(
                request,
                self.workers,
                self.encoder,
                self.settings.max_queue_wait_s,
                preparation.count,
                account.tenant.priority,
            )
        if request.caller.trace is not None:
            request.caller.trace.describe(prepared.card.name, streams, prepared.journals[0].sampling)
        return prepared

    async def prepare_embedding(self, request: EmbeddingRequest, account: Account) -> PreparedEmbedding:
        """Turn a request for embeddings into streams that are ready to run. The request is not needed afterwards.

        Raises:
            LockstepError: as for `prepare`.
        """
        account.expect(1)
        max_wait_s, priority = self.settings.max_queue_wait_s, account.tenant.priority
        async with Preparation(self.in_progress) as preparation:
            prepared = await prepare_embedding(
                request, self.workers, self.encoder, max_wait_s, preparation.count, priority
            )
        if request.caller.trace is not None:
            request.caller.trace.describe(prepared.card.name, len(prepared.journals))
        return prepared

    def run(
        self,
        prepared: Prepared,
        account: Account,
        *,
        is_collected: bool = False,
        observe: Observer | None = None,
    ) -> RunningRequest:
        """Run a request's streams. Leaving the context cancels those that still run.

        Args:
            prepared: the request.
            account: of the request; its tokens are charged to it.
            is_collected: the whole answer is kept until it is complete.
            observe: called with everything that its streams gain.

        Raises:
            LockstepError: when the context is entered. OVERLOADED, there are too many streams, or their journals are
                too large; RATE_LIMIT_EXCEEDED or RESOURCE_EXHAUSTED, a limit of the tenant.
        """
        make = partial(Generation, prepared, self.workers, self.settings, is_collected=is_collected, observe=observe)
        return RunningRequest(self.in_progress, prepared, account, make, self.tracing)

    @asynccontextmanager
    async def embedding(self, prepared: PreparedEmbedding, account: Account) -> AsyncIterator[Embedding]:
        """The computation of a request's embeddings, which leaving the context ends.

        Raises:
            LockstepError: as for `run`.
        """
        self.in_progress.check_room(prepared.prompt_bytes)
        # The request itself holds one stream already.
        streams = min(len(prepared.journals), _MAX_EMBEDDING_STREAMS, account.streams_left + 1)
        with self._running(streams), account.holding(streams - 1):
            # Last of all: a request that is refused costs its tenant no tokens.
            await account.charge_prompts(prepared.prompt_tokens)
            self.in_progress.check_end()
            self.in_progress.add_prompts(prepared.prompt_bytes)
            metrics.PROMPT_TOKENS.inc(prepared.prompt_tokens)
            embedding = Embedding(prepared, self.workers, self.settings, streams=streams)
            self.in_progress.generations.add(embedding)
            try:
                yield embedding
            finally:
                self.in_progress.generations.discard(embedding)

    def admitted(self, account: Account) -> Admission:
        """Count a request for tokens as in progress, from before it is prepared until its answer is written.

        Raises:
            LockstepError: when the context is entered. DRAINING, no new requests are accepted; OVERLOADED, there are
                too many requests; RATE_LIMIT_EXCEEDED, there are too many of the tenant.
        """
        return Admission(self.in_progress, account)

    def holding(self, answer: Iterable[bytes | bytearray]) -> UnsentAnswer:
        """Count the memory of a whole answer, which is kept until it is sent."""
        return UnsentAnswer(self.in_progress, answer)

    def check_answers(self) -> None:
        """Refuse another copy of a whole answer that is kept if those that are being sent have taken all the room.

        No kept answer is forgotten for it: the client could not ask for the same one again.

        Raises:
            LockstepError: OVERLOADED.
        """
        self.in_progress.check_answers()

    @contextmanager
    def reserved(self, streams: int, prompt_bytes: int, account: Account) -> Iterator[None]:
        """Keep room for the streams of a request that is about to run. It has one stream of its tenant already.

        Raises:
            LockstepError: as for `run`, when the context is entered.
        """
        self.in_progress.check_room(prompt_bytes)
        self.in_progress.other_bytes += prompt_bytes
        try:
            with self._running(streams), account.holding(streams - 1):
                yield
        finally:
            self.in_progress.other_bytes -= prompt_bytes

    def has_one_numerics(self, model: str, digest: str) -> bool:
        """Whether all workers compute the same tokens, so that it does not matter which one has begun a stream."""
        return self.workers.have_one_numerics(model, digest)

    def _note_requests(self) -> None:
        if self.requests or self.runs.readings:
            self._idle.clear()
        else:
            self._idle.set()

    @contextmanager
    def _running(self, streams: int) -> Iterator[None]:
        """Count a request's streams as in progress.

        Raises:
            LockstepError: OVERLOADED, there are too many streams.
        """
        self.in_progress.add_streams(streams)
        try:
            yield
        finally:
            self.in_progress.add_streams(-streams)

    async def leave(self, *, on_drain: Callable[[], None] = lambda: None) -> None:
        """Shut down: lame duck for `lame_duck_s`, then drain for at most `drain_timeout_s`. Requests that are still in
        progress then get the error DRAINING, and a moment to pass it on.

        `on_drain` is called between the two: from then on no connection may be used for another request.
        """
        self.leaving = True
        logger.info("lame duck begins", extra={"streams": self.streams, "lame_duck_s": self.settings.lame_duck_s})
        await asyncio.sleep(self.settings.lame_duck_s)
        self.in_progress.draining = True
        self.runs.drain()
        on_drain()
        logger.info("draining", extra={"streams": self.streams})
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            await self._end_all()

    async def _end_all(self) -> None:
        """End what is in progress with a typed error, and wait until clients have it, but not long."""
        logger.warning("requests have outlasted the drain", extra={"streams": self.streams})
        self.runs.end()
        self.in_progress.end()
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._idle.wait()
        except TimeoutError:
            pass


def _mirrored(own: MemoryJournalStore, settings: RouterSettings, dial: Dial) -> MirroredJournalStore | None:
    if not settings.state_server:
        return None
    return MirroredJournalStore(
        own,
        settings.state_server,
        dial,
        owner=settings.router_id,
        window_s=settings.resume_window_s,
        timeout_s=settings.state_timeout_s,
        max_lag_s=settings.state_max_lag_s,
    )
