"""The store of journals that are mirrored in a state server: the contract, what other routers see, and faults."""

import asyncio
import contextlib
import time
from array import array
from dataclasses import replace

import pytest
from journal_store_contract import KEEP_S, STOP, JournalStoreContract, logprobs, record
from lockstep_api.v1 import state_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_tls import dial_plain
from lockstep_router import metrics
from lockstep_router.generation.parsing import Parsing
from lockstep_router.journals import Claim, MemoryJournalStore, MirroredJournalStore, Outcome, Piece, shared_keys
from lockstep_router.journals import mirrored as mirrored_journals
from router_cluster import eventually
from state_server import Clock, StateServer

WINDOW_S = 100.0
TIMEOUT_S = 5.0
"""Tests that are not about time do not count on the machine's."""
FAILED = Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone"))
"""The stream may go on."""


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def server(tmp_path, clock):
    server = await StateServer(tmp_path / "state", clock).start()
    yield server
    await server.kill()


@pytest.fixture
async def make_store(server, clock):
    async with contextlib.AsyncExitStack() as stack:

        async def make(owner="router-1", timeout_s=TIMEOUT_S, max_lag_s=0.01, **bounds):
            front = MemoryJournalStore(**({"max_streams": 4, "max_bytes": 1 << 20} | bounds), clock=clock)
            store = MirroredJournalStore(
                front,
                server.target,
                dial_plain,
                owner=owner,
                window_s=WINDOW_S,
                timeout_s=timeout_s,
                max_lag_s=max_lag_s,
            )
            store.start()
            stack.push_async_callback(store.close)
            return store

        yield make


@pytest.fixture
async def store(make_store):
    return await make_store()


@pytest.fixture
async def other(make_store):
    """The store of another router."""
    return await make_store("router-2")


async def mirrored(store):
    """Wait until the state server has everything."""
    await eventually(lambda: store.mirror.is_idle)


@pytest.fixture
def advance(store, clock):
    async def advance(seconds):
        await mirrored(store)
        clock.now += seconds
        store.expire()

    return advance


def count(metric, *labels):
    return metric.labels(*labels)._value.get() if labels else metric._value.get()


async def fill(store, request_id="r-1", **changes):
    """A stream with a few tokens of two choices."""
    await store.open(record(request_id, **changes))
    store.append(request_id, Piece(0, 0, [5, 6], logprobs(5, 6), cached_tokens=2, numerics="numerics-1"))
    store.append(request_id, Piece(1, 0, [7], logprobs(7), STOP, is_inexact=True))


async def take(store, request_id="r-1"):
    """Have a store take a stream, as another router that was asked for it."""
    return await store.take(await store.look_up(request_id, "tenant"))


class TestContract(JournalStoreContract):
    """The contract holds."""


# What other routers see.


async def test_other_router_sees_what_was_written(store, other):
    written = replace(
        record(),
        parsing=Parsing("think", True, "hermes", frozenset({"a", "b"}), 1),
        prompts=(array("I", [1, 2]), array("I", [4_000_000_000])),
        prefixes=("é", ""),
    )
    await store.open(written)
    await fill(store, "r-2")
    store.append("r-1", Piece(0, 0, [5, 6], logprobs(5, 6), cached_tokens=2, numerics="numerics-1"))
    await mirrored(store)
    seen = await other.look_up("r-1", "tenant")
    assert (seen.record, seen.outcome) == (written, None)
    kept = await store.read("r-1")
    assert list(seen.logs) == list(kept.logs)
    assert seen.logs[0].numerics == "numerics-1"
    assert list((await other.look_up("r-2", "tenant")).logs) == list((await store.read("r-2")).logs)


async def test_a_stream_that_is_not_mirrored_any_more_is_logged_by_its_request(store, other, caplog):
    """Another router has begun a different one of the same id."""
    await fill(store)
    await mirrored(store)
    await other.open(replace(record(), prompts=(array("I", [9]),)))
    await eventually(lambda: caplog.records)
    (line,) = caplog.records
    assert (line.request_id, line.outcome) == ("r-1", "WRITE_OUTCOME_CONFLICT")


async def test_other_router_sees_how_a_stream_ended(store, other):
    await fill(store)
    await fill(store, "r-2")
    failure = LockstepError(ErrorCode.INTERNAL, "gone", field="model", retry_after_s=5)
    await store.seal("r-1", Outcome(failure), KEEP_S)
    await store.seal("r-2", Outcome(), KEEP_S)
    await mirrored(store)
    seen = (await other.look_up("r-1", "tenant")).outcome.failure
    assert (seen.code, seen.message, seen.field, seen.retry_after_s) == (failure.code, "gone", "model", 5)
    assert (await other.look_up("r-2", "tenant")).outcome == Outcome()
    assert not store.mirror.entries


async def test_failure_that_may_pass_is_no_end_for_other_routers(store, other):
    await fill(store)
    await store.seal("r-1", Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone")), KEEP_S)
    await mirrored(store)
    assert not store.mirror.entries
    assert (await store.read("r-1")).outcome.failure.code is ErrorCode.WORKER_LOST
    seen = await other.look_up("r-1", "tenant")
    assert (seen.outcome, list(seen.logs[0].ids)) == (None, [5, 6])
    await store.remove("r-1")
    await mirrored(store)
    assert await other.look_up("r-1", "tenant") is None


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


def lose_answer_to_take(server):
    """The next stream that is taken has its new epoch, and who asked for it is not told."""
    read = server.backend.backend.read

    async def read_without_answer(key, taker):
        found = await read(key, taker)
        if taker is None:
            return found
        server.backend.backend.read = read
        raise LockstepError(ErrorCode.UNAVAILABLE, "the answer is lost")

    server.backend.backend.read = read_without_answer


async def all_told(store):
    """Wait until the state server has everything, and it is known who has the streams that have been taken."""
    await eventually(lambda: not store.is_away and store.mirror.is_idle and not store._telling)


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


async def test_mark_after_the_tokens_keeps_the_cached_ones(store):
    await fill(store)
    store.append("r-1", Piece(0, 2, (), is_inexact=True))
    assert (await store.read("r-1")).logs[0].cached_tokens == 2


async def test_foreign_owner_sees_nothing(store, other):
    await fill(store)
    await mirrored(store)
    assert await other.look_up("r-1", "stranger") is None
    known = await other.look_up("r-1", "tenant")
    assert await other.take(replace(known, record=replace(known.record, owner="stranger"))) is None
    assert not await other.discard("r-1", "stranger")
    assert await other.look_up("r-1", "") is None
    assert await other.look_up("x" * 2000, "tenant") is None, "an id that the state server refuses"
    assert await other.look_up("r-1", "tenant") is not None


async def test_clients_without_a_key_have_streams_too(store, other):
    await store.open(replace(record(tenant="address"), owner=""))
    await mirrored(store)
    assert (await other.look_up("r-1", "")).record.tenant == "address"


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


async def test_removed_stream_is_gone_there_too(store, other, clock):
    await fill(store)
    await fill(store, "r-2")
    await store.seal("r-2", Outcome(), KEEP_S)
    await mirrored(store)
    await store.remove("r-1")
    await store.remove("r-2")
    await mirrored(store)
    assert await other.look_up("r-1", "tenant") is None
    assert await other.look_up("r-2", "tenant") is None
    assert not store.mirror.entries


async def test_stream_that_ends_elsewhere_and_is_removed_there_is_not_written_again(store, other):
    """Also by a router that learns of nothing before all of that is done."""
    lost = []
    store.on_taken(lambda request_id, *_: lost.append(request_id))
    await fill(store)
    await mirrored(store)
    await take(other)
    await other.seal("r-1", Outcome(), KEEP_S)
    await mirrored(other)
    await other.remove("r-1")
    await mirrored(other)
    assert not lost
    store.append("r-1", Piece(0, 2, [9], logprobs(9)))
    await eventually(lambda: lost == ["r-1"])
    await mirrored(store)
    assert await other.look_up("r-1", "tenant") is None
    assert not store.mirror.entries


async def test_removal_is_settled_when_the_state_server_knows_it(store, other):
    await fill(store)
    await mirrored(store)
    await store.remove("r-1")
    assert store.mirror.entries
    await store.settle("r-1")
    assert await other.look_up("r-1", "tenant") is None
    await store.settle("r-1")
    await store.settle("r-unknown")


async def test_removal_is_told_of_a_stream_whose_first_write_had_no_answer(make_store, server, other):
    store = await make_store(max_lag_s=2.0)
    server.backend.lost_answers = 1
    await fill(store)
    await eventually(lambda: not server.backend.lost_answers and not store.mirror._flight)
    assert not store.mirror.entries["r-1"].is_open, "the next batch comes after a second"
    await store.remove("r-1")
    await store.settle("r-1")
    assert await other.look_up("r-1", "tenant") is None


async def test_removed_stream_does_not_come_back_while_the_server_is_late(make_store, server):
    store = await make_store()
    await fill(store)
    await mirrored(store)
    server.backend.delay_s = 1.0
    await store.remove("r-1")
    assert await store.look_up("r-1", "tenant") is None
    server.backend.delay_s = 0.0


async def test_full_server_forgets_a_stream_that_is_removed(store, other, server):
    """The answer to a DELETE waits for that; the end of the stream itself would wait for room."""
    await fill(store)
    await mirrored(store)
    room = server.backend.backend._room
    room.max_bytes = room.used_bytes
    await store.remove("r-1")
    await store.settle("r-1")
    assert await other.look_up("r-1", "tenant") is None
    await eventually(lambda: not store.mirror.entries)


async def test_removal_is_not_waited_for_long_and_not_at_all_while_the_server_is_away(make_store, server):
    store = await make_store()
    await fill(store)
    await fill(store, "r-2")
    await mirrored(store)
    store.settle_s = store.client.timeout_s = 0.1  # only now: until here everything has to be in time
    server.backend.delay_s = 3600.0
    await store.remove("r-1")
    async with asyncio.timeout(60):
        await store.settle("r-1")
    assert "r-1" in store.mirror.entries, "it gave up"
    await eventually(lambda: store.client.mirror.is_open)
    await store.remove("r-2")
    assert "r-2" not in store.mirror.entries
    await store.settle("r-2")


@pytest.mark.parametrize("how", ["goes on", "discarded", "ended", "away"])
async def test_router_that_has_lost_a_stream_is_told_whether_it_was_removed(store, other, server, how):
    lost = []
    store.on_taken(lambda *told: lost.append((told[0], told[2])))
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
    await eventually(lambda: store._telling)
    assert await store.take(known) is not None
    may_answer.set()
    await eventually(lambda: not store._telling)
    assert not lost
    assert await store.read("r-1") is not None


async def test_left_stream_is_complete_and_keeps_its_key(store, other):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await store.leave("r-1")
    assert await store.read("r-1") is None
    await mirrored(store)
    assert not store.mirror.entries
    assert await other.claim("tenant/key", Claim("r-9", b"body")) == Claim("r-1", b"body")
    assert list((await take(other)).logs[0].ids) == [5, 6]


async def test_what_is_missing_is_written_at_the_end(make_store, other):
    store = await make_store("router-3")
    await fill(store)
    await store.leave("r-1")
    await store.close()
    assert list((await other.look_up("r-1", "tenant")).logs[0].ids) == [5, 6]


async def test_record_is_held_once(store, other):
    """The one in the journal is what the mirror writes from; a message of it would take as much memory again."""
    await fill(store)
    await mirrored(store)
    await take(other)
    for each in (store, other):
        entry = each.mirror.entries["r-1"]
        assert entry.stream.record is (await each.read("r-1")).record
        assert not [held for held in vars(entry).values() if isinstance(held, state_pb2.StreamRecord)]


async def test_unusable_record_is_absent(store, other, server):
    message = state_pb2.StreamRecord(schema=1, model="reference", request=b"no json")
    message.prompts.add(ids=[1])
    message.choices.add(stream_id="s")
    write = state_pb2.StreamWrite(tenant="tenant", stream_id="r-1", epoch=1, record=message, owner="x")
    response = await store.client.append(state_pb2.AppendRequest(writes=[write]))
    assert response.results[0].outcome == state_pb2.WRITE_OUTCOME_OK
    assert await other.look_up("r-1", "tenant") is None


# Keys.


async def test_key_holds_on_all_routers(store, other):
    assert await store.claim("tenant/key", Claim("r-1", b"body")) is None
    assert await other.claim("tenant/key", Claim("r-2", b"other")) == Claim("r-1", b"body")
    assert await other.find("tenant/key") == Claim("r-1", b"body")
    assert await other.find("stranger/key") is None
    await store.release("r-1")
    assert await other.claim("tenant/key", Claim("r-2", b"other")) is None


@pytest.mark.parametrize("is_told", [True, False])
async def test_key_of_a_removed_stream_is_free_though_the_stream_had_ended(store, other, is_told):
    """Also if the state server has yet to be told for how long it was to keep the key."""
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    await store.seal("r-1", Outcome(), KEEP_S)
    if is_told:
        await mirrored(store)
    assert await other.find("tenant/key") == Claim("r-1", b"body")
    await store.remove("r-1")
    await mirrored(store)
    assert await other.find("tenant/key") is None
    assert await store.claim("tenant/key", Claim("r-2", b"other")) is None


async def test_key_of_a_taken_stream_stays_when_its_former_run_ends(store, other):
    lost = []
    store.on_taken(lambda request_id, *_: lost.append(request_id))
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    await take(other)
    store.append("r-1", Piece(0, 2, [8], logprobs(8)))
    await eventually(lambda: lost)
    await store.remove("r-1")
    assert await other.find("tenant/key") == Claim("r-1", b"body")
    assert await store.find("tenant/key") == Claim("r-1", b"body")


async def test_key_of_a_failed_stream_that_another_one_has_stays_when_that_is_removed(store, other):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await store.release("r-1")
    await store.seal("r-1", FAILED, KEEP_S)
    await other.claim("tenant/key", Claim("r-2", b"body"))
    await store.remove("r-1")
    await mirrored(store)
    assert await store.find("tenant/key") == Claim("r-2", b"body")


async def test_many_claim_a_key_at_once(store, other):
    claims = [Claim(f"r-{n}", b"body") for n in range(20)]
    found = await asyncio.gather(
        *(
            each.claim("tenant/key", claim)
            for claim in claims
            for each in (store, other)
            if (each is store) == (claim.request_id[-1] in "02468")
        )
    )
    winners = [claim for claim in found if claim is None]
    assert len(winners) == 1
    assert len({claim.request_id for claim in found if claim is not None}) == 1


async def test_key_of_a_taken_stream_goes_with_it(store, other, clock):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    await take(other)
    await other.release("r-1")
    assert await store.client.look_up_claim(state_pb2.LookUpClaimRequest(tenant="tenant", key="tenant/key"))
    assert await other.find("tenant/key") is None


async def test_key_of_a_stream_that_is_gone_can_be_released_by_who_found_it(store, other):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    store._keys.forget("r-1")  # as if its router had died
    assert await other.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")
    assert await other.look_up("r-1", "tenant") is None
    await other.release("r-1")
    assert await other.claim("tenant/key", Claim("r-2", b"body")) is None


async def test_stream_found_by_its_key_is_waited_for_a_little(store, other):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await other.claim("tenant/key", Claim("r-2", b"body"))
    looking = asyncio.create_task(other.look_up("r-1", "tenant"))
    await asyncio.sleep(0.1)
    await fill(store)
    assert (await looking).record.request_id == "r-1"


async def test_stream_that_is_prepared_for_long_keeps_its_key(store, other, monkeypatch):
    monkeypatch.setattr(mirrored_journals, "OPENING_S", 0.2)
    monkeypatch.setattr(shared_keys, "MARK_AFTER_S", 0.01)
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await other.claim("tenant/key", Claim("r-2", b"body"))
    await mirrored(store)
    looking = asyncio.create_task(other.look_up("r-1", "tenant"))
    await asyncio.sleep(1.0)
    assert not looking.done()
    await fill(store)
    assert (await looking).record.request_id == "r-1"
    assert not store._keys._preparing


async def test_key_of_a_router_that_died_while_it_prepared_is_free(make_store, other, clock, monkeypatch):
    monkeypatch.setattr(mirrored_journals, "OPENING_S", 0.05)
    monkeypatch.setattr(shared_keys, "MARK_AFTER_S", 0.0)
    store = await make_store("router-3")
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await asyncio.sleep(0.05)
    await mirrored(store)
    store._keys.forget("r-1")  # as if it had died: nothing is renewed
    await other.claim("tenant/key", Claim("r-2", b"body"))
    looking = asyncio.create_task(other.look_up("r-1", "tenant"))
    await asyncio.sleep(0.3)
    assert not looking.done()
    clock.now += shared_keys._MARK_TTL_S + 0.1
    assert await looking is None


async def test_stream_that_is_prepared_for_too_long_is_an_error_to_retry(store, other, monkeypatch):
    monkeypatch.setattr(mirrored_journals, "OPENING_S", 0.1)
    monkeypatch.setattr(mirrored_journals, "PREPARING_S", 0.3)
    monkeypatch.setattr(shared_keys, "MARK_AFTER_S", 0.0)
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await asyncio.sleep(0.05)
    await mirrored(store)
    await other.claim("tenant/key", Claim("r-2", b"body"))
    with pytest.raises(LockstepError) as refused:
        await other.look_up("r-1", "tenant")
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert await other.find("tenant/key") == Claim("r-1", b"body"), "it keeps its key"


# Times to live.


async def test_idle_stream_stays_as_long_as_its_router_lives(store, other, clock, monkeypatch):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    monkeypatch.setattr(store.mirror, "ttl_s", 0.0)  # of the next renewals: at once
    monkeypatch.setattr(store._keys, "ttl_s", 0.0)
    for _ in range(5):
        clock.now += WINDOW_S
        store.mirror.ttl_s = 1.5 * WINDOW_S
        store.mirror.note_change("r-1")
        store._keys._renew("r-1", 1.5 * WINDOW_S)
        await mirrored(store)
        assert await other.look_up("r-1", "tenant") is not None
        assert await other.find("tenant/key") is not None
    clock.now += 1.5 * WINDOW_S + 1
    assert await other.look_up("r-1", "tenant") is None, "its router has died"
    assert await other.find("tenant/key") is None


# Faults.


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
