"""The link to one worker: what it has said of itself, and the attempts that run on it.

It tracks whether the worker is alive, passes the worker's frames to its attempts, and ends these when the worker is
lost. It never decides where a stream goes next.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum
from random import Random, SystemRandom
from typing import Any

from lockstep_api.v1 import worker_pb2
from lockstep_common.grpc_tls import Dial, dial_plain

from lockstep_router import metrics
from lockstep_router.discovery import WorkerAddress
from lockstep_router.history import History
from lockstep_router.lanes import Lane
from lockstep_router.policies import WorkerFacts
from lockstep_router.settings import RouterSettings
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.workers.clock import AwakeClock
from lockstep_router.workers.connection import ProtocolError, WorkerConnection, describe
from lockstep_router.workers.evidence import Evidence
from lockstep_router.workers.frame_numbers import clear_unusable
from lockstep_router.workers.health import BreakerState, Health
from lockstep_router.workers.health.watch import note_ejected, note_suspicion
from lockstep_router.workers.losses import Loss
from lockstep_router.workers.prefix_index import PrefixIndex
from lockstep_router.workers.reported import Reported
from lockstep_router.workers.running import RunningAttempt, RunningAttempts, WorkerProgress
from lockstep_router.workers.suspects import Life, Suspects
from lockstep_router.workers.tokenizer_cache import TokenizerCache
from lockstep_router.workers.wire import cancel_frame, submit_frame

logger = logging.getLogger("lockstep.router")
metrics.DROPPED_FRAMES.labels("stale_epoch")  # from 0

_RETIRED_TIMEOUT_DIVISOR = 3
"""The heartbeat timeout of a retired worker is divided by this. Such a worker will probably end
soon, and if its network is removed first, its connection is never reset.
"""


class LinkState(StrEnum):
    """A worker as the router sees it."""

    CONNECTING = "connecting"
    SILENT = "silent"
    LOADING = "loading"  # its tokenizer is being fetched
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    RETIRED = "retired"  # discovery no longer lists it


_STATES = {
    worker_pb2.WORKER_STATE_STARTING: LinkState.STARTING,
    worker_pb2.WORKER_STATE_READY: LinkState.READY,
    worker_pb2.WORKER_STATE_RESTARTING: LinkState.RESTARTING,
    worker_pb2.WORKER_STATE_DRAINING: LinkState.DRAINING,
    worker_pb2.WORKER_STATE_FAILED: LinkState.FAILED,
}
_RUNS_STREAMS = frozenset({worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_DRAINING})


class Link:
    """One worker at an address from discovery, connected or not."""

    def __init__(
        self,
        address: WorkerAddress,
        settings: RouterSettings,
        clock: AwakeClock,
        tokenizers: TokenizerCache,
        suspects: Suspects,
        on_change: Callable[["Link"], None],
        history: History,
        dial: Dial = dial_plain,
        rng: Random | None = None,
    ) -> None:
        self.address = address
        self.target = address.target
        self.listed = True
        """Whether discovery lists the worker."""
        self.retired = False
        """Whether the worker was given up because discovery no longer lists it: no new streams, no reconnection."""
        self.worker_id = ""
        """Like `card`, `incarnation` and `epoch`, the value of the last Hello: kept while there is no connection."""
        self.card: worker_pb2.ModelCard | None = None
        self.incarnation = 0
        self.epoch = 0
        self.status = worker_pb2.Status()
        self._load = Reported.of(self.status)
        self._rng = rng or SystemRandom()
        self._connection = WorkerConnection(self, settings, clock, dial, self._rng)
        self._stub: Any = None
        """Of the present connection."""
        self.health = Health(settings, clock.tick_s, self._rng)
        self.prefixes = PrefixIndex()
        """The worker's cached blocks, if its model's policy uses them."""
        self.last_seen_at: float | None = None
        self._settings = settings
        self._clock = clock
        self._tokenizers = tokenizers
        self._suspects = suspects
        self._on_change = on_change
        self._history = history
        self._connected = False
        self._silent = False
        self._stepped_at = 0.0
        self._served_life: Life | None = None
        """The current life if the worker has been ready in it, else None."""
        self._unseen = 0
        """Submits that the last status says nothing of."""
        self._attempts_at_status = 0
        self._attempts = RunningAttempts()
        self._evidence = Evidence()
        self._warned_of_numbers = False
        self._fetching: asyncio.Task[None] | None = None

    # For the rest of the router.

    @property
    def state(self) -> LinkState:
        """The worker's state as this router knows it."""
        if self.retired:
            return LinkState.RETIRED
        if not self._connected:
            return LinkState.CONNECTING
        if self._silent:
            return LinkState.SILENT
        state = _STATES.get(self.status.state, LinkState.STARTING)
        if state is LinkState.READY and not self._has_tokenizer:
            return LinkState.LOADING
        return state

    @property
    def problem(self) -> str:
        """Why there is no connection, or no tokenizer."""
        return self._connection.problem

    @property
    def greeted_at(self) -> float:
        """When the RouterHello of the present connection was sent, in the event loop's time."""
        return self._connection.greeted_at

    @property
    def lanes(self) -> dict[int, Lane]:
        """Take tokens at once while they are open; by the handle of the attempt."""
        return self._attempts.lanes

    @property
    def is_ready(self) -> bool:
        """Whether the worker takes new streams."""
        return self.state is LinkState.READY

    @property
    def model(self) -> str:
        """The name of the worker's model; empty if it is not known."""
        return self.card.name if self.card is not None else ""

    def adopt(self, address: WorkerAddress) -> bool:
        """Add the worker id to an address that was known without one; False if this is another worker."""
        if (
            self.address.worker_id is not None
            or self.target != address.target
            or self.worker_id not in ("", address.worker_id)
        ):
            return False
        self.address, self.listed, self.retired = address, True, False
        return True

    @property
    def is_connected(self) -> bool:
        """Whether the worker has sent Hello on the present connection."""
        return self._connected

    @property
    def has_streams(self) -> bool:
        """Whether any attempt is on this worker."""
        return bool(self._attempts)

    @property
    def streams(self) -> int:
        """This router's attempts on the worker; its own report counts those of all routers, a heartbeat late."""
        return len(self._attempts)

    @property
    def _has_tokenizer(self) -> bool:
        return self.card is not None and self.card.tokenizer_digest in self._tokenizers

    @property
    def life(self) -> Life:
        """One life of the worker's ranks: (target, incarnation, epoch) never comes twice."""
        return (self.target, self.incarnation, self.epoch)

    @property
    def grammar_engine(self) -> str:
        """Name and version of what computes the worker's grammars; empty: it takes none."""
        return self.card.grammar_engine if self.card is not None else ""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the worker's numerics; empty if unknown, or if its tokens depend on the batch."""
        return self.card.fingerprint if self.card is not None and self.card.deterministic else ""

    @property
    def load(self) -> Reported:
        """The load last reported."""
        return self._load

    @property
    def queue_wait_s(self) -> float:
        """Estimated wait of one more stream in the worker's queue."""
        return self._load.queue_wait_s + self._waiting_since_s

    def queue_wait_of(self, priority: int) -> float:
        """Estimated wait of one more stream of a class; that of normal ones if the worker knows no classes."""
        load = self._load
        return load.queue_waits_s.get(priority, load.queue_wait_s) + self._waiting_since_s

    @property
    def _waiting_since_s(self) -> float:
        """What the streams that the last status says nothing of add to the wait."""
        load = self._load
        more = self._unseen - load.free_seqs
        return more * load.queue_wait_per_request_s if more > 0 else 0.0

    @property
    def is_well(self) -> bool:
        """Whether it is connected, not silent, and neither draining nor failed."""
        ending = self.status.state in (worker_pb2.WORKER_STATE_DRAINING, worker_pb2.WORKER_STATE_FAILED)
        return self._connected and not self._silent and not ending

    @property
    def facts(self) -> WorkerFacts:
        """What policies choose by: the load last reported, and the streams that it says nothing of."""
        load = self._load
        return WorkerFacts(
            worker_id=self.worker_id,
            life=self.life,
            queued=load.queued,
            running=load.running,
            sent=self._unseen,
            queue_wait_s=self.queue_wait_s,
            capacity=load.capacity,
            is_suspected=self.health.is_suspected,
            is_ejected=self.health.breaker.is_ejected,
            is_slow=self.health.slowness.is_slow or (self.health.slowness.is_on_trial and self.streams > 0),
            blocks=self.prefixes,
        )

    def watch_prefixes(self, max_blocks: int) -> None:
        """Keep an index of the worker's cached blocks, of at most this size: ask for reports, if that is due."""
        self.prefixes.resize(max_blocks)
        if not self._connected or (watch := self.prefixes.asks(self._clock.now())) is None:
            return
        if not self._connection.send(worker_pb2.RouterFrame(prefix_watch=watch).SerializeToString()):
            self.prefixes.note_unasked()

    def silence_s(self) -> float | None:
        """Seconds since the last frame; None if there never was one."""
        return None if self.last_seen_at is None else self._clock.now() - self.last_seen_at

    def start(self, attempt: RunningAttempt, submit: worker_pb2.Submit) -> None:
        """Hand a stream to the worker."""
        self._attempts.add(attempt)
        submit.handle = attempt.handle
        submit.suspicion = suspicion = self._suspects.suspicion(attempt.stream_id)
        self._unseen += 1
        self.health.note_prompt()
        self.health.breaker.note_sent(attempt.stream_id)
        if self._connected and self._connection.send(submit_frame(submit)):
            self._evidence.note_sent(attempt.stream_id, suspicion)
        else:
            attempt.lose(Loss.UNAVAILABLE)

    def end(self, attempt: RunningAttempt, *, cancel: bool) -> None:
        """Forget an attempt; with `cancel` also have the worker stop computing it."""
        if self._attempts.remove(attempt):
            self._evidence.note_over(attempt.stream_id)
            self.prefixes.note_over(attempt.stream_id)
            self.health.breaker.note_over(attempt.stream_id)
            if cancel:
                request = worker_pb2.Cancel(stream_id=attempt.stream_id, attempt=attempt.number)
                if self._connected:
                    self._connection.send(cancel_frame(request))

    def check(self) -> None:
        """Check all deadlines; called at every tick of the clock."""
        now = self._clock.now()
        timeout_s = self._settings.heartbeat_timeout_s / (_RETIRED_TIMEOUT_DIVISOR if self.retired else 1)
        if self._connected and not self._silent and (self.silence_s() or 0) > timeout_s:
            self._silent = True
            logger.warning("worker is silent", extra={"worker": self.worker_id, "target": self.target})
            self._lose_attempts(Loss.SILENT)
            self._on_change(self)
        if self._connected and self.health.check(now, self._stepped_at, self.status.step_deadline_s):
            note_suspicion(self, now)
        progress = WorkerProgress(self._stepped_at, self.status.step_deadline_s, self.status.queued)
        for attempt in self._attempts:
            attempt.check(now, progress)

    # The connection.

    async def run(self) -> None:
        """Keep the link connected until cancelled or, when it is retired, until the connection ends."""
        await self._connection.run()

    def on_connected(self, hello: worker_pb2.Hello, stub: Any) -> None:
        """A connection begins.

        Raises:
            ProtocolError: another worker is there.
        """
        self._check_identity(hello)
        self._stub = stub
        self._connected = True
        self.epoch = 0
        self.status = worker_pb2.Status()
        self._load = Reported.of(self.status)
        self._evidence.begin()
        self._stepped_at = self._clock.now()
        self.health.note_connection(self._stepped_at)

    def on_disconnected(self) -> None:
        """The connection has ended."""
        self._connected = False
        self._silent = False
        self.health.note_connection(self._clock.now())
        self._unseen = 0
        self.prefixes.clear()
        self._lose_attempts(Loss.LINK_LOST)
        self._on_change(self)
        if self._fetching is not None:
            self._fetching.cancel()

    # Frames.

    def on_frame(self, frame: worker_pb2.WorkerFrame) -> None:
        """Take a frame.

        Raises:
            ProtocolError: the connection cannot be used any more.
        """
        if frame.epoch < self.epoch:
            metrics.DROPPED_FRAMES.labels("stale_epoch").inc()
            return
        self.last_seen_at = now = self._clock.now()
        self.health.suspicion.note_frame(now)
        if frame.epoch > self.epoch:
            self._enter_epoch(frame.epoch)
        self._take(frame, now)
        if self._silent:
            self._silent = False
            self._suspects.note_alive(self.life)
            logger.info("heartbeats have resumed", extra={"worker": self.worker_id, "target": self.target})
            self._on_change(self)

    def _take(self, frame: worker_pb2.WorkerFrame, now: float) -> None:
        match frame.WhichOneof("frame"):
            case "hello":
                self._on_hello(frame.hello)
            case "tokens":
                self._stepped_at = now
                self._attempts.on_tokens(frame.tokens, now, asyncio.get_running_loop().time())
            case "phases":
                self._on_phases(frame.phases)
            case "status":
                self._clear_unusable(frame)
                self._on_status(frame.status)
            case "rejected":
                self._clear_unusable(frame)
                self._attempts.on_rejected(frame.rejected)
            case "prefix_report":
                self.prefixes.take(frame.prefix_report)
            case "ended_attempts":
                self._clear_unusable(frame)
                self._history.note_ranks(self.worker_id, frame.ended_attempts.attempts)

    def _clear_unusable(self, frame: worker_pb2.WorkerFrame) -> None:
        name = clear_unusable(frame)
        if name and not self._warned_of_numbers:
            self._warned_of_numbers = True
            extra = {"worker": self.worker_id, "target": self.target, "field": name}
            logger.warning("worker reports a number that cannot be used", extra=extra)

    def _enter_epoch(self, epoch: int) -> None:
        self._lose_attempts(Loss.NEW_EPOCH)
        self.epoch = epoch
        self.prefixes.clear()
        self._stepped_at = self._clock.now()
        self.health.note_epoch()

    @property
    def expected_id(self) -> str:
        """The worker's id, as far as it is known."""
        return self.address.worker_id or self.worker_id

    def _check_identity(self, hello: worker_pb2.Hello) -> None:
        """Raise ProtocolError for a worker with another id: another pod may have taken over the address."""
        if self.address.worker_id is not None and hello.worker_id != self.address.worker_id:
            raise ProtocolError(f"the worker there is {hello.worker_id!r} and not {self.address.worker_id!r}")

    def _on_hello(self, hello: worker_pb2.Hello) -> None:
        self._check_identity(hello)
        if self.card is not None and (self.card.digest, self.incarnation) != (hello.model.digest, hello.incarnation):
            self._lose_attempts(Loss.NEW_EPOCH)
        self.worker_id = hello.worker_id or self.target
        self.incarnation = hello.incarnation
        # A worker that is still loading may not know its model yet.
        self.card = hello.model if hello.model.name else None
        self._connection.problem = ""
        self._suspects.note_alive(self.life)
        logger.info(
            "worker connected",
            extra={"worker": self.worker_id, "target": self.target, "epoch": self.epoch, "model": hello.model.name},
        )
        self._on_change(self)
        digest = hello.model.tokenizer_digest
        if self.card is not None and digest not in self._tokenizers:
            if self._fetching is not None:
                self._fetching.cancel()
            self._fetching = asyncio.create_task(self._fetch_tokenizer(self._stub, digest))

    def _on_phases(self, phases: worker_pb2.Phases) -> None:
        for change in phases.streams:
            if change.phase == worker_pb2.STREAM_PHASE_RUNNING:
                self.health.note_prompt()
            self._attempts.on_phase(change, self._clock.now())

    def _on_status(self, status: worker_pb2.Status) -> None:
        if status.steps != self.status.steps:
            self._stepped_at = self._clock.now()
        before, self.status = self.status.state, status
        self._load = Reported.of(status)
        self.health.note_status(status, self._clock.now())
        self._attempts_at_status = len(self._attempts)
        self._unseen = self._evidence.unseen(status)
        self.prefixes.note_status()
        if status.state in _RUNS_STREAMS:
            self._served_life = self.life
        else:
            self._lose_attempts(Loss.RESTARTING)
        if status.state != before:
            self._on_change(self)

    def _lose_attempts(self, reason: Loss) -> None:
        attempts = [attempt for attempt in self._attempts if not attempt.is_over]
        if reason.is_death and self._served_life == self.life:
            self._served_life = None
            self._charge(attempts)
        for attempt in attempts:
            attempt.lose(reason)

    def _charge(self, attempts: list[RunningAttempt]) -> None:
        """Note the worker's death with the streams that it ran."""
        others = self.status.running > self._attempts_at_status
        death = self._evidence.of_death(attempts, self.status, running_of_others=others)
        self._suspects.note_death(
            self.life,
            death.stream_ids,
            self._clock.now(),
            # A worker that was ejected for its faults may have died of them.
            is_certain=death.is_certain and not self.health.breaker.is_ejected,
            has_others=death.has_others,
        )
        # The death has an explanation if a stream is on trial for earlier ones, or if the worker was ending anyway.
        is_explained = death.is_explained or any(self._suspects.is_tried(each) for each in death.stream_ids)
        if not is_explained and not self.retired and self.status.state != worker_pb2.WORKER_STATE_DRAINING:
            self._note_death(self._clock.now())

    def _note_death(self, now: float) -> None:
        breaker = self.health.breaker
        breaker.note_death(now)
        if breaker.state is BreakerState.HALF_OPEN:
            breaker.eject("it died before its probe was over", now)
            note_ejected(self, now)

    async def _fetch_tokenizer(self, stub: Any, digest: str) -> None:
        """Fetch and build the tokenizer; retry until it succeeds, since the worker cannot be used without it."""
        while digest not in self._tokenizers:
            try:
                request = worker_pb2.TokenizerRequest(digest=digest)
                files = await stub.Tokenizer(request, timeout=self._settings.tokenizer_timeout_s)
                if files.digest != digest:
                    raise ProtocolError(f"asked for tokenizer {digest}, got {files.digest}")
                # Reading a large vocabulary takes about a second.
                self._tokenizers.add(await asyncio.to_thread(Tokenizer, files))
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # whatever a worker's files make the libraries raise, panics of Rust too
                self._connection.note_problem(f"tokenizer: {describe(error)}")
                await asyncio.sleep(self._settings.backoff_max_s * self._rng.uniform(0.5, 1.0))
        self._connection.problem = ""
        self._on_change(self)
