"""Real workers keep their cold KV blocks in Redis, which is killed, stopped, and has wrong data in it while eight
clients stream: no request fails, every token is that of an undisturbed run, and afterwards blocks are fetched again.

The workers' own caches hold a part of the conversations only, so most prefixes come from the state server, if it is
there and the cost gate lets them.
"""

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from lockstep_tools.debug.local import below
from lockstep_tools.load.comparison import compare, run_undisturbed
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import Traffic
from lockstep_tools.load.history import StreamRequest
from lockstep_tools.load.mix import with_sessions
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import left_since, port_is_free, traces
from redis_server import RedisServer
from store_faults import Fault, faults_of
from system import MODEL, REFERENCE

pytestmark = pytest.mark.slow

CLIENTS = 8
CONVERSATIONS = 12
STREAMS_IN_FAULT = 12
FAULTS = ("redis_killed", "redis_stopped", "values_damaged")
_SENTENCES = 45
_PATIENCE_S = 240.0
_FETCHED_BLOCKS = "lockstep_worker_remote_cache_fetched_blocks_total"


def request(number: int) -> StreamRequest:
    """The next turn of a long conversation."""
    body = {
        "model": MODEL,
        "prompt": f"Story {number}. " + f"It was night number {number}, and the rain fell on the house. " * _SENTENCES,
        "temperature": 0.8,
        "seed": number,
        "max_tokens": 24,
        "ignore_eos": True,
        "logprobs": 0,
        "stream_options": {"include_usage": True},
    }
    return StreamRequest("/completions", body)


class Cache:
    """What workers say of the blocks in the state server."""

    def __init__(self) -> None:
        self._client = httpx.Client(timeout=_PATIENCE_S, trust_env=False, verify=False)
        self._urls = [each.url for each in below(self._client, os.getpid()) if each.name.startswith("worker")]

    def count(self, metric: str) -> float:
        """A counter, over all workers."""
        pages = [self._client.get(f"{url}/metrics").raise_for_status().text for url in self._urls]
        lines = [line for page in pages for line in page.splitlines() if line.startswith(metric)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def is_used(self) -> None:
        """Wait until blocks are fetched."""
        before = await asyncio.to_thread(self.count, _FETCHED_BLOCKS)
        async with asyncio.timeout(_PATIENCE_S):
            while await asyncio.to_thread(self.count, _FETCHED_BLOCKS) <= before:
                await asyncio.sleep(0.1)


async def under(fault: Fault, run: Traffic) -> int:
    """Have a fault until some streams that began in it have ended; how many began."""
    begin = len(run.histories)
    await asyncio.to_thread(fault.begin)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while sum(each.ended_s is not None for each in run.histories[begin:]) < STREAMS_IN_FAULT:
                await asyncio.sleep(0.1)
    finally:
        await asyncio.to_thread(fault.end)
    return len(run.histories) - begin


async def test_streams_do_not_depend_on_stored_blocks(
    tmp_path: Path, private_tmp: object, pytestconfig: pytest.Config, summarize: Callable[[str], None]
) -> None:
    given = pytestconfig.getoption("--chaos-seed")
    seed = random.randrange(1 << 32) if given is None else given
    print("seed", seed)
    before = traces()
    redis = RedisServer(tmp_path / "redis")
    settings = StackSettings(
        str(REFERENCE), workers=2, tp=2, device="cpu", threads=1, kv_memory="12Mi", host_cache="4Mi",
        remote_cache=True, state=redis.address,
    )  # fmt: skip
    try:
        with Stack(settings) as stack:
            stack.wait_ready(_PATIENCE_S)
            endpoint, cache, faults = Endpoint(f"{stack.url}/v1"), Cache(), faults_of(redis, seed)
            requests = [request(number) for number in range(CONVERSATIONS)]
            undisturbed = await run_undisturbed(endpoint, requests)
            streams = {}
            async with Traffic(endpoint, with_sessions(requests), clients=CLIENTS) as run:
                await cache.is_used()
                for name in FAULTS:
                    streams[name] = await under(faults[name], run)
                    await cache.is_used()
            fetched, failures = (
                cache.count(f"lockstep_worker_remote_cache_{name}")
                for name in ("fetched_blocks_total", "failures_total")
            )
    finally:
        redis.thaw()
        redis.kill()
    comparison = compare(run.histories, undisturbed)
    summarize(
        f"KV blocks in Redis, {CLIENTS} clients, seed {seed}: {comparison.streams} streams ({streams} in faults), "
        f"{comparison.failed} failed, {comparison.changed} changed; {fetched:.0f} blocks fetched, {failures:.0f} calls "
        "of the state server failed"
    )
    assert comparison.holds, comparison.problems[:5]
    assert failures > 0, "no worker has noticed a fault"
    assert left_since(before) == []
    assert port_is_free(stack.port)
