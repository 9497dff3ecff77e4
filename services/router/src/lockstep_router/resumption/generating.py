"""The generation of a resumable request, from its preparation to its end. It writes the journal and knows no reader."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.generation.choices import Choice, Delta
from lockstep_router.generation.preparation import BYTES_OF_AN_ID, Prepared
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.journals import (
    ChoiceLog,
    JournalStore,
    Outcome,
    Piece,
    RequestRecord,
    StoreAwayError,
    StoredStream,
)
from lockstep_router.resumption.continuation import begun_again, continued, unproven
from lockstep_router.resumption.endings import gone, not_found
from lockstep_router.resumption.position import Position
from lockstep_router.resumption.run import Host, Run, record_of
from lockstep_router.tenants import Account

logger = logging.getLogger("lockstep.router")


def count_refused_takeover(error: LockstepError | None) -> None:
    """A stream of another router was asked for here, and is not given."""
    metrics.TAKEOVERS.labels("away" if isinstance(error, StoreAwayError) else "refused").inc()


class Generating:
    """Generates what runs are for.

    Args:
        host: the router.
        store: keeps the journals.
        on_end: called with each run that has ended, after its journal was closed and before its readers learn it.
    """

    def __init__(self, host: Host, store: JournalStore, on_end: Callable[[Run], None]) -> None:
        self._host = host
        self._store = store
        self._on_end = on_end
        self._settings = host.settings

    async def drive(self, run: Run, request: GenerationRequest, account: Account, style: Style) -> None:
        """Generate the answer of a request."""

        async def generate() -> None:
            nonlocal request
            timeout_s = request.caller.timeout_s
            # From the arrival on: to be prepared, a request may wait for its model's first worker.
            deadline_at = None if timeout_s is None else time.time() + timeout_s
            prepared = await self._host.prepare(request, account)
            for journal in prepared.journals:
                journal.run_id = run.request_id
            session = request.caller.session
            del request
            record = record_of(run, prepared, style, session, deadline_at)
            await self._store.open(record)
            run.is_kept = True
            await self._generate(run, record, prepared, account, [ChoiceLog() for _ in record.choices])

        await self._end_with(run, account, generate)

    async def go_on(self, run: Run, account: Account, known: StoredStream) -> None:
        """Go on with a stream that another router began, or that has failed here, as it is known."""

        async def generate() -> None:
            record = known.record
            tokenizer = self._host.tokenizer(record.tokenizer_digest)
            prompt_bytes = BYTES_OF_AN_ID * record.prompt_tokens + sum(map(len, record.prefixes))
            # What has failed here is in the store already.
            kept_bytes = 0 if known.outcome is not None else known.size_bytes
            # Room first: a stream that is taken has ended where it ran.
            with self._host.reserved(len(record.choices), prompt_bytes + kept_bytes, account):
                stored = await self._store.take(known)
            if stored is None:
                raise not_found()
            run.is_kept = True
            if known.outcome is not None and known.outcome.may_go_on:
                run.failed = known.outcome
            if stored.outcome is not None:
                run.record, run.tokenizer, run.logs = stored.record, tokenizer, list(stored.logs)
                run.unproven = begun_again(stored)
                if stored.outcome.failure is not None:
                    raise stored.outcome.failure.copied()
                return
            run.unproven = unproven(stored, self._host)
            for index in run.unproven:
                stored.logs[index].is_unproven = True  # its tokens take this to the store, and to other routers
            prepared = continued(stored, tokenizer, account.tenant.priority)
            await self._generate(run, stored.record, prepared, account, list(stored.logs))

        await self._end_with(run, account, generate)
        if run.record is None:
            count_refused_takeover(None if run.outcome is None else run.outcome.failure)

    async def _generate(
        self, run: Run, record: RequestRecord, prepared: Prepared, account: Account, logs: list[ChoiceLog]
    ) -> None:
        run.logs = logs
        async with self._host.run(prepared, account, observe=partial(self._note, run, prepared)) as generation:
            run.record, run.tokenizer, run.generation = record, prepared.tokenizer, generation
            run.trace = prepared.journals[0].trace
            run.prepared.set()
            if run.is_taken:
                metrics.TAKEOVERS.labels("continued").inc()
                logger.info("stream of an earlier run continued", extra={"request_id": run.request_id})
            try:
                async for _ in generation.deltas():
                    pass
            finally:
                run.end_generation()

    async def _end_with(self, run: Run, account: Account, generate: Callable[[], Awaitable[None]]) -> None:
        run.has_begun = True
        outcome = Outcome()
        try:
            if run.end is not None:
                raise run.end.copied()
            with self._host.admitted(account):
                await generate()
        except LockstepError as error:
            outcome = Outcome(error)
        except asyncio.CancelledError:
            outcome = Outcome(run.end or gone())
        except Exception:
            logger.exception("resumable stream failed", extra={"request_id": run.request_id})
            outcome = Outcome(LockstepError(ErrorCode.INTERNAL, "something went wrong in the router"))
        await self.finish(run, outcome)

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
            choice.index,
            len(log.ids),
            ids,
            logprobs,
            finish,
            choice.cached_tokens or 0,
            is_inexact,
            numerics,
            log.is_unproven,
        )
        log.add(piece)
        self._store.append(run.request_id, piece)
        run.wake()

    def note_reader(self, run: Run, position: Position) -> None:
        """Mark the choices of which a client has tokens with unknown numerics: what follows may not fit them."""
        for index in [each for each in run.unproven if position.tokens[each] > 0]:
            run.unproven -= {index}
            mark = Piece(index, len(run.logs[index].ids), (), is_inexact=True)
            run.logs[index].add(mark)
            self._store.append(run.request_id, mark)
            metrics.INEXACT_CONTINUATIONS.inc()
            logger.warning("stream continued inexactly: its copy had no token", extra={"request_id": run.request_id})

    async def finish(self, run: Run, outcome: Outcome) -> None:
        """Keep what a run gave, or forget it, and wake its readers."""
        run.is_ending = True
        try:
            may_go_on = run.end is not None and run.end.code is ErrorCode.DRAINING
            if run.is_taken and not run.is_kept:
                pass  # it was not taken, and is where it was
            elif run.failed is not None and run.record is None and not may_go_on:
                # It has not gone on: its client may have left before that.
                await self._store.seal(run.request_id, run.failed, self._settings.resume_window_s)
            elif may_go_on or (run.is_taken and run.record is None):
                await self._store.leave(run.request_id)
            elif run.record is None or run.end is not None:
                await self._store.remove(run.request_id)
            else:
                if outcome.failure is not None:
                    # A repeated request begins again; the failed stream can still be resumed.
                    await self._store.release(run.request_id)
                await self._store.seal(run.request_id, outcome, self._settings.resume_window_s)
        except (
            Exception,
            asyncio.CancelledError,
        ):  # the run itself may have ended by being cancelled; its waiters must know
            logger.exception("the journal of a resumable stream was not closed", extra={"request_id": run.request_id})
        run.outcome = outcome
        self._on_end(run)
        if run.timer is not None:
            run.timer.cancel()
        run.prepared.set()
        run.ended.set()
        run.wake()
