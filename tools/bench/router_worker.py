"""A worker for `router.py`, as a process of its own: all its streams get a token in each step, as from a real one.

A stream's first token comes at once, so that a request of one token shows what the router adds, and no part of a step.
`router_worker.py TESTS_OF_THE_ROUTER DIRECTORY STEP_EVERY_S`: its socket is `w0.sock` in the directory. The router's
sources, and with them the protocol, may be those of another checkout.
"""

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

import grpc
from lockstep_api.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from router_script import token
from scripted_worker import model_card, tokenizer_files

CONTEXT_LENGTH = 1 << 14
STEP_EVERY_S = float(sys.argv[3])
STATUS_EVERY_S = 0.1


class Live:
    """A stream that gets tokens."""

    def __init__(self, submit: worker_pb2.Submit, number: int) -> None:
        self.submit = submit
        self.number = number
        self.position = len(submit.emitted_ids)

    def step(self) -> worker_pb2.StreamTokens:
        """Its next token."""
        update = worker_pb2.StreamTokens(
            stream_id=self.submit.stream_id,
            attempt=self.submit.attempt,
            position=self.position,
            ids=[token(self.number, self.position)],
        )
        self.position += 1
        if self.is_over:
            update.finish = inference_pb2.FINISH_REASON_LENGTH
        return update

    @property
    def is_over(self) -> bool:
        """Whether it has all its tokens."""
        return self.position >= self.submit.sampling.max_tokens


class Servicer(worker_pb2_grpc.WorkerServicer):  # type: ignore[misc]
    """A worker of any number of routers."""

    async def Tokenizer(self, request: Any, context: Any) -> worker_pb2.TokenizerFiles:  # noqa: ARG002, N802
        """The reference model's files."""
        return tokenizer_files()

    async def Serve(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerFrame]:  # noqa: ARG002, N802
        """Steps for as long as the router stays."""
        async for frame in Serving().frames(requests):
            yield frame


class Serving:
    """What it does for one router, or for one of its processes."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, int], Live] = {}
        self._new: dict[tuple[str, int], Live] = {}
        """Streams that have no token yet."""
        self._wake = asyncio.Event()
        self._streams = 0
        self._steps = 0

    async def frames(self, requests: Any) -> AsyncIterator[worker_pb2.WorkerFrame]:
        """All that it says."""
        await anext(aiter(requests))
        card = model_card(context_length=CONTEXT_LENGTH)
        hello = worker_pb2.Hello(worker_id="w0", incarnation=time.time_ns(), model=card)
        if hasattr(hello, "accepts_several"):  # not in older checkouts
            hello.accepts_several = True
        yield worker_pb2.WorkerFrame(epoch=1, hello=hello)
        reading = asyncio.create_task(self._read(requests))
        said_at = stepped_at = 0.0
        try:
            while not reading.done():
                now = time.monotonic()
                if now - said_at >= STATUS_EVERY_S:
                    said_at = now
                    yield self._status()
                if self._new:
                    new, self._new = self._new, {}
                    yield self._tokens(new)
                    self._live |= {key: live for key, live in new.items() if not live.is_over}
                if self._live and now - stepped_at >= STEP_EVERY_S:
                    stepped_at = now
                    yield self._tokens(self._live)
                    self._live = {key: live for key, live in self._live.items() if not live.is_over}
                self._wake.clear()
                if not self._new:
                    until = min(said_at + STATUS_EVERY_S, stepped_at + STEP_EVERY_S if self._live else math.inf)
                    await self._sleep(until - time.monotonic())
        finally:
            reading.cancel()

    async def _sleep(self, seconds: float) -> None:
        """Wait for a new stream, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()

    def _tokens(self, streams: dict[tuple[str, int], Live]) -> worker_pb2.WorkerFrame:
        """A step of these streams."""
        self._steps += 1
        tokens = worker_pb2.Tokens()
        for live in streams.values():
            handle = getattr(live.submit, "handle", 0)  # not in older checkouts
            update = live.step()
            if handle and not live.is_over:
                tokens.handles.append(handle)
                tokens.positions.append(update.position)
                tokens.ids.extend(update.ids)
            else:
                tokens.streams.append(update)
        return worker_pb2.WorkerFrame(epoch=1, tokens=tokens)

    def _status(self) -> worker_pb2.WorkerFrame:
        status = worker_pb2.Status(
            state=worker_pb2.WORKER_STATE_READY,
            running=len(self._live) + len(self._new),
            free_blocks=90,
            total_blocks=100,
            steps=self._steps,
        )
        if hasattr(status, "free_seqs"):  # not in older checkouts
            status.free_seqs = 1 << 16
        return worker_pb2.WorkerFrame(epoch=1, status=status)

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            for frame in message.several.frames if message.WhichOneof("frame") == "several" else (message,):
                self._take(frame)

    def _take(self, frame: worker_pb2.RouterFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "submit":
            self._streams += 1
            key = (frame.submit.stream_id, frame.submit.attempt)
            self._new[key] = Live(frame.submit, self._streams)
            self._wake.set()
        elif kind == "cancel":
            for streams in (self._live, self._new):
                streams.pop((frame.cancel.stream_id, frame.cancel.attempt), None)


async def main() -> None:
    """Serve until the process is killed."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(Servicer(), server)
    server.add_insecure_port(f"unix:{Path(sys.argv[2]) / 'w0.sock'}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


asyncio.run(main())
