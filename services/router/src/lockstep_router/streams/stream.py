"""Runs one stream on a worker, and on the next one if that worker is lost, until the stream has all its tokens."""

import asyncio
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.seniority import turn_at

from lockstep_router import metrics
from lockstep_router.lanes import Lane
from lockstep_router.policies import RequestFacts
from lockstep_router.settings import RouterSettings
from lockstep_router.streams.attempt import Attempt, Finished, Outcome, WaitedTooLong
from lockstep_router.streams.journal import Journal
from lockstep_router.streams.timeline import timeline_of
from lockstep_router.streams.trace import trace_of
from lockstep_router.workers import Link, Workers
from lockstep_router.workers.health.health import PROOF_TOKENS
from lockstep_router.workers.losses import Loss, Lost
from lockstep_router.workers.retry_budget import Turn
from lockstep_router.workers.suspects import Life

logger = logging.getLogger("lockstep.router")
for _reason in Loss:
    metrics.FAILOVERS.labels(_reason.value)  # from 0
for _outcome in (
    "finished",
    "cancelled",
    ErrorCode.INVALID_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.RESOURCE_EXHAUSTED,
    ErrorCode.OVERLOADED,
    ErrorCode.UNAVAILABLE,
    ErrorCode.WORKER_LOST,
    ErrorCode.REQUEST_QUARANTINED,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.INTERNAL,
):
    metrics.STREAMS_ENDED.labels(_outcome)  # from 0

_RESET_TOKENS = 32
"""Tokens of one attempt after which earlier failures no longer count."""

_JITTER = 0.5
"""Back-offs are longer by a random share up to this one, so that streams refused together do not retry together."""

_EXACT_PATIENCE_S = 2.0
"""A stream waits this long for a worker with equal numerics that it has just left before another one continues it."""

_MAX_TRIAL_PAUSE_S = 1.0
"""Longest random pause before a trial if streams of other routers may be the cause of the deaths."""


_IN_QUEUE = "it waited for its turn on worker"
_RUNNING = "it ran on worker"
_PREEMPTED = "it waited for its next turn on worker"
"""What a stream does on a worker, for errors; its worker's id follows."""


def _as_told(failure: Exception | None) -> LockstepError | None:
    """What a stream reports of its failure: a defect is an error of the router, and says no more."""
    if failure is None or isinstance(failure, LockstepError):
        return failure
    return LockstepError(ErrorCode.INTERNAL, "something went wrong in the router")


def _let_wait(_: worker_pb2.StreamTokens) -> bool:
    return False


@dataclass(frozen=True)
class _Wait:
    """Why there is no worker for the stream now."""

    reason: str
    """What is waited for; completes the message `waited 3 s for …`."""
    recheck_s: float = math.inf
    """Seconds until the reason may have ended without a change of any worker."""


class Stream:
    """One stream of tokens, independent of the worker that it runs on.

    `run` drives it as a task; cancelling that task cancels the stream on its worker. `take` returns the updates that
    have arrived.

    Args:
        journal: the stream's journal.
        workers: those that may run it.
        settings: of the router.
        on_arrival: called whenever there are more updates to take.
        on_update: called with each update while none waits; True: it is taken, and does not wait. It must not raise.
    """

    # State that most streams never change. Setting all of it for each one would take longer than what it is for.

    failovers = 0
    is_complete = False
    """Whether all that is wanted of it has arrived, such as a stop string: a cancellation of `run` is its good end."""
    failure: Exception | None = None
    """Why its tokens cannot be used, in which case a cancellation of `run` is a failure and not its client's."""
    unread_tokens = 0
    """Tokens that have arrived since the last `take`."""
    _caught_up: asyncio.Event | None = None
    """Is set by `take`, while `run` waits for it."""
    _attempt: Attempt | None = None
    _fingerprint = ""  # numerics of the current attempt's worker
    _life: Life = ("", 0, 0)  # life of the current attempt's worker
    _link: Link | None = None  # the current attempt's worker
    _is_proved = False  # the current attempt has made progress
    _blamed: tuple[Link, ...] = ()  # workers that have lost the stream, if it makes progress on another one
    _avoided: Mapping[Life, float] = MappingProxyType({})  # until when, in the awake clock's time
    _was_taken = False  # a worker has accepted the stream into its queue
    _failures = 0  # in a row
    _refused_by: frozenset[Life] = frozenset()  # workers that have refused the stream since it last ran
    _has_failed = False  # the last attempt failed, so the next one is a retry
    _is_delayed = False  # by the retry budget
    _trial_at = 0.0  # event loop's time; the stream's next trial does not begin earlier
    _last_lost: Lost | None = None
    _activity = "it waited for a worker"
    _started_at: float | None = None
    _token_at: float | None = None
    _gap_from: float | None = None

    def __init__(
        self,
        journal: Journal,
        workers: Workers,
        settings: RouterSettings,
        on_arrival: Callable[[], None],
        on_update: Callable[[worker_pb2.StreamTokens], bool] | None = None,
    ) -> None:
        self.journal = journal
        self._workers = workers
        self._suspects = workers.suspects
        self._facts = RequestFacts(journal.session, journal.stream_id, journal.tenant, journal.prompt_ids)
        self._settings = settings
        self._on_arrival = on_arrival
        self._on_update = on_update or _let_wait
        self._arrived: deque[worker_pb2.StreamTokens] = deque()
        self._loop = workers.loop
        self._arrived_at = self._loop.time() if journal.arrived_at is None else journal.arrived_at
        self._trace = timeline_of(journal, workers.history, trace_of(journal), self._arrived_at, self._loop.time)
        self._deadline_at = None if journal.timeout_s is None else self._arrived_at + journal.timeout_s
        self._stalled_at = self._arrived_at  # when the stream last began to wait

    def take(self) -> list[worker_pb2.StreamTokens]:
        """The updates that have arrived since the last call, in order."""
        taken = list(self._arrived)
        self._arrived.clear()
        self.unread_tokens = 0
        if self._caught_up is not None:
            self._caught_up.set()
        return taken

    def open_lane(self, lane: Lane) -> None:
        """Let a lane take the next tokens, unless they need more than that."""
        attempt, link, journal = self._attempt, self._link, self.journal
        if attempt is None or link is None or self._token_at is None or attempt.is_over or not attempt.is_running:
            return
        if self._arrived or journal.logprobs_per_token or not self._suspects.is_clear(journal.stream_id):
            return
        end = journal.max_tokens - 1  # the last token ends the stream
        if not self._is_proved:
            end = min(end, len(journal.emitted_ids) - attempt.tokens + PROOF_TOKENS - 1)
        attempt.lane = lane
        lane.open(link.lanes, attempt.handle, end, self._token_at, self._trace.kept_id)

    def note_pushed(self, at: float) -> None:
        """Note when a lane has sent the stream's last token."""
        self._token_at = at

    async def run(self) -> None:
        """Drive the stream to its end.

        Raises:
            LockstepError: the stream cannot continue. The tokens delivered so far are correct.
        """
        self._workers.retries.deposit()
        self._trace.begin()
        outcome, failure = "finished", None
        try:
            await self._run_in_time()
        except asyncio.CancelledError:
            if self.is_complete:
                self._trace.leave(self._finish)
            else:
                outcome, failure = "cancelled", self.failure
            raise
        except Exception as error:
            failure = error
            raise
        finally:
            failure = _as_told(failure)
            metrics.STREAMS_ENDED.labels(outcome if failure is None else failure.code).inc()
            self._suspects.forget(self.journal.stream_id)
            self._leave_line()
            self._trace.end(failure or sys.exception())
            # Both refer to this object in turn: only the garbage collector would free it.
            self._attempt, self._on_update = None, _let_wait

    @property
    def _finish(self) -> Finished:
        """How it ended that is complete: as its worker says, if it has ended it too, else by what it has generated."""
        over = None if self._attempt is None else self._attempt.over
        if over is not None and over.done() and not over.cancelled():
            outcome = over.result()
            if isinstance(outcome, Finished):
                return outcome
        return Finished(inference_pb2.FINISH_REASON_STOP)

    async def _run_in_time(self) -> None:
        if self._deadline_at is None:
            await self._run()
            return
        try:
            async with asyncio.timeout_at(self._deadline_at):
                await self._run()
        except TimeoutError:
            raise LockstepError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"the request's timeout of {self.journal.timeout_s:g} s has passed while {self._doing}",
            ) from None

    async def _run(self) -> None:
        while True:
            self._check_quarantine()
            self._trace.seek()
            link = await self._find_worker()
            self._trace.choose(link, self._workers, self._settings)
            outcome = await self._try_on(link)
            self._trace.leave(outcome)
            if isinstance(outcome, Finished):
                return
            if isinstance(outcome, LockstepError):
                if outcome.code in (ErrorCode.INTERNAL, ErrorCode.NUMERICAL_ERROR):
                    self._workers.note_internal(link, self.journal.session)
                raise outcome
            if isinstance(outcome, WaitedTooLong):
                raise self._waited_too_long(
                    f"its turn on worker {link.worker_id!r}, where {link.status.queued} requests wait",
                    link.queue_wait_of(self.journal.priority),
                )
            self._note_loss(outcome)
            if outcome.reason is Loss.SLOW_CLIENT:
                self._activity = "its client read too slowly"
                assert self._caught_up is not None
                await self._caught_up.wait()
                self._stalled_at = self._loop.time()

    def _check_quarantine(self) -> None:
        if self._suspects.has_quarantined(self.journal.request_digest, self._loop.time()):
            raise LockstepError(
                ErrorCode.REQUEST_QUARANTINED,
                "the same request was running when several workers died, so it is refused for some minutes",
            )

    # Attempts.

    async def _try_on(self, link: Link) -> Outcome:
        """Run one attempt to its end."""
        now, journal = self._loop.time(), self.journal
        submit = journal.next_submit(
            link.worker_id,
            arrived_s=self._first_arrived_at - link.greeted_at,
            deadline_s=0.0 if self._deadline_at is None else max(self._deadline_at - now, 0.001),
        )
        self._attempt = attempt = Attempt(
            journal,
            self._loop.create_future(),
            now=self._workers.clock.now(),
            deadlines=self._workers.deadlines,
            first_wait_s=self._give_up_at - now,
            events=self,
        )
        self._life, self._fingerprint = link.life, self._numerics(link)
        self._link, self._is_proved = link, False
        self._activity = _IN_QUEUE
        self._suspects.enter(journal.stream_id, self._life)
        self._workers.note_sent(journal.model, self._facts, link)
        link.start(attempt, submit)
        outcome: Outcome | None = None
        try:
            outcome = await attempt.over
            return outcome
        finally:
            self._suspects.leave(journal.stream_id)
            if isinstance(outcome, Lost):
                self._blame(link, outcome.reason)
            elif outcome is None and self.is_complete and attempt.tokens and not self._is_proved:
                self._prove()  # a stop string or a tool call has ended it early
            unwanted = outcome is None or (isinstance(outcome, Lost) and outcome.reason.needs_cancel)
            link.end(attempt, cancel=unwanted or isinstance(outcome, WaitedTooLong))

    def _numerics(self, link: Link) -> str:
        return self.journal.numerics(link.fingerprint, link.grammar_engine)

    @property
    def _doing(self) -> str:
        """What it does, for errors."""
        is_there = self._activity in (_IN_QUEUE, _RUNNING, _PREEMPTED)
        return f"{self._activity} {self.journal.worker_id!r}" if is_there else self._activity

    def note_start(self) -> None:
        """The worker begins to run the stream."""
        self._activity = _RUNNING
        self._trace.note_start()
        if self._started_at is None:
            self._started_at = self._loop.time()
            if not self.journal.emitted_ids:  # else another router had it, and has counted this
                metrics.WAIT_SECONDS.observe(self._started_at - self._first_arrived_at)

    def note_wait(self) -> None:
        """The worker has preempted the stream."""
        self._activity = _PREEMPTED
        self._stalled_at = self._loop.time()

    def deliver(self, update: worker_pb2.StreamTokens) -> None:
        """Take an update of the attempt that has tokens or a finish reason."""
        attempt, tokens = self._attempt, len(update.ids)
        assert attempt is not None
        received = attempt.tokens
        if tokens:
            self._measure(tokens)
            if received == tokens:
                self._note_first_token(update.cached_tokens)
                self._note_numerics()
            self._suspects.note_progress(self.journal.stream_id, received)
        if not self._is_proved and (received >= PROOF_TOKENS or update.finish):
            self._prove()
        if not self._arrived and self._on_update(update):
            return
        self._arrived.append(update)
        self.unread_tokens += tokens
        # Each log probability takes as much memory as a token, or more.
        unread = self.unread_tokens * (1 + self.journal.logprobs_per_token)
        if unread > self._settings.max_unread_tokens and not update.finish:
            # The client reads more slowly than the worker computes. A pause works like a failover: the attempt stops
            # here, and the next one continues from the journal when the client has caught up.
            self._caught_up = asyncio.Event()
            attempt.lose(Loss.SLOW_CLIENT)
        self._on_arrival()

    def _note_numerics(self) -> None:
        """Note the numerics of an attempt when its first tokens arrive."""
        journal = self.journal
        if journal.fingerprint is None:
            journal.fingerprint = self._fingerprint
        elif not journal.can_continue_exactly(self._fingerprint):
            journal.is_inexact = True
            metrics.INEXACT_CONTINUATIONS.inc()
            logger.warning(
                "stream continued inexactly",
                extra=self._log_fields()
                | {
                    "fingerprint": self._fingerprint,
                    "began_with": journal.fingerprint,
                },
            )

    def _log_fields(self) -> dict[str, str | int]:
        """What each log line says of the stream and of the attempt that it is about, the last one."""
        _, _, epoch = self._life
        return self.journal.log_fields() | {"worker": self.journal.worker_id, "epoch": epoch}

    # Evidence about workers.

    def _note_first_token(self, cached_tokens: int) -> None:
        assert self._attempt is not None
        assert self._link is not None
        self._trace.note_attempt_token()
        journal, now = self.journal, self._workers.clock.now()
        self._link.prefixes.note_first_token(journal.stream_id, cached_tokens)
        computed = len(journal.prompt_ids) + len(journal.emitted_ids) - cached_tokens
        self._link.health.note_first_token(max(computed, 1), now - self._attempt.running_since, now)

    def _prove(self) -> None:
        """Note that stream and worker are well. So workers that lost the stream before were the cause."""
        assert self._link is not None
        self._is_proved = True
        self._workers.note_success(self._link, self.journal.stream_id)
        if self._blamed:
            for link in self._blamed:
                if link is not self._link:
                    self._workers.note_fault(link)
            self._blamed = ()

    def _blame(self, link: Link, reason: Loss) -> None:
        """Note that a worker has lost the stream: its fault only if the stream does better elsewhere."""
        if not reason.is_failure or self._suspects.is_tried(self.journal.stream_id):
            return
        if link.health.breaker.is_probe(self.journal.stream_id):
            self._workers.note_probe_failed(link, f"its probe failed: {reason}")
        elif link not in self._blamed:
            self._blamed += (link,)

    def _measure(self, tokens: int) -> None:
        now = self._loop.time()
        metrics.GENERATED_TOKENS.inc(tokens)
        if self._token_at is None:
            if len(self.journal.emitted_ids) == tokens:  # else another router had it, and has counted this
                waited_s = now - self._first_arrived_at
                self._trace.note_first_token(waited_s)
                metrics.FIRST_TOKEN_SECONDS.observe(waited_s, 1, self._trace.kept_id)
        else:
            metrics.INTER_TOKEN_SECONDS.observe(now - self._token_at, 1, self._trace.kept_id)
        if self._gap_from is not None:
            metrics.FAILOVER_GAP_SECONDS.observe(now - self._gap_from, 1, self._trace.kept_id)
            self._trace.note_gap(now - self._gap_from)
            self._gap_from = None
        self._token_at = now

    # Losses.

    def _note_loss(self, lost: Lost) -> None:
        """Count a loss.

        Raises:
            LockstepError: the stream has failed too often, or is quarantined.
        """
        assert self._attempt is not None
        reason = lost.reason
        self._last_lost = lost
        if self._attempt.is_running:
            self._stalled_at = self._loop.time()
        metrics.FAILOVERS.labels(reason.value).inc()
        if reason is not Loss.SLOW_CLIENT:
            self.failovers += 1
            self._workers.failovers += 1
            self._gap_from = self._gap_from or self._token_at
        logger.info(
            "stream leaves worker",
            extra=self._log_fields() | {"reason": reason.value, "emitted": len(self.journal.emitted_ids)},
        )
        awake_s = self._workers.clock.now()
        back_off_s = (lost.retry_after_s or reason.avoid_s) * self._workers.rng.uniform(1.0, 1.0 + _JITTER)
        avoided = {life: until for life, until in self._avoided.items() if until > awake_s}
        self._avoided = avoided | {self._life: awake_s + back_off_s}
        self._count_loss(reason)
        if self._suspects.is_tried_beside_others(self.journal.stream_id):
            # Another router's stream may be the cause. They show which one it is by not running at the same times.
            self._trial_at = self._loop.time() + self._workers.rng.uniform(0.0, _MAX_TRIAL_PAUSE_S)

    def _count_loss(self, reason: Loss) -> None:
        assert self._attempt is not None
        if self._attempt.tokens >= _RESET_TOKENS:
            self._failures = 0
        if self._attempt.has_run or not reason.is_refusal:
            self._refused_by = frozenset()
            self._was_taken = True
        else:
            self._refused_by |= {self._life}
        self._failures += reason.is_failure
        self._has_failed = reason.is_failure
        if self._suspects.is_guilty(self.journal.stream_id):
            raise self._quarantine()
        if self._failures >= self._settings.max_attempts:
            raise LockstepError(
                ErrorCode.WORKER_LOST,
                f"{self._failures} attempts in a row have failed on workers that live on (the last: {reason})",
                retry_after_s=5,
            )

    def _quarantine(self) -> LockstepError:
        deaths = self._suspects.deaths_alone(self.journal.stream_id)
        metrics.QUARANTINED.inc()
        logger.error(
            "stream quarantined: workers died one after the other while it ran on them",
            extra=self._log_fields() | {"deaths": deaths, "emitted": len(self.journal.emitted_ids)},
        )
        self._suspects.quarantine(self.journal.stream_id, self.journal.request_digest(), self._loop.time())
        return LockstepError(
            ErrorCode.REQUEST_QUARANTINED,
            f"{deaths} workers in a row died while they ran this request apart from other suspect ones",
        )

    # The choice of a worker.

    @property
    def _give_up_at(self) -> float:
        return self._stalled_at + self._settings.max_queue_wait_s

    async def _find_worker(self) -> Link:
        """The worker for the next attempt; waits until there is one."""
        loop = self._loop
        while True:
            choice = self._choose()
            if isinstance(choice, _Wait):
                self._leave_line()  # others need not wait for it
            elif not self._has_budget_for(choice):
                choice = self._wait_for_budget()
            now, give_up_at = loop.time(), self._give_up_at
            if isinstance(choice, Link) and now < give_up_at:
                return choice
            reason = choice.reason if isinstance(choice, _Wait) else "a worker"
            if now >= give_up_at:
                raise self._waited_too_long(reason)
            self._activity = f"it waited for {reason}"
            recheck_s = choice.recheck_s if isinstance(choice, _Wait) else 0.0
            await self._workers.wait_change(min(give_up_at, now + recheck_s + self._workers.clock.tick_s))

    def _choose(self) -> Link | _Wait:
        """The worker for the next attempt, or what the stream has to wait for.

        Raises:
            LockstepError: OVERLOADED, the request is refused without waiting.
        """
        journal = self.journal
        links = self._workers.ready(journal.model, journal.digest, grammars=journal.has_grammar)
        if not links:
            self._workers.note_no_worker(journal.model)
            what = " that takes grammars" if journal.has_grammar else ""
            return _Wait(f"a worker of {journal.model!r}{what} ({self._workers.describe_links()})")
        exact = links
        if journal.fingerprint is not None:
            exact = [link for link in links if journal.can_continue_exactly(self._numerics(link))]
        if not exact and self._settings.exact_failover == "strict":
            known = f"the numerics fingerprint {journal.fingerprint!r}" if journal.fingerprint else "known numerics"
            return _Wait(f"a worker of {journal.model!r} with {known} (exact_failover is strict)")
        if self._settings.exact_failover == "strict":
            return self._choose_of(exact)
        if exact and len(exact) < len(links):
            choice = self._choose_of(exact)
            if isinstance(choice, Link) or choice.recheck_s < _EXACT_PATIENCE_S:
                return choice
        return self._choose_of(links)

    def _choose_of(self, links: list[Link]) -> Link | _Wait:
        journal, suspects = self.journal, self._suspects
        if not self._avoided and suspects.is_empty:  # most streams
            return self._workers.pick(journal.model, self._facts, self._within_patience(links))
        awake_s = self._workers.clock.now()
        free = [link for link in links if self._avoided.get(link.life, 0.0) <= awake_s]
        if not free:
            self._check_refused()
            return _Wait(
                f"a worker of {journal.model!r} that takes it back",
                min(self._avoided[link.life] for link in links) - awake_s,
            )
        pause_s = self._trial_at - self._loop.time()
        if pause_s > 0:
            return _Wait("its turn to run apart from other suspects of the death of workers", pause_s)
        is_on_trial = suspects.is_tried(journal.stream_id)
        if is_on_trial:
            # The death of a worker that is ejected for its faults shows nothing about the stream.
            free = [link for link in free if not link.health.breaker.is_ejected] or free
        enterable = [link for link in free if suspects.may_enter(journal.stream_id, link.life)]
        if not enterable:
            return _Wait("a worker on which no other stream is on trial for the death of workers")
        without_trial = [link for link in enterable if not suspects.has_trial(link.life)]
        if without_trial and not is_on_trial:
            enterable = without_trial
        links = self._within_patience(enterable)
        return self._workers.pick(journal.model, self._facts, links)

    def _within_patience(self, links: list[Link]) -> list[Link]:
        """The links whose estimated wait a new request may wait. A stream that was in a queue before is not limited.

        Raises:
            LockstepError: OVERLOADED, there is no such link.
        """
        if self.journal.attempt:
            return links
        give_up_at = self._give_up_at if self._deadline_at is None else min(self._give_up_at, self._deadline_at)
        may_wait_s = give_up_at - self._loop.time()
        return self._workers.within_wait(links, may_wait_s, self.journal.priority)

    def _has_budget_for(self, link: Link) -> bool:
        """Withdraw the next attempt's cost from the retry budget; False if the budget is too small.

        Only retries cost something: attempts after a failure, and attempts on a worker that has refused the stream.
        """
        if not self._has_failed and link.life not in self._refused_by:
            self._leave_line()
            return True
        is_paid = self._workers.retries.withdraw(self._loop.time(), self._retry_turn)
        if not is_paid and not self._is_delayed:
            metrics.RETRIES_DELAYED.inc()
        self._is_delayed = not is_paid
        return is_paid

    def _leave_line(self) -> None:
        """Do not wait for the retry budget any more."""
        if self._is_delayed:
            self._workers.retries.leave(self._retry_turn)

    def _wait_for_budget(self) -> _Wait:
        self._check_refused()
        return _Wait("the retry budget", self._workers.retries.wait_s(self._retry_turn))

    @property
    def _first_arrived_at(self) -> float:
        """When the stream arrived here or at the router that had it before, in the event loop's time."""
        return self._arrived_at - self.journal.age_s

    @property
    def _retry_turn(self) -> Turn:
        turn = turn_at(self._first_arrived_at, self.journal.priority, has_output=bool(self.journal.emitted_ids))
        return (turn, self.journal.stream_id)

    def _check_refused(self) -> None:
        """Raise OVERLOADED for a request that was never in a queue and finds all queues full: it does not wait."""
        lost = self._last_lost
        if lost is not None and lost.reason is Loss.OVERLOADED and not self._was_taken:
            links = self._workers.ready(self.journal.model, self.journal.digest, grammars=self.journal.has_grammar)
            wait_s = min((link.queue_wait_of(self.journal.priority) for link in links), default=0.0)
            raise LockstepError(
                ErrorCode.OVERLOADED,
                f"all workers of {self.journal.model!r} are busy",
                retry_after_s=max(1, math.ceil(max(wait_s, lost.retry_after_s))),
            )

    def _waited_too_long(self, reason: str, retry_after_s: float = 0.0) -> LockstepError:
        waited_s = self._loop.time() - self._stalled_at
        return LockstepError(
            ErrorCode.UNAVAILABLE,
            f"waited {waited_s:.1f} s for {reason}",
            retry_after_s=max(5, math.ceil(retry_after_s)),
        )
