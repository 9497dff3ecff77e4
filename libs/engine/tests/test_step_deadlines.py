"""The deadline of the step in flight: a rank that hangs is named in time, and a pause of all processes is no hang."""

import asyncio
import time

import pytest
from lockstep_engine import step_deadlines
from lockstep_engine.step_deadlines import StepDeadlines


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(step_deadlines, "PAUSED_S", 0.2)
    return []


async def passed(late):
    async with asyncio.timeout(10):
        while not late:
            await asyncio.sleep(0.005)


async def test_a_step_that_is_late_is_told_once(late):
    deadlines = StepDeadlines(lambda what, since: late.append((what, since)))
    began = time.monotonic()
    deadlines.add(1, 0.05)
    await passed(late)
    assert time.monotonic() - began >= 0.05
    await asyncio.sleep(0.2)
    ((what, since),) = late
    assert what == "has not finished its step"
    assert since >= began


async def test_a_pause_of_the_process_gives_the_step_its_time_once_more(late):
    deadlines = StepDeadlines(lambda what, since: late.append(what))
    deadlines.add(1, 0.15)
    time.sleep(0.5)
    for _ in range(5):  # turns of the event loop, not time, of which a busy machine may take more than there is
        await asyncio.sleep(0)
    deadlines.finish(1)
    await asyncio.sleep(0.2)
    assert not late


async def test_a_step_that_is_late_after_a_pause_too_is_told(late):
    deadlines = StepDeadlines(lambda what, since: late.append(what))
    deadlines.add(1, 0.1)
    time.sleep(0.5)
    await passed(late)
