"""Bodies that take long to parse leave the event loop to streams, and small ones do not wait behind large ones."""

import asyncio
import time

import pytest
from lockstep_router.faces.body_turns import BodyTurns

COSTLY_S = 0.01
TINY, SMALL, LARGE = 1 << 9, 1 << 10, 1 << 20


def costly() -> None:
    """Compute for a while."""
    until = time.thread_time() + COSTLY_S
    while time.thread_time() < until:
        pass


async def occupy(turns: BodyTurns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a body that takes half a second, as far as `turns` knows."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "thread_time", iter([0.0, 0.5]).__next__)
        await turns.run(SMALL, lambda: None)


async def test_a_body_that_is_parsed_soon_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = BodyTurns()
    monkeypatch.setattr(time, "thread_time", lambda: 1.0)
    for _ in range(3):
        with pytest.raises(StopIteration) as ended:
            turns.run(SMALL, lambda: "parsed").send(None)
        assert ended.value.value == "parsed"


async def test_a_tiny_body_takes_its_turn_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = BodyTurns()
    await occupy(turns, monkeypatch)
    monkeypatch.setattr(time, "thread_time", lambda: pytest.fail("it asks for the time"))
    waiting = asyncio.create_task(turns.run(TINY, lambda: "parsed"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await waiting == "parsed"


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
async def test_bodies_that_take_long_leave_the_loop_half_of_its_time(size_bytes: int) -> None:
    turns, begun, ended = BodyTurns(), [], []

    def parse() -> None:
        begun.append(time.perf_counter())
        costly()
        ended.append(time.perf_counter())

    ticks = 0

    async def stream() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(stream())
    await asyncio.gather(*(turns.run(size_bytes, parse) for _ in range(8)))
    running.cancel()
    assert len(begun) == 8
    for index in range(7):
        assert begun[index + 1] - ended[index] >= COSTLY_S
    assert ticks > 8, "streams run meanwhile"


async def test_a_small_body_overtakes_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order = BodyTurns(), []
    await occupy(turns, monkeypatch)
    sizes = [LARGE, LARGE, SMALL]
    await asyncio.gather(*(turns.run(size, lambda size=size: order.append(size)) for size in sizes))
    assert order == [SMALL, LARGE, LARGE]


async def test_a_large_body_does_not_wait_for_all_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order = BodyTurns(), []
    await occupy(turns, monkeypatch)
    waiting = asyncio.create_task(turns.run(2 * SMALL, lambda: order.append("early")))
    await asyncio.sleep(0)
    time.sleep(0.15)  # a KiB is worth less
    later = [asyncio.create_task(turns.run(SMALL, lambda: order.append("late"))) for _ in range(3)]
    await asyncio.gather(waiting, *later)
    assert order[0] == "early"


async def test_one_that_leaves_while_it_waits_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order = BodyTurns(), []
    await occupy(turns, monkeypatch)
    left = asyncio.create_task(turns.run(SMALL, lambda: order.append("left")))
    stays = asyncio.create_task(turns.run(LARGE, lambda: order.append("stays")))
    await asyncio.sleep(0)
    left.cancel()
    await stays
    assert order == ["stays"]


async def test_errors_are_passed_on_and_the_next_one_is_parsed() -> None:
    turns = BodyTurns()

    def fail() -> None:
        costly()
        raise ValueError("bad")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            await turns.run(SMALL, fail)
    assert await turns.run(SMALL, lambda: 1) == 1
