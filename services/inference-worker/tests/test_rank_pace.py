"""What a step of each rank took lately, and that routers are told."""

import asyncio
import dataclasses

import pytest
from harness import make_settings, served, submit, until
from lockstep_engine import RankStatus
from lockstep_worker.rank_pace import NO_STEPS, WINDOW_S, RankPaces


@pytest.fixture
async def status(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        yield worker.engine.status()


def after(status, epoch, *sums):
    ranks = tuple(
        RankStatus(rank, 1, "ready", steps, forward_s=forward_s, collective_s=collective_s)
        for rank, (steps, forward_s, collective_s) in enumerate(sums)
    )
    return dataclasses.replace(status, epoch=epoch, ranks=ranks)


def test_it_is_the_mean_of_the_steps_of_the_last_seconds(status):
    paces = RankPaces()
    assert paces.of(after(status, 1, (10, 5.0, 1.0), (10, 5.0, 1.0)), 100.0) == {0: NO_STEPS, 1: NO_STEPS}
    found = paces.of(after(status, 1, (20, 7.0, 2.0), (20, 7.0, 1.5)), 101.0)
    assert found == {0: pytest.approx((0.1, 0.1)), 1: pytest.approx((0.15, 0.05))}
    # What was before the window does not count.
    paces.of(after(status, 1, (20, 7.0, 2.0), (20, 7.0, 1.5)), 102.0)
    found = paces.of(after(status, 1, (22, 7.4, 2.2), (22, 7.4, 1.5)), 102.0 + WINDOW_S)
    assert found == {0: pytest.approx((0.1, 0.1)), 1: pytest.approx((0.2, 0.0))}
    # Nor does what an idle worker ran.
    later = after(status, 1, (22, 7.4, 2.2), (22, 7.4, 1.5))
    for second in range(2 * round(WINDOW_S)):
        found = paces.of(later, 110.0 + second)
    assert found == {0: NO_STEPS, 1: NO_STEPS}


def test_an_epoch_begins_from_nothing(status):
    paces = RankPaces()
    paces.of(after(status, 1, (10, 5.0, 1.0)), 100.0)
    assert paces.of(after(status, 2, (50, 50.0, 1.0)), 101.0) == {0: NO_STEPS}
    assert paces.of(after(status, 2, (60, 55.0, 2.0)), 102.0) == {0: pytest.approx((0.4, 0.1))}


def test_what_is_kept_is_bounded(status):
    paces = RankPaces()
    for number in range(10_000):
        paces.of(after(status, 1, (number, float(number), 0.0)), number / 1000)
    assert len(paces._samples) < 30


async def test_routers_are_told_what_the_steps_of_each_rank_took(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("a", max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 1)
        worker.engine.step()
        async with asyncio.timeout(60):
            while not (ranks := (await router.next("status")).status.ranks)[0].compute_s:
                pass
        paces = [(rank.compute_s, rank.collective_s) for rank in ranks]
        assert paces == [pytest.approx((0.375, 0.125)), pytest.approx((0.4375, 0.0625))]
