"""What a worker's store of KV blocks reaches with state servers of this machine, or with one that runs already."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep_api.v1 import state_pb2
from lockstep_common.grpc_tls import dial_plain
from lockstep_common.lifecycle import DIE_WITH_PARENT_VARIABLE
from lockstep_engine.remote_store import BlockForm, HeadRange, StoredBlock
from lockstep_worker.kv_store import KvStore, StoreOptions

from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.state_bench.figures import Network

_FORM = BlockForm("uint8", (1 << 20,), 1 << 20)
_HEADS = HeadRange(0, 1)
_TENANT = "-bench"
_CALLS = 50
_READY_S = 60.0
_FETCH_S = 60.0
_FOREVER_S = 1e9
"""Computing takes so long that the gate lets everything pass."""


@dataclass(frozen=True)
class Measured:
    """What one backend reached."""

    backend: str
    put_bytes_per_s: float
    get_bytes_per_s: float
    round_trip_s: float

    @property
    def network(self) -> Network:
        """The way to the blocks."""
        return Network(f"{self.backend}, here", self.get_bytes_per_s, self.round_trip_s)


async def measure_backends(target: str | None, blocks: int, rounds: int) -> list[Measured]:
    """Measure a state server that runs at a target; without one, those of this machine, one after the other."""
    if target is not None:
        return [await _measure(target, target, blocks, rounds)]
    measured = []
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        directory = Path(name)
        async with _state_server(directory, "memory", blocks) as here:
            measured.append(await _measure("memory", here, blocks, rounds))
        if shutil.which("redis-server") is not None:
            async with _redis(directory) as address, _state_server(directory, address, blocks) as here:
                measured.append(await _measure("redis", here, blocks, rounds))
    return measured


async def _measure(backend: str, target: str, blocks: int, rounds: int) -> Measured:
    size = blocks * _FORM.length
    options = StoreOptions(target, 10.0, _FETCH_S, size + _FORM.length, 600.0, f"bench-{os.getpid()}")
    puts, gets = [], []
    async with KvStore(options, dial_plain) as store:
        await _until(store.link.estimate, f"the state server at {target} does not answer")
        trips = [await _round_trip(store) for _ in range(_CALLS)]
        memory = memoryview(bytearray(size))
        for _ in range(rounds):
            contents = [os.urandom(_FORM.length) for _ in range(blocks)]
            hashes = [hashlib.sha256(content).digest() for content in contents]
            parts = [
                StoredBlock(each, _HEADS, _FORM, memoryview(content))
                for each, content in zip(hashes, contents, strict=True)
            ]
            began_at = time.perf_counter()
            while parts:
                parts = parts[store.offer(_TENANT, parts) :]
            await store.flush(_FETCH_S)
            puts.append(time.perf_counter() - began_at)

            def into(block: int, _rank: int) -> memoryview:
                return memory[block * _FORM.length : (block + 1) * _FORM.length]

            began_at = time.perf_counter()
            result = await store.fetch(_TENANT, hashes, [_HEADS], _FORM, lambda count: count * _FOREVER_S, into, 0)
            gets.append(time.perf_counter() - began_at)
            if result.blocks != blocks or memory != b"".join(contents):
                raise CommandError(f"{backend}: {result.blocks} of {blocks} blocks came back: {result.outcome}", FAILED)
    return Measured(backend, size / statistics.median(puts), size / statistics.median(gets), statistics.median(trips))


async def _round_trip(store: KvStore) -> float:
    heads = [state_pb2.HeadRange(first=0, count=1)]
    request = state_pb2.LookUpBlocksRequest(tenant=_TENANT, hashes=[os.urandom(32)], heads=heads)
    began_at = time.perf_counter()
    await store.client.look_up(request)
    return time.perf_counter() - began_at


async def _until(holds: Callable[[], object], complaint: str) -> None:
    """Wait until it holds.

    Raises:
        CommandError: with the complaint, if that takes too long.
    """
    end = time.monotonic() + _READY_S
    while not holds():
        if time.monotonic() > end:
            raise CommandError(complaint, FAILED)
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _process(*command: str) -> AsyncIterator[None]:
    environment = os.environ | {"LOCKSTEP_LOG_LEVEL": "error", DIE_WITH_PARENT_VARIABLE: str(os.getpid())}
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null, env=environment)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def _state_server(directory: Path, store: str, blocks: int) -> AsyncIterator[str]:
    """The target of a state server with room for the blocks of two rounds."""
    target = f"unix:{directory}/{'memory' if store == 'memory' else 'redis'}.sock"
    flags = {
        "--listen": target,
        "--store": store,
        "--management-port": "0",
        "--max-memory-bytes": str((2 * blocks + 8) * _FORM.length),
        "--store-timeout-s": "10",
        "--store-batch-timeout-s": "30",
    }
    async with _process(sys.executable, "-m", "lockstep_state", *(word for pair in flags.items() for word in pair)):
        await _until(Path(target.removeprefix("unix:")).exists, "the state server does not start")
        yield target


def _is_free(port: int) -> bool:
    """Whether no process listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextlib.asynccontextmanager
async def _redis(directory: Path) -> AsyncIterator[str]:
    """The address of a Redis that keeps nothing on disk."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    where = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory))
    async with _process("redis-server", *where):
        await _until(lambda: not _is_free(port), "redis-server does not answer")
        yield f"redis://127.0.0.1:{port}/0"
