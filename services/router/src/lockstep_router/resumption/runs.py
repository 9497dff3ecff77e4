"""Runs the generations of resumable requests, each in a task of its own, and lets clients read them.

A generation goes on for `resume_window_s` after its last client has left. Then the store keeps what it gave for as
long. The client's connection has no part in it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.journals import ChoiceLog, Claim, JournalStore, Outcome, StoredStream
from lockstep_router.resumption.continuation import begun_again, is_exact, unproven
from lockstep_router.resumption.endings import cancelled, draining, gone, moved, not_found
from lockstep_router.resumption.generating import Generating, count_refused_takeover
from lockstep_router.resumption.position import After, Position, no_position
from lockstep_router.resumption.reading import Reading, Source, check_position, position_of
from lockstep_router.resumption.readings import Readings
from lockstep_router.resumption.run import Host, Run
from lockstep_router.tenants import Account
from lockstep_router.traces import join_stream, name_stream

for _outcome in ("running", "finished", "not_found", "invalid", "refused"):
    metrics.RESUMES.labels(_outcome)  # from 0
for _outcome in ("continued", "finished", "not_found", "away", "refused"):
    metrics.TAKEOVERS.labels(_outcome)
_EXPIRE_EVERY_S = 1.0
OnStream = Callable[[str, bool], None]
"""Gets a stream's id, and whether another request began it."""
OnRun = Callable[[Style], None]
"""Gets the form of a running stream's answer."""
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
        self._generating = Generating(host, store, self._note_end)
        self._settings = host.settings
        self._runs: dict[str, Run] = {}
        self._detached: set[Run] = set()
        self._expiring: asyncio.Task[None] | None = None
        self._readings = Readings(host.settings.max_streams, on_readings)
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
    def readings(self) -> int:
        """Clients that read a stream now."""
        return self._readings.count

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
        on_stream: OnStream = lambda *_: None,
        is_told: Callable[[], bool] = lambda: False,
    ) -> Reading:
        """Start a generation, or join the one that the key has; read it. The caller closes the reading.

        Args:
            request: the request.
            account: of its tenant.
            style: the form of the answer, for those who resume it.
            owner: names who may resume it.
            key: its idempotency key.
            after: the last event that the client has, if it sends the request with this key again.
            on_stream: called with the stream's id, and whether another request began it, as soon as there is a stream,
                long before there is something to read.
            is_told: whether the client has the stream's id by now.

        Raises:
            LockstepError: as from `Router.prepare` and `Router.run`; IDEMPOTENCY_KEY_REUSED; INVALID_REQUEST or
                STREAM_NOT_FOUND for `after`; OVERLOADED.
        """
        for _ in range(_CLAIM_TRIES):
            run = Run(owner, style, is_known=is_told)
            self._runs[run.request_id] = run  # before the claim: who finds that finds the run
            first: Claim | None = None
            try:
                if key is not None:
                    first = await self._claim(run, key, after)
                if first is None:
                    arrival = self._attach(run, account, is_own=True)
                    on_stream(run.request_id, False)
                    run.task = asyncio.create_task(self._generating.drive(run, request, account, style))
            finally:
                if run.task is None:
                    await self._generating.finish(run, Outcome(gone()))
            if first is None:
                del request
                return await self._read(run, arrival, None, is_resumed=False)
            if (reading := await self._join(first, owner, account, after, on_stream)) is not None:
                return reading
        raise LockstepError(ErrorCode.UNAVAILABLE, "the request's first stream is ending", retry_after_s=1)

    async def resume(
        self,
        request_id: str,
        owner: str,
        account: Account,
        after: After | None = None,
        on_run: OnRun = lambda _: None,
    ) -> Reading:
        """Read a stream that an earlier request started, here or on another router. The caller closes the reading.

        Args:
            request_id: the stream.
            owner: names whose it has to be.
            account: of the tenant, for a stream that goes on here.
            after: the last event that the client has.
            on_run: called with the form of the answer if the stream runs, long before there is something to read.

        Raises:
            LockstepError: STREAM_NOT_FOUND, there is none of this owner; INVALID_REQUEST, `after` is not one of its
                events; OVERLOADED; UNAVAILABLE, the tokenizer is not here, or the other routers' streams are not known
                now; as from `Router.run` for a stream that goes on here.
        """
        try:
            run = self._runs.get(request_id)
            if run is not None and run.owner == owner and run.end is None:
                on_run(run.style)
                if not run.is_taken:  # one that is taken stays where it was
                    run.is_known = lambda: True
            reading = await self._resume(request_id, owner, account, after)
        except LockstepError as error:
            outcome = {ErrorCode.STREAM_NOT_FOUND: "not_found", ErrorCode.INVALID_REQUEST: "invalid"}
            metrics.RESUMES.labels(outcome.get(error.code, "refused")).inc()
            raise
        metrics.RESUMES.labels("running" if request_id in self._runs else "finished").inc()
        return reading

    async def cancel(self, request_id: str, owner: str) -> None:
        """End a stream, if it runs, and forget it. Other routers know that then, as far as they can be told soon.

        Raises:
            LockstepError: STREAM_NOT_FOUND, there is none of this owner; UNAVAILABLE, another router has it and
                cannot be told.
        """
        await self._remove(request_id, owner)
        await self._store.settle(request_id)

    async def _remove(self, request_id: str, owner: str) -> None:
        run = self._runs.get(request_id)
        if run is not None and run.owner == owner and run.end is None:
            is_lost = run.is_kept and await self._store.read(request_id) is None
            run.cancel(cancelled())
            await run.ended.wait()
            await self._store.remove(request_id)
            if is_lost or (run.is_taken and run.record is None):  # another router has it
                await self._store.discard(request_id, owner)
            return
        if run is not None and run.owner == owner and run.has_left_nothing:
            await run.ended.wait()
            raise not_found()
        stored = await self._store.read(request_id)
        if stored is not None and stored.record.owner == owner:
            await self._store.remove(request_id)
        elif not await self._store.discard(request_id, owner):
            raise not_found()
        run = self._runs.get(request_id)
        if run is not None and run.owner == owner:  # another client had it continued here in the meantime
            run.cancel(cancelled())
            await run.ended.wait()
            await self._store.remove(request_id)

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
                arrival = self._attach(run, account, is_own=not run.readers)
                return await self._read(run, arrival, after, is_resumed=True)
            await run.ended.wait()
        stored = await self._store.read(request_id)
        if stored is None or stored.record.owner != owner:
            return await self._resume_elsewhere(request_id, owner, account, after)
        if stored.outcome is not None and stored.outcome.may_go_on:
            return await self._go_on(stored, account, after)
        return await self._replay(stored, account, after)

    async def _resume_elsewhere(self, request_id: str, owner: str, account: Account, after: After | None) -> Reading:
        """Read a stream that this router does not have; if it runs, it goes on here."""
        try:
            stored = await self._store.look_up(request_id, owner)
        except LockstepError as error:
            count_refused_takeover(error)
            raise
        if stored is None:
            metrics.TAKEOVERS.labels("away" if self._store.is_away else "not_found").inc()
            raise not_found()
        if stored.outcome is not None:
            metrics.TAKEOVERS.labels("finished").inc()
            return await self._replay(stored, account, after)
        return await self._go_on(stored, account, after)

    async def _go_on(self, stored: StoredStream, account: Account, after: After | None) -> Reading:
        """Continue a stream of another router, or one that has failed, and read it."""
        request_id, owner = stored.record.request_id, stored.record.owner
        run = self._runs.get(request_id)
        if run is not None and run.end is not None:
            await run.ended.wait()  # it would close the journal of the next one
            return await self._resume(request_id, owner, account, after)
        if run is None:
            # Who cannot continue it, or give it from there, must not take it: that ends it where it runs.
            self._host.tokenizer(stored.record.tokenizer_digest)
            if after is not None:
                position = check_position(after, stored)
                if self._settings.exact_failover == "strict" and not is_exact(unproven(stored, self._host), position):
                    raise not_found()
            join_stream(stored.record.traceparent)  # first: the call that takes it is a part of its trace
            run = Run(owner, stored.record.style, request_id)
            arrival = self._attach(run, account, is_own=True)
            self._runs[request_id] = run
            run.task = asyncio.create_task(self._generating.go_on(run, account, stored))
        else:
            arrival = self._attach(run, account, is_own=not run.readers)
        return await self._read(run, arrival, after, is_resumed=True)

    async def _replay(self, stored: StoredStream, account: Account, after: After | None) -> Reading:
        """Read a stream that has ended."""
        if stored.outcome is None:
            raise not_found()
        tokenizer = self._host.tokenizer(stored.record.tokenizer_digest)
        if after is not None:
            stored = self._as_seen_from(position_of(after, stored.record), stored)
        arrival, record = asyncio.Event(), stored.record
        name_stream(record.request_id)
        join_stream(record.traceparent)
        self._readings.add(arrival, record.request_id, record.owner, account, is_own=False)
        return await _begin(
            Reading(
                record,
                stored,
                tokenizer,
                arrival=arrival,
                on_close=partial(self._readings.remove, arrival),
                is_resumed=True,
            ),
            after,
        )

    def _as_seen_from(self, position: Position, stored: StoredStream) -> StoredStream:
        """A stream that has ended, as a client gets it that has so much of it, from this or an earlier run: with the
        mark, as `_read` does it while the stream runs.

        Raises:
            LockstepError: STREAM_NOT_FOUND, it may not get a rest that may not fit what it has.
        """
        again = begun_again(stored)
        if is_exact(again, position):
            return stored
        if self._settings.exact_failover == "strict":
            raise not_found()
        logs = [
            replace(log, is_inexact=log.is_inexact or (index in again and position.tokens[index] > 0))
            for index, log in enumerate(stored.logs)
        ]
        return replace(stored, logs=logs)

    async def _read(self, run: Run, arrival: asyncio.Event, after: After | None, *, is_resumed: bool) -> Reading:
        """Read a run to which the reader is attached already."""
        try:
            await run.prepared.wait()
            if run.record is None or run.tokenizer is None:
                outcome = run.outcome_for(arrival)
                assert outcome is not None
                raise outcome.error() or gone()
        except BaseException:
            self._detach(run, arrival)
            raise
        if is_resumed:
            join_stream(run.record.traceparent, run.trace)
        source: Source = _Followed(run, arrival)
        reading = Reading(
            run.record,
            source,
            run.tokenizer,
            arrival=arrival,
            on_close=partial(self._detach, run, arrival),
            is_resumed=is_resumed,
            may_be_ahead=run.is_taken,
            count_failovers=lambda: run.failovers,
        )
        reading = await _begin(reading, after)
        if not is_exact(run.unproven, reading.position):
            if self._settings.exact_failover == "strict":
                reading.close()
                raise not_found()
            self._generating.note_reader(run, reading.position)
        return reading

    def _attach(self, run: Run, account: Account, *, is_own: bool) -> asyncio.Event:
        arrival = asyncio.Event()
        name_stream(run.request_id)
        self._readings.add(arrival, run.request_id, run.owner, account, is_own=is_own)
        run.readers[arrival] = asyncio.get_running_loop().time()
        if run.timer is not None:
            run.timer.cancel()
            run.timer = None
        self._detached.discard(run)
        self._measure()
        return arrival

    def _detach(self, run: Run, arrival: asyncio.Event) -> None:
        run.readers.pop(arrival, None)
        self._readings.remove(arrival)
        if not run.readers and not run.is_ending:
            self._detached.add(run)
            if run.record is None and not run.is_known():
                run.cancel(gone())
            elif self._host.draining:
                run.cancel(draining())
            else:
                run.timer = asyncio.get_running_loop().call_later(self._settings.resume_window_s, run.cancel, gone())
        self._measure()

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
        self, claim: Claim, owner: str, account: Account, after: After | None, on_stream: OnStream
    ) -> Reading | None:
        """Read the stream that has a key; None if it has just ended, and the key is free."""
        run = self._runs.get(claim.request_id)
        if run is not None and run.end is not None:
            await run.ended.wait()
            return None
        if run is None or run.owner == owner:
            # Another router may prepare it for seconds, and it may wait here after that.
            on_stream(claim.request_id, True)
        try:
            reading = await self._resume(claim.request_id, owner, account, after)
        except LockstepError as error:
            if error.code is not ErrorCode.STREAM_NOT_FOUND:
                raise
            await self._store.release(claim.request_id)
            return None
        metrics.IDEMPOTENT_JOINS.inc()
        return reading

    # Ends.

    def _note_end(self, run: Run) -> None:
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]
        self._detached.discard(run)
        self._measure()

    def _lose(self, request_id: str, owned_at: float, is_removed: bool) -> None:
        """End a run that another router has taken over, and whose client may have deleted it there."""
        run = self._runs.get(request_id)
        if run is not None:
            run.owned_at = owned_at
            run.cancel(cancelled() if is_removed else moved())

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


@dataclass(frozen=True)
class _Followed:
    """A run as one of its readers sees it."""

    run: Run
    arrival: asyncio.Event

    @property
    def logs(self) -> Sequence[ChoiceLog]:
        """The choices so far."""
        return self.run.logs

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None: it runs."""
        return self.run.outcome_for(self.arrival)


async def _begin(reading: Reading, after: After | None) -> Reading:
    """Go to the position; the reading is closed if there is no such position."""
    try:
        if after is not None:
            await reading.skip(after)
    except BaseException:
        reading.close()
        raise
    return reading
