"""Two real workers and two routers: a conversation's next turn is predicted by a router that has never seen it.

The workers are processes with ranks on the reference model, the routers run in this process.
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lockstep_common.lifecycle import DIE_WITH_PARENT_VARIABLE
from lockstep_common.prefix_keys import prefix_keys
from lockstep_router.faces.rest.app import create_app
from lockstep_router.policies import RequestFacts
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.status import status_body
from machine import wait_for
from system import MODEL, REFERENCE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("private_tmp")]

WORKERS = 2
KV_MEMORY = "32Mi"
"""So little that a test can fill it."""


@pytest.fixture(scope="module")
def targets(private_tmp: Path) -> Iterator[list[str]]:
    """The addresses of two workers."""
    flags = {"model": REFERENCE, "device": "cpu", "threads": 1, "log-level": "error", "management-port": 0}
    flags |= {"kv-memory": KV_MEMORY}
    paths, processes = [private_tmp / f"w{number}.sock" for number in range(WORKERS)], []
    for number, path in enumerate(paths):
        own = flags | {"listen": f"unix:{path}", "worker-id": f"w{number}"}
        command = [sys.executable, "-m", "lockstep_worker", *(f"--{flag}={value}" for flag, value in own.items())]
        environment = {**os.environ, DIE_WITH_PARENT_VARIABLE: str(os.getpid())}
        processes.append(subprocess.Popen(command, env=environment))
    for path in paths:
        wait_for(path.exists, "the worker listens", 60)
    yield [f"unix:{path}" for path in paths]
    for process in processes:
        process.terminate()
    for process in processes:
        assert process.wait(30) == 0


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.02)


class Door:
    """A router and a client of it."""

    def __init__(self, router: Router, client: httpx.AsyncClient) -> None:
        self.router = router
        self._client = client

    async def ask(self, prompt: list[int]) -> int:
        """Send a prompt without a session; returns how many of its tokens were cached."""
        # Bursts would be spread over idle workers.
        await until(lambda: all(link.facts.requests == 0 for link in self.router.workers.ready()))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        response = await self._client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    def known(self, prompt: list[int]) -> dict[str, int]:
        """How many blocks of a prompt each worker has, as this router knows."""
        keys = prefix_keys("", prompt, 256)
        return {link.worker_id: link.prefixes.known(keys) for link in self.router.workers.links}

    async def until_known(self, prompt: list[int], blocks: int) -> None:
        """Wait until the router knows a worker that has so many blocks of a prompt."""
        await until(lambda: max(self.known(prompt).values()) == blocks)

    def choice(self, prompt: list[int]) -> str:
        """The worker that it would send a prompt to."""
        workers = self.router.workers
        facts = RequestFacts(f"request:{random.random()}", "stream", "", prompt)
        return workers.pick(MODEL, facts, workers.ready()).worker_id

    def counts(self, name: str) -> int:
        """A count of the status, over all workers."""
        return sum(worker["prefixes"][name] for worker in status_body(self.router)["workers"])


@contextlib.asynccontextmanager
async def door(targets: list[str], **settings: Any) -> AsyncIterator[Door]:
    given = RouterSettings(workers=targets, policy="prefix_aware", anonymous_cache="shared", **settings)
    async with Router(given) as router:
        transport = httpx.ASGITransport(app=create_app(router))
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=120) as client:
            await until(lambda: len(router.workers.ready()) == WORKERS)
            await until(lambda: all(link.prefixes.is_reported for link in router.workers.links))
            yield Door(router, client)


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(300, 2000) for _ in range(tokens)]


async def test_turns_are_predicted_by_a_router_that_has_not_seen_the_turns_before(targets: list[str]) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    async with door(targets) as first, door(targets) as second:
        conversations = [text(rng, 100) for _ in range(4)]
        for turn in range(3):
            here, there = (first, second) if turn % 2 == 0 else (second, first)
            for number, history in enumerate(conversations):
                cached = await here.ask(history)
                blocks = (len(history) - 1) // 16
                if turn:
                    assert cached >= 16 * (blocks - 5), "all but the last turn's new tokens"
                for router in (here, there):
                    await router.until_known(history, blocks)
                conversations[number] = history + text(rng, 60)
                assert here.choice(history) == there.choice(history)
        for router in (first, second):
            assert router.counts("predicted_tokens") == router.counts("cached_tokens") > 300
            assert router.counts("wrong_tokens") == 0


async def test_evicted_blocks_are_no_longer_expected(targets: list[str]) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    async with door(targets) as first, door(targets) as second:
        conversation = text(rng, 200)
        await first.ask(conversation)
        await second.until_known(conversation, 12)
        owner = second.choice(conversation)
        asked = 0
        while second.known(conversation)[owner]:
            await first.ask(text(rng, 1500))
            asked += 1
            assert asked < 500
        assert second.counts("predicted_tokens") == 0
        assert await second.ask(conversation) == 0
        assert second.counts("wrong_tokens") == 0


async def test_a_router_that_comes_later_learns_everything_at_once(targets: list[str]) -> None:
    rng = random.Random()
    conversation = text(rng, 200)
    async with door(targets) as first:
        await first.ask(conversation)
    async with door(targets) as second:
        await second.until_known(conversation, 12)
        assert await second.ask(conversation + text(rng, 20)) == 16 * 12
