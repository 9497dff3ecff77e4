"""The connection to one worker: a gRPC stream that is dialled again whenever it breaks.

It passes frames in both directions and never looks into those after the first one.
"""

import asyncio
import logging
from random import Random
from typing import Any, Protocol

import grpc
from lockstep_api.v1 import worker_pb2, worker_pb2_grpc
from lockstep_common.grpc_tls import Dial
from lockstep_common.protocol import MAX_MESSAGE_BYTES

from lockstep_router.discovery import WorkerAddress
from lockstep_router.settings import RouterSettings
from lockstep_router.workers.clock import AwakeClock
from lockstep_router.workers.connect import connect
from lockstep_router.workers.outbox import Outbox

logger = logging.getLogger("lockstep.router")

_WARN_AFTER_S = 5.0
"""A worker that has been unreachable for longer than this is logged as a warning."""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Each dial is a fresh connection: the pauses between dials are the router's own and no hidden state survives one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


_SERVE = "/lockstep.v1.Worker/Serve"
"""The stub's own method would serialize what the router writes; see `wire`."""


class ProtocolError(Exception):
    """The worker broke the protocol; the connection cannot be used."""


class Receiver(Protocol):
    """What takes a worker's frames."""

    address: WorkerAddress
    retired: bool
    """Whether no further connection is wanted."""
    last_seen_at: float | None
    """When the last frame was taken."""

    @property
    def expected_id(self) -> str:
        """The worker's id, as far as it is known."""

    def on_connected(self, hello: worker_pb2.Hello, stub: Any) -> None:
        """A connection begins; its first frame follows. ProtocolError: it cannot be used."""

    def on_frame(self, frame: worker_pb2.WorkerFrame) -> None:
        """Take a frame. ProtocolError: the connection cannot be used any more."""

    def on_disconnected(self) -> None:
        """The connection has ended."""


class WorkerConnection:
    """One worker's connection, whether there is one now or not."""

    def __init__(
        self, receiver: Receiver, settings: RouterSettings, clock: AwakeClock, dial: Dial, rng: Random
    ) -> None:
        self.greeted_at = 0.0
        """When the RouterHello of the present connection was sent, in the event loop's time."""
        self.problem = ""
        """Why there is no connection."""
        self._problem_at = 0.0
        self._problem_warned = False
        self._receiver = receiver
        self._settings = settings
        self._clock = clock
        self._dial = dial
        self._rng = rng
        # At most two frames for each stream. If the worker does not read them, new streams fail.
        self._outbox = Outbox(2 * settings.max_streams)

    def send(self, frame: bytes) -> bool:
        """Send a frame of `wire` while there is a connection; False if the worker does not read its frames."""
        is_sent = self._outbox.put(frame)
        if not is_sent:
            extra = {"worker": self._receiver.expected_id, "target": self._receiver.address.target}
            logger.warning("worker does not read its requests", extra=extra)
        return is_sent

    async def run(self) -> None:
        """Keep connected until cancelled or, when the worker is retired, until the connection ends."""
        pause_s = self._settings.backoff_initial_s
        while not self._receiver.retired:
            greeted_before = self._receiver.last_seen_at
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, ProtocolError, TimeoutError) as error:
                self.note_problem(describe(error))
            except Exception:
                logger.exception("link failed", extra={"target": self._receiver.address.target})
                self.note_problem("internal error")
            if self._receiver.last_seen_at != greeted_before:
                pause_s = self._settings.backoff_initial_s
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._settings.backoff_max_s)

    async def _serve(self) -> None:
        """Run one connection, from dialling to its end; always raises."""
        loop = asyncio.get_running_loop()
        connected_by = loop.time() + self._settings.connect_timeout_s
        address = self._receiver.address
        async with asyncio.timeout_at(connected_by):
            channel = await connect(
                (address.target, *address.alternates),
                lambda target: self._dial(target, CHANNEL_OPTIONS),
                self._settings.connect_hedge_s,
            )
        async with channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = channel.stream_stream(_SERVE, response_deserializer=worker_pb2.WorkerFrame.FromString)()
            async with asyncio.timeout_at(connected_by):
                hello = worker_pb2.RouterHello(router_id=self._settings.router_id)
                await call.write(worker_pb2.RouterFrame(hello=hello).SerializeToString())
                self.greeted_at = loop.time()  # after the time that connecting took
                frame = await call.read()
            if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "hello":
                raise ProtocolError("the worker's first frame is not Hello")
            self._receiver.on_connected(frame.hello, stub)
            writing = asyncio.create_task(self._write(call, several=frame.hello.accepts_several))
            try:
                while frame is not grpc.aio.EOF:
                    self._receiver.on_frame(frame)
                    frame = await call.read()
                raise ProtocolError("the worker closed the stream")
            finally:
                # The streams move on while the rest is cleaned up.
                self._outbox.clear()
                self._receiver.on_disconnected()
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, call: Any, *, several: bool) -> None:
        # A failed write ends the gRPC stream, and the reader sees that.
        while True:
            await call.write(await self._outbox.take(several=several))

    def note_problem(self, problem: str) -> None:
        """Note why the worker cannot be used."""
        # A rollout makes workers unreachable for a short time; only a longer problem is logged as a warning.
        now = self._clock.now()
        if not self.problem:
            self._problem_at, self._problem_warned = now, False
        lasted_s = now - self._problem_at
        receiver = self._receiver
        extra = {"target": receiver.address.target, "worker": receiver.expected_id, "problem": problem}
        if lasted_s >= _WARN_AFTER_S and not self._problem_warned:
            self._problem_warned = True
            logger.warning("no link to worker", extra=extra | {"for_s": round(lasted_s, 1)})
        elif problem != self.problem:
            logger.info("no link to worker", extra=extra)
        self.problem = problem


def describe(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
