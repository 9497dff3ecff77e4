"""State servers that are away, late, full or have forgotten everything."""

import asyncio
import time
from collections import Counter

import pytest
from journal_store_contract import KEEP_S, STOP, logprobs, record
from lockstep_api.v1 import state_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.state_channel import StateAwayError
from lockstep_router import metrics
from lockstep_router.journals import Claim, Outcome, Piece
from lockstep_router.journals.mirror import MIRROR_CALLS
from lockstep_router.journals.stored_form import tenant_of
from lockstep_state.keys import Kind, key_of
from mirrored_stores import FAILED, count, fill, mirrored
from router_cluster import eventually


async def test_server_that_has_forgotten_everything_is_told_again(store, other, server):
    await fill(store)
    await fill(store, "r-2")
    await mirrored(store)
    await server.restart()
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await eventually(lambda: not store.client.mirror.is_open and not store.mirror._changed and not store.mirror._flight)
    for request_id in ("r-1", "r-2"):
        await eventually(lambda: not store.client.mirror.is_open)
        store.mirror.note_change(request_id)
        await mirrored(store)
        kept = await store.read(request_id)
        assert list((await other.look_up(request_id, "tenant")).logs) == list(kept.logs)


async def test_server_that_has_forgotten_everything_is_told_the_keys_again(store, other, server):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    await server.restart()
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await eventually(lambda: not store.client.mirror.is_open and store.mirror.is_idle)
    store.expire()
    await mirrored(store)
    assert await other.claim("tenant/key", Claim("r-9", b"body")) == Claim("r-1", b"body")


async def test_nothing_waits_for_a_server_that_is_away(make_store, server, clock):
    store = await make_store(timeout_s=0.5, max_streams=1000, max_bytes=64 << 20)
    await server.kill()
    for n in range(20):
        await store.claim(f"tenant/{n}", Claim(f"r-{n}", b"body"))
    assert store.client.requests.is_open
    began = time.monotonic()
    for n in range(200):
        request_id = f"s-{n}"
        assert await store.claim(f"tenant/{request_id}", Claim(request_id, b"body")) is None
        await fill(store, request_id)
        assert (await store.read(request_id)).outcome is None
        await store.seal(request_id, Outcome(), KEEP_S)
    assert time.monotonic() - began < 10.0, "0.05 s each, where one call would wait ten times as long"
    assert await store.claim("tenant/s-1", Claim("t-1", b"body")) == Claim("s-1", b"body"), "keys hold here"
    await eventually(lambda: store.client.mirror.is_open)
    assert await store.look_up("r-none", "tenant") is None
    await server.start()
    await eventually(lambda: not store.client.mirror.is_open and not store.client.requests.is_open)
    await mirrored(store)
    assert not store.mirror.entries
    assert list((await store.look_up("s-7", "tenant")).logs[0].ids) == [5, 6]


async def test_streams_that_have_left_the_memory_are_dropped(make_store, server, clock):
    store = await make_store()
    await server.kill()
    for n in range(4):
        await fill(store, f"r-{n}")
        await store.seal(f"r-{n}", Outcome(), KEEP_S)
    before = count(metrics.JOURNAL_WRITES, "dropped")
    clock.now += KEEP_S + 1
    store.expire()
    assert not store.mirror.entries
    assert count(metrics.JOURNAL_WRITES, "dropped") - before == 4


async def test_failed_streams_that_a_full_server_does_not_take_are_dropped_with_the_memory(make_store, server, clock):
    server.settings = server.settings.model_copy(update={"max_tenant_streams": 1})
    await server.restart()
    store = await make_store()
    await fill(store, "r-0")
    await mirrored(store)
    full = count(metrics.JOURNAL_WRITES, "full")
    await fill(store, "r-1")
    await store.seal("r-1", FAILED, KEEP_S)
    await fill(store, "r-2")
    await store.leave("r-2")
    await eventually(lambda: count(metrics.JOURNAL_WRITES, "full") - full >= 2)
    store.expire()
    assert list(store.mirror.entries) == ["r-0", "r-1", "r-2"], "there may be room before its time is over"
    clock.now += KEEP_S + 1
    store.expire()
    assert list(store.mirror.entries) == ["r-0", "r-2"], "another router may be asked for what was never kept here"


async def test_left_stream_that_cannot_be_written_is_dropped_after_its_time(make_store, server, clock):
    store = await make_store()
    server.backend.delay_s = 3600.0
    await fill(store)
    await store.seal("r-1", FAILED, KEEP_S)
    clock.now += KEEP_S + 1
    store.expire()
    assert store.mirror.entries
    store.mirror.ttl_s = 0.0
    await asyncio.sleep(0.01)
    store.expire()
    assert not store.mirror.entries


async def test_slow_server_is_not_waited_for_but_still_written_to(make_store, server, other):
    store = await make_store(timeout_s=0.1)
    server.backend.delay_s = 0.2
    for n in range(3):
        await store.claim(f"tenant/{n}", Claim(f"r-{n}", b"body"))
    assert store.client.requests.is_open
    claiming = asyncio.create_task(store.claim("tenant/key", Claim("r-9", b"body")))
    for _ in range(5):  # turns of the event loop, in which no call is answered
        await asyncio.sleep(0)
    assert claiming.done()
    await fill(store, "r-9")
    await mirrored(store)
    assert not store.client.mirror.is_open
    server.backend.delay_s = 0.0
    assert await other.look_up("r-9", "tenant") is not None
    await eventually(lambda: not store.client.requests.is_open)


async def test_what_came_while_a_batch_took_long_is_written_at_once(make_store, server):
    """It has waited as long as changes are gathered. On a busy machine it may be late: then once more."""
    store = await make_store(max_lag_s=1.0)
    gather_s, acknowledged = 0.5, lambda: count(metrics.JOURNAL_WRITES, "ok")
    server.backend.delay_s = 1.5 * gather_s
    await store.open(record())
    for position in range(5):
        calls, before = len(server.backend.calls), acknowledged()
        await eventually(lambda calls=calls: len(server.backend.calls) > calls)
        store.append("r-1", Piece(0, position, [5], logprobs(5)))
        calls = len(server.backend.calls)  # now: the next one may begin before this task learns of the answer
        await eventually(lambda before=before: acknowledged() > before)
        answered_at = time.monotonic()
        await eventually(lambda calls=calls: len(server.backend.calls) > calls)
        waited_s = time.monotonic() - answered_at
        if waited_s < gather_s / 2:
            break
        await mirrored(store)
        store.append("r-1", Piece(1, position, [6], logprobs(6)))
    assert waited_s < gather_s / 2


async def test_what_did_not_fit_in_a_batch_is_written_at_once(make_store, monkeypatch):
    """It has waited as long as changes are gathered. Repeats wait. How long the mirror sleeps before a batch is what it
    asks for, which no busy machine changes.
    """
    gather_s = 1.0
    store = await make_store(timeout_s=60.0, max_lag_s=2 * gather_s, max_streams=2000, max_bytes=256 << 20)
    append, sleep, asked_s, batches, is_odd = store.client.append, asyncio.sleep, {}, [], False

    async def noted(delay_s, result=None):
        asked_s[asyncio.current_task()] = delay_s
        return await sleep(delay_s, result)

    async def counted(request):
        batches.append((len(request.writes), asked_s.pop(asyncio.current_task(), 0.0), time.monotonic()))
        response = await append(request)
        if is_odd:
            response.results[0].outcome = state_pb2.WRITE_OUTCOME_UNAVAILABLE
        return response

    monkeypatch.setattr(asyncio, "sleep", noted)
    monkeypatch.setattr(store.client, "append", counted)
    for n in range(1800):
        await store.open(record(f"r-{n}"))
    assert not asked_s, "nothing is written before all are open"
    await mirrored(store)
    sizes, waits_s, _ = zip(*batches, strict=True)
    assert sizes == (*[128] * 14, 8), "fourteen that are full, and the rest"
    assert set(waits_s[1:]) == {0.0}

    batches.clear()
    is_odd = True
    for n in range(1800):
        store.append(f"r-{n}", Piece(0, 0, [5], logprobs(5)))
    await eventually(lambda: len(batches) > MIRROR_CALLS)
    *_, (_, _, last_at), (_, _, next_at) = batches[: MIRROR_CALLS + 1]
    assert next_at - last_at > gather_s / 2, "those that were on their way already were not the only ones"


async def test_batches_are_on_their_way_beside_each_other_with_other_streams(make_store, server, other, monkeypatch):
    """As many as may be, while there is enough for them. Each stream grows meanwhile, and is never in two of them."""
    store = await make_store(timeout_s=60.0, max_streams=2000, max_bytes=256 << 20)
    names = [f"r-{n}" for n in range(800)]
    append, writing, most, most_of_one = store.client.append, Counter(), 0, 0

    async def watched(request):
        nonlocal most, most_of_one
        writing.update(write.stream_id for write in request.writes)
        most, most_of_one = max(most, sum(writing.values())), max(most_of_one, *writing.values())
        try:
            return await append(request)
        finally:
            writing.subtract(write.stream_id for write in request.writes)

    monkeypatch.setattr(store.client, "append", watched)
    for name in names:
        await store.open(record(name))
    server.backend.delay_s = 0.1
    for position in range(3):
        calls = len(server.backend.calls)
        for name in names:
            store.append(name, Piece(0, position, [5 + position], logprobs(5 + position)))
        await eventually(lambda calls=calls: len(server.backend.calls) > calls)
    server.backend.delay_s = 0.0
    await mirrored(store)
    assert (most, most_of_one) == (MIRROR_CALLS * 128, 1)
    for name in (names[0], names[-1]):
        assert list((await other.look_up(name, "tenant")).logs[0].ids) == [5, 6, 7]


@pytest.mark.parametrize("has_defect", [False, True])
async def test_a_batch_beside_others_that_is_lost_is_written_again(make_store, other, monkeypatch, has_defect):
    """Though nothing else changes after it, and whatever has become of it."""
    store = await make_store(timeout_s=60.0, max_streams=2000, max_bytes=256 << 20)
    append, batches = store.client.append, 0

    async def losing(request):
        nonlocal batches
        batches += 1
        number = batches
        response = await append(request)
        if number == 2:
            await eventually(lambda: store.mirror.entries["r-0"].is_open)  # the first one's answer is there
            raise RuntimeError if has_defect else StateAwayError("DEADLINE_EXCEEDED")
        return response

    monkeypatch.setattr(store.client, "append", losing)
    for n in range(200):
        await store.open(record(f"r-{n}"))
    await eventually(lambda: batches >= 2)
    await mirrored(store)
    assert await other.look_up("r-199", "tenant") is not None


async def test_batches_that_fail_together_count_as_one_failure(store, server):
    await server.kill()
    for is_open in (False, True):
        batches = [store.client.append(state_pb2.AppendRequest()) for _ in range(MIRROR_CALLS)]
        failures = await asyncio.gather(*batches, return_exceptions=True)
        assert {type(each) for each in failures} == {StateAwayError}
        assert store.client.mirror.is_open == is_open


async def test_taken_stream_keeps_its_key_while_the_server_is_away(store, other, server):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    await other.take(await other.look_up("r-1", "tenant"))
    server.backend.is_away = True
    assert await other.claim("tenant/key", Claim("r-9", b"body")) == Claim("r-1", b"body")


async def test_full_store_is_no_server_that_is_away(store, other, server):
    await fill(store)
    await mirrored(store)
    server.backend.is_full = True
    for number in range(4):
        with pytest.raises(LockstepError) as refused:
            await other.look_up("r-1", "tenant")
        assert refused.value.code is ErrorCode.UNAVAILABLE
        await other.claim(f"tenant/{number}", Claim(f"r-{number}", b"body"))
    assert (other.client.mirror.is_open, other.client.requests.is_open) == (False, False)
    server.backend.is_full = False
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6]


@pytest.mark.parametrize("what", ["tenant", "store"])
async def test_keys_that_find_no_room_when_they_are_renewed_are_no_server_that_is_away(make_store, server, what):
    """Streams that are there can still be read and taken, which stands behind the same breaker."""
    if what == "tenant":
        server.settings = server.settings.model_copy(update={"max_tenant_bytes": 2048})
        await server.restart()
    store = await make_store()
    for number in range(12):
        assert await store.claim(f"tenant/{number}", Claim(f"r-{number}", b"body")) is None
    server.backend.is_full = what == "store"
    refused = count(metrics.STATE_FAILURES, "resource_exhausted")
    store.mirror.on_return()
    store.expire()
    await eventually(lambda: count(metrics.STATE_FAILURES, "resource_exhausted") >= refused + 8)
    await mirrored(store)
    assert not store.client.mirror.is_open


async def test_streams_that_take_too_long_to_read_stop_nothing_else(make_store, server):
    """They may be long. The server counts as away if it says so, or does not answer at all."""
    other = await make_store("router-2", timeout_s=0.1)
    server.backend.read_delay_s = 3600.0
    late = await asyncio.gather(*(other.look_up(f"r-{n}", "tenant") for n in range(4)), return_exceptions=True)
    assert {error.code for error in late} == {ErrorCode.UNAVAILABLE}
    assert not other.client.mirror.is_open
    await fill(other)
    await mirrored(other)
    await other.claim("tenant/key", Claim("r-1", b"body"))
    assert (other.client.mirror.is_open, other.client.requests.is_open) == (False, False)
    server.backend.is_away = True
    with pytest.raises(LockstepError):
        await other.look_up("r-9", "tenant")
    await eventually(lambda: other.client.mirror.is_open)


async def test_store_behind_the_server_that_is_away_opens_the_breaker(make_store, server):
    store = await make_store()
    server.backend.is_away = True
    await fill(store)
    await eventually(lambda: store.client.mirror.is_open)
    appends = server.backend.calls.count("append")
    await asyncio.sleep(1.2)
    assert server.backend.calls.count("append") == appends, "no more calls while it is away"
    server.backend.is_away = False
    await mirrored(store)
    assert (await store.look_up("r-1", "tenant")) is not None


async def test_full_server_is_tried_again_and_a_large_stream_is_frozen(tmp_path, clock, make_store, server, other):
    server.settings = server.settings.model_copy(update={"max_tenant_streams": 1, "max_stream_bytes": 8192})
    await server.restart()
    store = await make_store(max_streams=10)
    full, large = count(metrics.JOURNAL_WRITES, "full"), count(metrics.JOURNAL_WRITES, "too_large")
    await fill(store, "r-1")
    await mirrored(store)
    await fill(store, "r-2")
    await eventually(lambda: count(metrics.JOURNAL_WRITES, "full") > full)
    store.append("r-1", Piece(0, 2, [5] * 5000, logprobs(*[5] * 5000)))
    await eventually(lambda: count(metrics.JOURNAL_WRITES, "too_large") > large)
    assert len((await store.read("r-1")).logs[0].ids) == 5002, "it is served all the same"
    seen = await other.look_up("r-1", "tenant")
    assert list(seen.logs[0].ids)[:2] == [5, 6], "what is there can be continued"
    assert len(seen.logs[0].ids) < 5002
    await store.remove("r-1")
    await eventually(lambda: "r-1" not in store.mirror.entries)
    await store.seal("r-2", Outcome(), KEEP_S)
    clock.now += 2.0
    await eventually(lambda: not store.mirror.entries)
    assert (await other.look_up("r-2", "tenant")).outcome == Outcome()


async def test_much_is_written_in_parts(make_store, other):
    store = await make_store(max_streams=2000, max_bytes=256 << 20)
    for n in range(1200):
        await store.open(record(f"r-{n}"))
    await store.open(record("long", prompt=[7] * 50_000))
    store.append("long", Piece(0, 0, list(range(100_000)), ()))
    store.append("long", Piece(1, 0, [3] * 3000, logprobs(*[3] * 3000), STOP))
    await store.seal("long", Outcome(), KEEP_S)
    await mirrored(store)
    seen = await other.look_up("long", "tenant")
    assert list(seen.logs[0].ids) == list(range(100_000))
    assert (len(seen.logs[1].logprobs), seen.logs[1].finish, seen.outcome) == (3000, STOP, Outcome())
    assert (await other.look_up("r-1199", "tenant")) is not None


async def test_mirror_does_nothing_while_all_streams_are_put_off(make_store, server, other, monkeypatch):
    """It sleeps before each batch, and makes none before the time of the first stream that was answered FULL."""
    server.settings = server.settings.model_copy(update={"max_tenant_streams": 1})
    await server.restart()
    store = await make_store(max_streams=10)
    for n in range(4):
        await fill(store, f"r-{n}")
    full, sleep, sleeps = lambda: count(metrics.JOURNAL_WRITES, "full"), asyncio.sleep, []
    await eventually(lambda: store.mirror.entries["r-0"].is_open)

    async def noted(delay_s, result=None):
        if asyncio.current_task() is not this:
            sleeps.append(delay_s)
        return await sleep(delay_s, result)

    this, before, calls = asyncio.current_task(), full(), len(server.backend.calls)
    monkeypatch.setattr(asyncio, "sleep", noted)
    await eventually(lambda: full() >= before + 6)
    batches = len(server.backend.calls) - calls
    assert len(sleeps) <= 2 * batches + 4, "one of the server's double and one of the mirror for each batch"
    store.append("r-0", Piece(0, 2, [8], logprobs(8)))
    await eventually(lambda: store.mirror.entries["r-0"].written[0] == 3)
    assert list((await other.look_up("r-0", "tenant")).logs[0].ids) == [5, 6, 8]


async def test_a_stream_that_grows_while_it_is_refused_waits_and_stops_no_other(make_store, server):
    """It changes during each try."""
    store, loop = await make_store(), asyncio.get_running_loop()
    one, two = (key_of(Kind.STREAM, tenant_of("tenant"), name) for name in (b"r-1", b"r-2"))
    server.backend.refused, server.backend.delay_s = {one, two}, 0.05
    began_at = loop.time()
    await fill(store)
    await fill(store, "r-2")

    async def grow():
        for position in range(2, 10_000):
            store.append("r-1", Piece(0, position, [8], logprobs(8)))
            await asyncio.sleep(0.01)

    growing = asyncio.create_task(grow())
    await eventually(lambda: server.backend.refusals[two] and server.backend.refusals[one] >= 3)
    assert server.backend.refusals[one] <= 2 + loop.time() - began_at, "once a second"
    server.backend.refused = {one}
    await eventually(lambda: store.mirror.entries["r-2"].is_open)
    growing.cancel()


async def test_batch_that_the_server_refuses_is_halved(tmp_path, clock, make_store, server, other):
    server.settings = server.settings.model_copy(update={"max_batch": 3})
    await server.restart()
    store = await make_store(max_streams=100)
    for n in range(40):
        await fill(store, f"r-{n}")
    await mirrored(store)
    for n in range(40):
        assert list((await other.look_up(f"r-{n}", "tenant")).logs[0].ids) == [5, 6]


async def test_batch_that_is_too_much_for_the_time_is_halved(make_store, server, other):
    """As when the state server comes back: everything is written again, and a slow one must not be asked for it at once
    for ever.
    """
    store = await make_store(timeout_s=0.05, max_streams=100)
    server.backend.is_away = True
    for n in range(40):
        await fill(store, f"r-{n}")
    await eventually(lambda: store.client.mirror.is_open)
    server.backend.is_away, server.backend.most_writes = False, 5
    await mirrored(store)
    for n in range(40):
        assert list((await other.look_up(f"r-{n}", "tenant")).logs[0].ids) == [5, 6]
