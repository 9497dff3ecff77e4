"""Virtual time: the order of what happens, and processes that are stopped and killed."""

import asyncio

import pytest
from simulated.kernel import Kernel, ProcessLoop, Stuck


def make_loop(kernel, name="p", offset=0.0):
    return ProcessLoop(kernel, name, offset)


def test_time_jumps_to_what_happens_next():
    kernel, seen = Kernel(), []
    kernel.at(3600.0, lambda: seen.append(("hour", kernel.now)))
    kernel.at(5.0, lambda: seen.append(("first", kernel.now)))
    kernel.at(5.0, lambda: seen.append(("second", kernel.now)))
    assert kernel.run_until(lambda: len(seen) == 3, 7200.0)
    assert seen == [("first", 5.0), ("second", 5.0), ("hour", 3600.0)]


def test_processes_sleep_in_one_time_with_clocks_of_their_own():
    kernel, seen = Kernel(), []

    async def sleeper(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, kernel.now, asyncio.get_running_loop().time()))

    loops = [make_loop(kernel, "a", 100.0), make_loop(kernel, "b", 7000.0)]
    tasks = [loops[0].spawn(sleeper("a", 2.0)), loops[1].spawn(sleeper("b", 1.0))]
    assert kernel.run_until(lambda: all(task.done() for task in tasks), 10.0)
    assert seen == [("b", 1.0, 7001.0), ("a", 2.0, 102.0)]
    for loop in loops:
        loop.bury()


def test_frozen_process_is_late_and_a_dead_one_does_nothing_more():
    kernel, seen = Kernel(), []

    async def tick(name):
        while True:
            await asyncio.sleep(1.0)
            seen.append((name, kernel.now))

    frozen, dead = make_loop(kernel, "frozen"), make_loop(kernel, "dead")
    frozen.spawn(tick("frozen"))
    dead.spawn(tick("dead"))
    kernel.at(1.5, lambda: frozen.freeze(2.0))
    kernel.at(2.5, dead.kill)
    kernel.run_for(5.0)
    assert seen == [("frozen", 1.0), ("dead", 1.0), ("dead", 2.0), ("frozen", 3.5), ("frozen", 4.5)]
    assert frozen.frozen_s == 2.0
    frozen.bury()
    dead.bury()
    assert len(seen) == 5


def test_limit_ends_a_run():
    kernel = Kernel()
    kernel.at(9.0, lambda: None)
    assert not kernel.run_until(lambda: False, 4.0)
    assert kernel.now == 4.0


def test_callbacks_that_call_each_other_without_an_end_are_found():
    kernel = Kernel()
    loop = make_loop(kernel)

    def again():
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(Stuck):
        kernel.run_for(1.0)
    loop.close()


def test_exception_that_nobody_handles_is_kept():
    kernel = Kernel()
    loop = make_loop(kernel)
    loop.call_soon(lambda: 1 / 0)
    kernel.at(2.0, lambda: None)
    kernel.run_for(1.0)
    assert len(loop.complaints) == 1
    assert "ZeroDivisionError" in loop.complaints[0]
    loop.bury()
