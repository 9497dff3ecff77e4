"""Many streams at once, streams whose client leaves, and the choice of the worker."""

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from lockstep_tools.serving.stack import Stack
from machine import wait_for
from system import MODEL, MOST_TOKENS, Json, System

PROMPT = "It was a dark night, and"
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": MOST_TOKENS, "temperature": 0}
CUT_SHORT = MOST_TOKENS // 2
"""A worker that makes fewer steps has not brought the long stream to its end."""


@dataclass
class Begun:
    """A long stream that has begun."""

    events: openai.Stream
    serving: Json
    """Its worker, soon after that."""
    steps_before: int


@pytest.fixture
def stream(client: openai.OpenAI, system: System, steps_at_rest: Callable[[], int]) -> Iterator[Begun]:
    steps_before = steps_at_rest()
    events = client.completions.create(**LONG, stream=True)
    for _ in range(5):
        next(events)
    yield Begun(events, system.serving(), steps_before)
    events.close()


def test_closing_a_stream_frees_its_blocks(stream: Begun, steps_at_rest: Callable[[], int]) -> None:
    assert stream.serving["free_blocks"] < stream.serving["total_blocks"]
    stream.events.close()
    assert steps_at_rest() - stream.steps_before < CUT_SHORT


def test_a_client_that_breaks_off_before_the_first_token_frees_its_blocks(
    system: System, steps_at_rest: Callable[[], int]
) -> None:
    steps_before = steps_at_rest()
    body = {"model": MODEL, "prompt": list(range(4, 1000)), "max_tokens": 1000, "ignore_eos": True}
    ranks = [rank["pid"] for worker in system.workers().values() for rank in worker["ranks"]]
    with closing(http.client.HTTPConnection(urlsplit(system.url).netloc)) as connection:
        # Ranks that stand still have no token, however long it takes until the stream is seen to run.
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            system.serving()
            connection.close()
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
        assert steps_at_rest() - steps_before < 500


def test_a_client_that_vanishes_frees_its_blocks(system: System, steps_at_rest: Callable[[], int]) -> None:
    """Its connection is reset, as when its process is killed."""
    steps_before = steps_at_rest()
    with (
        httpx.Client(base_url=system.api, trust_env=False, timeout=60) as http,
        http.stream("POST", "/completions", json=LONG | {"stream": True}) as response,
    ):
        arriving = response.iter_bytes()
        next(arriving)
        system.serving()
        response.extensions["network_stream"].get_extra_info("socket").close()
        assert steps_at_rest() - steps_before < CUT_SHORT


async def test_eight_streams_at_once_have_the_texts_of_each_alone(system: System) -> None:
    requests = [
        {"model": MODEL, "prompt": f"Chapter {n}. {PROMPT}", "max_tokens": 20 + 10 * n, "user": f"user {n}"}
        | ({"temperature": 0} if n % 2 else {"temperature": 0.9, "seed": n})
        for n in range(8)
    ]

    async with openai.AsyncOpenAI(base_url=system.api, api_key="anybody", max_retries=0) as client:

        async def streamed(request: dict) -> str:
            chunks = await client.completions.create(**request, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        together = await asyncio.gather(*map(streamed, requests))
        alone = [(await client.completions.create(**request)).choices[0].text for request in requests]
    assert together == alone


async def test_cancelling_one_of_many_leaves_the_others_alone(system: System) -> None:
    async with openai.AsyncOpenAI(base_url=system.api, api_key="anybody", max_retries=0) as client:
        request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 120, "seed": 1}
        alone = (await client.completions.create(**request)).choices[0].text

        async def streamed(leave_after: int) -> str:
            pieces: list[str] = []
            async with await client.completions.create(**request, stream=True) as chunks:
                async for chunk in chunks:
                    pieces.append(chunk.choices[0].text)
                    if len(pieces) == leave_after:
                        break
            return "".join(pieces)

        texts = await asyncio.gather(*(streamed(leave_after) for leave_after in (1000, 10, 1000, 30)))
    assert texts[0] == texts[2] == alone
    assert alone.startswith(texts[1])
    assert alone.startswith(texts[3])
    await asyncio.to_thread(system.until_idle)


def worker_of(http: httpx.Client, system: System, session: str) -> str:
    """The worker that serves a session: the one that makes steps for its request."""
    before = {worker_id: worker["steps"] for worker_id, worker in system.until_idle().items()}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
    http.post("/completions", json=body, headers={"X-Session-ID": session}).raise_for_status()

    def stepped() -> list[str]:
        return [worker_id for worker_id, worker in system.workers().items() if worker["steps"] > before[worker_id]]

    (worker_id,) = wait_for(stepped, "a worker has made steps")
    return worker_id


def test_a_session_stays_on_its_worker_also_over_a_restart_of_the_router(
    http: httpx.Client, system: System, stack: Stack
) -> None:
    sessions = [f"session {n}" for n in range(6)]
    workers = [worker_of(http, system, session) for session in sessions]
    assert set(workers) == {"w0", "w1"}
    assert [worker_of(http, system, session) for session in sessions[:3]] == workers[:3]
    router = stack.router_pid
    os.kill(router, signal.SIGKILL)
    wait_for(lambda: stack.router_pid not in (None, router), "the router is started again")
    stack.wait_ready(30)
    assert [worker_of(http, system, session) for session in sessions] == workers


def test_a_router_that_dies_leaves_no_stream_behind_in_the_workers(
    stream: Begun, stack: Stack, steps_at_rest: Callable[[], int]
) -> None:
    os.kill(stack.router_pid, signal.SIGKILL)
    with pytest.raises(openai.APIConnectionError):
        list(stream.events)
    stack.wait_ready(30)
    assert steps_at_rest() - stream.steps_before < CUT_SHORT
