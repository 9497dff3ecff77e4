"""The network between routers and workers, and the part of `grpc.aio` that a link uses, on top of it.

A connection keeps the order of its frames, as HTTP/2 does, whatever their delays; connections overtake each other.
A path that is cut loses nothing: frames are sent again and arrive, late, when it heals, unless one side has given the
connection up before. Ends of connections travel like frames, so a cut path leaves them half-open.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import grpc
from lockstep_api.v1 import worker_pb2

from simulated.kernel import Event, Kernel, ProcessLoop

KEEPALIVE_S = 15.0
"""Time after which both sides give up a connection whose peer answers no pings: 10 s to a ping, 5 s for its answer."""

JITTER_S = 0.002
"""Largest random delay of a path without faults."""

_MAX_HELD = 1024
"""Frames on the way to a router that does not take them, after which the worker gives the connection up."""

_WINDOW = 256
"""Frames on the way to a worker, after which a router's write waits."""


@dataclass
class Path:
    """What the network does to frames from one machine to another."""

    least_s: float = 0.0005
    jitter_s: float = JITTER_S
    is_cut: bool = False
    cut_since: float = 0.0
    healed_at: float = 0.0


class Host(Protocol):
    """A worker's process, as the network sees it."""

    target: str
    incarnation: int
    is_listening: bool
    is_reachable: bool
    is_stopped: bool

    def on_hello(self, connection: "Connection", hello: worker_pb2.RouterHello) -> None: ...
    def on_frame(self, connection: "Connection", frame: worker_pb2.RouterFrame) -> None: ...
    def on_end(self, connection: "Connection") -> None: ...


Rewrite = Callable[[Any], list[Any]]
"""What becomes of a frame: itself, nothing, or others. Mutations of the transport, to test the checker."""


class Reading(Protocol):
    """Watches routers that read frames."""

    def on_read(self, connection: "Connection", frame: worker_pb2.WorkerFrame) -> None:
        """A router gets a frame."""

    def on_next(self, connection: "Connection") -> None:
        """It wants the next one: what it does with the last one is done."""


@dataclass
class Network:
    """All paths and connections."""

    kernel: Kernel
    rng: Random
    hosts: dict[str, Host] = field(default_factory=dict)
    """Worker processes by target."""
    connections: list["Connection"] = field(default_factory=list)
    to_worker: Rewrite = lambda frame: [frame]
    to_router: Rewrite = lambda frame: [frame]
    reading: Reading | None = None
    _paths: dict[tuple[str, str], Path] = field(default_factory=dict)

    def path(self, source: str, destination: str) -> Path:
        return self._paths.setdefault((source, destination), Path())

    def cut(self, source: str, destination: str) -> None:
        path = self.path(source, destination)
        if not path.is_cut:
            path.is_cut, path.cut_since = True, self.kernel.now
        for connection in self.between(source, destination):
            connection.watch()

    def heal(self, source: str, destination: str) -> None:
        path = self.path(source, destination)
        path.is_cut, path.healed_at = False, self.kernel.now
        for connection in self.between(source, destination):
            connection.flush()

    def between(self, one: str, other: str) -> list["Connection"]:
        return [each for each in self.connections if {each.router, each.target} == {one, other}]

    def of(self, machine: str) -> list["Connection"]:
        """The connections of a router or of a worker's target."""
        return [each for each in self.connections if machine in (each.router, each.target)]

    def delay_s(self, source: str, destination: str) -> float:
        path = self.path(source, destination)
        return path.least_s + self.rng.random() * path.jitter_s

    def dial(self, loop: ProcessLoop, target: str) -> "Channel":
        return Channel(self, loop, target)


class Pipe:
    """One direction of a connection."""

    def __init__(
        self,
        network: Network,
        source: str,
        destination: str,
        deliver: Callable[[Any], None],
        is_held: Callable[[], bool],
    ) -> None:
        self._network = network
        self._source, self._destination = source, destination
        self._deliver = deliver
        self._is_held = is_held
        self._waiting: deque[tuple[float, Any]] = deque()
        self._event: Event | None = None
        self._last_at = 0.0
        self.is_open = True
        self.on_room: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, item: Any) -> None:
        if not self.is_open:
            return
        at = self._network.kernel.now + self._network.delay_s(self._source, self._destination)
        self._last_at = max(self._last_at, at)
        self._waiting.append((self._last_at, item))
        self._schedule()

    def close(self) -> None:
        """Nothing that is on the way arrives."""
        self.is_open = False
        self._waiting.clear()
        if self._event is not None:
            self._event.cancel()

    def flush(self) -> None:
        """What was held goes on now."""
        self._schedule()

    @property
    def is_blocked(self) -> bool:
        return self._network.path(self._source, self._destination).is_cut or self._is_held()

    def _schedule(self) -> None:
        if self._event is None and self._waiting and not self.is_blocked:
            self._event = self._network.kernel.at(self._waiting[0][0], self._arrive)

    def _arrive(self) -> None:
        self._event = None
        now = self._network.kernel.now
        while self._waiting and self._waiting[0][0] <= now and not self.is_blocked:
            self._deliver(self._waiting.popleft()[1])
        self.on_room()
        self._schedule()


_END = object()
"""Travels in place of a frame: the other side has ended the connection."""


class Connection:
    """One Serve stream between a router and a worker process."""

    def __init__(self, network: Network, loop: ProcessLoop, host: Host) -> None:
        self._network = network
        self._kernel = network.kernel
        self.loop = loop
        """Of the router's process."""
        self.host = host
        self.router, self.target = loop.name, host.target
        self._up = Pipe(network, self.router, self.target, self._at_worker, self._worker_is_away)
        self._down = Pipe(network, self.target, self.router, self._at_router, lambda: False)
        self._up.on_room = self._wake_writers
        self._read: deque[Any] = deque()
        self._readers: deque[asyncio.Future[None]] = deque()
        self._writers: deque[asyncio.Future[None]] = deque()
        self.router_knows_end = self.worker_knows_end = False
        self._is_greeted = False
        self._watch: Event | None = None
        self.hello_sent_at = 0.0
        network.connections.append(self)

    # For the worker.

    def send(self, frame: worker_pb2.WorkerFrame) -> None:
        if self.worker_knows_end:
            return
        for each in self._network.to_router(frame):
            self._down.send(each.SerializeToString())
        if len(self._down) + len(self._read) > _MAX_HELD:
            self._kernel.trace("overflow", self.router, self.target)
            self.end_by_worker()

    def end_by_worker(self) -> None:
        """End it on the worker's side: the process died, or it hangs up."""
        if not self.worker_knows_end:
            self.worker_knows_end = True
            self._up.close()
            self._down.send(_END)
            self.host.on_end(self)
            self._forget()

    # For the router.

    async def write(self, frame: worker_pb2.RouterFrame) -> None:
        while len(self._up) >= _WINDOW and not self.router_knows_end:
            self._writers.append(self.loop.create_future())
            await self._writers[-1]
        if self.router_knows_end:
            raise unavailable("the connection has ended")
        if frame.WhichOneof("frame") == "hello":
            self.hello_sent_at = self._kernel.now
        kept = [each for one in frames_of(frame) for each in self._network.to_worker(one)]
        if frame.HasField("several"):
            self._up.send(worker_pb2.RouterFrame(several=worker_pb2.RouterFrames(frames=kept)).SerializeToString())
        else:
            for each in kept:
                self._up.send(each.SerializeToString())

    async def read(self) -> Any:
        reading = self._network.reading
        if reading is not None:
            reading.on_next(self)
        while not self._read:
            if self.router_knows_end:
                raise unavailable("the connection was reset")
            self._readers.append(self.loop.create_future())
            await self._readers[-1]
        frame = worker_pb2.WorkerFrame.FromString(self._read.popleft())
        if reading is not None:
            reading.on_read(self, frame)
        return frame

    def end_by_router(self) -> None:
        """End it on the router's side: its process died, or it closes the channel."""
        if not self.router_knows_end:
            self.router_knows_end = True
            self._down.close()
            self._read.clear()
            self._up.send(_END)
            self._wake()
            self._forget()

    # Both.

    def vanish(self, *, for_worker: bool) -> None:
        """One side forgets it and the other does not learn it, as when a NAT drops its state."""
        if for_worker and not self.worker_knows_end:
            self.worker_knows_end = True
            self.host.on_end(self)
        elif not for_worker:
            self._end_for_router()
        self._up.close()
        self._down.close()
        self.watch()
        self._forget()

    def flush(self) -> None:
        self._up.flush()
        self._down.flush()

    def watch(self) -> None:
        """Give it up on both sides if the peer's silence lasts."""
        if self._watch is None:
            self._watch = self._kernel.after(KEEPALIVE_S, self._check)

    @property
    def _is_half_open(self) -> bool:
        return not self._up.is_open or not self._down.is_open

    @property
    def _is_mute(self) -> bool:
        return self._up.is_blocked or self._down.is_blocked or self.loop.is_frozen

    def _check(self) -> None:
        self._watch = None
        there, back = self._network.path(self.router, self.target), self._network.path(self.target, self.router)
        quiet_s = self._kernel.now - max(there.healed_at, back.healed_at)
        if not self._is_half_open and (not self._is_mute or quiet_s < KEEPALIVE_S):
            if self._is_mute:
                self.watch()
            return
        self._kernel.trace("keepalive", self.router, self.target)
        self._end_for_router()
        if not self.worker_knows_end:
            self.worker_knows_end = True
            self.host.on_end(self)
        self._up.close()
        self._down.close()
        self._forget()

    @property
    def can_reach_worker(self) -> bool:
        """Whether what the router sends, its end included, arrives."""
        return self._up.is_open and not self._up.is_blocked

    def _worker_is_away(self) -> bool:
        return self.host.is_stopped or not self.host.is_reachable

    def _at_worker(self, item: Any) -> None:
        if self.worker_knows_end:
            return
        if item is _END:
            self.worker_knows_end = True
            self._down.close()
            self.host.on_end(self)
            self._forget()
            return
        for frame in frames_of(worker_pb2.RouterFrame.FromString(item)):
            if frame.WhichOneof("frame") == "hello":
                self.host.on_hello(self, frame.hello)
            else:
                self.host.on_frame(self, frame)

    def _at_router(self, item: Any) -> None:
        if self.router_knows_end:
            return
        if item is _END:
            self._end_for_router()
            self._up.close()
            self._forget()
            return
        self._read.append(item)
        self._wake_one()

    def _end_for_router(self) -> None:
        self.router_knows_end = True
        self._wake()

    def _wake_one(self) -> None:
        while self._readers:
            reader = self._readers.popleft()
            if not reader.done():
                reader.set_result(None)
                return

    def _wake(self) -> None:
        for waiter in (*self._readers, *self._writers):
            if not waiter.done():
                waiter.set_result(None)
        self._readers.clear()
        self._writers.clear()

    def _wake_writers(self) -> None:
        while self._writers and len(self._up) < _WINDOW:
            writer = self._writers.popleft()
            if not writer.done():
                writer.set_result(None)

    def _forget(self) -> None:
        if self.router_knows_end and self.worker_knows_end and self in self._network.connections:
            self._network.connections.remove(self)


def frames_of(message: worker_pb2.RouterFrame) -> list[worker_pb2.RouterFrame]:
    """The frames of one message."""
    return list(message.several.frames) if message.HasField("several") else [message]


def unavailable(details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class Channel:
    """A channel of `grpc.aio` as the generated stub and the link use it."""

    def __init__(self, network: Network, loop: ProcessLoop, target: str) -> None:
        self.network = network
        self.loop = loop
        self.target = target
        self._calls: list[Call] = []
        self._state = grpc.ChannelConnectivity.IDLE
        self._changed = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        for call in self._calls:
            call.end()

    def get_state(self, try_to_connect: bool) -> grpc.ChannelConnectivity:
        if try_to_connect and self._connecting is None:
            self._state = grpc.ChannelConnectivity.CONNECTING
            self._connecting = self.loop.create_task(self._connect())
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            self._changed.clear()
            await self._changed.wait()

    async def _connect(self) -> None:
        try:
            await self.reach()
            self._state = grpc.ChannelConnectivity.READY
        except grpc.aio.AioRpcError:
            self._state = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        self._changed.set()

    def stream_stream(self, _method: str, **_: object) -> Callable[[], "Call"]:
        def call() -> Call:
            self._calls.append(Call(self))
            return self._calls[-1]

        return call

    def unary_unary(self, _method: str, **_: object) -> Callable[..., Any]:
        async def fetch(request: worker_pb2.TokenizerRequest, timeout: float) -> worker_pb2.TokenizerFiles:
            try:
                async with asyncio.timeout(timeout):
                    host = await self.reach()
                    return host.tokenizer(request)  # type: ignore[attr-defined, no-any-return]
            except TimeoutError:
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "no answer"
                ) from None

        return fetch

    async def reach(self) -> Host:
        """A round trip to the listener; it takes as long as the paths are cut."""
        network = self.network
        there, back = network.path(self.loop.name, self.target), network.path(self.target, self.loop.name)
        while True:
            trip_s = network.delay_s(self.loop.name, self.target) + network.delay_s(self.target, self.loop.name)
            await asyncio.sleep(trip_s)
            host = network.hosts.get(self.target)
            if there.is_cut or back.is_cut or (host is not None and (host.is_stopped or not host.is_reachable)):
                await asyncio.sleep(0.2)  # the next SYN
                continue
            if host is None or not host.is_listening:
                raise unavailable("connection refused")
            return host


class Call:
    """A Serve call: it connects with its first frame."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._connection: Connection | None = None

    async def write(self, message: bytes) -> None:
        if self._connection is None:
            host = await self._channel.reach()
            self._connection = Connection(self._channel.network, self._channel.loop, host)
        await self._connection.write(worker_pb2.RouterFrame.FromString(message))

    async def read(self) -> Any:
        assert self._connection is not None
        return await self._connection.read()

    def end(self) -> None:
        if self._connection is not None:
            self._connection.end_by_router()
