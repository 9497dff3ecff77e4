"""The store of journals that are mirrored in a state server: the contract, and what other routers see."""

from array import array
from dataclasses import replace

from journal_store_contract import KEEP_S, STOP, JournalStoreContract, logprobs, record
from lockstep_api.v1 import state_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.generation.parsing import Parsing
from lockstep_router.journals import Claim, Outcome, Piece
from mirrored_stores import WINDOW_S, fill, mirrored, take
from router_cluster import eventually


class TestContract(JournalStoreContract):
    """The contract holds."""


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


async def test_mark_after_the_tokens_keeps_the_cached_ones(store):
    await fill(store)
    store.append("r-1", Piece(0, 2, (), is_inexact=True))
    assert (await store.read("r-1")).logs[0].cached_tokens == 2


async def test_mark_after_the_tokens_is_mirrored(store, other, make_store, server):
    await fill(store)
    await mirrored(store)
    store.append("r-1", Piece(0, 2, (), is_inexact=True))
    await mirrored(store)
    assert (await take(other)).logs[0].is_inexact
    await server.restart()
    other.mirror.note_change("r-1")
    third = await make_store("router-3")
    await eventually(lambda: not other.is_away and other.mirror.is_idle)
    assert (await third.look_up("r-1", "tenant")).logs[0].is_inexact, "nor is it lost when all is written again"


async def test_mark_of_a_choice_that_has_ended_is_mirrored(store, other):
    await store.open(record())
    store.append("r-1", Piece(0, 0, [5], logprobs(5), STOP))
    await mirrored(store)
    store.append("r-1", Piece(0, 1, (), is_inexact=True))
    await mirrored(store)
    assert [log.is_inexact for log in (await other.look_up("r-1", "tenant")).logs] == [True, False]


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
