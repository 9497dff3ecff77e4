"""Time during which the router did not run does not make a worker late."""

import asyncio
import logging

from lockstep_router.workers.clock import AwakeClock
from router_cluster import eventually


def test_late_tick_counts_as_two_at_most():
    clock = AwakeClock(tick_s=0.1)
    clock.advance(0.1)
    clock.advance(30.0)
    assert clock.now() == 0.1 + 0.2


async def test_ticks_follow_real_time():
    clock = AwakeClock(tick_s=0.01)
    ticks = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    running = asyncio.create_task(clock.run(lambda: ticks.append(clock.now())))
    await eventually(lambda: len(ticks) >= 3)
    running.cancel()
    assert ticks == sorted(ticks)
    assert 0 < clock.now() <= loop.time() - began


async def test_clock_goes_on_when_a_tick_fails(caplog):
    clock = AwakeClock(tick_s=0.01)
    ticks = []

    def tick():
        ticks.append(clock.now())
        if len(ticks) in (2, 3, 5):
            raise RuntimeError("a defect")

    with caplog.at_level(logging.ERROR, "lockstep.router"):
        running = asyncio.create_task(clock.run(tick))
        await eventually(lambda: len(ticks) >= 6)
    running.cancel()
    assert ticks[5] > ticks[4]
    assert [record.message for record in caplog.records] == ["tick failed"] * 2  # once until a tick succeeds
