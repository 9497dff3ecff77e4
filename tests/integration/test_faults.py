"""Streams while the processes that serve them die, hang or are replaced: the client sees only a pause."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import record
from lockstep_tools.load.history import History, StreamRequest, violations
from machine import left_since, traces, wait_for
from serving import Serve
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL, Json, System

BEFORE_FAULT = 30
"""Tokens before the fault, each of which takes 50 ms: the fault has to hit a stream in its middle."""
BODY = {
    "model": MODEL,
    "prompt": "It was a dark night, and",
    "temperature": 0.8,
    "seed": 3,
    "logprobs": 0,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
STEP_DEADLINE_S = 5.0
"""Decode deadline of the worker. Faults that are noticed at once recover sooner, also on a slow machine."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, ranks that start do not become ready."""
    return tmp_path_factory.mktemp("held") / "held"


@pytest.fixture(scope="module")
def system(
    tmp_path_factory: pytest.TempPathFactory, private_tmp: object, slow_steps: SlowSteps, held: Path
) -> Iterator[System]:
    """Two workers with two ranks each, behind `lockstep serve`."""
    before = traces()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELD_RANKS_FILE", str(held))
        with Serve(tmp_path_factory.mktemp("serve"), "--workers", "2", "--tp", "2") as serve:
            yield serve.ready().system
            serve.interrupt(signal.SIGINT)
            assert serve.end() == 0
            assert "Traceback" not in serve.notes, serve.notes
    assert left_since(before) == []


@pytest.fixture(scope="module")
def undisturbed(system: System) -> History:
    """The same stream undisturbed."""
    request = StreamRequest("/completions", BODY | {"max_tokens": SLOW_TOKENS})
    history = asyncio.run(stream(system, History(request)))
    assert violations(history, require_ids=True) == []
    assert history.tokens == request.body["max_tokens"]
    return history


@pytest.fixture(autouse=True)
def _ready(system: System) -> Iterator[None]:
    """Every test begins and ends with two ready workers, and leaves nothing running."""
    system.until_ready()
    yield
    system.until_ready()
    system.until_idle(within_s=5)


async def stream(system: System, history: History) -> History:
    async with Endpoint(system.api).client() as client:
        return await record(client, history.request, history=history)


class Disturbed:
    """A stream with a fault in its middle. `async with` waits for the middle, and for the end; steps are slow until
    its block has ended, or has ended them.
    """

    def __init__(
        self, system: System, slow_steps: SlowSteps, undisturbed: History, headers: dict[str, str] | None = None
    ) -> None:
        asked = undisturbed.request
        self.history = History(StreamRequest(asked.path, asked.body, headers or {}))
        self._system = system
        self._slow_steps = slow_steps
        self._undisturbed = undisturbed
        self._failovers = system.router()["failovers"]
        self.worker: Json = {}
        """The worker that served it."""
        self.disturbed_s = 0.0

    async def __aenter__(self) -> "Disturbed":
        self._slow_steps.begin()
        self._task = asyncio.create_task(stream(self._system, self.history))
        while len(self.history.spoken) < BEFORE_FAULT:
            assert not self._task.done(), self.history.error
            await asyncio.sleep(0.01)
        self.worker = await asyncio.to_thread(self._system.serving)
        self.disturbed_s = time.monotonic()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._slow_steps.end()
        if kind is not None:
            self._task.cancel()
            return
        await self._task
        assert violations(self.history, reference=self._undisturbed.text(), require_ids=True) == []
        assert self.history.tokens == self._undisturbed.tokens

    @property
    def gap_s(self) -> float:
        return self.history.longest_gap_s(self.disturbed_s)

    @property
    def moves(self) -> int:
        """How often the router has moved a stream since the fault."""
        return self._system.router()["failovers"] - self._failovers


async def test_a_killed_rank(system: System, slow_steps: SlowSteps, undisturbed: History) -> None:
    async with Disturbed(system, slow_steps, undisturbed) as disturbed:
        os.kill(disturbed.worker["ranks"][1]["pid"], signal.SIGKILL)
    after = system.until_ready()[disturbed.worker["id"]]
    assert disturbed.moves == 1
    assert disturbed.gap_s < STEP_DEADLINE_S
    assert (after["pid"], after["epoch"] > disturbed.worker["epoch"]) == (disturbed.worker["pid"], True)


@pytest.mark.slow
async def test_a_killed_worker_is_started_again(system: System, slow_steps: SlowSteps, undisturbed: History) -> None:
    async with Disturbed(system, slow_steps, undisturbed) as disturbed:
        ranks = [psutil.Process(rank["pid"]) for rank in disturbed.worker["ranks"]]
        os.kill(disturbed.worker["pid"], signal.SIGKILL)
    assert disturbed.moves == 1
    assert disturbed.gap_s < STEP_DEADLINE_S
    # The kernel ends them with their worker, and the stream does not wait for that.
    wait_for(lambda: not any(rank.is_running() for rank in ranks), "its ranks have ended")
    after = system.until_ready()[disturbed.worker["id"]]
    assert after["pid"] != disturbed.worker["pid"]
    assert after["incarnation"] > disturbed.worker["incarnation"]


@pytest.mark.slow
async def test_a_rank_that_dies_while_a_stream_has_a_grammar(system: System, slow_steps: SlowSteps) -> None:
    """The other worker goes on at the same place of the grammar: the text is that of the undisturbed stream."""
    rest = {"seed": 4, "ignore_eos": True, "max_tokens": 400, "response_format": {"type": "json_object"}}
    request = StreamRequest("/completions", BODY | rest)
    alone = await stream(system, History(request))
    assert violations(alone, require_ids=True) == []
    assert alone.text().startswith("{")
    assert alone.tokens > 150
    async with Disturbed(system, slow_steps, alone) as disturbed:
        os.kill(disturbed.worker["ranks"][1]["pid"], signal.SIGKILL)
    assert disturbed.moves == 1


@pytest.mark.slow
async def test_a_hung_rank_is_named_and_replaced(
    system: System, slow_steps: SlowSteps, undisturbed: History, held: Path
) -> None:
    async with Disturbed(system, slow_steps, undisturbed) as disturbed:
        worker_id, hung = disturbed.worker["id"], disturbed.worker["ranks"][0]["pid"]
        held.touch()  # until its state is seen: ranks start in less time than a machine may pause the test
        try:
            os.kill(hung, signal.SIGSTOP)
            found = await asyncio.to_thread(system.until_state, worker_id, "restarting", within_s=10)
        finally:
            held.unlink()
        assert f"rank 0 (pid {hung}) has not finished its step" in found["reason"]
    assert disturbed.moves == 1
    assert 1 < disturbed.gap_s < 3 * STEP_DEADLINE_S
    assert system.until_ready()[worker_id]["epoch"] > disturbed.worker["epoch"]
    assert not psutil.pid_exists(hung)


@pytest.mark.slow
async def test_a_worker_that_falls_silent(system: System, slow_steps: SlowSteps, undisturbed: History) -> None:
    async with Disturbed(system, slow_steps, undisturbed) as disturbed:
        os.kill(disturbed.worker["pid"], signal.SIGSTOP)
        try:
            await asyncio.to_thread(system.until_state, disturbed.worker["id"], "silent", within_s=10)
            slow_steps.end()
            while disturbed.history.ended_s is None:
                await asyncio.sleep(0.01)
        finally:
            os.kill(disturbed.worker["pid"], signal.SIGCONT)
    assert disturbed.moves == 1
    assert 1 < disturbed.gap_s < STEP_DEADLINE_S
    after = system.until_ready()[disturbed.worker["id"]]
    assert after["pid"] == disturbed.worker["pid"]


@pytest.mark.slow
async def test_a_worker_that_gets_sigterm_finishes_or_hands_over(
    system: System, slow_steps: SlowSteps, undisturbed: History
) -> None:
    """Steps are slow until the drain is over, so that it is before the streams are."""
    session = {"X-Session-ID": "one for all"}
    same = StreamRequest(undisturbed.request.path, undisturbed.request.body, session)
    others = [asyncio.create_task(stream(system, History(same))) for _ in range(9)]
    async with Disturbed(system, slow_steps, undisturbed, session) as disturbed:
        os.kill(disturbed.worker["pid"], signal.SIGTERM)
        await asyncio.to_thread(wait_for, lambda: disturbed.moves, "the drain is over")
    for history in await asyncio.gather(*others):
        assert violations(history, reference=undisturbed.text(), require_ids=True) == []
        assert history.tokens == undisturbed.tokens
    after = system.until_ready()[disturbed.worker["id"]]
    assert after["pid"] != disturbed.worker["pid"]
    assert disturbed.gap_s < STEP_DEADLINE_S


async def test_all_workers_killed_at_once(system: System, slow_steps: SlowSteps, undisturbed: History) -> None:
    """The stream waits until one of them is ready again."""
    async with Disturbed(system, slow_steps, undisturbed) as disturbed:
        for worker in system.workers().values():
            os.kill(worker["pid"], signal.SIGKILL)
    assert disturbed.moves in (1, 2)  # it may have gone to the second one before that was dead
    assert disturbed.gap_s < 30
