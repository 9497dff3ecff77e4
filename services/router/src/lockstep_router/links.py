"""The line to one worker: a gRPC stream that is dialled again whenever it breaks.

It knows whether the worker lives, routes its frames to the attempts that run on it, and tells them when it is gone. It
never decides where a stream goes next.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import grpc
from lockstep_api.v1 import worker_pb2, worker_pb2_grpc

from lockstep_router import metrics
from lockstep_router.attempts import Attempt
from lockstep_router.clock import AwakeClock
from lockstep_router.discovery import Found
from lockstep_router.losses import Loss
from lockstep_router.routing import Load
from lockstep_router.settings import RouterSettings
from lockstep_router.tokenizer import Tokenizer
from lockstep_router.tokenizer_cache import TokenizerCache

logger = logging.getLogger("lockstep.router")

_LASTING_S = 5.0
"""A worker that is away for longer is worth a warning."""

_RETIRED_HASTE = 3
"""A worker that discovery names no more is about to go, and may go without a reset when its network goes first: so many
times sooner its silence is taken for its end.
"""

_MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
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
    LOADING = "loading"  # its tokenizer is on its way
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    RETIRED = "retired"  # discovery does not name it any more


_STATES = {
    worker_pb2.WORKER_STATE_STARTING: LinkState.STARTING,
    worker_pb2.WORKER_STATE_READY: LinkState.READY,
    worker_pb2.WORKER_STATE_RESTARTING: LinkState.RESTARTING,
    worker_pb2.WORKER_STATE_DRAINING: LinkState.DRAINING,
    worker_pb2.WORKER_STATE_FAILED: LinkState.FAILED,
}
_RUNS_STREAMS = frozenset({worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_DRAINING})


class ProtocolError(Exception):
    """The worker broke the protocol; the connection is of no use."""


class Link:
    """One worker that discovery has found, connected or not."""

    def __init__(
        self,
        found: Found,
        settings: RouterSettings,
        clock: AwakeClock,
        tokenizers: TokenizerCache,
        on_change: Callable[["Link"], None],
    ) -> None:
        self.found = found
        self.target = found.target
        self.retired = False
        """No new streams, and no other connection after this one."""
        self.worker_id = ""
        """As of the last Hello, like the card: they outlive a broken connection."""
        self.card: worker_pb2.ModelCard | None = None
        self.incarnation = 0
        self.epoch = 0
        self.status = worker_pb2.Status()
        self.last_seen_at: float | None = None
        self.problem = ""
        """Why there is no connection."""
        self._problem_at = 0.0
        self._problem_told = False
        self._settings = settings
        self._clock = clock
        self._tokenizers = tokenizers
        self._on_change = on_change
        self._connected = False
        self._silent = False
        self._stepped_at = 0.0
        self._sent_since_status = 0
        self._attempts: dict[str, Attempt] = {}
        # Two frames a stream at most; a worker that does not read them is not one to give more.
        self._outbox: asyncio.Queue[worker_pb2.RouterFrame] = asyncio.Queue(2 * settings.max_streams)
        self._fetching: asyncio.Task[None] | None = None

    # What the rest of the router asks.

    @property
    def state(self) -> LinkState:
        """The worker's state, as far as it can be known from here."""
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

    def adopt(self, found: Found) -> bool:
        """Take a name for a worker that has been known by its address alone; False if this is another one."""
        if (
            self.found.worker_id is not None
            or self.target != found.target
            or self.worker_id not in ("", found.worker_id)
        ):
            return False
        self.found, self.retired = found, False
        return True

    @property
    def is_connected(self) -> bool:
        """Whether the worker has said Hello on a connection that still stands."""
        return self._connected

    @property
    def has_streams(self) -> bool:
        """Whether any stream runs on it."""
        return bool(self._attempts)

    @property
    def _has_tokenizer(self) -> bool:
        return self.card is not None and self.card.tokenizer_digest in self._tokenizers

    @property
    def life(self) -> tuple[str, int, int]:
        """What a worker never has twice: (target, incarnation, epoch)."""
        return (self.target, self.incarnation, self.epoch)

    @property
    def load(self) -> Load:
        """The last reported load and what has been sent since."""
        return Load(self.worker_id, self.status.queued, self.status.running, self._sent_since_status)

    def silence_s(self) -> float | None:
        """Since the last frame; None if there never was one."""
        return None if self.last_seen_at is None else self._clock.now() - self.last_seen_at

    def start(self, attempt: Attempt, submit: worker_pb2.Submit) -> None:
        """Hand a stream to the worker."""
        self._attempts[attempt.stream_id] = attempt
        self._sent_since_status += 1
        if not self._send(worker_pb2.RouterFrame(submit=submit)):
            attempt.lose(Loss.UNAVAILABLE)

    def end(self, attempt: Attempt, *, cancel: bool) -> None:
        """Forget an attempt and, if wanted, tell the worker to stop computing it."""
        if self._attempts.get(attempt.stream_id) is attempt:
            del self._attempts[attempt.stream_id]
            if cancel:
                frame = worker_pb2.Cancel(stream_id=attempt.stream_id, attempt=attempt.number)
                self._send(worker_pb2.RouterFrame(cancel=frame))

    def check(self) -> None:
        """Look for lateness: called at every tick of the clock."""
        now = self._clock.now()
        patience_s = self._settings.heartbeat_timeout_s / (_RETIRED_HASTE if self.retired else 1)
        if self._connected and not self._silent and (self.silence_s() or 0) > patience_s:
            self._silent = True
            logger.warning("worker is silent", extra={"worker": self.worker_id, "target": self.target})
            self._lose_attempts(Loss.SILENT)
            self._on_change(self)
        for attempt in list(self._attempts.values()):
            attempt.check(now, self._stepped_at)

    # The connection.

    async def run(self) -> None:
        """Keep the link up until cancelled or, once it is retired, until the connection ends."""
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
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._settings.backoff_max_s)

    async def _serve(self) -> None:
        """One connection, from dialling to its end, which is always an exception."""
        async with grpc.aio.insecure_channel(self.target, options=CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Serve()
            async with asyncio.timeout(self._settings.connect_timeout_s):
                hello = worker_pb2.RouterHello(router_id=self._settings.router_id)
                await call.write(worker_pb2.RouterFrame(hello=hello))
                frame = await call.read()
            if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "hello":
                raise ProtocolError("the worker's first frame is not Hello")
            self._check_identity(frame.hello)
            writing = asyncio.create_task(self._write(call))
            try:
                self._connected = True
                self.epoch = 0
                self.status = worker_pb2.Status()
                self._stepped_at = self._clock.now()
                while frame is not grpc.aio.EOF:
                    self._on_frame(frame, stub)
                    frame = await call.read()
                raise ProtocolError("the worker closed the stream")
            finally:
                # First of all the attempts: their streams move on while the rest is cleaned up.
                self._disconnect()
                await _stop(writing, self._fetching)

    async def _write(self, call: Any) -> None:
        # A failed write ends the stream, which the reader sees.
        while True:
            await call.write(await self._outbox.get())

    def _disconnect(self) -> None:
        self._connected = False
        self._silent = False
        self._sent_since_status = 0
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._lose_attempts(Loss.LINK_LOST)
        self._on_change(self)

    def _send(self, frame: worker_pb2.RouterFrame) -> bool:
        if not self._connected:
            return False
        try:
            self._outbox.put_nowait(frame)
        except asyncio.QueueFull:
            logger.warning("worker reads no requests", extra={"worker": self.worker_id, "target": self.target})
            return False
        return True

    def _note_problem(self, problem: str) -> None:
        # Pods come and go: what passes by itself is no warning, and what stays is one.
        now = self._clock.now()
        if not self.problem:
            self._problem_at, self._problem_told = now, False
        lasts_s = now - self._problem_at
        extra = {"target": self.target, "worker": self._expected_id, "problem": problem}
        if lasts_s >= _LASTING_S and not self._problem_told:
            self._problem_told = True
            logger.warning("no link to worker", extra=extra | {"for_s": round(lasts_s, 1)})
        elif problem != self.problem:
            logger.info("no link to worker", extra=extra)
        self.problem = problem

    # Frames.

    def _on_frame(self, frame: worker_pb2.WorkerFrame, stub: Any) -> None:
        if frame.epoch < self.epoch:
            metrics.DROPPED_FRAMES.labels("stale_epoch").inc()
            return
        self.last_seen_at = self._clock.now()
        kind = frame.WhichOneof("frame")
        if frame.epoch > self.epoch:
            self._enter_epoch(frame.epoch)
        match kind:
            case "hello":
                self._on_hello(frame.hello, stub)
            case "tokens":
                self._on_tokens(frame.tokens)
            case "status":
                self._on_status(frame.status)
            case "rejected":
                self._on_rejected(frame.rejected)
        if self._silent:
            self._silent = False
            logger.info("worker is heard again", extra={"worker": self.worker_id, "target": self.target})
            self._on_change(self)

    def _enter_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._stepped_at = self._clock.now()
        self._lose_attempts(Loss.NEW_EPOCH)

    @property
    def _expected_id(self) -> str:
        return self.found.worker_id or self.worker_id

    def _check_identity(self, hello: worker_pb2.Hello) -> None:
        """An address that another pod has got meanwhile leads to another worker."""
        if self.found.worker_id is not None and hello.worker_id != self.found.worker_id:
            raise ProtocolError(f"the worker there is {hello.worker_id!r} and not {self.found.worker_id!r}")

    def _on_hello(self, hello: worker_pb2.Hello, stub: Any) -> None:
        self._check_identity(hello)
        if self.card is not None and (self.card.digest, self.incarnation) != (hello.model.digest, hello.incarnation):
            self._lose_attempts(Loss.NEW_EPOCH)
        self.worker_id = hello.worker_id or self.target
        self.incarnation = hello.incarnation
        # A worker that still loads may not know its model yet.
        self.card = hello.model if hello.model.name else None
        self.problem = ""
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
        for frame in tokens.streams:
            attempt = self._attempts.get(frame.stream_id)
            if attempt is None:
                # Usual after a cancel: the worker had already computed them.
                metrics.DROPPED_FRAMES.labels("late").inc()
            else:
                attempt.on_tokens(frame, now)

    def _on_status(self, status: worker_pb2.Status) -> None:
        if status.steps != self.status.steps:
            self._stepped_at = self._clock.now()
        before, self.status = self.status.state, status
        self._sent_since_status = 0
        if status.state not in _RUNS_STREAMS:
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
        for attempt in list(self._attempts.values()):
            attempt.lose(reason)

    async def _fetch_tokenizer(self, stub: Any, digest: str) -> None:
        """Fetch and build the tokenizer, again and again if that fails: without it the worker cannot be used."""
        while digest not in self._tokenizers:
            try:
                request = worker_pb2.TokenizerRequest(digest=digest)
                files = await stub.Tokenizer(request, timeout=self._settings.tokenizer_timeout_s)
                if files.digest != digest:
                    raise ProtocolError(f"asked for tokenizer {digest}, got {files.digest}")
                # Large vocabularies take a second to read.
                self._tokenizers.add(await asyncio.to_thread(Tokenizer, files))
            except (grpc.aio.AioRpcError, ProtocolError, ValueError) as error:
                self._note_problem(f"tokenizer: {_describe(error)}")
                await asyncio.sleep(self._settings.backoff_max_s)
        self.problem = ""
        self._on_change(self)


async def _stop(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error)
