"""What `router.py` measures on one running server: CPU time, rates, delays and memory under a scripted load."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_tools import file_limit
from router_load import Client, Figures, Load, connect, request, stream_text
from router_sides import Side

TOKENS = 128
"""Of a stream."""
SHORT_TOKENS = 8
"""Of a short stream, whose cost is mostly that of a request."""
STEP_S = 0.01
"""Of the backend: streams at 100 tokens a second, as of a small model on a GPU."""
FULL_STEP_S = 0.001
"""Of the backend while the cost of a token is measured with many of them. On two cores backend and clients are the
limit then, not the router."""
FULL_TOKENS = 2048
"""Of a stream then: compared with its tokens its request counts for nothing."""
PACED_STEP_S = 0.03
"""Of the backend while a step is measured: the router sleeps between two of them, as before a real worker."""
SLOW_STEP_S = 0.5
"""Of the backend while memory is measured, so that no side is busy."""
MANY = 64
"""Clients of the loads whose CPU time is reported, for each of a router's processes: they are as busy as one alone."""
_TIMEOUT_S = 60.0
_SETTLE_S = 30.0
_CALM_S = 0.25
_CALM_SHARE = 0.1
"""A server is calm if it uses less of a core than this for so long."""
_OTHER_FILES = 512
_SPIN = 200_000


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    seconds: float = 2.0
    """Of each load."""
    warm_s: float = 0.5
    clients: tuple[int, ...] = (1, MANY, 512)
    idle: int = 10_000
    """Idle connections whose memory is measured; 0: no memory."""
    streams_held: int = 512


QUICK = Extent(seconds=0.4, warm_s=0.2, clients=(1, MANY), idle=200, streams_held=64)


def percentile(values: Sequence[float], share: float) -> float:
    """In milliseconds; NaN without values."""
    ordered = sorted(values)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def calibrate() -> float:
    """Milliseconds of CPU time of a fixed loop: how fast the machine is now."""
    began = time.process_time()
    for _ in range(_SPIN):
        pass
    return 1e3 * (time.process_time() - began)


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as it may; how many connections that is."""
    return file_limit.raise_file_limit() - _OTHER_FILES


async def settle(side: Side) -> None:
    """Wait, for a while, until a server has done what the load before has left it: that is no part of the next one."""
    until_s = time.monotonic() + _SETTLE_S
    used_s = sum(side.cpu_s().values())
    while time.monotonic() < until_s:
        before_s = used_s
        await asyncio.sleep(_CALM_S)
        used_s = sum(side.cpu_s().values())
        if used_s - before_s < _CALM_SHARE * _CALM_S:
            return


async def stretch(side: Side, load: Load, extent: Extent) -> dict[str, float]:
    """What a load costs and sees, after a warm-up."""
    await settle(side)
    async with load:
        await asyncio.sleep(extent.warm_s)
        load.take()
        began_s, before, own_s = time.monotonic(), side.cpu_s(), time.process_time()
        await asyncio.sleep(extent.seconds)
        passed_s, after, own_s = time.monotonic() - began_s, side.cpu_s(), time.process_time() - own_s
        seen: Figures = load.take()
        load.check()
    used = [used_s - before.get(pid, 0.0) for pid, used_s in after.items()]
    cpu_s = sum(used)
    answers, events = seen.answers or math.nan, seen.events or math.nan  # of a machine that is far too busy
    return {
        "per_s": seen.events / passed_s,
        "cpu_s": cpu_s,
        "cores": cpu_s / passed_s,
        "busiest_share": max(used) / cpu_s if cpu_s else math.nan,
        "answers": seen.answers,
        "events": seen.events,
        "cpu_us": 1e6 * cpu_s / answers,
        "client_us": 1e6 * own_s / events,
        "first_p50_ms": percentile(seen.first_s, 0.5),
        "first_p99_ms": percentile(seen.first_s, 0.99),
        "whole_p50_ms": percentile(seen.whole_s, 0.5),
        "whole_p99_ms": percentile(seen.whole_s, 0.99),
        "gap_p99_ms": percentile(seen.gaps_s, 0.99),
    }


async def costs(side: Side, extent: Extent) -> dict[str, float]:
    """Microseconds of a router's CPU time for a request of one token, a short stream and a streamed token."""
    assert await stream_text(side.port, TOKENS, _TIMEOUT_S), "a stream has no text"
    calibration = calibrate()
    clients = MANY * side.processes
    requests = await stretch(side, Load(side.port, clients, tokens=1, stream=False), extent)
    short = await stretch(side, Load(side.port, clients, tokens=SHORT_TOKENS, stream=True), extent)
    streams = await stretch(side, Load(side.port, clients, tokens=TOKENS, stream=True), extent)
    return {
        "request_us": requests["cpu_us"],
        "short_us": short["cpu_us"],
        "token_us": (1e6 * streams["cpu_s"] - requests["cpu_us"] * streams["answers"])
        / (streams["events"] or math.nan),
        "busiest_share": requests["busiest_share"],
        "calibration_ms": (calibration + calibrate()) / 2,
    }


async def full_cost(side: Side, extent: Extent) -> dict[str, float]:
    """Microseconds of a router's CPU time for a streamed token while the worker has more tokens than it can send."""
    found = await stretch(side, Load(side.port, MANY * side.processes, tokens=FULL_TOKENS, stream=True), extent)
    return {
        "full_token_us": 1e6 * found["cpu_s"] / (found["events"] or math.nan),
        "per_s": found["per_s"],
        "cores": found["cores"],
    }


async def at_rate(side: Side, extent: Extent, *, rate: float) -> dict[str, float]:
    """Requests at a rate, evenly spaced."""
    return await stretch(side, Load(side.port, MANY, tokens=1, stream=False, rate=rate), extent)


async def step_cost(side: Side, extent: Extent) -> dict[str, float]:
    """Milliseconds of a router's CPU time for a step of a worker that brings each of 64 streams a token.

    Everything that the router does in that time counts, heartbeats too.
    """
    tokens = 8 * math.ceil((extent.warm_s + extent.seconds) / PACED_STEP_S)
    found = await stretch(side, Load(side.port, MANY * side.processes, tokens=tokens, stream=True), extent)
    steps = found["events"] / MANY or math.nan
    return {"step_ms": 1e3 * found["cpu_s"] / steps, "steps": steps, "gap_p99_ms": found["gap_p99_ms"]}


async def rates(side: Side, extent: Extent) -> dict[str, dict[str, float]]:
    """All loads on one side, by name."""
    assert await stream_text(side.port, TOKENS, _TIMEOUT_S), "a stream has no text"
    found = {}
    for clients in extent.clients:
        load = Load(side.port, clients, tokens=1, stream=False)
        found[f"requests, {clients}"] = await stretch(side, load, extent)
    for clients in extent.clients:
        load = Load(side.port, clients, tokens=TOKENS, stream=True)
        found[f"streams, {clients}"] = await stretch(side, load, extent)
    request_us, streams = found[f"requests, {MANY}"]["cpu_us"], found[f"streams, {MANY}"]
    token_us = (1e6 * streams["cpu_s"] - request_us * streams["answers"]) / (streams["events"] or math.nan)
    return found | {"costs": {"request_us": request_us, "token_us": token_us}}


async def memory(side: Side, extent: Extent) -> dict[str, float]:
    """KiB of a router for each stream in progress, and for each idle connection that has had an answer."""
    async with Load(side.port, MANY, tokens=1, stream=False):
        await asyncio.sleep(extent.warm_s)
    before = side.memory_bytes()
    async with Load(side.port, extent.streams_held, tokens=TOKENS, stream=True) as load:
        await asyncio.sleep(4 * SLOW_STEP_S)
        load.check()
        streams = side.memory_bytes() - before
    before = side.memory_bytes()
    clients: list[Client] = []
    with contextlib.suppress(TimeoutError):  # of a machine that is far too busy; the table shows how many were open
        async with asyncio.timeout(_TIMEOUT_S):
            while len(clients) < extent.idle:
                # Each has its answer soon: servers close connections that send nothing.
                ended = asyncio.Semaphore(0)
                count = min(MANY, extent.idle - len(clients))
                made = await connect(
                    side.port, count, request(1, stream=False), Figures(), lambda _, ended=ended: ended.release()
                )
                clients += made
                for client in made:
                    client.send()
                for _ in made:
                    await ended.acquire()
    connections, are_open = side.memory_bytes() - before, sum(client.is_open for client in clients)
    for client in clients:
        client.close()
    return {
        "stream_kib": streams / 1024 / extent.streams_held,
        "idle_kib": connections / 1024 / max(1, len(clients)),
        "idle_open": are_open,
    }
