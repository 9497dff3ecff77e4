"""The worker's store of cold KV blocks, against a scripted state server: what is fetched and stored, and every way in
which the server can be away.
"""

import asyncio

import grpc
import pytest
from harness import make_settings, served, until
from lockstep_api.v1 import state_pb2
from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing.spans import CURRENT, Tracing
from lockstep_engine.remote_store import BlockForm
from scripted_kv import (
    FORM,
    HEADS,
    Memory,
    ScriptedKv,
    block_hash,
    content_of,
    fetch,
    opened,
    parts_of,
    serving,
    stored,
    value,
)

RANKS = len(HEADS)


@pytest.fixture
async def store(kv, target):
    async with opened(target) as store:
        kv.calls.clear()
        yield store


async def test_blocks_come_back_into_the_memory_they_are_wanted_in(kv, store):
    before = value("bytes_total", direction="in"), value("fetches_total", outcome="fetched")
    await stored(store, "abc")
    memory = Memory()
    result = await fetch(store, "abcd", memory)
    assert (result.blocks, result.outcome) == (3, "fetched")
    assert memory.has("abc", 3)
    assert kv.calls == ["Put", "LookUp", "Get"]
    assert value("bytes_total", direction="in") - before[0] == 3 * RANKS * FORM.length
    assert value("fetches_total", outcome="fetched") - before[1] == 1


async def test_estimates_of_the_gate_are_counted_beside_what_fetches_took(store):
    names = ("estimated_fetch_seconds_total", "estimated_recompute_seconds_total", "complete_fetch_seconds_total")
    before = [value(name) for name in names]
    await stored(store, "ab")
    await fetch(store, "ab", Memory(), recompute_s=100.0)
    estimated_s, recompute_s, took_s = (value(name) - old for name, old in zip(names, before, strict=True))
    assert estimated_s > 0
    assert recompute_s == pytest.approx(200.0)
    assert took_s > 0
    assert value("latency_seconds") > 0
    assert value("bytes_per_second") > 0


async def test_what_has_to_be_fetched_afterwards_counts(store):
    await stored(store, "ab")
    assert (await fetch(store, "ab", Memory(), recompute_s=100.0, further_bytes=1)).outcome == "fetched"
    assert (await fetch(store, "ab", Memory(), recompute_s=100.0, further_bytes=1 << 60)).outcome == "gate"


async def test_large_parts_are_stored_and_fetched_in_slices(store):
    form = BlockForm("bfloat16", (3, 1 << 20), 3 << 20)
    await stored(store, ["a"], form=form)
    memory = Memory(form.length)
    assert (await fetch(store, ["a"], memory, form=form)).blocks == 1
    assert memory.has("a", 1)


async def test_another_tenant_has_other_blocks(store):
    await stored(store, "ab")
    for tenant in ("", "other", "-probe", "T"):
        assert (await fetch(store, "ab", Memory(), tenant=tenant)).outcome == "absent"
    assert store.offer("", parts_of("x")) == RANKS
    await store.flush(30.0)
    assert (await fetch(store, "x", Memory(), tenant="")).blocks == 1
    assert (await fetch(store, "x", Memory())).outcome == "absent"


async def test_a_block_that_went_between_the_calls_ends_the_fetch(kv, store):
    await stored(store, "abc")

    def forget(messages):
        return [message for message in messages if message.index != 1 * RANKS]

    kv.mangle = forget
    memory = Memory()
    result = await fetch(store, "abc", memory)
    assert (result.blocks, result.outcome) == (1, "fetched")
    assert memory.has("abc", 1)


async def test_what_is_faster_to_compute_is_not_asked_for(kv, store):
    await stored(store, "ab")
    kv.calls.clear()
    result = await fetch(store, "ab", Memory(), recompute_s=1e-9)
    assert (result.blocks, result.outcome) == (0, "gate")
    assert kv.calls == []


async def test_nothing_is_fetched_over_a_link_that_was_not_measured(kv, target):
    kv.answers.clear()
    async with opened(target, is_measured=False) as store:
        assert (await fetch(store, "ab", Memory())).outcome == "unmeasured"
        kv.answers.set()
        await until(lambda: store.link.estimate() is not None)
        assert kv.probes() == 2


async def test_nothing_wanted_is_absent(store):
    assert (await fetch(store, "", Memory())).outcome == "absent"


async def test_what_has_come_by_the_deadline_counts(kv, target):
    async with opened(target, fetch_timeout_s=1.0) as store:
        await stored(store, "abc")
        kv.before = 6 + 2  # of the three messages that each part has: the first block, and some of the second
        kv.sends.clear()
        memory = Memory()
        result = await fetch(store, "abc", memory)
        assert (result.blocks, result.outcome) == (1, "deadline")
        assert memory.has("abc", 1)
        assert not store.client.is_away, "it is slow, not away"


async def test_a_server_that_looks_up_and_sends_nothing_is_asked_seldom(kv, target):
    async with opened(target, fetch_timeout_s=0.3) as store:
        await stored(store, "a")
        kv.sends.clear()
        for _ in range(50):
            if (await fetch(store, "a", Memory())).outcome != "deadline":
                break
        assert (await fetch(store, "a", Memory())).outcome == "unavailable"
        assert not store.client.is_away
        kv.sends.set()
        clock = store.link.clock
        store.link.clock = lambda: clock() + 30
        for _ in range(50):
            if (await fetch(store, "a", Memory())).blocks:
                break
            store.link.clock = lambda now=store.link.clock: now() + 30
        assert store._silent == 0


async def test_after_a_silence_one_fetch_finds_out_for_all(kv, target):
    async with opened(target, fetch_timeout_s=60.0) as store:
        await stored(store, "a")
        kv.sends.clear()
        for _ in range(50):
            if (await fetch(store, "a", Memory(), recompute_s=0.3)).outcome == "unavailable":
                break
        clock = store.link.clock
        store.link.clock = lambda: clock() + 30
        fetching = [asyncio.create_task(fetch(store, "a", Memory())) for _ in range(4)]
        await until(lambda: sum(each.done() for each in fetching) == 3)
        kv.sends.set()
        results = await asyncio.gather(*fetching)
        assert sorted(each.outcome for each in results) == ["fetched", "unavailable", "unavailable", "unavailable"]


async def test_a_fetch_ends_when_its_blocks_would_have_been_computed(kv, target):
    async with opened(target, fetch_timeout_s=60.0) as store:
        await stored(store, "a")
        kv.sends.clear()
        result = await fetch(store, "a", Memory(), recompute_s=1.0)
        assert (result.blocks, result.outcome) == (0, "deadline")


async def test_a_cancelled_fetch_writes_nothing_more(kv, store):
    await stored(store, "ab")
    kv.before = 1
    kv.sends.clear()
    memory = Memory()
    task = asyncio.create_task(fetch(store, "ab", memory))
    await until(lambda: memory.parts)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = {key: bytes(part) for key, part in memory.parts.items()}
    kv.sends.set()
    kv.before = 0
    assert (await fetch(store, "ab", Memory())).blocks == 2
    assert {key: bytes(part) for key, part in memory.parts.items()} == kept


async def test_a_server_that_stops_opens_the_breaker_and_its_return_closes_it(kv, target):
    async with opened(target, timeout_s=0.3) as store:
        await stored(store, "a")
        kv.answers.clear()
        outcomes = []
        while not store.client.is_away:
            outcomes.append((await fetch(store, "a", Memory())).outcome)
        assert outcomes == ["deadline"] * 3
        assert value("breaker_open") == 1
        kv.calls.clear()
        assert (await fetch(store, "a", Memory())).outcome == "unavailable"
        assert kv.calls == [], "it is not asked any more"
        kv.answers.set()
        await until(lambda: not store.client.is_away)
        assert value("breaker_open") == 0
        # The link may look slow after the stop; it is measured again.
        async with asyncio.timeout(30):
            while (await fetch(store, "a", Memory())).blocks != 1:
                await asyncio.sleep(0.01)


async def test_a_server_that_dies_is_found_again(target):
    async with serving(ScriptedKv(), target) as first:
        opening = opened(target, timeout_s=5.0)
        store = await opening.__aenter__()
        await stored(store, "a")
        blocks = first.blocks
    try:
        while not store.client.is_away:
            assert (await fetch(store, "a", Memory())).outcome in ("unavailable", "deadline")
        second = ScriptedKv()
        second.blocks = blocks
        async with serving(second, target):
            await until(lambda: not store.client.is_away)
            memory = Memory()
            assert (await fetch(store, "a", memory)).blocks == 1
            assert memory.has("a", 1)
            await opening.__aexit__(None, None, None)
            opening = None
    finally:
        if opening is not None:
            await opening.__aexit__(None, None, None)


async def test_a_defect_of_the_engine_is_a_miss(store):
    await stored(store, "a")

    def broken(_block, _rank):
        raise RuntimeError("no memory")

    assert (await fetch(store, "a", broken)).outcome == "unavailable"
    assert (await fetch(store, "a", Memory(FORM.length - 1))).outcome == "unavailable"


# The queue.


async def test_the_queue_is_bounded_in_bytes_and_copies_what_it_takes(kv, target):
    async with opened(target, queue_bytes=5 * FORM.length) as store:
        kv.answers.clear()
        dropped = value("puts_total", outcome="dropped")
        content = bytearray(content_of("a", 0))
        parts = parts_of("abcd")
        first = type(parts[0])(parts[0].hash, parts[0].heads, FORM, memoryview(content))
        assert store.offer("t", [first, *parts[1:]]) == 5
        assert value("puts_total", outcome="dropped") - dropped == 3
        assert value("queue_bytes") == 5 * FORM.length
        content[:] = bytes(FORM.length)
        assert store.offer("t", parts) == 5, "those that wait already are not copied again"
        assert store.offer("t", parts_of("e")) == 0
        kv.answers.set()
        await store.flush(30.0)
        assert value("queue_bytes") == 0
        memory = Memory()
        assert (await fetch(store, "ab", memory)).blocks == 2
        assert memory.has("ab", 2)


async def test_a_tenant_beyond_its_share_of_the_queue_gives_room_to_others(kv, target):
    async with opened(target, queue_bytes=8 * FORM.length, tenant_share=0.5) as store:
        kv.answers.clear()
        dropped, lost = value("puts_total", outcome="dropped"), []
        store.on_lost = lost.extend
        assert store.offer("greedy", parts_of("abcd")) == 8, "nobody else needs the room"
        assert store.offer("greedy", parts_of("e")) == 0
        assert store.offer("modest", parts_of("xy")) == 4
        assert store.offer("modest", parts_of("z")) == 0, "at its own share"
        assert value("queue_bytes") == 8 * FORM.length
        assert value("puts_total", outcome="dropped") - dropped == 4 * RANKS
        kv.answers.set()
        await store.flush(30.0)
        assert value("queue_bytes") == 0
        assert lost == [block_hash(name) for name in "ddcc"], "the engine offers them again"
    kept = {(tenant, block) for tenant, block, *_ in kv.blocks if not tenant.startswith("-")}
    # The newest ones of the greedy tenant were dropped.
    assert kept == {(each, block_hash(name)) for each, names in (("greedy", "ab"), ("modest", "xy")) for name in names}


async def test_tenants_are_stored_in_turn(kv, target):
    stored_for = []
    async with opened(target, timeout_s=0.3) as store:
        kv.answers.clear()
        while not store.client.is_away:  # so that all is in the queue before anything is stored
            await fetch(store, "x", Memory())
        store.client.timeout_s = 20.0  # an answer that is late once the server is back would change the order
        names = [f"{number}" for number in range(300)]  # two batches and more
        assert store.offer("greedy", parts_of(names)) == 300 * RANKS
        assert store.offer("modest", parts_of("a")) == RANKS
        kv.on_put = stored_for.append
        kv.answers.set()
        await until(lambda: value("queue_bytes") == 0)
    assert [each for each in stored_for if not each.startswith("-")] == ["greedy", "modest", "greedy", "greedy"]


async def test_a_tenant_for_which_the_server_has_no_room_waits_alone(kv, store, monkeypatch):
    monkeypatch.setattr("lockstep_worker.kv_store.write_behind.PAUSE_S", 3600.0)

    def on_put(tenant):
        is_full = tenant == "full"
        kv.put_outcome = state_pb2.PUT_OUTCOME_FULL if is_full else state_pb2.PUT_OUTCOME_STORED

    kv.on_put = on_put
    before = value("puts_total", outcome="full")
    assert store.offer("full", parts_of("a")) == RANKS
    await until(lambda: value("puts_total", outcome="full") - before == RANKS)
    assert store.offer("full", parts_of("b")) == RANKS
    assert store.offer("t", parts_of("c")) == RANKS
    await until(lambda: value("queue_bytes") == RANKS * FORM.length)
    assert (await fetch(store, "c", Memory())).blocks == 1
    assert value("puts_total", outcome="full") - before == RANKS


async def test_blocks_wait_for_a_server_that_is_away(kv, target):
    async with opened(target, timeout_s=0.3) as store:
        kv.answers.clear()
        while not store.client.is_away:
            await fetch(store, "x", Memory())
        assert store.offer("t", parts_of("a")) == RANKS
        await store.flush(60.0)  # does not wait for it
        assert value("queue_bytes") == RANKS * FORM.length
        kv.answers.set()
        await until(lambda: value("queue_bytes") == 0)
        assert ("t", block_hash("a"), HEADS[0].first, HEADS[0].count) in kv.blocks


async def test_blocks_of_several_tenants_are_stored_for_each(kv, store):
    for number in range(6):
        assert store.offer(f"t{number % 2}", parts_of(str(number))) == RANKS
    await store.flush(30.0)
    for number in range(6):
        assert (await fetch(store, str(number), Memory(), tenant=f"t{number % 2}")).blocks == 1
        assert (await fetch(store, str(number), Memory(), tenant=f"t{1 - number % 2}")).blocks == 0


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"put_outcome": state_pb2.PUT_OUTCOME_FULL}, "full"),
        ({"put_status": grpc.StatusCode.INVALID_ARGUMENT}, "refused"),
        ({"put_status": grpc.StatusCode.RESOURCE_EXHAUSTED}, "failed"),
    ],
)
async def test_blocks_that_cannot_be_stored_are_dropped_and_counted(kv, store, change, outcome):
    before, lost = value("puts_total", outcome=outcome), []
    store.on_lost = lost.extend
    for name, setting in change.items():
        setattr(kv, name, setting)
    assert store.offer("t", parts_of("a")) == RANKS
    await until(lambda: value("puts_total", outcome=outcome) - before == RANKS)
    assert value("queue_bytes") == 0
    assert not store.client.is_away
    assert lost == ([block_hash("a")] * RANKS if outcome == "failed" else []), "only those may be taken another time"
    kv.put_outcome, kv.put_status = state_pb2.PUT_OUTCOME_STORED, None
    await stored(store, "b")
    assert (await fetch(store, "b", Memory())).blocks == 1


async def test_fresh_blocks_beside_one_that_has_failed_keep_their_tries(kv, store):
    before = value("puts_total", outcome="failed")
    kv.put_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert store.offer("t", parts_of("a")) == RANKS
    await until(lambda: kv.calls.count("Put") == 1)
    assert store.offer("t", parts_of("bc")) == 2 * RANKS
    await until(lambda: value("puts_total", outcome="failed") > before)
    kv.put_status = None
    await store.flush(30.0)
    assert value("puts_total", outcome="failed") - before == RANKS
    assert kv.calls.count("Put") == 3
    assert (await fetch(store, "b", Memory())).blocks == (await fetch(store, "c", Memory())).blocks == 1
    assert (await fetch(store, "a", Memory())).blocks == 0


async def test_a_flush_ends_at_its_time(kv, store):
    kv.answers.clear()
    store.offer("t", parts_of("a"))
    async with asyncio.timeout(30):
        await store.flush(0.05)
    assert value("queue_bytes") > 0


async def test_a_flush_ends_when_the_server_goes_away(kv, target):
    async with opened(target, timeout_s=0.3) as store:
        kv.answers.clear()
        store.offer("t", parts_of("a"))
        flushing = asyncio.create_task(store.flush(3600.0))
        while not store.is_away:
            assert not flushing.done()
            await fetch(store, "x", Memory())
        async with asyncio.timeout(30):
            await flushing
        assert value("queue_bytes") > 0


async def test_blocks_are_kept_for_half_of_their_time_and_until_the_server_was_away(kv, target):
    async with opened(target, timeout_s=0.3, ttl_s=3600.0) as store:
        clock = store.link.clock
        offered_at = clock()
        store.link.clock = lambda: offered_at + 1799
        assert store.is_kept(offered_at)
        store.link.clock = lambda: offered_at + 1801
        assert not store.is_kept(offered_at)
        store.link.clock = clock
        assert store.is_kept(offered_at)
        kv.answers.clear()
        while not store.is_away:
            await fetch(store, "x", Memory())
        kv.answers.set()
        await until(lambda: not store.is_away)
        assert not store.is_kept(offered_at), "it may have started again, with nothing"
        await asyncio.sleep(0.01)
        assert store.is_kept(clock())


async def test_the_end_counts_what_was_not_stored(kv, target):
    dropped = value("puts_total", outcome="dropped")
    async with opened(target) as store:
        kv.answers.clear()
        store.offer("t", parts_of("ab"))
    assert value("puts_total", outcome="dropped") - dropped == 2 * RANKS
    assert value("queue_bytes") == 0


# Traces.


async def test_a_fetch_is_a_span_of_its_request(store):
    await stored(store, "a")
    exported = []
    trace = Tracing(ratio=1.0, slow_s=10.0, export=exported.extend).trace(TraceContext(1, 2, True))
    queue = trace.begin("queue")
    token = CURRENT.set(queue)
    try:
        assert (await fetch(store, "a", Memory())).blocks == 1
    finally:
        CURRENT.reset(token)
    spans = {span.name: span for span in exported}
    assert set(spans) == {"kv fetch", "Kv.LookUp", "Kv.Get"}
    assert spans["kv fetch"].parent_id == queue.span_id
    assert spans["Kv.Get"].parent_id == spans["kv fetch"].span_id
    attributes = spans["kv fetch"].attributes
    assert attributes.pop("lockstep.kv.estimated_fetch_s") > 0
    assert attributes.pop("lockstep.kv.estimated_recompute_s") == 1000.0
    assert attributes == {
        "lockstep.outcome": "fetched",
        "lockstep.kv.blocks": 1,
        "lockstep.kv.bytes": RANKS * FORM.length,
    }


async def test_the_span_of_a_fetch_that_the_gate_refuses_has_both_estimates(store):
    exported = []
    token = CURRENT.set(
        Tracing(ratio=1.0, slow_s=10.0, export=exported.extend).trace(TraceContext(1, 2, True)).begin("q")
    )
    try:
        assert (await fetch(store, "a", Memory(), recompute_s=1e-9)).outcome == "gate"
    finally:
        CURRENT.reset(token)
    (span,) = exported
    assert span.attributes["lockstep.outcome"] == "gate"
    assert span.attributes["lockstep.kv.estimated_fetch_s"] > span.attributes["lockstep.kv.estimated_recompute_s"] > 0


# The process.


async def test_the_worker_gives_the_store_to_its_engine_and_flushes_it_when_it_drains(kv, target, model_dir):
    changes = {"state_server": target, "host_cache_bytes": 1 << 20, "state_timeout_s": 10.0}
    settings = make_settings(model_dir, f"{target.removeprefix('unix:')}w", **changes)
    async with served(settings) as worker:
        await worker.greeted()
        store = worker.engine.remote_store
        await until(lambda: store.link.estimate() is not None)
        assert store.offer("t", parts_of("ab")) == 2 * RANKS
        worker.stop.set()
        assert await worker.exit_code() == 0
    assert {key[1] for key in kv.blocks if key[0] == "t"} == {block_hash("a"), block_hash("b")}


@pytest.mark.parametrize("drain_timeout_s", [60.0, 0.1])
async def test_the_drain_stores_blocks_for_as_long_as_it_may_last(kv, target, model_dir, drain_timeout_s):
    """A slow state server gets what streams have left of the drain, and a second more."""
    changes = {"state_server": target, "host_cache_bytes": 1 << 20, "state_timeout_s": 10.0}
    path = f"{target.removeprefix('unix:')}w"
    async with served(make_settings(model_dir, path, drain_timeout_s=drain_timeout_s, **changes)) as worker:
        await worker.greeted()
        store = worker.engine.remote_store
        await until(lambda: store.link.estimate() is not None)
        kv.answers.clear()
        assert store.offer("t", parts_of("ab")) == 2 * RANKS
        worker.stop.set()
        if drain_timeout_s > 1:
            await asyncio.sleep(2.0)  # more than the second that is given in any case
            assert not worker.task.done()
            kv.answers.set()
        assert await worker.exit_code() == 0
    stored = {key[1] for key in kv.blocks if key[0] == "t"}
    assert stored == ({block_hash("a"), block_hash("b")} if drain_timeout_s > 1 else set())


async def test_a_worker_without_a_state_server_has_no_store(worker):
    await worker.greeted()
    assert worker.engine.remote_store is None


async def test_a_worker_starts_and_ends_without_its_state_server(target, model_dir):
    changes = {"state_server": target, "host_cache_bytes": 1 << 20}
    async with served(make_settings(model_dir, f"{target.removeprefix('unix:')}w", **changes)) as worker:
        await worker.greeted()
        assert worker.engine.remote_store.offer("t", parts_of("a")) == RANKS
        worker.stop.set()
        assert await worker.exit_code() == 0
