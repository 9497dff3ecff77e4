"""Long queues in front of real workers: waiting requests do not fail, also when workers are killed meanwhile."""

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from otlp_receiver import Received, grpc_receiver
from serving import Serve
from slow_steps import SlowSteps
from spans import headers as trace_headers
from spans import named
from system import MODEL, System

pytestmark = pytest.mark.usefixtures("private_tmp")

_APART_NS = 100_000_000
"""Two things whose order is compared are at least so far apart: a router and a worker see them at other moments."""


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


async def ask(client: httpx.AsyncClient, number: int, tokens: int, trace: int = 0) -> str:
    headers = trace_headers(trace) if trace else {}
    response = await client.post("/completions", json=question(number, tokens), headers=headers)
    assert response.status_code == 200, response.text
    body = response.json()
    assert "lockstep" not in body, "workers on one machine have the same numerics"
    text: str = body["choices"][0]["text"]
    return text


def client_of(system: System) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=system.api, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)
    )


class Turn(NamedTuple):
    """An attempt of a request that had no output yet, in the queue of a worker."""

    request: str
    worker: str
    arrived_ns: int
    """When the request arrived at the router."""
    queued_ns: int
    left_ns: int
    """When it began to run, or left the worker."""
    ran: bool


def turns(spans: Sequence[Received]) -> list[Turn]:
    arrived = {span.trace_id: span.begin_ns for span in named(spans, "request")}
    has_output = {
        span.span_id: bool(span.attributes["lockstep.attempt.emitted_before"]) for span in named(spans, "attempt")
    }
    ran = {span.parent_id for span in named(spans, "prefill")}
    return [
        Turn(
            span.trace_id,
            span.resource["service.instance.id"],
            arrived[span.trace_id],
            span.begin_ns,
            span.end_ns,
            span.parent_id in ran,
        )
        for span in named(spans, "queue")
        if span.trace_id in arrived and not has_output.get(span.parent_id, False)
    ]


def compared(waited: Sequence[Turn]) -> tuple[list[tuple[Turn, Turn]], list[tuple[Turn, Turn]]]:
    """Pairs of turns of an older and a younger request that waited at one worker at the same time, and one of which
    began to run while the other one waited: those in which it was the older one, and those in which it was not.
    """
    at = defaultdict(list)
    for turn in waited:
        at[turn.worker].append(turn)
    pairs = [
        (older, younger)
        for there in at.values()
        for older, younger in permutations(there, 2)
        if older.arrived_ns + _APART_NS < younger.arrived_ns
    ]
    return (
        [pair for pair in pairs if _began_before(*pair)],
        [(older, younger) for older, younger in pairs if _began_before(younger, older)],
    )


def _began_before(first: Turn, other: Turn) -> bool:
    """Whether a turn began to run while the other one waited."""
    return first.ran and other.queued_ns + _APART_NS < first.left_ns < other.left_ns - _APART_NS


def test_a_younger_request_that_begins_first_is_found() -> None:
    ms = 1_000_000
    older = Turn("a", "w0", 0, 1 * ms, 2000 * ms, ran=True)
    younger = Turn("b", "w0", 500 * ms, 501 * ms, 1000 * ms, ran=True)
    assert compared([older, younger]) == ([], [(older, younger)])
    later = younger._replace(left_ns=3000 * ms)
    assert compared([later, older]) == ([(older, later)], [])
    elsewhere, never = younger._replace(worker="w1"), younger._replace(ran=False)
    assert compared([older, elsewhere]) == compared([older, never]) == ([], [])


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
    tmp_path: Path, slow_steps: SlowSteps, short_deadlines: pytest.MonkeyPatch
) -> None:
    short_deadlines.setenv("LOCKSTEP_MAX_SEQS", "4")
    with grpc_receiver() as receiver:
        short_deadlines.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        short_deadlines.setenv("OTEL_TRACES_SAMPLER_ARG", "0")  # of requests without a trace
        with Serve(tmp_path, "--workers", "2", "--tp", "2") as serve:
            serve.ready()
            killed = await answer_under_kills(serve, slow_steps, 200)
            assert killed > 0
            assert serve.system.router()["failovers"] > 0
            serve.interrupt(signal.SIGINT)  # then all spans come, but for those of workers that were killed
            assert serve.end() == 0
        waited = turns(receiver.wait({"request": 200}))
    in_order, overtaken = compared(waited)
    assert len(in_order) > 200
    assert overtaken == []


async def answer_under_kills(serve: Serve, slow_steps: SlowSteps, requests: int) -> int:
    """All requests are answered; the number of processes that were killed meanwhile.

    Steps are slow until the first kill: then most requests wait, on a fast machine too.
    """
    async with client_of(serve.system) as client:
        calm = [await ask(client, number, 60) for number in range(8)]
        with slow_steps.during():
            running = []
            for number in range(requests):
                running.append(asyncio.create_task(ask(client, number, 60, trace=1 + number)))
                await asyncio.sleep(0.01)  # so that their order is known
            killed = 0
            while killed < 4:
                workers = await asyncio.to_thread(serve.system.until_ready)
                if all(task.done() for task in running):
                    break
                worker = workers[f"w{killed % 2}"]
                os.kill(worker["ranks"][1]["pid"] if killed < 2 else worker["pid"], signal.SIGKILL)
                slow_steps.end()
                killed += 1
                await asyncio.sleep(0.5)
        texts = await asyncio.gather(*running)
    assert texts[:8] == calm
    return killed
