"""KV blocks from a store outside of the machine: a stream that begins with them has the bits of one that computed all
of its blocks, and whatever the store does, no stream gets another token.
"""

import asyncio
import os
import signal

import pytest
import torch
from checkpoints import make
from lockstep_common.errors import LockstepError
from lockstep_engine import AsyncEngine, EngineConfig, Request
from lockstep_engine.blocks import BlockKey
from lockstep_engine.config import BLOCK_SIZE, SlidingWindow
from remote_double import MemoryStore
from remote_worker import FULL, Worker, first_turn, second_turn
from test_host_memory import MODEL, MODES, PARAMS, TEXT, Ranks, words


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("model"))[0]


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mode", "tp"), [*((mode, 1) for mode in MODES), ("none", 2), ("lazy", 2)])
async def test_a_session_goes_on_at_another_worker_with_the_bits_of_computed_blocks(path, mode, tp, dtype):
    store, mode = MemoryStore(), MODES[mode]
    ids = await first_turn(path, store, tp=tp, dtype=dtype, **mode)
    other = Worker(path, store, tp, dtype, **mode)
    *found, cached = await other.ask("second", second_turn(ids))
    assert cached == FULL
    assert other.tier.usage.fetched >= FULL // BLOCK_SIZE
    assert other.scheduler.blocks.host.usage.copied_in >= FULL // BLOCK_SIZE
    await other.close()
    *computed, cached = Ranks(path, tp, dtype, **mode).run(second_turn(ids))
    assert cached == 0
    assert found == computed


@pytest.mark.bits
@pytest.mark.parametrize("further", [9, 30])
@pytest.mark.parametrize("mode", MODES)
async def test_of_a_model_with_a_window_the_last_blocks_of_a_session_are_enough(tmp_path, mode, further):
    """The second turn's own window reaches back to the end of the first one, whose window lies before it."""
    path, store, mode = make("mistral", tmp_path)[0], MemoryStore(), {**MODES[mode], "window": SlidingWindow(37)}
    turn = [*words(0), *await first_turn(path, store, **mode), *words(9, further)]
    other = Worker(path, store, **mode)
    *found, cached = await other.ask("second", turn)
    assert cached == FULL
    assert other.tier.usage.fetched == FULL // BLOCK_SIZE - SlidingWindow(37).first_seen(FULL)
    await other.close()
    *computed, cached = Ranks(path, 1, torch.float32, **mode).run(turn)
    assert cached == 0
    assert found == computed


async def test_of_a_model_with_a_window_a_text_that_ended_long_before_is_computed(tmp_path):
    path, store, mode = make("mistral", tmp_path)[0], MemoryStore(), {"window": SlidingWindow(37)}
    turn = [*words(0), *await first_turn(path, store, **mode), *words(9, 90)]
    other = Worker(path, store, **mode)
    *found, cached = await other.ask("second", turn)
    assert (cached, other.tier.usage.fetched) == (0, 0)
    await other.close()
    assert found == list(Ranks(path, 1, torch.float32, **mode).run(turn)[:2])


@pytest.mark.parametrize("mode", ["none", "lazy"])
@pytest.mark.parametrize("fault", ["fewer", "absent", "damaged", "unavailable", "gate", "deadline", "error", "silent"])
async def test_whatever_the_store_does_the_tokens_are_those_of_computed_blocks(path, mode, fault):
    """The parts that are not complete have been written to all the same."""
    store, mode = MemoryStore(), MODES[mode]
    ids = await first_turn(path, store, **mode)
    store.spoils = True
    if fault == "fewer":
        store.most = 4
    elif fault == "error":
        store.error = OSError("the connection is gone")
    elif fault == "silent":
        store.gate = asyncio.Event()
    else:
        store.outcome = fault
    worker = Worker(path, store, **mode)
    worker.tier.fetch_deadline_s = 0.05
    *found, cached = await worker.ask("second", second_turn(ids))
    *computed, _ = Ranks(path, 1, torch.float32, **mode).run(second_turn(ids))
    assert found == computed
    assert cached == (4 * BLOCK_SIZE if (mode, fault) == ({}, "fewer") else 0) or fault == "fewer"
    assert len(store.asked) >= 2
    assert not worker.scheduler.slots.filling
    await worker.close()


async def test_others_go_on_while_a_request_waits_for_its_blocks(path):
    store = MemoryStore()
    ids = await first_turn(path, store)
    worker = Worker(path, store)
    store.gate = asyncio.Event()
    worker.submit("waits", second_turn(ids))
    assert worker.scheduler.sequences.free_seqs == 3
    store.gate.clear()
    await store.began.wait()
    gate, store.gate = store.gate, None
    await worker.ask("other", words(1, 20))
    assert worker.tier.usage.fetching == 1
    assert len(worker.scheduler.sequences.waiting) == 1
    gate.set()
    assert (await worker.end("waits"))[2] == FULL
    assert worker.changes > 0
    await worker.close()


async def test_a_request_that_needs_nothing_does_not_ask(path):
    store = MemoryStore()
    worker = Worker(path, store)
    await worker.ask("short", words(0, BLOCK_SIZE))
    assert store.asked == []
    await worker.ask("first", words(0))
    asked = len(store.asked)
    assert (await worker.ask("again", words(0)))[2] == TEXT // BLOCK_SIZE * BLOCK_SIZE
    assert len(store.asked) == asked
    assert store.estimates[0] == pytest.approx((TEXT // BLOCK_SIZE - 1) * BLOCK_SIZE / 1000)
    await worker.close()


async def test_two_requests_with_one_beginning_fetch_it_once(path):
    store = MemoryStore()
    ids = await first_turn(path, store)
    store.asked.clear()
    worker = Worker(path, store, recompute_s=float)  # so long that `b` waits however slow this machine is
    worker.submit("a", second_turn(ids))
    worker.submit("b", [*second_turn(ids), 7, 8])
    assert [(await worker.end(each))[2] for each in "ab"] == [FULL, (TEXT + 45) // BLOCK_SIZE * BLOCK_SIZE]
    assert len(store.asked) == 1
    await worker.close()


@pytest.mark.parametrize("way", ["is cancelled", "waits no longer"])
async def test_a_request_waits_for_a_fetch_whatever_becomes_of_another_that_waits_for_it(path, way):
    store = MemoryStore()
    ids = await first_turn(path, store)
    store.asked.clear()
    waits = {"is cancelled": float, "waits no longer": lambda tokens: float(tokens > BLOCK_SIZE) * 60}[way]
    worker = Worker(path, store, recompute_s=waits)
    worker.tier.fetch_deadline_s = 60
    store.gate = asyncio.Event()
    worker.submit("fetches", second_turn(ids))
    worker.submit("between", words(0, BLOCK_SIZE + 4))
    worker.submit("waits", [*second_turn(ids), 7, 8])
    await store.began.wait()
    if way == "is cancelled":
        worker.tier.cancel("between")
        assert worker.scheduler.cancel("between")
    else:
        await worker.end("between")
    for _ in range(20):  # turns of the loop: enough for all that the end of a wait leads to
        await worker.step()
    assert worker.tier.usage.fetching == 2
    store.gate.set()
    found = [(await worker.end(each))[2] for each in ("fetches", "waits")]
    assert found == [FULL, (TEXT + 45) // BLOCK_SIZE * BLOCK_SIZE]
    assert len(store.asked) == 1
    await worker.close()


async def test_a_short_request_does_not_wait_for_the_blocks_of_a_long_one(path):
    store = MemoryStore()
    ids = await first_turn(path, store)
    worker = Worker(path, store)
    store.gate = asyncio.Event()
    worker.submit("long", second_turn(ids))
    worker.submit("short", words(0, BLOCK_SIZE + 4))
    await store.began.wait()
    assert (await worker.end("short"))[2] == 0
    assert worker.tier.usage.fetching == 1
    store.gate.set()
    assert (await worker.end("long"))[2] > 0
    await worker.close()


async def test_a_request_is_not_held_for_ever_if_the_store_ends_as_if_it_was_cancelled(path):
    store = MemoryStore()
    store.error = asyncio.CancelledError()
    worker = Worker(path, store)
    assert (await worker.ask("a", words(0)))[2] == 0
    await worker.close()


async def test_blocks_that_the_store_has_lost_are_offered_again(path):
    store = MemoryStore()
    worker = Worker(path, store)
    await worker.ask("first", words(0))
    assert await worker.stored()
    offered = len(store.offers)
    store.parts.clear()
    worker.scheduler.shed(0)  # the worker has lost them too
    await worker.ask("again", words(0))
    assert await worker.stored()
    assert len(store.offers) == 2 * offered
    await worker.close()


async def test_the_store_is_told_when_the_turn_of_a_request_comes(path):
    store = MemoryStore()
    told = []

    async def fetch(tenant, hashes, heads, form, recompute_s, into, further_bytes, plain=store.fetch):
        told.append(recompute_s(0))
        return await plain(tenant, hashes, heads, form, recompute_s, into, further_bytes)

    store.fetch = fetch
    worker = Worker(path, store, recompute_s=lambda tokens: 7 + tokens)
    await worker.ask("a", words(0))
    assert told == [7]
    await worker.close()


@pytest.mark.parametrize("mode", ["none", "lazy"])
async def test_the_store_is_told_what_blocks_are_worth_and_what_they_need(path, mode):
    """A part of a hot window saves nothing. Compressed blocks are of no use without the window."""
    store = MemoryStore()
    ids = await first_turn(path, store, **MODES[mode])
    told = []

    async def fetch(tenant, hashes, heads, form, recompute_s, into, further_bytes, plain=store.fetch):
        told.append(([recompute_s(count) for count in range(len(hashes) + 1)], further_bytes, form.length * len(heads)))
        return await plain(tenant, hashes, heads, form, recompute_s, into, further_bytes)

    store.fetch = fetch
    worker = Worker(path, store, **MODES[mode])
    worker.tier.recompute_s = lambda tokens: tokens
    ids, _, cached = await worker.ask("second", second_turn(ids))
    blocks = len(second_turn(ids)) // BLOCK_SIZE
    if mode == "none":
        ((worth, further, _),) = told
        assert worth == [BLOCK_SIZE * count for count in range(blocks + 1)]
        assert further == 0
    else:
        (cold, further, _), (hot, nothing, block_bytes) = told
        window = MODES[mode]["hot_window"]
        first = window.sink + window.size
        assert cold == [0, *(BLOCK_SIZE * (first + count) for count in range(1, len(cold)))]
        assert hot == [0] * first + [cached]
        assert (further, nothing) == (first * block_bytes, 0)
    await worker.close()


async def test_other_tenants_see_nothing(path):
    store = MemoryStore()
    worker = Worker(path, store)
    ids, *_ = await worker.ask("first", words(0), tenant="a")
    assert await worker.stored()
    await worker.close()
    assert {tenant for tenant, *_ in store.parts} == {"a"}
    store.parts |= {("b", *rest): part for (_, *rest), part in store.parts.items()}
    other = Worker(path, store)
    assert (await other.ask("second", second_turn(ids), tenant="b"))[2] == 0
    await other.close()


async def test_a_request_that_is_cancelled_gives_back_what_was_kept_for_it(path):
    store = MemoryStore()
    ids = await first_turn(path, store)
    store.gate, store.spoils = asyncio.Event(), True
    worker = Worker(path, store)
    worker.submit("second", second_turn(ids))
    await store.began.wait()
    assert len(worker.scheduler.slots.filling) == len(second_turn(ids)) // BLOCK_SIZE
    worker.scheduler.blocks.check()
    worker.tier.cancel("second")
    assert worker.scheduler.cancel("second")
    await worker.tier.wait_closed()
    assert not worker.scheduler.slots.filling
    worker.scheduler.blocks.check()
    assert worker.tier.usage.fetching == 0
    await worker.close()


async def test_what_comes_after_a_restart_of_the_ranks_does_not_reach_the_new_ones(path):
    """Also if the store writes on when it should not."""
    store = MemoryStore()
    ids = await first_turn(path, store)
    store.gate, store.spoils = asyncio.Event(), True
    kept = []

    async def fetch(tenant, hashes, heads, form, recompute_s, into, further_bytes, plain=store.fetch):
        kept.append((into, form))
        return await plain(tenant, hashes, heads, form, recompute_s, into, further_bytes)

    store.fetch = fetch
    worker = Worker(path, store)
    worker.submit("second", second_turn(ids))
    await store.began.wait()
    worker.tier.close()
    worker.scheduler.clear()
    worker.open()
    await worker.tier.wait_closed()
    into, form = kept[0]
    into(1, 0)[:] = b"\xff" * form.length
    assert not any(map(any, worker.views))
    assert not worker.scheduler.slots.filling
    store.gate, store.spoils = None, False
    *found, cached = await worker.ask("again", second_turn(ids))
    assert cached == FULL
    assert found == list(Ranks(path, 1, torch.float32).run(second_turn(ids))[:2])
    await worker.close()


async def test_a_fetch_survives_that_the_scheduler_starts_over(path):
    store = MemoryStore()
    ids = await first_turn(path, store)
    worker = Worker(path, store)
    store.gate, store.spoils = asyncio.Event(), True
    worker.submit("second", second_turn(ids))
    worker.submit("other", words(1, 20))
    await store.began.wait()
    filling = set(worker.scheduler.slots.filling)
    assert filling
    (ended,) = worker.scheduler.shed(0)
    assert ended.request_id == "other"
    worker.tier.cancel("other")
    worker.scheduler.blocks.check()
    assert worker.scheduler.slots.filling == filling
    store.gate.set()
    assert (await worker.end("second"))[2] == FULL
    await worker.close()


@pytest.mark.parametrize("mode", ["none", "lazy"])
@pytest.mark.parametrize("outcome", ["absent", "unavailable", "gate"])
async def test_what_does_not_come_evicts_nothing_from_host_memory(path, mode, outcome):
    store = MemoryStore()
    worker = Worker(path, store, **MODES[mode])
    host = worker.scheduler.blocks.host
    for number in range(worker.sizes.host.slots):
        (slots,) = host.reserve(1, cold=True)
        host.adopt(BlockKey(bytes([number % 256, number // 256]), b"", b""), slots, cold=True)
    store.outcome = outcome
    blocks = host.usage.blocks
    assert blocks == worker.sizes.host.slots
    worker.submit("a", words(3))
    while worker.tier.usage.fetching:
        await asyncio.sleep(0)
    assert store.asked[-1][1] > 0
    assert host.usage.blocks == blocks
    await worker.close()


async def test_blocks_that_come_when_there_is_no_room_any_more_are_computed(path):
    store = MemoryStore()
    ids = await first_turn(path, store)
    worker = Worker(path, store)
    store.gate = asyncio.Event()
    worker.submit("second", second_turn(ids))
    await store.began.wait()
    host = worker.scheduler.blocks.host
    taken = host.reserve(host.fillable(cold=False) - 2, cold=False)
    store.gate.set()
    *found, cached = await worker.end("second")
    assert cached == 2 * BLOCK_SIZE
    assert found == list(Ranks(path, 1, torch.float32).run(second_turn(ids))[:2])
    for slots in taken:
        host.give_back(slots)
    await worker.close()


@pytest.mark.parametrize("tp", [1, 2])
async def test_no_block_takes_the_slots_of_one_that_came_when_there_was_no_room(path, tp):
    """With two ranks there is room again between the two parts of that block."""
    store = MemoryStore()
    ids = await first_turn(path, store, tp=tp)
    worker = Worker(path, store, tp)
    host = worker.scheduler.blocks.host
    taken = []

    async def fetch(tenant, hashes, heads, form, recompute_s, into, further_bytes, plain=store.fetch):
        taken.extend(host.reserve(host.fillable(cold=False) - 2, cold=False))

        def scarce(index, part):
            memory = into(index, part)
            if index == 2:
                while taken:
                    host.give_back(taken.pop())
            return memory

        return await plain(tenant, hashes, heads, form, recompute_s, scarce, further_bytes)

    store.fetch = fetch
    *found, cached = await worker.ask("second", second_turn(ids))
    assert not taken
    assert cached == 2 * BLOCK_SIZE
    assert found == list(Ranks(path, tp, torch.float32).run(second_turn(ids))[:2])
    await worker.close()


def test_a_store_needs_memory_of_the_host():
    config = EngineConfig(model=str(MODEL))
    with pytest.raises(LockstepError, match="host_cache_bytes must be above 0 with a store"):
        AsyncEngine(config, on_outputs=lambda *_: None, on_change=lambda: None, remote_store=object())


def test_models_with_different_names_have_no_block_in_common():
    """Their digests may be equal: these are of samples of the weights."""
    digests = set()
    for name in ("base", "tuned"):
        config = EngineConfig(model=str(MODEL), name=name, host_cache_bytes=2**24)
        engine = AsyncEngine(config, on_outputs=lambda *_: None, on_change=lambda: None, remote_store=MemoryStore())
        digests.add(engine._remote._model_digest)
    assert len(digests) == 2


class Served:
    """A real engine."""

    def __init__(self, store, **settings):
        self.outputs, self.ready = asyncio.Queue(), asyncio.Event()
        config = EngineConfig(
            model=str(MODEL), tp=2, threads=1, max_seqs=4, kv_memory_bytes=2**21, host_cache_bytes=2**24, **settings
        )
        self.engine = AsyncEngine(
            config,
            on_outputs=lambda _step, new: [self.outputs.put_nowait(each) for each in new],
            on_change=lambda: self.ready.set() if self.engine.status().state == "ready" else self.ready.clear(),
            remote_store=store,
        )

    async def answer(self):
        ids, scores, cached, last = [], [], 0, None
        async with asyncio.timeout(60):
            while last is None or (last.finish is None and last.error is None):
                last = await self.outputs.get()
                ids += last.ids
                scores += last.logprobs
                cached += last.cached_tokens
        return ids, scores, cached, last.error

    async def ask(self, name, prompt, tenant=""):
        self.engine.submit(Request(name, tuple(prompt), PARAMS, tenant=tenant))
        return await self.answer()


@pytest.mark.slow
async def test_workers_with_processes_share_a_store_and_survive_that_a_rank_dies_during_a_fetch():
    store = MemoryStore()
    first = Served(store)
    await first.engine.start()
    try:
        ids, *_ = await first.ask("first", words(0, 300))
        assert await first.engine.store_prefixes(60)
    finally:
        await first.engine.close()
    turn = [*words(0, 300), *ids, 7]
    second = Served(store)
    await second.engine.start()
    try:
        store.gate = asyncio.Event()
        second.engine.submit(Request("lost", tuple(turn), PARAMS))
        await store.began.wait()
        os.kill(second.engine.status().ranks[1].pid, signal.SIGKILL)
        assert (await second.answer())[3] is not None
        store.gate = None
        async with asyncio.timeout(60):
            await second.ready.wait()
        found = await second.ask("second", turn)
        assert found[2] == 304
        assert second.engine.status().remote.fetched >= 19
        computed = await second.ask("of another tenant", turn, tenant="b")
        assert computed[2] == 0
        assert found[:2] == computed[:2]
    finally:
        await second.engine.close()
