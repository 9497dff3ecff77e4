"""Idempotency keys of all routers."""

import asyncio

import pytest
from journal_store_contract import KEEP_S, logprobs
from lockstep_api.v1 import state_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router import metrics
from lockstep_router.journals import Claim, Outcome, Piece, shared_keys
from lockstep_router.journals import mirrored as mirrored_journals
from mirrored_stores import FAILED, TIMEOUT_S, WINDOW_S, count, fill, mirrored, take
from router_cluster import eventually


async def test_key_holds_on_all_routers(store, other):
    assert await store.claim("tenant/key", Claim("r-1", b"body")) is None
    assert await other.claim("tenant/key", Claim("r-2", b"other")) == Claim("r-1", b"body")
    assert await other.find("tenant/key") == Claim("r-1", b"body")
    assert await other.find("stranger/key") is None
    await store.release("r-1")
    assert await other.claim("tenant/key", Claim("r-2", b"other")) is None


@pytest.mark.parametrize("is_told", [True, False])
async def test_key_of_a_removed_stream_is_free_though_the_stream_had_ended(store, other, is_told):
    """Also if the state server does not know yet how long to keep the key."""
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


async def claim_and_take(store, other):
    """A stream with a key that another router takes. The key was renewed there, and is not for a while now."""
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    await take(other)
    other.expire()
    await mirrored(other)


@pytest.mark.parametrize("end", ["fails", "may go on", "is given up"])
async def test_key_of_a_taken_stream_stays_when_its_former_run_ends_without_knowing(store, other, make_store, end):
    """The former router has gained nothing since then, so that nothing has told it."""
    await claim_and_take(store, other)
    if end == "is given up":
        await store.remove("r-1")
    else:
        failed = FAILED if end == "may go on" else Outcome(LockstepError(ErrorCode.INTERNAL, "a defect"))
        await store.release("r-1")
        await store.seal("r-1", failed, KEEP_S)
    await mirrored(store)
    third = await make_store("router-3")
    assert await third.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")


async def test_key_is_not_released_while_it_is_not_known_whose_its_stream_is(store, other, make_store, server):
    await claim_and_take(store, other)
    append, may_append = server.backend.backend.append, asyncio.Event()

    async def append_later(writes):
        await may_append.wait()
        return await append(writes)

    server.backend.backend.append = append_later
    store.client.timeout_s = 0.05
    await store.release("r-1")
    may_append.set()
    third = await make_store("router-3")
    assert await third.find("tenant/key") == Claim("r-1", b"body")


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


async def test_key_of_a_taken_stream_is_kept_as_long_as_the_stream(store, other, make_store, clock):
    """Its former router may have died long ago: little of the key's time is left then."""
    await store.claim("tenant/key", Claim("r-1", b"body"))
    await fill(store)
    await mirrored(store)
    third = await make_store("router-3")
    clock.now += 1.4 * WINDOW_S
    await take(other)
    other.expire()
    await mirrored(other)
    clock.now += 0.2 * WINDOW_S
    assert await third.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")


async def test_key_whose_claim_was_late_is_claimed_again_soon(make_store, other, server):
    store = await make_store(timeout_s=0.1)
    server.backend.delay_s = 3600.0
    assert await store.claim("tenant/key", Claim("r-1", b"body")) is None
    server.backend.delay_s = 0.0
    store.client.timeout_s = TIMEOUT_S  # from here on everything has to be in time
    store.expire()
    await mirrored(store)
    assert await other.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")


@pytest.mark.parametrize("repeats", [0, 2])
async def test_key_that_had_no_room_is_claimed_again_as_soon_as_there_is_room(store, other, server, repeats):
    server.backend.is_full = True
    assert await store.claim("tenant/key", Claim("r-1", b"body")) is None
    for _ in range(repeats):
        store.expire()
        await mirrored(store)
    server.backend.is_full = False
    store.expire()
    await mirrored(store)
    assert await other.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")


async def test_key_that_had_no_room_is_not_claimed_again_once_it_is_free(store, other, server):
    server.backend.is_full = True
    assert await store.claim("tenant/key", Claim("r-1", b"body")) is None
    store.expire()
    await mirrored(store)
    server.backend.is_full = False
    await store.release("r-1")
    store.expire()
    await mirrored(store)
    assert await other.find("tenant/key") is None


async def test_key_of_a_stream_that_is_gone_can_be_released_by_who_found_it(store, other):
    await store.claim("tenant/key", Claim("r-1", b"body"))
    store._keys.forget("r-1")  # as if its router had died
    assert await other.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")
    assert await other.look_up("r-1", "tenant") is None
    await other.release("r-1")
    assert await other.claim("tenant/key", Claim("r-2", b"body")) is None


async def test_stream_found_by_its_key_is_waited_for_a_little(store, other, monkeypatch):
    monkeypatch.setattr(mirrored_journals, "OPENING_S", 30.0)  # longer than any machine takes for what follows
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
    await eventually(lambda: not store._keys._preparing)


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


async def marked(store):
    """Wait until a router that has found the key of r-1 sees that it is marked."""
    async with asyncio.timeout(30.0):
        while not await store._keys.is_preparing("r-1"):
            await asyncio.sleep(0.02)


async def refuses_to_begin_again(store):
    with pytest.raises(LockstepError) as refused:
        await store.look_up("r-1", "tenant")
    return refused.value.code is ErrorCode.UNAVAILABLE and await store.find("tenant/key") == Claim("r-1", b"body")


@pytest.fixture
async def server_with_room_for_a_key_alone(server, monkeypatch):
    """For none of its marks, and not for its stream."""
    monkeypatch.setattr(mirrored_journals, "OPENING_S", 0.05)
    monkeypatch.setattr(mirrored_journals, "PREPARING_S", 0.2)
    monkeypatch.setattr(shared_keys, "MARK_AFTER_S", 0.0)
    server.settings = server.settings.model_copy(update={"max_tenant_bytes": 1000})
    return await server.restart()


@pytest.mark.usefixtures("server_with_room_for_a_key_alone")
async def test_key_of_a_tenant_without_room_is_kept_while_its_request_is_prepared(make_store, clock):
    store, other = await make_store("router-1"), await make_store("router-2")
    assert await store.claim("tenant/key", Claim("r-1", b"body")) is None
    assert await other.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")
    await marked(other)
    assert await refuses_to_begin_again(other)
    store._keys.forget("r-1")  # as if its router had died
    await mirrored(store)
    clock.now += shared_keys._MARK_TTL_S + 0.1
    assert await other.look_up("r-1", "tenant") is None, "another router may begin it"


@pytest.mark.usefixtures("server_with_room_for_a_key_alone")
async def test_key_of_a_stream_without_room_is_kept_as_long_as_its_router_has_the_stream(make_store, clock):
    store, other = await make_store("router-1"), await make_store("router-2")
    assert await store.claim("tenant/key", Claim("r-1", b"body")) is None
    assert await other.claim("tenant/key", Claim("r-2", b"body")) == Claim("r-1", b"body")
    full = count(metrics.JOURNAL_WRITES, "full")
    await fill(store)
    await eventually(lambda: count(metrics.JOURNAL_WRITES, "full") > full)
    for is_ended in (False, True):
        if is_ended:
            await store.seal("r-1", Outcome(), KEEP_S)
        clock.now += shared_keys._MARK_TTL_S + 0.1
        await marked(other)
        assert await refuses_to_begin_again(other)
    await store.remove("r-1")
    assert await other.find("tenant/key") is None
