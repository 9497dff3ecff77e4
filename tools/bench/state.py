"""What the kv-state-server costs: blocks, journals and memory, in memory and on Redis, in one run.

Blocks go through gRPC to a state server process and back, next to `redis-benchmark` on the same Redis with values of
the same size, and next to copies in memory. Journals are written in batches, as a router does it. The last part fills
one state server with streams that are all written to, and reads how large its process has become.

`state.py --save`. Needs redis-server and redis-benchmark.
"""

import argparse
import asyncio
import contextlib
import csv
import hashlib
import io
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import redis
import xxhash
from lockstep_api.v1 import inference_pb2, state_pb2, state_pb2_grpc
from measure import machine, save, seconds, table

_BLOCK_BYTES = 1 << 20
_BLOCKS = 48
_CALLS = 4
"""Calls at a time that move blocks."""
_WRITES = 256
_BATCHES = 12
_PIECE_IDS = 8
_STREAMS = 10_000
_PROMPT_IDS = 500
_ROUNDS_OF_PIECES = 10
_STREAM_PIECE_IDS = 20
_MOST_RSS = 256 << 20
_READY_S = 60.0
_MIB = 1 << 20


@dataclass
class Side:
    """One state server and what it keeps everything in."""

    name: str
    process: psutil.Process
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.kv = state_pb2_grpc.KvStub(self.channel)
        self.journal = state_pb2_grpc.JournalStub(self.channel)


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """The port of a Redis that keeps nothing on disk."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(redis.ConnectionError), redis.Redis(port=port) as client:
                client.ping()
                break
            if time.monotonic() > end:
                raise SystemExit("redis-server does not answer")
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def state_server(name: str, directory: Path, *flags: str, listen: str = "") -> AsyncIterator[Side]:
    """A state server as a process. It listens on a socket in `directory`, unless an address is given."""
    listen = listen or f"unix:{directory}/{name}"
    patience = ("--store-timeout-s", "10", "--store-batch-timeout-s", "30", "--call-timeout-s", "60")
    command = [sys.executable, "-m", "lockstep_state", "--listen", listen, "--management-port", "0", *patience, *flags]
    environment = os.environ | {"LOCKSTEP_LOG_LEVEL": "error"}
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL, env=environment)
    try:
        async with grpc.aio.insecure_channel(listen) as channel:
            await asyncio.wait_for(channel.channel_ready(), _READY_S)
            yield Side(name, psutil.Process(process.pid), channel)
    finally:
        process.kill()
        await process.wait()


# Blocks.


def key(number: int) -> state_pb2.BlockKey:
    """The key of a block."""
    digest = hashlib.sha256(number.to_bytes(4, "big")).digest()
    return state_pb2.BlockKey(hash=digest, heads=state_pb2.HeadRange(first=0, count=8))


async def put(side: Side, contents: dict[int, bytes]) -> None:
    """Store blocks in some calls at a time."""

    async def call(numbers: list[int]) -> None:
        def messages() -> Iterator[state_pb2.PutBlocksRequest]:
            for at, number in enumerate(numbers):
                content = contents[number]
                header = state_pb2.BlockHeader(
                    schema=1,
                    key=key(number),
                    dtype="uint8",
                    shape=[len(content)],
                    length=len(content),
                    checksum=xxhash.xxh3_64_intdigest(content),
                )
                yield state_pb2.PutBlocksRequest(tenant="" if at else "bench", header=header, data=content)

        response = await side.kv.Put(messages())
        if set(response.outcomes) != {state_pb2.PUT_OUTCOME_STORED}:
            raise SystemExit(f"blocks were not stored: {response.outcomes}")

    numbers = sorted(contents)
    await asyncio.gather(*(call(numbers[start::_CALLS]) for start in range(_CALLS)))


async def get(side: Side, contents: dict[int, bytes]) -> None:
    """Fetch them, and compare."""

    async def call(numbers: list[int]) -> None:
        found: dict[int, list[bytes]] = {}
        request = state_pb2.GetBlocksRequest(tenant="bench", keys=map(key, numbers))
        async for message in side.kv.Get(request):
            found.setdefault(message.index, []).append(message.data)
        if [b"".join(found.get(at, ())) for at in range(len(numbers))] != [contents[number] for number in numbers]:
            raise SystemExit("blocks are missing, or others than were stored")

    numbers = sorted(contents)
    await asyncio.gather(*(call(numbers[start::_CALLS]) for start in range(_CALLS)))


def redis_benchmark(port: int) -> dict[str, float]:
    """Seconds for as many SETs and GETs, of values as large, on as many connections."""
    command = ["redis-benchmark", "-p", str(port), "-t", "set,get", "-d", str(_BLOCK_BYTES), "-n", str(_BLOCKS)]
    output = subprocess.check_output([*command, "-c", str(_CALLS), "--csv"], text=True)
    rates = {row["test"]: float(row["rps"]) for row in csv.DictReader(io.StringIO(output))}
    return {"put": _BLOCKS / rates["SET"], "get": _BLOCKS / rates["GET"]}


async def timed(work: Callable[[], Awaitable[None]]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def measure_blocks(sides: list[Side], port: int, rounds: int) -> dict[str, dict[str, float]]:
    """MB/s of each side, median of rounds that are taken in turn."""
    contents = {number: os.urandom(_BLOCK_BYTES) for number in range(_BLOCKS)}
    times: dict[str, dict[str, list[float]]] = {}

    def note(side: str, kind: str, took_s: float) -> None:
        times.setdefault(side, {}).setdefault(kind, []).append(took_s)

    def copy() -> None:
        for content in contents.values():
            bytearray(content)

    def check() -> None:
        for content in contents.values():
            xxhash.xxh3_64_intdigest(content)

    for _ in range(rounds):
        for side in sides:
            note(side.name, "put", await timed(lambda side=side: put(side, contents)))
            note(side.name, "get", await timed(lambda side=side: get(side, contents)))
        for kind, took_s in (await asyncio.to_thread(redis_benchmark, port)).items():
            note("redis-benchmark", kind, took_s)
        for kind in ("put", "get"):
            note("memcpy", kind, seconds(copy))
            note("XXH3", kind, seconds(check))
    size_mb = _BLOCKS * _BLOCK_BYTES / 1e6
    return {
        side: {kind: size_mb / statistics.median(each) for kind, each in kinds.items()} for side, kinds in times.items()
    }


# Journals.


def opening(tenant: str, stream_id: str, prompt_ids: int) -> state_pb2.StreamWrite:
    """Opens a stream of one choice."""
    sampling = inference_pb2.Sampling(max_tokens=1000, temperature=1.0, seed=1)
    record = state_pb2.StreamRecord(
        schema=1,
        model="bench",
        prompts=[inference_pb2.TokenIds(ids=range(10_000, 10_000 + prompt_ids))],
        choices=[state_pb2.StreamChoice(stream_id=stream_id, sampling=sampling)],
        request=bytes(300),
    )
    return state_pb2.StreamWrite(tenant=tenant, stream_id=stream_id, epoch=1, owner="bench", record=record)


def growth(tenant: str, stream_id: str, position: int, count: int) -> state_pb2.StreamWrite:
    """Adds tokens to a stream."""
    piece = state_pb2.Piece(choice=0, position=position, ids=range(position, position + count))
    return state_pb2.StreamWrite(tenant=tenant, stream_id=stream_id, epoch=1, pieces=[piece])


async def append(side: Side, writes: list[state_pb2.StreamWrite]) -> None:
    """One batch, which has to be written."""
    results = (await side.journal.Append(state_pb2.AppendRequest(writes=writes))).results
    outcomes = {result.outcome for result in results}
    if outcomes != {state_pb2.WRITE_OUTCOME_OK}:
        raise SystemExit(f"streams were not written: {outcomes}")


async def measure_journals(sides: list[Side], rounds: int) -> dict[str, dict[str, float]]:
    """Writes a second and the time of a batch, for streams that are open."""
    names = [f"s{number}" for number in range(_WRITES)]
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds):
        tenant = f"round-{number}"
        for side in sides:
            await append(side, [opening(tenant, name, _PROMPT_IDS) for name in names])
            for position in range(0, _BATCHES * _PIECE_IDS, _PIECE_IDS):
                writes = [growth(tenant, name, position, _PIECE_IDS) for name in names]
                times[side.name].append(await timed(lambda side=side, writes=writes: append(side, writes)))
    result = {}
    for name, each in times.items():
        batch_s = statistics.median(each)
        result[name] = {"writes_per_s": _WRITES / batch_s, "batch_ms": 1000 * batch_s, "us": 1e6 * batch_s / _WRITES}
    return result


# Memory.


async def measure_streams(side: Side, used_bytes: Callable[[], int]) -> dict[str, float]:
    """Open many streams, write to all of them, read some, and see what they take."""
    before, began = used_bytes(), time.perf_counter()
    names = [(f"tenant-{number % 10}", f"s{number}") for number in range(_STREAMS)]
    peak = 0
    for start in range(0, _STREAMS, _WRITES):
        await append(side, [opening(*name, _PROMPT_IDS) for name in names[start : start + _WRITES]])
    for position in range(0, _ROUNDS_OF_PIECES * _STREAM_PIECE_IDS, _STREAM_PIECE_IDS):
        for start in range(0, _STREAMS, _WRITES):
            part = names[start : start + _WRITES]
            await append(side, [growth(*name, position, _STREAM_PIECE_IDS) for name in part])
        peak = max(peak, side.process.memory_info().rss)
    took_s = time.perf_counter() - began
    expected = list(range(_ROUNDS_OF_PIECES * _STREAM_PIECE_IDS))
    for tenant, stream_id in names[:: _STREAMS // 100]:
        stored = await side.journal.Read(state_pb2.ReadRequest(tenant=tenant, stream_id=stream_id))
        if list(stored.logs[0].ids) != expected:
            raise SystemExit("a stream is not as it was written")
    return {
        "streams": _STREAMS,
        "bytes_per_stream": (used_bytes() - before) / _STREAMS,
        "rss_before_mib": before / _MIB if side.name == "memory" else 0.0,
        "rss_peak_mib": peak / _MIB,
        "writes_per_s": _STREAMS * (1 + _ROUNDS_OF_PIECES) / took_s,
    }


async def measure(rounds: int) -> dict[str, Any]:
    """All parts."""
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        directory = Path(name)
        with redis_server(directory) as port:
            store = ("--store", f"redis://127.0.0.1:{port}/0")
            async with (
                state_server("memory", directory) as memory,
                state_server("redis", directory, *store) as on_redis,
            ):
                sides = [memory, on_redis]
                blocks = await measure_blocks(sides, port, rounds)
                journals = await measure_journals(sides, rounds)
            streams = {}
            limit = ("--max-memory-bytes", str(_MOST_RSS // 2))
            async with state_server("memory", directory, *limit) as memory:
                process = memory.process
                streams["memory"] = await measure_streams(memory, lambda: int(process.memory_info().rss))
            with redis.Redis(port=port) as client:
                client.flushall()
                async with state_server("redis", directory, *store) as on_redis:
                    used = lambda: int(client.info("memory")["used_memory"])  # noqa: E731
                    streams["redis"] = await measure_streams(on_redis, used)
    return {"blocks_mb_per_s": blocks, "journals": journals, "streams": streams}


def text_of(parts: dict[str, Any]) -> str:
    """The tables."""
    memcpy = parts["blocks_mb_per_s"]["memcpy"]
    blocks = [
        [side, *(f"{rates[kind]:,.0f}" for kind in ("put", "get")), f"{rates['get'] / memcpy['get']:.1%}"]
        for side, rates in parts["blocks_mb_per_s"].items()
    ]
    journals = [
        [side, f"{each['writes_per_s']:,.0f}", f"{each['batch_ms']:.1f}", f"{each['us']:.0f}"]
        for side, each in parts["journals"].items()
    ]
    streams = [
        [
            side,
            f"{each['streams']:,}",
            f"{each['bytes_per_stream']:,.0f}",
            f"{each['rss_peak_mib']:.0f}",
            f"{each['writes_per_s']:,.0f}",
        ]
        for side, each in parts["streams"].items()
    ]
    tokens = _ROUNDS_OF_PIECES * _STREAM_PIECE_IDS
    return "\n\n".join(
        (
            f"Blocks of {_BLOCK_BYTES / _MIB:g} MiB, {_CALLS} calls at a time.",
            table(["blocks", "put, MB/s", "get, MB/s", "get against memcpy"], blocks),
            f"Journals: batches of {_WRITES} writes with {_PIECE_IDS} tokens each to open streams, one call at a time.",
            table(["journals", "writes/s", "batch, ms", "µs a write"], journals),
            f"Streams of {_PROMPT_IDS} prompt ids and {tokens} tokens, all open. Bytes are the process's, or Redis'.",
            table(["streams", "number", "bytes a stream", "state server's memory at most, MiB", "writes/s"], streams),
        )
    )


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of blocks and journals (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    for program in ("redis-server", "redis-benchmark"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed")
    version = subprocess.check_output(["redis-server", "--version"], text=True).split("v=")[1].split()[0]
    about = machine() | {"redis": version, "rounds": arguments.rounds}
    parts = asyncio.run(measure(arguments.rounds))
    about["load_at_end"] = round(os.getloadavg()[0], 1)
    text = text_of(parts)
    print(text)
    peak = max(each["rss_peak_mib"] for each in parts["streams"].values())
    if arguments.save:
        save("state", {"machine": about, **parts}, text)
    if peak > _MOST_RSS / _MIB:
        raise SystemExit(f"{_STREAMS} streams take {peak:.0f} MiB")


if __name__ == "__main__":
    main()
