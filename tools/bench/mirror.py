"""How far the journals in the state server are behind the router's, and what it costs the router to mirror them.

Streams get their tokens one by one, evenly spread over time, in a store of journals as a router has it. The lag of a
token is the time from its appending in the router until the state server has acknowledged it. CPU is that of the whole
process, without what the same load takes when nothing is mirrored: gRPC's threads count. The state server and Redis are
processes of their own on the same machine.

`mirror.py --save`. Needs redis-server.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_common.grpc_tls import dial_plain
from lockstep_router.generation.style import Style
from lockstep_router.journals import (
    ChoiceRecord,
    MemoryJournalStore,
    MirroredJournalStore,
    Outcome,
    Piece,
    RequestRecord,
)
from measure import machine, save, table
from state import redis_server, state_server

_STREAMS = (8, 200, 1000)
_PROMPT_IDS = 500
_TICK_S = 0.002
_WARM_UP_S = 1.0
_OPEN_S = 60.0
_TOKENS_PER_S = 20.0
_LAG_LIMIT_MS = 50.0


@dataclass
class Lags:
    """When each token was appended, and how long it took until it was acknowledged."""

    appended_at: dict[str, list[float]] = field(default_factory=dict)
    lags: list[float] = field(default_factory=list)
    calls: int = 0
    writes: int = 0

    def watch(self, store: MirroredJournalStore) -> None:
        """Take the times of the store's calls."""
        append = store.client.append

        async def timed(request: state_pb2.AppendRequest) -> state_pb2.AppendResponse:
            response = await append(request)
            now = time.perf_counter()
            for write, result in zip(request.writes, response.results, strict=True):
                if result.outcome != state_pb2.WRITE_OUTCOME_OK:
                    raise SystemExit(f"a stream was not written: {result.outcome}")
                for piece in write.pieces:
                    times = self.appended_at[write.stream_id][piece.position : piece.position + len(piece.ids)]
                    self.lags += [now - each for each in times]
            self.calls += 1
            self.writes += len(request.writes)
            return response

        store.client.append = timed  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget what was measured."""
        self.lags, self.calls, self.writes = [], 0, 0


def record(request_id: str) -> RequestRecord:
    """A request of one choice."""
    return RequestRecord(
        request_id=request_id,
        owner="bench",
        model="bench",
        digest="model",
        tokenizer_digest="tokenizer",
        created=1_700_000_000,
        style=Style("chat", stream=True, include_usage=True, logprobs=False),
        stops=(),
        prompts=(array("I", range(10_000, 10_000 + _PROMPT_IDS)),),
        prefixes=("",),
        choices=(ChoiceRecord(f"{request_id}-0", inference_pb2.Sampling(max_tokens=10_000, seed=1)),),
        tenant="bench",
        session="",
    )


async def _at_once() -> None:
    """Return at once."""


async def run(
    store: Any, streams: int, seconds: float, lags: Lags, opened: Callable[[], Awaitable[None]] = _at_once
) -> float:
    """Open streams, wait until that is `opened`, and let each have its tokens; this process's CPU seconds a second."""
    names = [f"{streams}-{number}" for number in range(streams)]
    for name in names:
        lags.appended_at[name] = []
        await store.open(record(name))
    await opened()
    step_s = 1 / (_TOKENS_PER_S * streams)
    began, appended, cpu_s, measured_from = time.perf_counter(), 0, 0.0, 0.0
    while (elapsed_s := time.perf_counter() - began) < _WARM_UP_S + seconds:
        if not measured_from and elapsed_s >= _WARM_UP_S:
            lags.begin()
            cpu_s, measured_from = time.process_time(), time.perf_counter()
        while appended * step_s <= elapsed_s:
            name, position = names[appended % streams], appended // streams
            lags.appended_at[name].append(time.perf_counter())
            store.append(name, Piece(0, position, [position]))
            appended += 1
        await asyncio.sleep(_TICK_S)
    share = (time.process_time() - cpu_s) / (time.perf_counter() - measured_from)
    for name in names:
        await store.seal(name, Outcome(), 1.0)
    return share


async def _until_idle(store: MirroredJournalStore) -> None:
    for _ in range(int(_OPEN_S / _TICK_S)):
        if store.mirror.is_idle:
            return
        await asyncio.sleep(_TICK_S)


async def measure_one(target: str | None, streams: int, seconds: float) -> dict[str, float]:
    """One number of streams; without a target nothing is mirrored."""
    front, lags = MemoryJournalStore(max_streams=2 * streams, max_bytes=1 << 30), Lags()
    if target is None:
        return {"cpu": await run(front, streams, seconds, lags)}
    store = MirroredJournalStore(
        front, target, dial_plain, owner="bench", window_s=60.0, timeout_s=1.0, max_lag_s=_LAG_LIMIT_MS / 1000
    )
    lags.watch(store)
    store.start()
    try:
        cpu = await run(store, streams, seconds, lags, partial(_until_idle, store))
        p50, p99 = (1000 * float(each) for each in np.percentile(lags.lags, [50, 99]))
        found = {"cpu": cpu, "p50_ms": p50, "p99_ms": p99, "writes_per_call": lags.writes / lags.calls}
    finally:
        await store.close()
    return found


async def measure(seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """All numbers of streams, on each backend in turn."""
    found: dict[str, dict[str, dict[str, float]]] = {"none": {}, "memory": {}, "redis": {}}
    with tempfile.TemporaryDirectory(prefix="ls-") as name, redis_server(Path(name)) as port:
        directory, store = Path(name), ("--store", f"redis://127.0.0.1:{port}/0")
        async with state_server("memory", directory), state_server("redis", directory, *store):
            for streams in _STREAMS:
                for side, each in found.items():
                    target = None if side == "none" else f"unix:{directory}/{side}"
                    each[str(streams)] = await measure_one(target, streams, seconds)
    return found


def text_of(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The table."""
    rows = []
    for side in ("memory", "redis"):
        for streams, each in found[side].items():
            cpu = each["cpu"] - found["none"][streams]["cpu"]
            row = [side, f"{int(streams):,}", f"{each['p50_ms']:.0f}", f"{each['p99_ms']:.0f}", f"{cpu:.1%}"]
            per_token_us = 1e6 * cpu / (int(streams) * _TOKENS_PER_S)
            rows.append([*row, f"{per_token_us:.0f}", f"{cpu / int(streams):.3%}", f"{each['writes_per_call']:.0f}"])
    header = ["backend", "streams", "lag p50, ms", "lag p99, ms", "router's CPU, of one core", "µs a token"]
    return (
        f"Streams of {_TOKENS_PER_S:g} tokens/s, mirrored with `state_max_lag_s` {_LAG_LIMIT_MS / 1000:g}.\n\n"
        + table([*header, "of a stream's time", "writes a batch"], rows)
    )


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed")
    version = subprocess.check_output(["redis-server", "--version"], text=True).split("v=")[1].split()[0]
    about = machine() | {"redis": version, "seconds": arguments.seconds}
    found = uvloop.run(measure(arguments.seconds))
    about["load_at_end"] = round(os.getloadavg()[0], 1)
    text = text_of(found)
    print(text)
    if arguments.save:
        save("mirror", {"machine": about, "mirror": found}, text)


if __name__ == "__main__":
    main()
