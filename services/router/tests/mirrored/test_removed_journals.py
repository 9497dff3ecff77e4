"""Streams that are removed are gone for all routers."""

import asyncio

from journal_store_contract import KEEP_S, logprobs
from lockstep_router.journals import Outcome, Piece
from mirrored_stores import fill, mirrored, take
from router_cluster import eventually


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


async def test_removal_ends_a_stream_that_another_router_has_already(store, other):
    """This one learns of it only now, as the stream has gained nothing in the meantime."""
    lost = []
    other.on_taken(lambda request_id, _, is_removed: lost.append((request_id, is_removed)))
    await fill(store)
    await mirrored(store)
    await take(other)
    await mirrored(other)
    await store.remove("r-1")
    await store.settle("r-1")
    assert await store.look_up("r-1", "tenant") is None
    other.append("r-1", Piece(0, 2, [9], logprobs(9)))
    await eventually(lambda: lost == [("r-1", True)])


async def test_stream_that_is_removed_for_no_client_goes_on_at_the_router_that_has_it(store, other):
    await fill(store)
    await mirrored(store)
    await take(other)
    await store.remove("r-1")  # nobody settles it: its client has left here, and reads there
    await mirrored(store)
    other.append("r-1", Piece(0, 2, [9], logprobs(9)))
    await mirrored(other)
    assert list((await store.look_up("r-1", "tenant")).logs[0].ids) == [5, 6, 9]


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


async def test_stream_that_is_discarded_while_it_is_looked_up_is_not_taken(store, make_store):
    """Though the state server does not know yet that it is gone."""
    other = await make_store("router-2", max_lag_s=2.0)
    await fill(store)
    await mirrored(store)
    known = await other.look_up("r-1", "tenant")
    assert await other.discard("r-1", "tenant")
    assert other.mirror.is_removed("r-1"), "the next batch comes after a second"
    assert await other.take(known) is None
    await mirrored(other)
    assert await store.look_up("r-1", "tenant") is None
    assert await other.read("r-1") is None


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
