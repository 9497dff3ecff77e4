"""Many streams at once, streams whose client leaves, and the choice of the worker."""

import asyncio
import http.client
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from lockstep_tools.serving.stack import Stack
from machine import wait_for
from system import MODEL, MOST_TOKENS, System

PROMPT = "It was a dark night, and"
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": MOST_TOKENS, "temperature": 0}
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""Of SO_LINGER: on, for no time."""


@pytest.fixture
def stream(
    client: openai.OpenAI, standing_stream: Callable[..., AbstractContextManager[Any]]
) -> Iterator[openai.Stream]:
    """A long stream in the middle of which the ranks stand."""

    def begin() -> openai.Stream:
        events = client.completions.create(**LONG, stream=True)
        for _ in range(5):
            next(events)
        return events

    with standing_stream(begin) as events:
        yield events


def test_closing_a_stream_frees_its_blocks(stream: openai.Stream, system: System) -> None:
    serving = system.serving()
    assert serving["free_blocks"] < serving["total_blocks"]
    stream.close()


def test_a_client_that_breaks_off_before_the_first_token_frees_its_blocks(
    system: System, ranks_stand: Callable[[], AbstractContextManager[None]]
) -> None:
    body = {"model": MODEL, "prompt": list(range(4, 1000)), "max_tokens": 1000, "ignore_eos": True}
    with closing(http.client.HTTPConnection(urlsplit(system.url).netloc)) as connection, ranks_stand():
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        system.serving()
        connection.close()


def test_a_client_that_vanishes_frees_its_blocks(
    http: httpx.Client, standing_stream: Callable[..., AbstractContextManager[Any]]
) -> None:
    """Its connection is reset, as when its process is killed."""
    arriving = []  # httpx closes a stream whose iterator is dropped

    def begin() -> socket.socket:
        request = http.build_request("POST", "/completions", json=LONG | {"stream": True})
        response = http.send(request, stream=True)
        arriving.append(response.iter_bytes())
        next(arriving[-1])
        return response.extensions["network_stream"].get_extra_info("socket")

    with standing_stream(begin) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        connection.close()


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
    before = {worker_id: worker["steps"] for worker_id, worker in system.until_at_rest().items()}
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


def test_a_router_that_dies_leaves_no_stream_behind_in_the_workers(stream: openai.Stream, stack: Stack) -> None:
    os.kill(stack.router_pid, signal.SIGKILL)
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    stack.wait_ready(30)
