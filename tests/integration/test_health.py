"""Workers that hang: new streams avoid them while they do, and return afterwards."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import record
from lockstep_tools.load.history import History, StreamRequest
from machine import left_since, traces, wait_for
from serving import Serve
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL, System

_LONG_S = 60.0
"""Limit for what takes seconds on an idle machine."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, private_tmp: object, slow_steps: SlowSteps) -> Iterator[System]:
    """Two workers with two ranks each."""
    before = traces()
    with pytest.MonkeyPatch.context() as patch:
        # A rank that hangs is given up so late that the test has seen before what happens until then.
        patch.setenv("LOCKSTEP_DECODE_DEADLINE_S", "15")
        with Serve(tmp_path_factory.mktemp("serve"), "--workers", "2", "--tp", "2") as serve:
            yield serve.ready().system
            serve.interrupt(signal.SIGINT)
            assert serve.end() == 0
    assert left_since(before) == []


def problems(system: System, worker: str) -> list[str]:
    return list(system.worker(worker)["health"]["problems"])


def request(session: str, tokens: int) -> StreamRequest:
    body = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": tokens, "temperature": 0}
    return StreamRequest("/completions", body | {"ignore_eos": True}, {"X-Session-ID": session})


async def stream(system: System, session: str, tokens: int) -> History:
    async with Endpoint(system.api).client() as client:
        history = await record(client, request(session, tokens))
    assert history.error is None, history.error
    return history


async def served_by(system: System, session: str) -> str:
    """The worker that runs a short stream of a session, on an idle system."""
    await asyncio.to_thread(system.until_idle)
    before = {worker_id: worker["steps"] for worker_id, worker in system.workers().items()}
    await stream(system, session, 20)
    await asyncio.to_thread(system.until_idle)

    def moved() -> list[str]:
        return [worker_id for worker_id, worker in system.workers().items() if worker["steps"] != before[worker_id]]

    # A stream may be over before the worker's next status.
    ran = await asyncio.to_thread(wait_for, moved, "a worker has computed it")
    assert len(ran) == 1, ran
    return ran[0]


@pytest.mark.slow
async def test_new_streams_avoid_a_worker_whose_rank_hangs(system: System, slow_steps: SlowSteps) -> None:
    """They are answered while the worker still waits for its rank, long before it gives the rank up."""
    system.until_ready(_LONG_S)
    own = await served_by(system, "hang")
    epoch = system.worker(own)["epoch"]
    with slow_steps.during():
        running = asyncio.create_task(stream(system, "hang", SLOW_TOKENS))
        worker = await asyncio.to_thread(system.serving, _LONG_S)
        assert worker["id"] == own
        os.kill(worker["ranks"][1]["pid"], signal.SIGSTOP)
    await asyncio.to_thread(wait_for, lambda: "suspected" in problems(system, own), "it is suspected", _LONG_S)
    answered = await stream(system, "hang", 5)
    hung = system.worker(own)
    assert answered.tokens == 5
    assert (hung["epoch"], hung["running"]) == (epoch, 1), "the running stream is still there"
    await running
    system.until_ready(_LONG_S)
    await asyncio.to_thread(wait_for, lambda: not problems(system, own), "it is well again", _LONG_S)
    assert await served_by(system, "hang") == own
