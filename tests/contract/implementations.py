"""The implementations of worker.proto behind one interface: where it listens, and how it loses a rank.

The double is what the router's tests run against, so what holds for it here must hold for the real worker. The worker
on a scripted engine is the service's own code without a model; the real one is a process with ranks.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import grpc
from harness import Router, make_settings, open_channel, served
from lockstep_api.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from lockstep_common.lifecycle import DIE_WITH_PARENT_VARIABLE
from machine import standing_still, wait_for
from scripted_engine import Script as EngineScript
from scripted_worker import Script, ScriptedWorker
from system import REFERENCE

DOUBLE = "router's double"
SCRIPTED = "worker on a scripted engine"
REAL = "worker with ranks"

_STEP_S = 0.01  # makes a stream last long enough to be disturbed
_RESTART_S = 0.2
_START_S = 60.0


@dataclass
class Implementation:
    """A worker that listens."""

    channel: grpc.aio.Channel
    lose_rank: Callable[[Router], Awaitable[None]]
    """Makes it lose a rank while a router's streams run, and become ready in the next epoch."""
    standing: Callable[[worker_pb2.Status], AbstractContextManager[None]] = lambda _: nullcontext()
    """While it is entered, ranks of another process than the test's make no steps: no stream ends, however long the
    machine pauses the test. A worker in the test's own process is paused with it. The argument has the ranks.
    """

    @property
    def stub(self) -> worker_pb2_grpc.WorkerStub:
        return worker_pb2_grpc.WorkerStub(self.channel)

    def router(self) -> Router:
        """A router's end of a new Serve stream, not greeted yet."""
        return Router(self.stub.Serve())

    async def greeted(self) -> tuple[Router, worker_pb2.Hello]:
        """A router that has been greeted and has seen the worker ready."""
        router = self.router()
        hello = await router.greet()
        await router.ready()
        return router, hello


def submit(
    stream_id: str,
    attempt: int = 1,
    *,
    prompt_ids: tuple[int, ...] = (5, 6, 7),
    emitted_ids: tuple[int, ...] = (),
    max_tokens: int = 12,
    **sampling: object,
) -> worker_pb2.Submit:
    """A stream of random tokens with a fixed seed by default."""
    values = {"temperature": 0.9, "seed": 7, "ignore_eos": True} | sampling
    return worker_pb2.Submit(
        stream_id=stream_id,
        attempt=attempt,
        prompt_ids=prompt_ids,
        emitted_ids=emitted_ids,
        sampling=inference_pb2.Sampling(max_tokens=max_tokens, **values),
    )


@contextlib.asynccontextmanager
async def double(path: Path) -> AsyncIterator[Implementation]:
    """The scripted worker of the router's tests."""
    worker = ScriptedWorker("w0", path, script=Script(delay_s=_STEP_S, says_phase=True, caches=True), heartbeat_s=0.1)
    await worker.start()

    async def lose_rank(_: Router) -> None:
        worker.lose_ranks()
        await asyncio.sleep(_RESTART_S)
        worker.announce(state=worker_pb2.WORKER_STATE_READY)

    async with open_channel(worker.target) as channel:
        yield Implementation(channel, lose_rank)
    await worker.kill()


@contextlib.asynccontextmanager
async def scripted(path: Path) -> AsyncIterator[Implementation]:
    """The worker's own code on an engine without a model."""
    settings = make_settings(REFERENCE, str(path), status_interval_s=0.1)
    async with served(settings, EngineScript(step_s=_STEP_S)) as worker:

        async def lose_rank(_: Router) -> None:
            worker.engine.lose_ranks()
            await asyncio.sleep(_RESTART_S)
            worker.engine.restart()

        yield Implementation(worker.channel, lose_rank)


class RealProcess:
    """`python -m lockstep_worker` with two ranks on the reference model."""

    def __init__(self, path: Path) -> None:
        self.target = f"unix:{path}"
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless that has been done."""
        if self._process is None:
            flags = {"model": REFERENCE, "listen": self.target, "worker-id": "w0", "tp": 2, "threads": 1}
            flags |= {"device": "cpu", "log-level": "error", "management-port": 0}
            # Tests stop ranks, and a machine may pause a test meanwhile.
            flags |= {"decode-deadline-s": 600, "prefill-deadline-s": 600}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep_worker", *(f"--{flag}={value}" for flag, value in flags.items())],
                env={**os.environ, DIE_WITH_PARENT_VARIABLE: str(os.getpid())},
            )
            wait_for(self._path.exists, "the worker listens", _START_S)

    def stop(self) -> None:
        """End it as a supervisor does."""
        if self._process is not None:
            self._process.terminate()
            assert self._process.wait(15) == 0


@contextlib.asynccontextmanager
async def real(process: RealProcess) -> AsyncIterator[Implementation]:
    """A worker process with ranks."""
    process.start()

    async def lose_rank(router: Router) -> None:
        # Not the next status: streams of a fast worker end before it comes.
        ranks = next(frame.status.ranks for frame in reversed(router.seen) if frame.status.ranks)
        os.kill(ranks[-1].pid, signal.SIGKILL)

    def standing(status: worker_pb2.Status) -> AbstractContextManager[None]:
        return standing_still([rank.pid for rank in status.ranks])

    async with open_channel(process.target) as channel:
        # The path exists for a moment before the worker listens: it looks first whether another one does.
        await asyncio.wait_for(channel.channel_ready(), _START_S)
        yield Implementation(channel, lose_rank, standing)
