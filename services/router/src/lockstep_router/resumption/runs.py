"""Runs the generations of resumable requests, each in a task of its own, and lets clients read them.

A generation goes on for `resume_window_s` after its last client has left. Then the store keeps what it gave for as
long. The client's connection has no part in it.
"""

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.generation.choices import Choice, Delta
from lockstep_router.generation.generation import Generation, Observer
from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.journals import ChoiceLog, ChoiceRecord, Claim, JournalStore, Outcome, Piece, Record
from lockstep_router.resumption.position import After, no_position
from lockstep_router.resumption.reading import Reading, Source
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import Account
from lockstep_router.text.tokenizer import Tokenizer

logger = logging.getLogger("lockstep.router")

_ID_BYTES = 16
_EXPIRE_EVERY_S = 1.0
_CLAIM_TRIES = 8
"""Tries to get an idempotency key whose stream is just ending."""


class Host(Protocol):
    """What runs need of the router."""

    settings: RouterSettings
    draining: bool

    def admitted(self, account: Account) -> AbstractContextManager[None]:
        """Count a request for tokens as in progress."""

    async def prepare(self, request: GenerationRequest, account: Account) -> Prepared:
        """Turn a request into streams that are ready to run."""

    def run(
        self, prepared: Prepared, account: Account, *, observe: Observer | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Run a request's streams."""

    def tokenizer(self, digest: str) -> Tokenizer:
        """A model's tokenizer."""


@dataclass(frozen=True)
class IdempotencyKey:
    """A client's name for a request that it may send several times."""

    scope: str
    """The key, and whose it is."""
    fingerprint: bytes
    """Of the request."""
    field: str
    """The name of the header or field that it came in, for errors."""


class Run:
    """One generation that runs, or is being prepared."""

    def __init__(self, owner: str) -> None:
        self.request_id = f"r-{secrets.token_hex(_ID_BYTES)}"
        self.owner = owner
        self.record: Record | None = None
        self.tokenizer: Tokenizer | None = None
        self.logs: list[ChoiceLog] = []
        self.outcome: Outcome | None = None
        self.prepared = asyncio.Event()
        """Set when there is a record, or an outcome without one."""
        self.ended = asyncio.Event()
        self.readers: set[asyncio.Event] = set()
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False
        self.end: LockstepError | None = None
        """Why it is being ended; it can no longer be read then."""
        self.is_ending = False
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Tell all readers that there is more."""
        for arrival in self.readers:
            arrival.set()

    def cancel(self, reason: LockstepError) -> None:
        """End the generation; its readers get the reason."""
        if self.end is None and not self.is_ending:
            self.end = reason
            # A task that has not begun would never run its clean-up; it looks at `end` first.
            if self.task is not None and self.has_begun:
                self.task.cancel()


class Runs:
    """The resumable generations of one router, and the readings of their clients."""

    def __init__(self, host: Host, store: JournalStore, on_readings: Callable[[], None]) -> None:
        """Make it without any.

        Args:
            host: the router.
            store: keeps the journals.
            on_readings: called when the number of readings has changed.
        """
        self._host = host
        self._store = store
        self._on_readings = on_readings
        self._settings = host.settings
        self._runs: dict[str, Run] = {}
        self._detached: set[Run] = set()
        self._expiring: asyncio.Task[None] | None = None
        self.readings = 0
        """Clients that read a stream now."""

    def begin(self) -> None:
        """Begin to expire what is kept."""
        self._expiring = asyncio.create_task(self._expire())

    async def stop(self) -> None:
        """End all runs."""
        if self._expiring is not None:
            self._expiring.cancel()
        self._cancel_all(lambda _: True)
        await asyncio.gather(*(run.ended.wait() for run in list(self._runs.values())))

    def drain(self) -> None:
        """End the runs without a client, now and from now on."""
        self._cancel_all(lambda run: not run.readers)

    @property
    def running(self) -> int:
        """Resumable requests in progress."""
        return len(self._runs)

    @property
    def detached(self) -> int:
        """Those of them without a client."""
        return len(self._detached)

    async def start(
        self,
        request: GenerationRequest,
        account: Account,
        style: Style,
        *,
        owner: str,
        key: IdempotencyKey | None = None,
        after: After | None = None,
    ) -> Reading:
        """Start a generation, or join the one that the key has; read it. The caller closes the reading.

        Args:
            request: the request.
            account: of its tenant.
            style: the form of the answer, for those who resume it.
            owner: names who may resume it.
            key: its idempotency key.
            after: the last event that the client has, if it sends the request with this key again.

        Raises:
            LockstepError: as from `Router.prepare` and `Router.run`; IDEMPOTENCY_KEY_REUSED; INVALID_REQUEST or
                STREAM_NOT_FOUND for `after`; OVERLOADED.
        """
        for _ in range(_CLAIM_TRIES):
            run = Run(owner)
            self._runs[run.request_id] = run  # before the claim: who finds that finds the run
            first: Claim | None = None
            try:
                if key is not None:
                    first = await self._claim(run, key, after)
                if first is None:
                    arrival = self._attach(run)
                    run.task = asyncio.create_task(self._drive(run, request, account, style))
            finally:
                if run.task is None:
                    await self._finish(run, Outcome(_gone()))
            if first is None:
                del request
                return await self._read(run, arrival, None, is_resumed=False)
            if (reading := await self._join(first, owner, after)) is not None:
                return reading
        raise LockstepError(ErrorCode.UNAVAILABLE, "the request's first stream is ending", retry_after_s=1)

    async def resume(self, request_id: str, owner: str, after: After | None = None) -> Reading:
        """Read a stream that an earlier request started. The caller closes the reading.

        Raises:
            LockstepError: STREAM_NOT_FOUND, there is none of this owner; INVALID_REQUEST, `after` is not one of its
                events; OVERLOADED; UNAVAILABLE, the tokenizer is not here.
        """
        try:
            reading = await self._resume(request_id, owner, after)
        except LockstepError as error:
            outcome = {ErrorCode.STREAM_NOT_FOUND: "not_found", ErrorCode.INVALID_REQUEST: "invalid"}
            metrics.RESUMES.labels(outcome.get(error.code, "refused")).inc()
            raise
        metrics.RESUMES.labels("running" if request_id in self._runs else "finished").inc()
        return reading

    async def cancel(self, request_id: str, owner: str) -> None:
        """End a stream, if it runs, and forget it.

        Raises:
            LockstepError: STREAM_NOT_FOUND, there is none of this owner.
        """
        run = self._runs.get(request_id)
        if run is not None and run.owner == owner and run.end is None:
            run.cancel(LockstepError(ErrorCode.CANCELLED, "the stream was cancelled"))
            await run.ended.wait()
            await self._store.remove(request_id)
            return
        stored = await self._store.read(request_id)
        if stored is None or stored.record.owner != owner:
            raise _not_found()
        await self._store.remove(request_id)

    # Readings.

    async def _resume(self, request_id: str, owner: str, after: After | None) -> Reading:
        if after is not None and after.request_id != request_id:
            raise no_position(after.field)
        run = self._runs.get(request_id)
        if run is not None and run.owner == owner and run.end is None:
            return await self._read(run, self._attach(run), after, is_resumed=True)
        stored = await self._store.read(request_id)
        if stored is None or stored.outcome is None or stored.record.owner != owner:
            raise _not_found()
        tokenizer = self._host.tokenizer(stored.record.tokenizer_digest)
        self._count_reading()
        return await _begin(
            Reading(
                stored.record,
                stored,
                tokenizer,
                arrival=asyncio.Event(),
                on_close=self._discount_reading,
                is_resumed=True,
            ),
            after,
        )

    async def _read(self, run: Run, arrival: asyncio.Event, after: After | None, *, is_resumed: bool) -> Reading:
        """Read a run to which the reader is attached already."""
        try:
            await run.prepared.wait()
            if run.record is None or run.tokenizer is None:
                assert run.outcome is not None
                raise run.outcome.failure or _gone()
        except BaseException:
            self._detach(run, arrival)
            raise
        source: Source = run
        reading = Reading(
            run.record,
            source,
            run.tokenizer,
            arrival=arrival,
            on_close=partial(self._detach, run, arrival),
            is_resumed=is_resumed,
        )
        return await _begin(reading, after)

    def _attach(self, run: Run) -> asyncio.Event:
        self._count_reading()
        arrival = asyncio.Event()
        run.readers.add(arrival)
        if run.timer is not None:
            run.timer.cancel()
            run.timer = None
        self._detached.discard(run)
        self._measure()
        return arrival

    def _detach(self, run: Run, arrival: asyncio.Event) -> None:
        run.readers.discard(arrival)
        self._discount_reading()
        if not run.readers and not run.is_ending:
            self._detached.add(run)
            if run.record is None:
                run.cancel(_gone())  # nobody knows its id
            elif self._host.draining:
                run.cancel(_draining())
            else:
                run.timer = asyncio.get_running_loop().call_later(self._settings.resume_window_s, run.cancel, _gone())
        self._measure()

    def _count_reading(self) -> None:
        if self.readings >= self._settings.max_streams:
            raise LockstepError(ErrorCode.OVERLOADED, "too many clients read streams of this router", retry_after_s=1)
        self.readings += 1
        self._on_readings()

    def _discount_reading(self) -> None:
        self.readings -= 1
        self._on_readings()

    # Idempotency.

    async def _claim(self, run: Run, key: IdempotencyKey, after: After | None) -> Claim | None:
        """Give the key to a run; the claim of the one that has it already.

        Raises:
            LockstepError: IDEMPOTENCY_KEY_REUSED, that one has another body; STREAM_NOT_FOUND, none has it, so the one
                that `after` names is gone.
        """
        known = await self._store.claim(key.scope, Claim(run.request_id, key.fingerprint))
        if known is None and after is not None:
            raise _not_found()
        if known is not None and known.fingerprint != key.fingerprint:
            sentence = f"{key.field} was used for a request with another body"
            raise LockstepError(ErrorCode.IDEMPOTENCY_KEY_REUSED, sentence, field=key.field)
        return known

    async def _join(self, claim: Claim, owner: str, after: After | None) -> Reading | None:
        """Read the stream that has a key; None if it has just ended, and the key is free."""
        run = self._runs.get(claim.request_id)
        if run is not None and run.end is not None:
            await run.ended.wait()
            return None
        try:
            reading = await self._resume(claim.request_id, owner, after)
        except LockstepError as error:
            if error.code is not ErrorCode.STREAM_NOT_FOUND:
                raise
            await self._store.release(claim.request_id)
            return None
        metrics.IDEMPOTENT_JOINS.inc()
        return reading

    # Generation.

    async def _drive(self, run: Run, request: GenerationRequest, account: Account, style: Style) -> None:
        run.has_begun = True
        outcome = Outcome()
        try:
            if run.end is not None:
                raise run.end
            with self._host.admitted(account):
                prepared = await self._host.prepare(request, account)
                deadline_s = request.caller.timeout_s
                session = request.caller.session
                del request
                record = _record(run, prepared, style, session, deadline_s)
                await self._store.open(record)
                async with self._host.run(prepared, account, observe=partial(self._note, run, prepared)) as generation:
                    run.record, run.tokenizer = record, prepared.tokenizer
                    run.logs = [ChoiceLog() for _ in record.choices]
                    run.prepared.set()
                    async for _ in generation.deltas():
                        pass
        except LockstepError as error:
            outcome = Outcome(error)
        except asyncio.CancelledError:
            outcome = Outcome(run.end or _gone())
        except Exception:
            logger.exception("resumable stream failed")
            outcome = Outcome(LockstepError(ErrorCode.INTERNAL, "something went wrong in the router"))
        await self._finish(run, outcome)

    def _note(
        self,
        run: Run,
        prepared: Prepared,
        choice: Choice,
        updates: Sequence[worker_pb2.StreamTokens],
        deltas: Sequence[Delta],
    ) -> None:
        """Write what a choice has gained to its journal, without the tokens after a stop string."""
        log = run.logs[choice.index]
        count = choice.tokens - len(log.ids)
        ids = [token_id for update in updates for token_id in update.ids][:count]
        logprobs = [each for update in updates for each in update.logprobs][:count]
        finish = inference_pb2.FINISH_REASON_UNSPECIFIED
        if choice.is_finished and not log.finish:
            is_length = deltas and deltas[-1].finish_reason == "length"
            finish = inference_pb2.FINISH_REASON_LENGTH if is_length else inference_pb2.FINISH_REASON_STOP
        if not ids and not finish:
            return
        is_inexact = prepared.journals[choice.index].is_inexact
        piece = Piece(choice.index, len(log.ids), ids, logprobs, finish, choice.cached_tokens or 0, is_inexact)
        log.add(piece)
        self._store.append(run.request_id, piece)
        run.wake()

    async def _finish(self, run: Run, outcome: Outcome) -> None:
        """Keep what a run gave, or forget it, and tell its readers."""
        run.is_ending = True
        try:
            if run.record is None or run.end is not None:
                await self._store.remove(run.request_id)
            else:
                if outcome.failure is not None:
                    # A repeated request tries again; the failed stream can still be resumed.
                    await self._store.release(run.request_id)
                await self._store.seal(run.request_id, outcome, self._settings.resume_window_s)
        except Exception:
            logger.exception("the journal of a resumable stream was not closed")
        self._runs.pop(run.request_id, None)
        self._detached.discard(run)
        run.outcome = outcome
        if run.timer is not None:
            run.timer.cancel()
        run.prepared.set()
        run.ended.set()
        run.wake()
        self._measure()

    def _cancel_all(self, is_meant: Callable[[Run], bool]) -> None:
        for run in list(self._runs.values()):
            if is_meant(run):
                run.cancel(_draining())

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            self._store.expire()
            self._measure()

    def _measure(self) -> None:
        metrics.DETACHED_STREAMS.set(self.detached)
        metrics.KEPT_STREAMS.set(self._store.kept)
        metrics.KEPT_BYTES.set(self._store.size_bytes)


async def _begin(reading: Reading, after: After | None) -> Reading:
    """Go to the position; the reading is closed if there is no such position."""
    try:
        if after is not None and not reading.record.style.stream:
            raise no_position(after.field)
        if after is not None:
            await reading.skip(after)
    except BaseException:
        reading.close()
        raise
    return reading


def _record(run: Run, prepared: Prepared, style: Style, session: str, timeout_s: float | None) -> Record:
    now = time.time()
    return Record(
        request_id=run.request_id,
        owner=run.owner,
        model=prepared.card.name,
        digest=prepared.card.digest,
        tokenizer_digest=prepared.card.tokenizer_digest,
        created=int(now),
        style=style,
        stops=prepared.stops,
        prompts=tuple(array("I", prompt.ids) for prompt in prepared.prompts),
        prefixes=tuple(prompt.text for prompt in prepared.prompts),
        choices=tuple(ChoiceRecord(journal.stream_id, journal.sampling) for journal in prepared.journals),
        tenant=prepared.journals[0].tenant,
        session=session,
        parsing=prepared.parsing,
        deadline_at=None if timeout_s is None else now + timeout_s,
    )


def _not_found() -> LockstepError:
    """The same for a stream that never was, that is gone, and that is another tenant's."""
    return LockstepError(ErrorCode.STREAM_NOT_FOUND, "there is no such stream, or it can no longer be resumed")


def _gone() -> LockstepError:
    return LockstepError(ErrorCode.CANCELLED, "no client reads the stream")


def _draining() -> LockstepError:
    return LockstepError(ErrorCode.DRAINING, "this router is shutting down", retry_after_s=1)
