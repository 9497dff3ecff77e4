"""Whatever comes in at a worker's gRPC port, no defect shows, nothing is left behind, and the streams of a router that
keeps to the protocol are as without it.

`--fuzz-cases 100000` or `--fuzz-seconds 600` for a long run by hand; a seed makes the same cases again.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import odd_frames
import psutil
import pytest
from fuzzing import PREFACE, run_cases
from lockstep_api.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from lockstep_common.ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from system import REFERENCE

_SCRIPTED = Path(__file__).parents[2] / "services/inference-worker/tests/scripted_process.py"
_START_S = 180.0
_PATIENCE_S = 60.0
_QUIET_S = 10.0
"""The longest silence of a stream that behaves."""
_MOST_ROUTERS = 16
_FILES = 16
"""What a worker opens once, when it first needs it."""
_TOKENS = 30
_OWN = "behaved-"


@dataclass
class Worker:
    """A worker process."""

    port: int
    management_port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def defects(self) -> list[str]:
        """The lines of the log that no client may cause: errors, and what is no line of the log."""
        lines = self.log.read_text().splitlines()
        return [
            each for each in lines if not each.startswith("{") or json.loads(each)["level"] in ("error", "critical")
        ]

    def open_files(self) -> int:
        """Those that no connection explains which the client's own library has still open."""
        own = sum(bool(each.raddr) and each.raddr.port == self.port for each in psutil.Process().net_connections())
        return int(psutil.Process(self.process.pid).num_fds()) - own

    async def gauges(self) -> dict[str, float]:
        """What the worker holds for routers."""
        async with httpx.AsyncClient(trust_env=False, timeout=_PATIENCE_S) as client:
            text = (await client.get(f"http://127.0.0.1:{self.management_port}/metrics")).text
        names = ("routers", "streams", "running", "queued", "free_blocks")
        found = {family.name: family.samples for family in text_string_to_metric_families(text)}
        return {name: found[f"lockstep_worker_{name}"][0].value for name in names}


@pytest.fixture(scope="module", params=["scripted", pytest.param("ranks", marks=pytest.mark.slow)])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The worker's own code on a scripted engine, or on ranks with the reference model. In the end it stops as it
    should.
    """
    port, management_port, log = free_port(), free_port(), tmp_path_factory.mktemp("worker") / "log"
    flags = {"model": REFERENCE, "listen": f"127.0.0.1:{port}", "management-port": management_port, "worker-id": "w0"}
    flags |= {"tp": 2, "threads": 1, "device": "cpu", "max-routers": _MOST_ROUTERS, "drain-timeout-s": 1}
    program = [str(_SCRIPTED)] if request.param == "scripted" else ["-m", "lockstep_worker"]
    command = [sys.executable, *program, *(f"--{name}={value}" for name, value in flags.items())]
    environment = os.environ | {"LOCKSTEP_DIE_WITH_PARENT": str(os.getpid())}
    with log.open("w") as written, subprocess.Popen(command, stderr=written, env=environment) as process:
        try:
            made = Worker(port, management_port, process, log)
            yield made
            assert process.poll() is None
            process.terminate()
            assert process.wait(_PATIENCE_S) == 0
            assert made.defects() == []
        finally:
            process.kill()


def connect(target: str) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    return grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])


@dataclass
class Behaved:
    """A router that keeps to the protocol: one stream after the other, all with the same tokens."""

    call: Any
    expected: list[int] = field(default_factory=list)
    """The tokens of the first stream, which has the worker for itself."""
    tokens: int = 0
    streams: int = 0
    silence_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        """Greet the worker, wait until it is ready, and learn what a stream's tokens are."""
        hello = worker_pb2.RouterHello(router_id="behaved")
        await self.call.write(worker_pb2.RouterFrame(hello=hello))
        while (await self.call.read()).status.state != worker_pb2.WORKER_STATE_READY:
            pass
        await self._submit()
        self.expected = [token async for token in self._tokens()]
        assert len(self.expected) == _TOKENS

    async def go_on(self) -> None:
        """Begin a stream whenever one has ended."""
        while True:
            await self._submit()
            last_s, position = time.monotonic(), 0
            async for token in self._tokens():
                if token != self.expected[position]:
                    self.wrong.append(f"token {position} is {token}, not {self.expected[position]}")
                self.silence_s = max(self.silence_s, time.monotonic() - last_s)
                last_s, position = time.monotonic(), position + 1
                self.tokens += 1
            if position != _TOKENS:
                self.wrong.append(f"a stream has {position} tokens")

    async def _submit(self) -> None:
        self.streams += 1
        submit = worker_pb2.Submit(
            stream_id=f"{_OWN}{self.streams}",
            attempt=1,
            prompt_ids=[3, 1, 4, 1, 5],
            sampling=inference_pb2.Sampling(max_tokens=_TOKENS, temperature=0.9, seed=7, ignore_eos=True),
            priority=1,
            handle=self.streams,
        )
        await self.call.write(worker_pb2.RouterFrame(submit=submit))

    async def _tokens(self) -> AsyncIterator[int]:
        """The tokens of the stream that runs; notes what is not its own."""
        stream_id, position = f"{_OWN}{self.streams}", 0
        while True:
            frame = await self.call.read()
            if frame is grpc.aio.EOF:
                raise EOFError
            if frame.HasField("rejected"):
                self.wrong.append(f"rejected: {frame.rejected}")
                return
            strangers = [each for each in _names(frame) if not each.startswith(_OWN)]
            self.wrong += [f"of somebody else: {each}" for each in strangers]
            columns = zip(frame.tokens.handles, frame.tokens.positions, frame.tokens.ids, strict=True)
            pieces = [(at, [token]) for handle, at, token in columns if handle == self.streams]
            own = [each for each in frame.tokens.streams if each.stream_id == stream_id]
            for at, ids in [*pieces, *((each.position, each.ids) for each in own)]:
                if at != position:
                    self.wrong.append(f"position {at} after {position} tokens")
                position += len(ids)
                for token in ids:
                    yield token
            if any(each.finish for each in own):
                return


def _names(frame: worker_pb2.WorkerFrame) -> list[str]:
    """The streams that a frame is about."""
    parts = (frame.tokens.streams, frame.phases.streams, frame.ended_attempts.attempts)
    return [each.stream_id for part in parts for each in part]


@contextlib.asynccontextmanager
async def behaved(worker: Worker) -> AsyncIterator[Behaved]:
    """A router under what is done within. Its streams go on unchanged, and afterwards the worker holds nothing else."""
    async with connect(worker.target) as channel:
        await asyncio.wait_for(channel.channel_ready(), _START_S)
        router = Behaved(worker_pb2_grpc.WorkerStub(channel).Serve())  # type: ignore[no-untyped-call]
        async with asyncio.timeout(_START_S):
            await router.begin()
        idle = await _idle(worker)
        files = worker.open_files()
        going_on = asyncio.create_task(router.go_on())
        yield router
        count = router.tokens
        async with asyncio.timeout(_PATIENCE_S):
            while router.tokens < count + _TOKENS:
                assert not going_on.done(), going_on.exception()
                await asyncio.sleep(0.01)
        going_on.cancel()
        router.call.cancel()
    assert router.wrong == []
    assert router.silence_s < _QUIET_S
    assert await _idle(worker, routers=0) == idle | {"routers": 0}
    end_s = time.monotonic() + _PATIENCE_S
    while worker.open_files() > files + _FILES:
        assert time.monotonic() < end_s, (files, worker.open_files())
        await asyncio.sleep(0.1)


async def _idle(worker: Worker, routers: int = 1) -> dict[str, float]:
    """Wait until so many routers are left, and no stream; what the worker holds then."""
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        found = await worker.gauges()
        if found["routers"] == routers and not found["streams"] + found["running"] + found["queued"]:
            return found
        assert time.monotonic() < end_s, found
        await asyncio.sleep(0.1)


async def test_frames(worker: Worker, seed: int, pytestconfig: pytest.Config, summarize: Callable[[str], None]) -> None:
    draw, statuses = random.Random(seed), Counter[str]()
    async with behaved(worker) as router, connect(worker.target) as shared:

        async def case() -> None:
            made = odd_frames.make(draw)
            async with contextlib.AsyncExitStack() as stack:
                channel = await stack.enter_async_context(connect(worker.target)) if made.is_alone else shared
                status = await odd_frames.send(channel, made, _PATIENCE_S)
            assert status in odd_frames.ANSWERS, (status, made)
            statuses[status] += 1

        cases = await run_cases(pytestconfig, case, share=5, timeout_s=_PATIENCE_S)
    counts = f"{dict(statuses)}; {router.streams} other streams, silent for {router.silence_s:.2f} s at most"
    summarize(f"worker, frames: {cases} calls (seed {seed}), {counts}")
    assert statuses["OK"] > cases / 10
    assert statuses["INVALID_ARGUMENT"] > cases / 10


async def test_bytes(worker: Worker, seed: int, pytestconfig: pytest.Config, summarize: Callable[[str], None]) -> None:
    draw, answered = random.Random(seed), 0

    async def case() -> None:
        nonlocal answered
        data = PREFACE if draw.random() < 0.8 else odd_frames.noise(draw)
        for _ in range(draw.randrange(1, 6)):
            payload = odd_frames.noise(draw)
            head = len(payload).to_bytes(3) + bytes([draw.randrange(11), draw.randrange(256)])
            data += head + draw.randrange(8).to_bytes(4) + payload
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        received = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(0.05):
                while some := await reader.read(1 << 16):
                    received += len(some)
        writer.transport.abort()
        answered += received > 0

    async with behaved(worker) as router:
        cases = await run_cases(pytestconfig, case, share=5, timeout_s=_PATIENCE_S)
    summarize(f"worker, bytes: {cases} connections, {answered} answered (seed {seed}); {router.streams} other streams")
    assert answered  # nearly all, where the machine is not so slow that they are cut off first


async def test_many_connections(worker: Worker) -> None:
    """Those that say nothing, and more routers than the worker takes, which are refused until others have gone."""
    async with behaved(worker):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(150):
                _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
                stack.callback(writer.transport.abort)
            channels = [await stack.enter_async_context(connect(worker.target)) for _ in range(2 * _MOST_ROUTERS)]
            calls = [worker_pb2_grpc.WorkerStub(channel).Serve() for channel in channels]  # type: ignore[no-untyped-call]
            taken = [await _greets(call) for call in calls]
            assert taken.count(True) == _MOST_ROUTERS - 1
        async with asyncio.timeout(_PATIENCE_S), connect(worker.target) as channel:
            while not await _greets(worker_pb2_grpc.WorkerStub(channel).Serve()):  # type: ignore[no-untyped-call]
                await asyncio.sleep(0.05)


async def _greets(call: Any) -> bool:
    """Whether the worker takes one more router; only too many may be the reason if it does not."""
    try:
        await call.write(worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="one more")))
        return bool((await call.read()).HasField("hello"))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        return False
