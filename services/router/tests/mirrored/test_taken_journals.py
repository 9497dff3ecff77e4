"""Streams that another router takes, or that this one takes back."""

import asyncio
import time
from dataclasses import replace

import pytest
from journal_store_contract import KEEP_S, STOP, logprobs, record
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_tls import dial_plain
from lockstep_router.journals import MemoryJournalStore, MirroredJournalStore, Outcome, Piece
from mirrored_stores import FAILED, TIMEOUT_S, WINDOW_S, all_told, fill, mirrored, take
from router_cluster import eventually


async def test_stream_that_has_failed_here_is_taken_back_with_all_that_is_here(store, other):
    await fill(store)
    await store.seal("r-1", Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone")), KEEP_S)  # nothing is written yet
    taken = await store.take(await store.read("r-1"))
    assert (taken.outcome, list(taken.logs[0].ids)) == (None, [5, 6])
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    assert list(taken.logs[0].ids) == [5, 6]
    await store.seal("r-1", Outcome(), KEEP_S)
    await mirrored(store)
    seen = await other.look_up("r-1", "tenant")
    assert (seen.outcome, list(seen.logs[0].ids), list(seen.logs[1].ids)) == (Outcome(), [5, 6, 8], [7])
    assert store.kept == 1


async def test_stream_that_has_failed_here_and_ended_elsewhere_is_taken_back_as_it_ended(store, other):
    await fill(store)
    await store.seal("r-1", Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone")), KEEP_S)
    await mirrored(store)
    await take(other)
    other.append("r-1", Piece(0, 2, [9], logprobs(9), STOP))
    await other.seal("r-1", Outcome(), KEEP_S)
    await mirrored(other)
    taken = await store.take(await store.read("r-1"))
    assert (taken.outcome, list(taken.logs[0].ids)) == (Outcome(), [5, 6, 9])
    assert (await store.read("r-1")).outcome == Outcome()
    assert not store.mirror.entries


@pytest.mark.parametrize("ahead_s", [20.0, -20.0])
async def test_taken_stream_has_what_was_left_of_its_timeout_by_any_clock(store, other, monkeypatch, clock, ahead_s):
    """The routers' clocks differ by more than the timeout."""
    began_at = time.time()
    await store.open(replace(record(), deadline_at=began_at + 15.0))
    await mirrored(store)
    clock.now += 5.0
    there = time.time
    monkeypatch.setattr(time, "time", lambda: there() + ahead_s)
    taken = await take(other)
    took_s = there() - began_at
    assert 10.0 - took_s <= taken.record.deadline_at - time.time() <= 10.0


async def fail_after_taking_back(store, server):
    """A stream that this router has taken, and that has failed here."""
    other = MirroredJournalStore(
        MemoryJournalStore(max_streams=4, max_bytes=1 << 20),
        server.target,
        dial_plain,
        owner="router-3",
        window_s=WINDOW_S,
        timeout_s=TIMEOUT_S,
        max_lag_s=0.01,
    )
    other.start()
    await fill(other)
    await mirrored(other)
    await take(store)
    await other.close()
    await store.seal("r-1", Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone")), KEEP_S)
    await mirrored(store)


async def test_stream_that_is_taken_back_without_an_answer_keeps_its_epoch(store, other, server):
    lost = []
    store.on_taken(lambda *taken: lost.append(taken))
    await fail_after_taking_back(store, server)
    server.backend.is_away = store.client.mirror.is_open = True
    assert (await store.take(await store.read("r-1"))).outcome is None
    server.backend.is_away = store.client.mirror.is_open = False
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await mirrored(store)
    assert not lost
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6, 8]


async def test_taken_stream_with_a_timeout_is_written_again_as_the_same(store, other, server):
    """What was left of its timeout differs by a little each time that it is read."""
    await store.open(replace(record(), deadline_at=time.time() + 1000.0))
    await mirrored(store)
    await take(other)
    other.append("r-1", Piece(0, 0, [5], logprobs(5)))
    await other.seal("r-1", FAILED, KEEP_S)
    await mirrored(other)
    server.backend.is_away = other.client.mirror.is_open = True
    assert (await other.take(await other.read("r-1"))).outcome is None
    server.backend.is_away = other.client.mirror.is_open = False
    other.append("r-1", Piece(0, 1, [6], logprobs(6)))
    await mirrored(other)
    assert "r-1" in other.mirror.entries
    assert list((await store.look_up("r-1", "tenant")).logs[0].ids) == [5, 6]


async def test_taken_stream_with_a_timeout_is_written_after_its_former_router_has_opened_it_again(store, other, server):
    """The state server has forgotten everything, and the former router has not been told that the stream was taken."""
    await store.open(replace(record(), deadline_at=time.time() + 1000.0))
    await mirrored(store)
    await take(other)
    await mirrored(other)
    await server.restart()
    append, is_open = server.backend.backend.append, asyncio.Event()

    async def append_after_the_former_router(writes):
        openings = [write.epoch for write in writes if write.opening is not None]
        if 2 in openings:
            await is_open.wait()
        results = await append(writes)
        if 1 in openings:
            is_open.set()
        return results

    server.backend.backend.append = append_after_the_former_router
    other.append("r-1", Piece(0, 0, [5, 6], logprobs(5, 6)))
    store.append("r-1", Piece(0, 0, [5], logprobs(5)))
    await all_told(other)
    await all_told(store)
    assert is_open.is_set()
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6]


def lose_answer_to_take(server):
    """The next stream that is taken has its new epoch, and the router that asked for it does not learn it."""
    read = server.backend.backend.read

    async def read_without_answer(key, taker):
        found = await read(key, taker)
        if taker is None:
            return found
        server.backend.backend.read = read
        raise LockstepError(ErrorCode.UNAVAILABLE, "the answer is lost")

    server.backend.backend.read = read_without_answer


async def reopened_without_answer(store, server):
    """A stream that has failed here goes on here, though it is not known that it was taken back."""
    await fill(store)
    await store.seal("r-1", FAILED, KEEP_S)
    await mirrored(store)
    lose_answer_to_take(server)
    store.client.note_failure(store.client.mirror, "UNAVAILABLE")  # one more, and it counts as away
    assert (await store.take(await store.read("r-1"))).outcome is None


async def test_stream_that_this_router_has_taken_itself_goes_on(store, other, server):
    lost = []
    store.on_taken(lambda *taken: lost.append(taken))
    await reopened_without_answer(store, server)
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await all_told(store)
    assert not lost
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6, 8]
    await store.seal("r-1", Outcome(), KEEP_S)
    await all_told(store)
    seen = await other.look_up("r-1", "tenant")
    assert (seen.outcome, list(seen.logs[0].ids), list(seen.logs[1].ids)) == (Outcome(), [5, 6, 8], [7])


async def test_own_taking_is_found_although_the_answer_to_that_is_lost_too(store, other, server):
    lost, asked = [], 0
    store.on_taken(lambda *taken: lost.append(taken))
    await reopened_without_answer(store, server)
    read = server.backend.backend.read

    async def answer_the_second(key, taker=None):
        nonlocal asked
        asked += 1
        if asked == 1:
            raise LockstepError(ErrorCode.UNAVAILABLE, "the answer is lost")
        return await read(key, taker)

    server.backend.backend.read = answer_the_second
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await all_told(store)
    assert (lost, asked) == ([], 2)
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6, 8]
    # It is known now whose the stream is: it is lost without a question when another takes it.
    assert await take(other) is not None
    asked = 1
    store.append("r-1", Piece(0, 3, [9], logprobs(9)))
    await all_told(store)
    assert await store.read("r-1") is None
    assert asked == 1


@pytest.mark.parametrize("outcome", [Outcome(), FAILED])
async def test_stream_that_this_router_has_taken_itself_may_end_before_it_is_known(store, other, server, outcome):
    await reopened_without_answer(store, server)
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await store.seal("r-1", outcome, KEEP_S)
    await all_told(store)
    seen = await other.look_up("r-1", "tenant")
    assert (seen.outcome, list(seen.logs[0].ids)) == (outcome if outcome == Outcome() else None, [5, 6, 8])
    assert (await store.read("r-1")).outcome is not None


async def test_stream_that_was_taken_without_an_answer_may_be_taken_by_others(store, other, server):
    lost = []
    store.on_taken(lambda *taken: lost.append((taken[0], taken[2])))
    await reopened_without_answer(store, server)
    assert await take(other) is not None
    await mirrored(other)
    await eventually(lambda: lost == [("r-1", False)])
    assert await store.read("r-1") is None


async def test_failed_stream_whose_taking_had_no_answer_is_kept_and_written(store, other, server):
    lost = []
    store.on_taken(lambda *taken: lost.append(taken))
    await fill(store)
    await mirrored(store)
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await store.seal("r-1", FAILED, KEEP_S)  # the last token is not written yet
    lose_answer_to_take(server)
    with pytest.raises(LockstepError):
        await store.take(await store.read("r-1"))
    await all_told(store)
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6, 8]
    assert not lost
    assert (await store.read("r-1")).outcome.may_go_on


async def test_removal_ends_a_stream_whose_taking_had_no_answer(store, other, server):
    may_write, append = asyncio.Event(), server.backend.backend.append

    async def append_later(writes):
        await may_write.wait()
        return await append(writes)

    await reopened_without_answer(store, server)
    server.backend.backend.append = append_later
    server.backend.calls.clear()
    await eventually(lambda: "append" in server.backend.calls)
    await store.remove("r-1")
    may_write.set()
    await all_told(store)
    assert not store.mirror.entries
    assert await other.look_up("r-1", "tenant") is None


async def test_failed_stream_is_not_taken_back_while_it_is_not_known_who_has_it(store, other, server):
    await fill(store)
    server.backend.delay_s = 0.05
    await store.seal("r-1", Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone")), KEEP_S)  # nothing is written yet
    server.backend.is_away = True
    known = await store.read("r-1")
    with pytest.raises(LockstepError) as refused:
        await store.take(known)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert (await store.read("r-1")).outcome is not None
    server.backend.is_away, server.backend.delay_s = False, 0.0
    await eventually(lambda: not store.client.mirror.is_open and not store.mirror.entries)
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6]
    assert list((await store.take(known)).logs[0].ids) == [5, 6]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_failed_stream_that_is_removed_elsewhere_is_gone_here(store, other, goes_on):
    await fill(store)
    await store.seal("r-1", Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone")), KEEP_S)
    await mirrored(store)
    if goes_on:
        await take(other)
        await other.remove("r-1")
    else:
        assert await other.discard("r-1", "tenant")
    await mirrored(other)
    assert await store.take(await store.read("r-1")) is None
    assert await store.read("r-1") is None


async def test_removing_a_failed_stream_ends_it_where_it_goes_on(store, other):
    lost = []
    other.on_taken(lambda request_id, *_: lost.append(request_id))
    await fill(store)
    await store.seal("r-1", Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone")), KEEP_S)
    await mirrored(store)
    await take(other)
    await mirrored(other)
    await store.remove("r-1")
    await mirrored(store)
    other.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await eventually(lambda: lost == ["r-1"])
    await mirrored(other)
    assert await store.look_up("r-1", "tenant") is None


async def test_taken_stream_is_fenced(store, other):
    lost = []
    store.on_taken(lambda request_id, *_: lost.append(request_id))
    await fill(store)
    await mirrored(store)
    taken = await take(other)
    assert list(taken.logs[0].ids) == [5, 6]
    store.append("r-1", Piece(0, 2, [99], logprobs(99)))
    await eventually(lambda: lost == ["r-1"])
    assert await store.read("r-1") is None
    assert not store.mirror.entries
    store.append("r-1", Piece(0, 3, [98], logprobs(98)))
    other.append("r-1", Piece(0, 2, [8], logprobs(8), STOP))
    await mirrored(other)
    await mirrored(store)
    assert list((await store.look_up("r-1", "tenant")).logs[0].ids) == [5, 6, 8]


async def test_stream_can_be_taken_back(store, other):
    await fill(store)
    await mirrored(store)
    await take(other)
    other.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await mirrored(other)
    store.append("r-1", Piece(0, 2, [9], logprobs(9)))
    await eventually(lambda: "r-1" not in store.mirror.entries)
    assert list((await take(store)).logs[0].ids) == [5, 6, 8]
    store.append("r-1", Piece(0, 3, [10], logprobs(10), STOP))
    await store.seal("r-1", Outcome(), KEEP_S)
    await mirrored(store)
    other.append("r-1", Piece(0, 3, [11], logprobs(11)))
    await eventually(lambda: "r-1" not in other.mirror.entries)
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6, 8, 10]


async def test_stream_without_room_is_not_taken(store, make_store):
    other = await make_store("router-2", max_streams=1)
    await other.open(record("r-own"))
    await fill(store)
    await mirrored(store)
    with pytest.raises(LockstepError) as refused:
        await take(other)
    assert refused.value.code is ErrorCode.OVERLOADED
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await mirrored(store)
    assert (await store.read("r-1")).outcome is None, "its router has it still"
    assert await other.read("r-1") is None


async def test_discarded_stream_ends_where_it_runs_and_is_gone_for_all(store, other):
    lost = []
    store.on_taken(lambda request_id, *_: lost.append(request_id))
    await fill(store)
    await fill(store, "r-2")
    await store.seal("r-2", Outcome(), KEEP_S)
    await mirrored(store)
    assert await other.discard("r-1", "tenant")
    assert await other.discard("r-2", "tenant")
    await mirrored(other)
    assert await other.look_up("r-1", "tenant") is None
    assert await other.look_up("r-2", "tenant") is None
    assert not await other.discard("r-1", "tenant")
    store.append("r-1", Piece(0, 2, [9], logprobs(9)))
    await eventually(lambda: lost == ["r-1"])
    await mirrored(store)
    assert await other.look_up("r-1", "tenant") is None, "its router does not write it again"
    assert not other.mirror.entries


@pytest.mark.parametrize("how", ["goes on", "discarded", "ended", "away"])
async def test_router_that_has_lost_a_stream_is_told_whether_it_was_removed(store, other, server, how):
    lost = []
    store.on_taken(lambda *reported: lost.append((reported[0], reported[2])))
    await fill(store)
    await mirrored(store)
    if how == "discarded":
        assert await other.discard("r-1", "tenant")
    else:
        await take(other)
    if how == "ended":
        await other.seal("r-1", Outcome(), KEEP_S)
        await mirrored(other)
        await other.remove("r-1")
    await mirrored(other)
    if how == "away":
        read = server.backend.backend.read

        async def fail(*_):
            raise LockstepError(ErrorCode.UNAVAILABLE, "the store does not answer")

        server.backend.backend.read = fail
    store.append("r-1", Piece(0, 2, [9], logprobs(9)))
    await eventually(lambda: lost == [("r-1", how in ("discarded", "ended"))])
    assert await store.read("r-1") is None
    if how == "away":
        server.backend.backend.read = read


async def test_stream_that_came_back_is_not_ended_for_having_been_lost(store, other, monkeypatch):
    """Its former run may end, and a client resume it here, before it is known why it was lost."""
    lost, may_answer, ask = [], asyncio.Event(), store.client.read
    store.on_taken(lambda request_id, *_: lost.append(request_id))
    await fill(store)
    await mirrored(store)
    known = await take(other)

    async def read(request):
        response = await ask(request)
        await may_answer.wait()
        return response

    monkeypatch.setattr(store.client, "read", read)
    store.append("r-1", Piece(0, 2, [9], logprobs(9)))
    await eventually(lambda: store._reporting)
    assert await store.take(known) is not None
    may_answer.set()
    await eventually(lambda: not store._reporting)
    assert not lost
    assert await store.read("r-1") is not None
