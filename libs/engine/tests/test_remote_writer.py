"""What is stored outside of the machine, when, and how often it is offered."""

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest
from checkpoints import make
from lockstep_engine.config import BLOCK_SIZE
from remote_double import MemoryStore
from remote_worker import FULL, Worker, first_turn, second_turn
from test_host_memory import PARAMS, TEXT, words


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("model"))[0]


async def test_no_block_is_offered_twice(path):
    store = MemoryStore()
    ids = await first_turn(path, store)
    worker = Worker(path, store)
    for name in ("second", "third"):
        await worker.ask(name, second_turn(ids))
        assert await worker.stored()
    assert len(set(store.offers)) == len(store.offers)
    assert worker.tier.usage.stored == (TEXT + 5 + 40 + 5 - 1) // BLOCK_SIZE - FULL // BLOCK_SIZE
    await worker.close()


async def test_what_the_store_does_not_keep_any_more_is_offered_again(path):
    """At the end of a text that begins with it, and at a drain."""
    store = MemoryStore()
    worker = Worker(path, store)
    await worker.ask("first", words(0))
    assert await worker.stored()
    offered = len(store.offers)
    assert offered == FULL // BLOCK_SIZE
    store.lost_at = time.monotonic()
    await worker.ask("again", words(0))
    await worker.settled()
    assert len(store.offers) == 2 * offered
    assert await worker.stored()
    assert len(store.offers) == 2 * offered
    store.lost_at = time.monotonic()
    assert await worker.stored()
    assert len(store.offers) == 3 * offered
    await worker.close()


async def test_what_the_store_has_lost_after_taking_it_is_offered_again(path):
    store = MemoryStore()
    worker = Worker(path, store)
    await worker.ask("first", words(0))
    assert await worker.stored()
    lost = store.offers[1]
    store.on_lost([lost[1]])
    await worker.ask("again", words(0))
    await worker.settled()
    assert store.offers[FULL // BLOCK_SIZE :] == [lost]
    store.on_lost([lost[1]])
    assert await worker.stored()
    assert store.offers[FULL // BLOCK_SIZE :] == [lost, lost]
    await worker.close()
    store.on_lost([lost[1]])


async def test_what_the_store_does_not_take_is_dropped(path, monkeypatch):
    monkeypatch.setattr("lockstep_engine.remote_writer.PATIENCE_S", 0.0)
    store = MemoryStore()
    store.room = 3
    ids = await first_turn(path, store)
    assert len(store.offers) == 3
    worker = Worker(path, store)
    assert (await worker.ask("second", second_turn(ids)))[2] == 3 * BLOCK_SIZE
    await worker.close()


async def test_a_tenant_whose_blocks_are_not_taken_holds_up_nobody(path, monkeypatch):
    monkeypatch.setattr("lockstep_engine.remote_writer.PATIENCE_S", 3600.0)
    store = MemoryStore()
    take, refused = store.offer, []
    store.offer = lambda tenant, blocks: refused.append(tenant) or 0 if tenant == "a" else take(tenant, blocks)
    worker = Worker(path, store)
    await worker.ask("a", words(0), tenant="a")
    await worker.ask("b", words(1), tenant="b")
    async with asyncio.timeout(60):
        while len(store.parts) < FULL // BLOCK_SIZE or len(refused) < 3:
            await worker.step()
    assert {tenant for tenant, *_ in store.parts} == {"b"}
    store.offer = take
    await worker.settled()
    assert len(store.parts) == 2 * (FULL // BLOCK_SIZE)
    await worker.close()


async def test_what_the_pools_evict_is_stored(path, monkeypatch):
    """Here the end of a text stores nothing, because the store is full then."""
    monkeypatch.setattr("lockstep_engine.remote_writer.PATIENCE_S", 0.0)
    store = MemoryStore()
    store.room = 0
    worker = Worker(path, store)
    ids, *_ = await worker.ask("first", words(0))
    await worker.settled()
    assert store.parts == {}
    store.room = None
    for seed in range(1, 4):
        await worker.ask(str(seed), words(seed))
    await worker.settled()
    await worker.close()
    other = Worker(path, store)
    assert (await other.ask("second", second_turn(ids)))[2] == FULL
    await other.close()


async def test_a_worker_that_drains_stores_what_runs(path):
    store = MemoryStore()
    worker = Worker(path, store)
    worker.submit("long", words(0), replace(PARAMS, max_tokens=100))
    while len(worker.outputs["long"][0]) < 5:
        await worker.step()
    ids = list(worker.outputs["long"][0])
    assert await worker.stored()
    await worker.close()
    other = Worker(path, store)
    assert (await other.ask("long", [*words(0), *ids, 7]))[2] == FULL
    await other.close()


async def test_a_worker_that_drains_stores_nothing_of_what_has_no_output_yet(path):
    """Only its output tells whether its blocks hold numbers."""
    store = MemoryStore()
    worker = Worker(path, store)
    worker.submit("long", words(0), replace(PARAMS, max_tokens=100))
    while not any(each.keys[: each.remembered] for each in worker.scheduler.sequences.running):
        await worker.step()
    assert worker.outputs["long"][0] == []
    assert await worker.tier.store_all(5)  # without a step, which may give an output
    assert store.offers == []
    await worker.close()


async def test_a_worker_that_drains_stores_what_runs_before_what_has_ended(path, monkeypatch):
    monkeypatch.setattr("lockstep_engine.remote_writer.PATIENCE_S", 0.0)
    store = MemoryStore()
    worker = Worker(path, store)
    store.room = 0
    ids, *_ = await worker.ask("ended", words(0))
    await worker.settled()
    worker.submit("long", words(1), replace(PARAMS, max_tokens=100))
    while len(worker.outputs["long"][0]) < 5:
        await worker.step()
    running = [*words(1), *worker.outputs["long"][0], 7]
    store.room = None
    assert await worker.stored()
    await worker.close()
    first = [name for _, name, _ in store.offers]
    other = Worker(path, MemoryStore())
    await other.ask("long", running)
    assert await other.stored()
    await other.close()
    theirs = [name for _, name, _ in other.tier._store.offers]
    assert first[: FULL // BLOCK_SIZE] == theirs[: FULL // BLOCK_SIZE]
    third = Worker(path, store)
    assert (await third.ask("second", second_turn(ids)))[2] == FULL
    await third.close()


async def drain_into_a_full_store(path, *, is_away):
    """A worker that has begun to drain."""
    store = MemoryStore()
    store.room, store.is_away = 0, is_away
    worker = Worker(path, store)
    await worker.ask("ended", words(0))
    return worker, store, asyncio.ensure_future(worker.tier.store_all(3600))


@pytest.mark.parametrize("is_away_at_first", [True, False])
async def test_a_worker_that_drains_does_not_wait_for_a_store_that_is_away(path, monkeypatch, is_away_at_first):
    """Its queue is full then, and each block would be offered for a while."""
    monkeypatch.setattr("lockstep_engine.remote_writer.PATIENCE_S", 3600.0)
    monkeypatch.setattr("lockstep_engine.remote_tier.AWAY_S", 0.2)
    worker, store, draining = await drain_into_a_full_store(path, is_away=is_away_at_first)
    if not is_away_at_first:
        await asyncio.sleep(0.5)
        assert not draining.done()
        store.is_away = True
    async with asyncio.timeout(60):
        assert not await draining
    await worker.close()


async def test_a_worker_that_drains_goes_on_with_a_store_that_was_away_for_a_moment(path, monkeypatch):
    monkeypatch.setattr("lockstep_engine.remote_writer.PATIENCE_S", 3600.0)
    monkeypatch.setattr("lockstep_engine.remote_tier.AWAY_S", 4.0)
    worker, store, draining = await drain_into_a_full_store(path, is_away=True)
    await asyncio.sleep(0.05)
    store.is_away = False
    await asyncio.sleep(4.3)
    assert not draining.done()
    store.room = None
    async with asyncio.timeout(60):
        while not draining.done():
            await worker.step()
    assert await draining
    assert len(store.parts) == FULL // BLOCK_SIZE
    await worker.close()


async def test_the_loop_goes_on_while_blocks_are_offered_that_are_gone(path):
    store = MemoryStore()
    worker = Worker(path, store)
    await worker.ask("first", words(0))
    await worker.settled()
    writer, turns = worker.tier._epoch.writer, 0
    writer._offered.clear()
    worker.scheduler.shed(0)
    blocks = worker.scheduler.blocks
    one_by_one = msgspec.structs.replace(blocks.sizes.host, step_slots=1)
    blocks.sizes = msgspec.structs.replace(blocks.sizes, host=one_by_one)
    await writer.add_evicted()
    due = len(writer._due)
    assert due == FULL // BLOCK_SIZE
    idle = asyncio.ensure_future(writer._idle.wait())
    while not idle.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > due
    await worker.close()
