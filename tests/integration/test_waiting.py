"""Long queues in front of real workers: waiting requests do not fail, also when workers are killed meanwhile."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from serving import Serve
from system import MODEL, System

pytestmark = pytest.mark.usefixtures("private_tmp")


def question(number: int, tokens: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": f"Chapter {number}. It was",
        "max_tokens": tokens,
        "temperature": 0.7,
        "seed": number,
        "ignore_eos": True,
        "user": f"user {number}",
    }


async def ask(client: httpx.AsyncClient, number: int, tokens: int) -> str:
    response = await client.post("/completions", json=question(number, tokens))
    assert response.status_code == 200, response.text
    body = response.json()
    assert "lockstep" not in body, "workers on one machine have the same numerics"
    text: str = body["choices"][0]["text"]
    return text


def client_of(system: System) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=system.api, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)
    )


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A deadline of running streams that is shorter than the waits in these tests."""
    monkeypatch.setenv("LOCKSTEP_FIRST_TOKEN_DEADLINE_S", "3.0")
    return monkeypatch


@pytest.mark.slow
async def test_every_request_of_a_long_queue_is_answered_by_the_only_worker(
    tmp_path: Path, short_deadlines: pytest.MonkeyPatch
) -> None:
    short_deadlines.setenv("LOCKSTEP_MAX_SEQS", "1")
    with Serve(tmp_path) as serve:
        serve.ready()
        async with client_of(serve.system) as client:
            calm = await ask(client, 0, 200)
            texts = await asyncio.gather(*(ask(client, number, 200) for number in range(24)))
        assert texts[0] == calm
        assert len(set(texts)) == 24


@pytest.mark.slow
async def test_two_hundred_requests_on_two_workers_survive_kills(
    tmp_path: Path, short_deadlines: pytest.MonkeyPatch
) -> None:
    short_deadlines.setenv("LOCKSTEP_MAX_SEQS", "4")
    with Serve(tmp_path, "--workers", "2", "--tp", "2") as serve:
        serve.ready()
        async with client_of(serve.system) as client:
            calm = [await ask(client, number, 60) for number in range(8)]
            running = [asyncio.create_task(ask(client, number, 60)) for number in range(200)]
            killed = 0
            while killed < 4:
                workers = await asyncio.to_thread(serve.system.until_ready)
                if all(task.done() for task in running):
                    break
                worker = workers[f"w{killed % 2}"]
                os.kill(worker["ranks"][1]["pid"] if killed < 2 else worker["pid"], signal.SIGKILL)
                killed += 1
                await asyncio.sleep(0.5)
            texts = await asyncio.gather(*running)
        assert texts[:8] == calm
        assert killed > 0
        assert serve.system.router()["failovers"] > 0
