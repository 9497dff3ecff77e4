"""What a client's stream goes through when something under it dies, hangs or is replaced. It never notices."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from lockstep_tools.endpoint import Endpoint
from lockstep_tools.history import History, StreamRequest, violations
from lockstep_tools.loadgen import record
from machine import left_since, traces
from serving import Serve
from system import MODEL, Json, System

TOKENS = 500
REQUEST = StreamRequest(
    "/completions",
    {
        "model": MODEL,
        "prompt": "It was a dark night, and",
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": 3,
        "logprobs": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    },
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, private_tmp: object) -> Iterator[System]:
    """Two workers with two ranks each, behind `lockstep serve`."""
    before = traces()
    with Serve(tmp_path_factory.mktemp("serve"), "--workers", "2", "--tp", "2") as serve:
        yield serve.ready().system
        serve.interrupt(signal.SIGINT)
        assert serve.end() == 0
        assert "Traceback" not in serve.notes, serve.notes
    assert left_since(before) == []


@pytest.fixture(scope="module")
def calm(system: System) -> History:
    """The stream when it is left in peace."""
    history = asyncio.run(stream(system, History(REQUEST)))
    assert violations(history, require_ids=True) == []
    assert history.tokens == TOKENS
    return history


@pytest.fixture(autouse=True)
def _whole(system: System) -> Iterator[None]:
    """Every test begins and ends with two ready workers, and leaves nothing running."""
    system.until_whole()
    yield
    system.until_whole()
    system.until_idle(within_s=5)


async def stream(system: System, history: History) -> History:
    async with Endpoint(system.api).client() as client:
        return await record(client, history.request, history=history)


class Disturbed:
    """A stream with a fault in its middle. `async with` waits for the middle, and for the end."""

    def __init__(self, system: System, calm: History, request: StreamRequest = REQUEST) -> None:
        self.history = History(request)
        self._system = system
        self._calm = calm
        self._failovers = system.router()["failovers"]
        self.worker: Json = {}
        """The one that served it."""
        self.disturbed_s = 0.0

    async def __aenter__(self) -> "Disturbed":
        self._task = asyncio.create_task(stream(self._system, self.history))
        while len(self.history.spoken) < 60:
            assert not self._task.done(), self.history.error
            await asyncio.sleep(0.01)
        self.worker = await asyncio.to_thread(self._system.serving)
        self.disturbed_s = time.monotonic()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._task.cancel()
            return
        await self._task
        assert violations(self.history, reference=self._calm.text(), require_ids=True) == []
        assert self.history.tokens == TOKENS

    @property
    def gap_s(self) -> float:
        return self.history.longest_gap_s(self.disturbed_s)

    @property
    def moves(self) -> int:
        """How often the router moved a stream since."""
        return self._system.router()["failovers"] - self._failovers


async def test_a_killed_rank(system: System, calm: History) -> None:
    async with Disturbed(system, calm) as disturbed:
        os.kill(disturbed.worker["ranks"][1]["pid"], signal.SIGKILL)
    after = system.until_whole()[disturbed.worker["id"]]
    assert disturbed.moves == 1
    assert disturbed.gap_s < 2
    assert (after["pid"], after["epoch"] > disturbed.worker["epoch"]) == (disturbed.worker["pid"], True)


async def test_a_killed_worker_is_started_again(system: System, calm: History) -> None:
    async with Disturbed(system, calm) as disturbed:
        ranks = [psutil.Process(rank["pid"]) for rank in disturbed.worker["ranks"]]
        os.kill(disturbed.worker["pid"], signal.SIGKILL)
    assert disturbed.moves == 1
    assert disturbed.gap_s < 2
    assert not any(rank.is_running() for rank in ranks)
    after = system.until_whole()[disturbed.worker["id"]]
    assert after["pid"] != disturbed.worker["pid"]
    assert after["incarnation"] > disturbed.worker["incarnation"]


async def test_a_hung_rank_is_named_and_replaced(system: System, calm: History) -> None:
    async with Disturbed(system, calm) as disturbed:
        worker_id, hung = disturbed.worker["id"], disturbed.worker["ranks"][0]["pid"]
        os.kill(hung, signal.SIGSTOP)
        found = await asyncio.to_thread(system.until_state, worker_id, "restarting", within_s=10)
        assert f"rank 0 (pid {hung}) has not finished its step" in found["reason"]
    assert disturbed.moves == 1
    assert 1 < disturbed.gap_s < 8
    assert system.until_whole()[worker_id]["epoch"] > disturbed.worker["epoch"]
    assert not psutil.pid_exists(hung)


async def test_a_worker_that_falls_silent(system: System, calm: History) -> None:
    async with Disturbed(system, calm) as disturbed:
        os.kill(disturbed.worker["pid"], signal.SIGSTOP)
        try:
            await asyncio.to_thread(system.until_state, disturbed.worker["id"], "silent", within_s=4)
            while disturbed.history.ended_s is None:
                await asyncio.sleep(0.01)
        finally:
            os.kill(disturbed.worker["pid"], signal.SIGCONT)
    assert disturbed.moves == 1
    assert 1 < disturbed.gap_s < 4
    after = system.until_whole()[disturbed.worker["id"]]
    assert after["pid"] == disturbed.worker["pid"]


async def test_a_worker_that_is_told_to_end_finishes_or_hands_over(system: System, calm: History) -> None:
    """So many streams that the drain is over before they are."""
    same_session = StreamRequest(REQUEST.path, REQUEST.body, {"X-Session-ID": "one for all"})
    others = [asyncio.create_task(stream(system, History(same_session))) for _ in range(9)]
    async with Disturbed(system, calm, same_session) as disturbed:
        os.kill(disturbed.worker["pid"], signal.SIGTERM)
    for history in await asyncio.gather(*others):
        assert violations(history, reference=calm.text(), require_ids=True) == []
        assert history.tokens == TOKENS
    after = system.until_whole()[disturbed.worker["id"]]
    assert after["pid"] != disturbed.worker["pid"]
    assert disturbed.gap_s < 2


async def test_all_workers_killed_at_once(system: System, calm: History) -> None:
    """More than is promised: the stream waits until one of them is back."""
    async with Disturbed(system, calm) as disturbed:
        for worker in system.workers().values():
            os.kill(worker["pid"], signal.SIGKILL)
    assert disturbed.moves in (1, 2)  # it may have gone to the second one before that was dead
    assert disturbed.gap_s < 30
