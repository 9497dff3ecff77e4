"""A state server that has no room for the blocks of the probe: a fetch measures the way to it instead."""

import asyncio
import logging

import pytest
from harness import until
from lockstep_engine.remote_store import BlockForm
from scripted_kv import Memory, fetch, opened, stored, value

LARGE = BlockForm("bfloat16", (64, 1 << 10), 128 << 10)
"""Fetches of such blocks are large enough to measure the link."""


@pytest.fixture
async def unmeasured(kv, target):
    """A store for whose probe the server has no room."""
    kv.has_room_for_probes = False
    async with opened(target, is_measured=False) as store:
        await until(lambda: kv.calls == ["LookUp", "Put", "LookUp", "LookUp", "LookUp"])
        await stored(store, "abc", form=LARGE)
        yield store


async def probed_again(kv, store):
    """Let time pass until the store probes."""
    puts = kv.calls.count("Put")
    while kv.calls.count("Put") == puts:
        store.link.clock = lambda clock=store.link.clock: clock() + 60
        store.client.on_return()  # it looks at once whether to probe
        await asyncio.sleep(0.05)


async def test_a_fetch_measures_the_link_if_the_server_has_no_room_for_the_probe(unmeasured):
    before = value("fetches_total", outcome="unmeasured")
    assert unmeasured.link.estimate() is None
    memory = Memory(LARGE.length)
    assert (await fetch(unmeasured, "abc", memory, form=LARGE)).blocks == 3
    assert memory.has("abc", 3)
    assert unmeasured.link.estimate() is not None
    assert (await fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE, recompute_s=1e-9)).outcome == "gate"
    assert value("fetches_total", outcome="unmeasured") == before


async def test_one_fetch_at_a_time_measures_the_link(kv, unmeasured):
    before = value("fetches_total", outcome="unmeasured")
    assert (await fetch(unmeasured, "x", Memory(LARGE.length), form=LARGE)).outcome == "absent", "nothing was measured"
    kv.sends.clear()
    first = asyncio.create_task(fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE))
    await until(lambda: kv.calls[-1] == "Get")
    assert (await fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE)).outcome == "unmeasured"
    assert value("fetches_total", outcome="unmeasured") - before == 1
    kv.sends.set()
    assert (await first).blocks == 3
    assert (await fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE)).blocks == 3


async def test_a_fetch_that_measures_the_link_ends_when_its_blocks_would_have_been_computed(kv, unmeasured):
    kv.sends.clear()
    result = await fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE, recompute_s=0.3)
    assert (result.blocks, result.outcome) == (0, "deadline")
    assert (await fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE)).outcome == "unmeasured"


async def test_a_fetch_that_measures_the_link_is_small(kv, unmeasured):
    names = [f"{number}" for number in range(20)]
    await stored(unmeasured, names, form=LARGE)
    assert (await fetch(unmeasured, names, Memory(LARGE.length), form=LARGE)).blocks == 8  # 2 MiB
    assert (await fetch(unmeasured, names, Memory(LARGE.length), form=LARGE)).blocks == 20


async def test_what_was_measured_long_ago_is_measured_again_whatever_the_gate_says(kv, unmeasured):
    assert (await fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE)).blocks == 3
    await probed_again(kv, unmeasured)
    measured_at, blocks = unmeasured.link.measured_at, 0
    async with asyncio.timeout(30):
        while not blocks:  # it may not have heard yet that there is no room
            result = await fetch(unmeasured, "abc", Memory(LARGE.length), form=LARGE, further_bytes=1 << 60)
            blocks = result.blocks
            await asyncio.sleep(0.01)  # a fetch that the gate refuses waits for nothing: the probe needs the loop too
    assert blocks == 3
    assert unmeasured.link.measured_at > measured_at


async def test_a_server_without_room_for_the_probe_is_logged_once(kv, target, caplog):
    caplog.set_level(logging.WARNING, "lockstep.worker")
    kv.has_room_for_probes = False
    async with opened(target, is_measured=False) as store:
        for _ in range(3):
            await probed_again(kv, store)
    assert caplog.text.count("has no room for the probe") == 1


async def test_a_store_ends_also_at_the_moment_when_its_server_returns(kv, target):
    def its_tasks():
        return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__.startswith("KvStore.")]

    async with asyncio.timeout(30):
        async with opened(target) as store:
            await asyncio.sleep(0.05)  # it waits to probe again
            assert its_tasks()
            store.client.on_return()
    assert not its_tasks()
    assert store.client.is_away
