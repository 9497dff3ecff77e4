"""A worker served over a unix socket in this process, and a router's end of its Serve stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from lockstep_api.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from lockstep_worker.server import run
from lockstep_worker.settings import WorkerSettings
from scripted_engine import Script, ScriptedEngine
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

PATIENCE_S = 30.0


def tokenizer_json(*words: str) -> str:
    """A tokenizer that knows these words."""
    vocabulary = {word: number for number, word in enumerate(("?", *words))}
    return Tokenizer(WordLevel(vocabulary, unk_token="?")).to_str()


def make_settings(model: Path, socket_path: str, **changes: Any) -> WorkerSettings:
    values = {
        "worker_id": "w0",
        "management_port": 0,
        "status_interval_s": 0.05,
        "drain_timeout_s": 2.0,
        "tp": 2,
    } | changes
    return WorkerSettings(model=str(model), listen=f"unix:{socket_path}", **values)


def submit(stream_id: str = "s", attempt: int = 1, *, max_tokens: int = 4, **fields: Any) -> worker_pb2.Submit:
    message = {"prompt_ids": [1, 2, 3], "sampling": inference_pb2.Sampling(max_tokens=max_tokens)} | fields
    return worker_pb2.Submit(stream_id=stream_id, attempt=attempt, **message)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel with its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(address, options=options)


@dataclass
class Router:
    """One router's Serve stream. `seen` keeps every frame in the order it came."""

    call: Any
    seen: list[worker_pb2.WorkerFrame] = field(default_factory=list)

    async def send(self, **frame: Any) -> None:
        await self.call.write(worker_pb2.RouterFrame(**frame))

    async def greet(self, router_id: str = "r0") -> worker_pb2.Hello:
        await self.send(hello=worker_pb2.RouterHello(router_id=router_id))
        return (await self.next("hello")).hello

    async def next(self, kind: str | None = None) -> worker_pb2.WorkerFrame:
        """The next frame, or the next one of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                frame = await self.call.read()
                if frame is grpc.aio.EOF:
                    raise EOFError
                self.seen.append(frame)
                if kind in (None, frame.WhichOneof("frame")):
                    return frame

    async def status(self, state: int) -> worker_pb2.Status:
        """The next Status in a state."""
        while True:
            status = (await self.next("status")).status
            if status.state == state:
                return status

    async def ready(self) -> None:
        await self.status(worker_pb2.WORKER_STATE_READY)

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Read on until the worker ends the RPC."""
        try:
            while True:
                await self.next()
        except (EOFError, grpc.aio.AioRpcError):
            return await self.call.code(), await self.call.details()

    def kinds(self) -> list[str | None]:
        return [frame.WhichOneof("frame") for frame in self.seen]


@dataclass
class Served:
    """A worker that runs in this process."""

    script: Script
    stop: asyncio.Event
    task: asyncio.Task[int]
    address: str
    channel: grpc.aio.Channel

    @property
    def engine(self) -> ScriptedEngine:
        return self.script.engine

    @property
    def stub(self) -> worker_pb2_grpc.WorkerStub:
        return worker_pb2_grpc.WorkerStub(self.channel)

    def router(self) -> Router:
        return Router(self.stub.Serve())

    async def greeted(self, router_id: str = "r0") -> Router:
        """A router that has been greeted and has seen the worker ready."""
        router = self.router()
        await router.greet(router_id)
        await router.ready()
        return router

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


@contextlib.asynccontextmanager
async def served(settings: WorkerSettings, script: Script | None = None) -> AsyncIterator[Served]:
    script = script or Script()
    stop = asyncio.Event()
    task = asyncio.create_task(run(settings, stop, script))
    path = settings.listen.removeprefix("unix:")
    await until(lambda: Path(path).exists() or task.done())
    channel = open_channel(settings.listen)
    try:
        yield Served(script, stop, task, settings.listen, channel)
    finally:
        await channel.close()
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(task, return_exceptions=True)
