"""Runs the generations of resumable requests, each in a task of its own, and lets clients read them.

A generation goes on for `resume_window_s` after its last client has left. Then the store keeps what it gave for as
long. The client's connection has no part in it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.generation.choices import Choice, Delta
from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.journals import ChoiceLog, Claim, JournalStore, Outcome, Piece, Record, StoredStream
from lockstep_router.resumption.continuation import continued
from lockstep_router.resumption.endings import draining, gone, moved, not_found
from lockstep_router.resumption.position import After, no_position
from lockstep_router.resumption.reading import Reading, Source
from lockstep_router.resumption.run import Host, Run, record_of
from lockstep_router.tenants import Account

logger = logging.getLogger("lockstep.router")

_EXPIRE_EVERY_S = 1.0
_CLAIM_TRIES = 8
"""Tries to get an idempotency key whose stream is just ending."""


@dataclass(frozen=True)
class IdempotencyKey:
    """A client's name for a request that it may send several times."""

    scope: str
    """The key, and whose it is."""
    fingerprint: bytes
    """Of the request."""
    field: str
    """The name of the header or field that it came in, for errors."""


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
        store.on_taken(self._lose)

    def begin(self) -> None:
        """Begin to expire what is kept."""
        self._expiring = asyncio.create_task(self._expire())

    async def stop(self) -> None:
        """End all runs."""
        if self._expiring is not None:
            self._expiring.cancel()
        self.end()
        await asyncio.gather(*(run.ended.wait() for run in list(self._runs.values())))

    def drain(self) -> None:
        """End the runs without a client, now and from now on."""
        self._cancel_all(lambda run: not run.readers)

    def end(self) -> None:
        """End all runs: the time of the drain is over. Their readers get the error."""
        self._cancel_all(lambda _: True)

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
        on_stream: Callable[[str], None] = lambda _: None,
    ) -> Reading:
        """Start a generation, or join the one that the key has; read it. The caller closes the reading.

        Args:
            request: the request.
            account: of its tenant.
            style: the form of the answer, for those who resume it.
            owner: names who may resume it.
            key: its idempotency key.
            after: the last event that the client has, if it sends the request with this key again.
            on_stream: called with the stream's id as soon as there is a stream, long before there is something to read.

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
                    on_stream(run.request_id)
                    run.task = asyncio.create_task(self._drive(run, request, account, style))
            finally:
                if run.task is None:
                    await self._finish(run, Outcome(gone()))
            if first is None:
                del request
                return await self._read(run, arrival, None, is_resumed=False)
            if (reading := await self._join(first, owner, account, after, on_stream)) is not None:
                return reading
        raise LockstepError(ErrorCode.UNAVAILABLE, "the request's first stream is ending", retry_after_s=1)

    async def resume(self, request_id: str, owner: str, account: Account, after: After | None = None) -> Reading:
        """Read a stream that an earlier request started, here or on another router. The caller closes the reading.

        Args:
            request_id: the stream.
            owner: names whose it has to be.
            account: of the tenant, for a stream that goes on here.
            after: the last event that the client has.

        Raises:
            LockstepError: STREAM_NOT_FOUND, there is none of this owner; INVALID_REQUEST, `after` is not one of its
                events; OVERLOADED; UNAVAILABLE, the tokenizer is not here, or the other routers' streams are not known
                now; as from `Router.run` for a stream that goes on here.
        """
        try:
            reading = await self._resume(request_id, owner, account, after)
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
            if run.is_taken and run.record is None:  # the other router has it still
                await self._store.discard(request_id, owner)
            return
        stored = await self._store.read(request_id)
        if stored is not None and stored.record.owner == owner:
            await self._store.remove(request_id)
        elif not await self._store.discard(request_id, owner):
            raise not_found()

    async def cancel_key(self, scope: str, owner: str) -> str:
        """End the stream that has an idempotency key, and forget it; its id. Keys of other owners are never looked up.

        Raises:
            LockstepError: STREAM_NOT_FOUND, none has the key.
        """
        claim = await self._store.find(scope)
        if claim is None:
            raise not_found()
        await self.cancel(claim.request_id, owner)
        return claim.request_id

    # Readings.

    async def _resume(self, request_id: str, owner: str, account: Account, after: After | None) -> Reading:
        if after is not None and after.request_id != request_id:
            raise no_position(after.field)
        run = self._runs.get(request_id)
        if run is not None and run.owner == owner:
            if run.end is None:
                return await self._read(run, self._attach(run), after, is_resumed=True)
            await run.ended.wait()
        stored = await self._store.read(request_id)
        if stored is None or stored.record.owner != owner:
            return await self._resume_elsewhere(request_id, owner, account, after)
        return await self._replay(stored, after)

    async def _resume_elsewhere(self, request_id: str, owner: str, account: Account, after: After | None) -> Reading:
        """Read a stream that this router does not have; if it runs, it goes on here."""
        stored = await self._store.look_up(request_id, owner)
        if stored is None:
            metrics.TAKEOVERS.labels("not_found").inc()
            raise not_found()
        if stored.outcome is not None:
            metrics.TAKEOVERS.labels("finished").inc()
            return await self._replay(stored, after)
        run = self._runs.get(request_id)
        if run is None or run.end is not None:
            self._host.tokenizer(stored.record.tokenizer_digest)  # who cannot continue it must not take it
            run = Run(owner, request_id)
            arrival = self._attach(run)
            self._runs[request_id] = run
            run.task = asyncio.create_task(self._continue(run, account))
        else:
            arrival = self._attach(run)
        return await self._read(run, arrival, after, is_resumed=True)

    async def _replay(self, stored: StoredStream, after: After | None) -> Reading:
        """Read a stream that has ended."""
        if stored.outcome is None:
            raise not_found()
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
                raise run.outcome.failure or gone()
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
            may_be_ahead=run.is_taken,
        )
        return await _begin(reading, after)

    def _attach(self, run: Run) -> asyncio.Event:
        self._count_reading()
        arrival = asyncio.Event()
        run.readers[arrival] = None
        if run.timer is not None:
            run.timer.cancel()
            run.timer = None
        self._detached.discard(run)
        self._measure()
        return arrival

    def _detach(self, run: Run, arrival: asyncio.Event) -> None:
        run.readers.pop(arrival, None)
        self._discount_reading()
        if not run.readers and not run.is_ending:
            self._detached.add(run)
            if run.record is None:
                run.cancel(gone())  # nobody knows its id
            elif self._host.draining:
                run.cancel(draining())
            else:
                run.timer = asyncio.get_running_loop().call_later(self._settings.resume_window_s, run.cancel, gone())
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
            raise not_found()
        if known is not None and known.fingerprint != key.fingerprint:
            sentence = f"{key.field} was used for a request with another body"
            raise LockstepError(ErrorCode.IDEMPOTENCY_KEY_REUSED, sentence, field=key.field)
        return known

    async def _join(
        self, claim: Claim, owner: str, account: Account, after: After | None, on_stream: Callable[[str], None]
    ) -> Reading | None:
        """Read the stream that has a key; None if it has just ended, and the key is free."""
        run = self._runs.get(claim.request_id)
        if run is not None and run.end is not None:
            await run.ended.wait()
            return None
        if run is not None and run.owner == owner:
            on_stream(run.request_id)
        try:
            reading = await self._resume(claim.request_id, owner, account, after)
        except LockstepError as error:
            if error.code is not ErrorCode.STREAM_NOT_FOUND:
                raise
            await self._store.release(claim.request_id)
            return None
        metrics.IDEMPOTENT_JOINS.inc()
        return reading

    # Generation.

    async def _drive(self, run: Run, request: GenerationRequest, account: Account, style: Style) -> None:
        async def generate() -> None:
            nonlocal request
            prepared = await self._host.prepare(request, account)
            deadline_s = request.caller.timeout_s
            session = request.caller.session
            del request
            record = record_of(run, prepared, style, session, deadline_s)
            await self._store.open(record)
            await self._generate(run, record, prepared, account, [ChoiceLog() for _ in record.choices])

        await self._end_with(run, account, generate)

    async def _continue(self, run: Run, account: Account) -> None:
        """Go on with a stream that another router began."""

        async def generate() -> None:
            stored = await self._store.take(run.request_id, run.owner)
            if stored is None:
                raise not_found()
            tokenizer = self._host.tokenizer(stored.record.tokenizer_digest)
            if stored.outcome is not None:
                run.record, run.tokenizer, run.logs = stored.record, tokenizer, list(stored.logs)
                if stored.outcome.failure is not None:
                    raise stored.outcome.failure
                return
            prepared = continued(stored, tokenizer, account.tenant.priority)
            await self._generate(run, stored.record, prepared, account, list(stored.logs))

        await self._end_with(run, account, generate)
        if run.record is None:
            metrics.TAKEOVERS.labels("refused").inc()

    async def _generate(
        self, run: Run, record: Record, prepared: Prepared, account: Account, logs: list[ChoiceLog]
    ) -> None:
        run.logs = logs
        async with self._host.run(prepared, account, observe=partial(self._note, run, prepared)) as generation:
            run.record, run.tokenizer = record, prepared.tokenizer
            run.prepared.set()
            if run.is_taken:
                metrics.TAKEOVERS.labels("continued").inc()
                logger.info("stream of another router continued", extra={"stream": run.request_id})
            async for _ in generation.deltas():
                pass

    async def _end_with(self, run: Run, account: Account, generate: Callable[[], Awaitable[None]]) -> None:
        run.has_begun = True
        outcome = Outcome()
        try:
            if run.end is not None:
                raise run.end
            with self._host.admitted(account):
                await generate()
        except LockstepError as error:
            outcome = Outcome(error)
        except asyncio.CancelledError:
            outcome = Outcome(run.end or gone())
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
        numerics = prepared.journals[choice.index].fingerprint or ""
        piece = Piece(
            choice.index, len(log.ids), ids, logprobs, finish, choice.cached_tokens or 0, is_inexact, numerics
        )
        log.add(piece)
        self._store.append(run.request_id, piece)
        run.wake()

    async def _finish(self, run: Run, outcome: Outcome) -> None:
        """Keep what a run gave, or forget it, and tell its readers."""
        run.is_ending = True
        try:
            may_go_on = run.end is not None and run.end.code is ErrorCode.DRAINING
            if may_go_on or (run.is_taken and run.record is None):
                await self._store.leave(run.request_id)
            elif run.record is None or run.end is not None:
                await self._store.remove(run.request_id)
            else:
                if outcome.failure is not None:
                    # A repeated request tries again; the failed stream can still be resumed.
                    await self._store.release(run.request_id)
                await self._store.seal(run.request_id, outcome, self._settings.resume_window_s)
        except (
            Exception,
            asyncio.CancelledError,
        ):  # the run itself may have ended by being cancelled; who waits must know
            logger.exception("the journal of a resumable stream was not closed")
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]
        self._detached.discard(run)
        run.outcome = outcome
        if run.timer is not None:
            run.timer.cancel()
        run.prepared.set()
        run.ended.set()
        run.wake()
        self._measure()

    def _lose(self, request_id: str) -> None:
        """End a run that another router has taken over."""
        run = self._runs.get(request_id)
        if run is not None:
            run.cancel(moved())

    def _cancel_all(self, is_meant: Callable[[Run], bool]) -> None:
        for run in list(self._runs.values()):
            if is_meant(run):
                run.cancel(draining())

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
