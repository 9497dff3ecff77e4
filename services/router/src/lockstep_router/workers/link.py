"""The link to one worker: a gRPC stream that is dialled again whenever it breaks.

It tracks whether the worker is alive, passes the worker's frames to the attempts that run on it, and ends these
attempts when the worker is lost. It never decides where a stream goes next.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random, SystemRandom
from typing import Any, Protocol

import grpc
from lockstep_api.v1 import worker_pb2, worker_pb2_grpc
from lockstep_common.protocol import MAX_MESSAGE_BYTES

from lockstep_router import metrics
from lockstep_router.discovery import WorkerAddress
from lockstep_router.policies import WorkerFacts
from lockstep_router.settings import RouterSettings
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.tls import Dial, dial_plain
from lockstep_router.workers.clock import AwakeClock
from lockstep_router.workers.connect import connect
from lockstep_router.workers.health import BreakerState, Health
from lockstep_router.workers.health.watch import note_ejected, note_suspicion
from lockstep_router.workers.losses import Loss
from lockstep_router.workers.outbox import Outbox
from lockstep_router.workers.suspects import Life, Suspects
from lockstep_router.workers.tokenizer_cache import TokenizerCache

logger = logging.getLogger("lockstep.router")

_WARN_AFTER_S = 5.0
"""A worker that has been unreachable for longer than this is logged as a warning."""

_RETIRED_TIMEOUT_DIVISOR = 3
"""The heartbeat timeout of a retired worker is divided by this. Such a worker will probably end
soon, and if its network is removed first, its connection is never reset.
"""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Each dial is a fresh connection: the pauses between dials are the link's own and no hidden state survives one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


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


class ProtocolError(Exception):
    """The worker broke the protocol; the connection cannot be used."""


@dataclass(frozen=True)
class WorkerProgress:
    """The last signs of a worker's progress, for the deadlines of its attempts."""

    stepped_at: float
    """When it last finished a step of any stream, in the awake clock's time."""
    step_deadline_s: float
    """Deadline after which the worker treats the current step as hung; 0: no step is running."""
    queued: int
    """Streams in the worker's queue."""


class RunningAttempt(Protocol):
    """An attempt of a stream on this worker, as the link sees it."""

    @property
    def stream_id(self) -> str: ...  # noqa: D102
    @property
    def number(self) -> int: ...  # noqa: D102
    @property
    def submitted_at(self) -> float: ...  # noqa: D102

    def on_tokens(self, update: worker_pb2.StreamTokens, now: float) -> None:
        """Take the worker's next tokens."""

    def on_phase(self, change: worker_pb2.StreamPhaseChange, now: float) -> None:
        """Note that the worker runs the stream or lets it wait."""

    def on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        """Note that the worker does not run the stream."""

    def lose(self, reason: Loss) -> None:
        """End the attempt: its worker is lost."""

    @property
    def is_running(self) -> bool:
        """Whether the worker computes it, as far as the worker has said."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, though its stream may not have noticed yet."""

    def check(self, now: float, worker: "WorkerProgress") -> None:
        """End the attempt if the worker is too late."""


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
        self._rng = rng or SystemRandom()
        self.health = Health(settings, clock.tick_s, self._rng)
        self.last_seen_at: float | None = None
        self.greeted_at = 0.0
        """When the RouterHello of the present connection was sent, in the event loop's time."""
        self.problem = ""
        """Why there is no connection."""
        self._problem_at = 0.0
        self._problem_warned = False
        self._settings = settings
        self._clock = clock
        self._tokenizers = tokenizers
        self._suspects = suspects
        self._on_change = on_change
        self._dial = dial
        self._connected = False
        self._silent = False
        self._stepped_at = 0.0
        self._served_life: Life | None = None
        """The current life if the worker has been ready in it, else None."""
        self._sent_since_status = 0
        self._attempts_at_status = 0
        self._attempts: dict[str, RunningAttempt] = {}
        # At most two frames for each stream. If the worker does not read them, new streams fail.
        self._outbox = Outbox(2 * settings.max_streams)
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
    def queue_wait_s(self) -> float:
        """Estimated wait of one more stream in the worker's queue."""
        waiting_since = max(0, self._sent_since_status - self.status.free_seqs)
        return self.status.queue_wait_s + waiting_since * self.status.queue_wait_per_request_s

    def queue_wait_of(self, priority: int) -> float:
        """Estimated wait of one more stream of a class; that of normal ones if the worker knows no classes."""
        by_class = self.status.queue_waits_s
        if priority not in by_class:
            return self.queue_wait_s
        return self.queue_wait_s - self.status.queue_wait_s + by_class[priority]

    @property
    def is_well(self) -> bool:
        """Whether it is connected, not silent, and neither draining nor failed."""
        ending = self.status.state in (worker_pb2.WORKER_STATE_DRAINING, worker_pb2.WORKER_STATE_FAILED)
        return self._connected and not self._silent and not ending

    @property
    def facts(self) -> WorkerFacts:
        """What policies choose by: the load last reported, and the streams sent since then."""
        status = self.status
        return WorkerFacts(
            worker_id=self.worker_id,
            life=self.life,
            queued=status.queued,
            running=status.running,
            sent=self._sent_since_status,
            queue_wait_s=self.queue_wait_s,
            capacity=status.total_blocks,
            is_suspected=self.health.is_suspected,
            is_ejected=self.health.breaker.is_ejected,
            is_slow=self.health.slowness.is_slow,
        )

    def silence_s(self) -> float | None:
        """Seconds since the last frame; None if there never was one."""
        return None if self.last_seen_at is None else self._clock.now() - self.last_seen_at

    def start(self, attempt: RunningAttempt, submit: worker_pb2.Submit) -> None:
        """Hand a stream to the worker."""
        self._attempts[attempt.stream_id] = attempt
        self._sent_since_status += 1
        self.health.note_prompt()
        self.health.breaker.note_sent(attempt.stream_id)
        if not self._send(worker_pb2.RouterFrame(submit=submit)):
            attempt.lose(Loss.UNAVAILABLE)

    def end(self, attempt: RunningAttempt, *, cancel: bool) -> None:
        """Forget an attempt; with `cancel` also tell the worker to stop computing it."""
        if self._attempts.get(attempt.stream_id) is attempt:
            del self._attempts[attempt.stream_id]
            self.health.breaker.note_over(attempt.stream_id)
            if cancel:
                request = worker_pb2.Cancel(stream_id=attempt.stream_id, attempt=attempt.number)
                self._send(worker_pb2.RouterFrame(cancel=request))

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
        for attempt in list(self._attempts.values()):
            attempt.check(now, progress)

    # The connection.

    async def run(self) -> None:
        """Keep the link connected until cancelled or, when it is retired, until the connection ends."""
        pause_s = self._settings.backoff_initial_s
        while not self.retired:
            greeted_before = self.last_seen_at
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, ProtocolError, TimeoutError) as error:
                self._note_problem(_describe(error))
            except Exception:
                logger.exception("link failed", extra={"target": self.target})
                self._note_problem("internal error")
            if self.last_seen_at != greeted_before:
                pause_s = self._settings.backoff_initial_s
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._settings.backoff_max_s)

    async def _serve(self) -> None:
        """Run one connection, from dialling to its end; always raises."""
        loop = asyncio.get_running_loop()
        connected_by = loop.time() + self._settings.connect_timeout_s
        async with asyncio.timeout_at(connected_by):
            channel = await connect(
                (self.target, *self.address.alternates),
                lambda target: self._dial(target, CHANNEL_OPTIONS),
                self._settings.connect_hedge_s,
            )
        async with channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Serve()
            async with asyncio.timeout_at(connected_by):
                hello = worker_pb2.RouterHello(router_id=self._settings.router_id)
                await call.write(worker_pb2.RouterFrame(hello=hello))
                self.greeted_at = loop.time()  # after the time that connecting took
                frame = await call.read()
            if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "hello":
                raise ProtocolError("the worker's first frame is not Hello")
            self._check_identity(frame.hello)
            writing = asyncio.create_task(self._write(call, several=frame.hello.accepts_several))
            try:
                self._connected = True
                self.epoch = 0
                self.status = worker_pb2.Status()
                self._stepped_at = self._clock.now()
                self.health.note_connection(self._stepped_at)
                while frame is not grpc.aio.EOF:
                    self._on_frame(frame, stub)
                    frame = await call.read()
                raise ProtocolError("the worker closed the stream")
            finally:
                # The attempts end first, so that their streams move on while the rest is cleaned up.
                self._disconnect()
                await _stop(writing, self._fetching)

    async def _write(self, call: Any, *, several: bool) -> None:
        # A failed write ends the gRPC stream, and the reader sees that.
        while True:
            await call.write(await self._outbox.take(several=several))

    def _disconnect(self) -> None:
        self._connected = False
        self._silent = False
        self.health.note_connection(self._clock.now())
        self._sent_since_status = 0
        self._outbox.clear()
        self._lose_attempts(Loss.LINK_LOST)
        self._on_change(self)

    def _send(self, frame: worker_pb2.RouterFrame) -> bool:
        if not self._connected:
            return False
        is_sent = self._outbox.put(frame)
        if not is_sent:
            logger.warning("worker does not read its requests", extra={"worker": self.worker_id, "target": self.target})
        return is_sent

    def _note_problem(self, problem: str) -> None:
        # A rollout makes workers unreachable for a short time; only a longer problem is logged as a warning.
        now = self._clock.now()
        if not self.problem:
            self._problem_at, self._problem_warned = now, False
        lasted_s = now - self._problem_at
        extra = {"target": self.target, "worker": self._expected_id, "problem": problem}
        if lasted_s >= _WARN_AFTER_S and not self._problem_warned:
            self._problem_warned = True
            logger.warning("no link to worker", extra=extra | {"for_s": round(lasted_s, 1)})
        elif problem != self.problem:
            logger.info("no link to worker", extra=extra)
        self.problem = problem

    # Frames.

    def _on_frame(self, frame: worker_pb2.WorkerFrame, stub: Any) -> None:
        if frame.epoch < self.epoch:
            metrics.DROPPED_FRAMES.labels("stale_epoch").inc()
            return
        self.last_seen_at = self._clock.now()
        self.health.suspicion.note_frame(self.last_seen_at)
        kind = frame.WhichOneof("frame")
        if frame.epoch > self.epoch:
            self._enter_epoch(frame.epoch)
        match kind:
            case "hello":
                self._on_hello(frame.hello, stub)
            case "tokens":
                self._on_tokens(frame.tokens)
            case "phases":
                self._on_phases(frame.phases)
            case "status":
                self._on_status(frame.status)
            case "rejected":
                self._on_rejected(frame.rejected)
        if self._silent:
            self._silent = False
            self._suspects.note_alive(self.life)
            logger.info("worker is heard again", extra={"worker": self.worker_id, "target": self.target})
            self._on_change(self)

    def _enter_epoch(self, epoch: int) -> None:
        self._lose_attempts(Loss.NEW_EPOCH)
        self.epoch = epoch
        self._stepped_at = self._clock.now()
        self.health.note_epoch()

    @property
    def _expected_id(self) -> str:
        return self.address.worker_id or self.worker_id

    def _check_identity(self, hello: worker_pb2.Hello) -> None:
        """Raise ProtocolError for a worker with another id: another pod may have taken over the address."""
        if self.address.worker_id is not None and hello.worker_id != self.address.worker_id:
            raise ProtocolError(f"the worker there is {hello.worker_id!r} and not {self.address.worker_id!r}")

    def _on_hello(self, hello: worker_pb2.Hello, stub: Any) -> None:
        self._check_identity(hello)
        if self.card is not None and (self.card.digest, self.incarnation) != (hello.model.digest, hello.incarnation):
            self._lose_attempts(Loss.NEW_EPOCH)
        self.worker_id = hello.worker_id or self.target
        self.incarnation = hello.incarnation
        # A worker that is still loading may not know its model yet.
        self.card = hello.model if hello.model.name else None
        self.problem = ""
        self._suspects.note_alive(self.life)
        logger.info(
            "worker says hello",
            extra={"worker": self.worker_id, "target": self.target, "epoch": self.epoch, "model": hello.model.name},
        )
        self._on_change(self)
        digest = hello.model.tokenizer_digest
        if self.card is not None and digest not in self._tokenizers:
            if self._fetching is not None:
                self._fetching.cancel()
            self._fetching = asyncio.create_task(self._fetch_tokenizer(stub, digest))

    def _on_tokens(self, tokens: worker_pb2.Tokens) -> None:
        now = self._clock.now()
        self._stepped_at = now
        for update in tokens.streams:
            attempt = self._attempts.get(update.stream_id)
            if attempt is None:
                # Normal after a cancel: the worker had already computed these tokens.
                metrics.DROPPED_FRAMES.labels("late").inc()
            else:
                attempt.on_tokens(update, now)

    def _on_phases(self, phases: worker_pb2.Phases) -> None:
        for change in phases.streams:
            if change.phase == worker_pb2.STREAM_PHASE_RUNNING:
                self.health.note_prompt()
            if (attempt := self._attempts.get(change.stream_id)) is not None:
                attempt.on_phase(change, self._clock.now())

    def _on_status(self, status: worker_pb2.Status) -> None:
        if status.steps != self.status.steps:
            self._stepped_at = self._clock.now()
        before, self.status = self.status.state, status
        self.health.note_status(status, self._clock.now())
        self._attempts_at_status = len(self._attempts)
        self._sent_since_status = 0
        if status.state in _RUNS_STREAMS:
            self._served_life = self.life
        else:
            self._lose_attempts(Loss.RESTARTING)
        if status.state != before:
            self._on_change(self)

    def _on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        attempt = self._attempts.get(rejected.stream_id)
        if attempt is None:
            metrics.DROPPED_FRAMES.labels("late").inc()
        else:
            attempt.on_rejected(rejected)

    def _lose_attempts(self, reason: Loss) -> None:
        attempts = [attempt for attempt in self._attempts.values() if not attempt.is_over]
        if reason.is_death and self._served_life == self.life:
            self._served_life = None
            self._charge(attempts)
        for attempt in attempts:
            attempt.lose(reason)

    def _charge(self, attempts: list[RunningAttempt]) -> None:
        """Note the worker's death with the streams that it ran."""
        running = [attempt for attempt in attempts if attempt.is_running]
        # A worker may die before it reports what it runs: then all of its streams are suspects. But it may have been
        # dead when it got them, unless it was heard afterwards.
        heard_at = self.last_seen_at or 0.0
        is_certain = bool(running) or any(attempt.submitted_at < heard_at for attempt in attempts)
        self._suspects.note_death(
            self.life,
            [attempt.stream_id for attempt in running or attempts],
            is_certain=is_certain,
            has_others=self.status.running > self._attempts_at_status,
        )
        # The death has an explanation if a stream is on trial for earlier ones, or if the worker was ending anyway.
        is_explained = any(self._suspects.is_tried(attempt.stream_id) for attempt in attempts)
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
                self._note_problem(f"tokenizer: {_describe(error)}")
                await asyncio.sleep(self._settings.backoff_max_s * self._rng.uniform(0.5, 1.0))
        self.problem = ""
        self._on_change(self)


async def _stop(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
