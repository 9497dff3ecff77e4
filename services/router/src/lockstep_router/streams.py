"""Drives one stream: on a worker, and on the next one when that is lost, until it has all its tokens."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.attempts import Attempt, Finished, Outcome
from lockstep_router.journal import Journal
from lockstep_router.links import Link
from lockstep_router.losses import Loss, Lost
from lockstep_router.settings import RouterSettings
from lockstep_router.workers import Workers

logger = logging.getLogger("lockstep.router")


class Stream:
    """One stream of tokens that outlives its workers.

    `run` drives it as a task; cancelling that task cancels the stream on its worker. `take` gives what has arrived;
    `on_arrival` is called whenever there is more.
    """

    def __init__(
        self, journal: Journal, workers: Workers, settings: RouterSettings, on_arrival: Callable[[], None]
    ) -> None:
        self.journal = journal
        self.failovers = 0
        self._workers = workers
        self._settings = settings
        self._on_arrival = on_arrival
        self._arrived: deque[worker_pb2.StreamTokens] = deque()
        self._unread = 0
        self._caught_up = asyncio.Event()
        self._attempt: Attempt | None = None
        self._avoided: dict[tuple[str, int, int], float] = {}  # a worker's life -> awake time until
        self._fruitless = 0  # attempts lost in a row without a token
        self._last_lost: Lost | None = None
        self._life = ("", 0, 0)  # of the current attempt's worker
        now = asyncio.get_running_loop().time()
        self._began_at = now
        self._token_at: float | None = None
        self._stalled_at = now  # when the stream last began to wait for a worker
        self._gap_from: float | None = None

    def take(self) -> list[worker_pb2.StreamTokens]:
        """The frames that have arrived since the last call, in order."""
        taken = list(self._arrived)
        self._arrived.clear()
        self._unread = 0
        self._caught_up.set()
        return taken

    async def run(self) -> None:
        """Drive the stream to its end.

        Raises:
            LockstepError: it cannot be had. What has been delivered before is right all the same.
        """
        while True:
            link = await self._find_worker()
            outcome = await self._try_on(link)
            if isinstance(outcome, Finished):
                return
            if isinstance(outcome, LockstepError):
                raise outcome
            self._note_loss(link, outcome)
            if outcome.reason is Loss.SLOW_CLIENT:
                await self._caught_up.wait()
                self._stalled_at = asyncio.get_running_loop().time()

    async def _try_on(self, link: Link) -> Outcome:
        """One attempt, to its end."""
        submit = self.journal.next_submit(link.worker_id)
        self._attempt = attempt = Attempt(
            self.journal,
            now=self._workers.clock.now(),
            first_token_deadline_s=self._settings.first_token_deadline_s,
            inter_token_deadline_s=self._settings.inter_token_deadline_s,
            deliver=self._deliver,
        )
        self._life = link.life
        link.start(attempt, submit)
        outcome: Outcome | None = None
        try:
            outcome = await attempt.over
            return outcome
        finally:
            unwanted = outcome is None or (isinstance(outcome, Lost) and outcome.reason.worker_may_go_on)
            link.end(attempt, cancel=unwanted)

    def _deliver(self, frame: worker_pb2.StreamTokens) -> None:
        self._measure(len(frame.ids))
        self._arrived.append(frame)
        self._unread += len(frame.ids)
        if self._unread > self._settings.max_unread_tokens and not frame.finish:
            # The client reads slower than the worker computes. Pausing is the same as failing over: stop here, go on
            # from the journal when the client has caught up.
            self._caught_up.clear()
            assert self._attempt is not None
            self._attempt.lose(Loss.SLOW_CLIENT)
        self._on_arrival()

    def _measure(self, tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        metrics.GENERATED_TOKENS.inc(tokens)
        if self._token_at is None:
            metrics.FIRST_TOKEN_SECONDS.observe(now - self._began_at)
        else:
            metrics.INTER_TOKEN_SECONDS.observe(now - self._token_at)
        if self._gap_from is not None:
            metrics.FAILOVER_GAP_SECONDS.observe(now - self._gap_from)
            self._gap_from = None
        self._token_at = now

    def _note_loss(self, link: Link, lost: Lost) -> None:
        """Count a loss and decide whether the stream may go on."""
        assert self._attempt is not None
        now = asyncio.get_running_loop().time()
        self._last_lost = lost
        if self._attempt.tokens:
            self._fruitless = 0
            self._stalled_at = now
        elif not lost.reason.is_blameless:
            self._fruitless += 1
        metrics.FAILOVERS.labels(lost.reason.value).inc()
        if lost.reason is not Loss.SLOW_CLIENT:
            self.failovers += 1
            self._workers.failovers += 1
            self._gap_from = self._gap_from or self._token_at
        logger.info(
            "stream leaves worker",
            extra={
                "stream": self.journal.stream_id,
                "attempt": self.journal.attempt,
                "worker": link.worker_id,
                "reason": lost.reason.value,
                "emitted": len(self.journal.emitted_ids),
            },
        )
        awake_s = self._workers.clock.now()
        self._avoided = {life: until for life, until in self._avoided.items() if until > awake_s}
        self._avoided[self._life] = awake_s + (lost.retry_after_s or lost.reason.avoid_s)
        if self._fruitless >= self._settings.max_attempts:
            raise LockstepError(
                ErrorCode.WORKER_LOST,
                f"{self._fruitless} workers in a row were lost without a token of this request (last: {lost.reason})",
                retry_after_s=5,
            )

    async def _find_worker(self) -> Link:
        """The worker for the next attempt; waits for one if need be."""
        loop = asyncio.get_running_loop()
        give_up_at = self._stalled_at + self._settings.resume_deadline_s
        while True:
            ready = self._workers.ready(self.journal.model, self.journal.digest)
            now = self._workers.clock.now()
            free = [link for link in ready if self._avoided.get(link.life, 0.0) <= now]
            if free and loop.time() < give_up_at:
                return self._workers.pick(self.journal.session, free)
            if (ready and self._was_refused) or loop.time() >= give_up_at:
                raise self._no_worker()
            recheck_s = min(
                (self._avoided[link.life] - now for link in ready), default=self._settings.resume_deadline_s
            )
            await self._workers.wait_change(min(give_up_at, loop.time() + recheck_s + self._workers.clock.tick_s))

    @property
    def _was_refused(self) -> bool:
        """Whether a request that has not begun was turned away for load: it is told so rather than kept waiting."""
        return self._token_at is None and self._last_lost is not None and self._last_lost.reason is Loss.OVERLOADED

    def _no_worker(self) -> LockstepError:
        if self._was_refused:
            assert self._last_lost is not None
            return LockstepError(
                ErrorCode.OVERLOADED,
                f"all workers of {self.journal.model!r} are busy",
                retry_after_s=self._last_lost.retry_after_s or 1,
            )
        waited_s = self._settings.resume_deadline_s
        return LockstepError(
            ErrorCode.UNAVAILABLE, f"no worker of {self.journal.model!r} was ready for {waited_s:g} s", retry_after_s=5
        )
