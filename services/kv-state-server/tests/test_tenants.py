"""Tenants cannot read, change or guess what others have, nor find out by time that it is there."""

import random
import time

import grpc
import pytest
import redis
from lockstep_api.v1 import state_pb2
from state_serving import refused, served
from test_journal_service import OK, append_one, piece, reading, record, taking
from test_kv_service import STORED, get, header, key, look_up, put
from test_names_service import bind, worker_of

UNKNOWN = state_pb2.WRITE_OUTCOME_UNKNOWN
ROUNDS = 300
TRIES = 5
CHAIN = 256


async def test_stranger_finds_and_changes_nothing(client):
    mine, stranger = client.tenant, f"{client.tenant}-other"
    content = b"private"
    assert (await append_one(client, record=record(), pieces=[piece(0, 0, 5)])).outcome == OK
    assert (await bind(client, "w1")).bound
    assert await put(client, (header("a", content), content)) == [STORED]
    claim = state_pb2.ClaimRequest(tenant=mine, key="k", request_id="r1")
    assert (await client.journal.Claim(claim)).granted

    client.tenant = stranger
    for call in (reading(client), taking(client)):
        await refused(call, grpc.StatusCode.NOT_FOUND)
    assert (await append_one(client, epoch=9, pieces=[piece(0, 1, 6)])).outcome == UNKNOWN
    trim = state_pb2.TrimRequest(tenant=stranger, stream_ids=["stream"])
    assert (await client.journal.Trim(trim)).trimmed == 0
    release = state_pb2.ReleaseClaimRequest(tenant=stranger, key="k", request_id="r1")
    assert not (await client.journal.Release(release)).released
    theirs = state_pb2.ClaimRequest(tenant=stranger, key="k", request_id="r2")
    assert (await client.journal.Claim(theirs)).granted
    assert await worker_of(client) == ""
    assert (await bind(client, "w2", if_worker="")).bound
    assert (await look_up(client, "a")).present == 0
    assert await get(client, key("a")) == {}
    assert await put(client, (header("a", b"theirs"), b"theirs")) == [STORED]

    client.tenant = mine
    stored = await reading(client)
    assert (stored.epoch, list(stored.logs[0].ids)) == (1, [5])
    assert not (await client.journal.Claim(theirs.__class__(tenant=mine, key="k", request_id="r2"))).granted
    assert await worker_of(client) == "w1"
    assert await get(client, key("a")) == {0: content}


async def get_block(client, name, tenant):
    return await get(client, key(name), tenant=tenant)


async def look_up_chain(client, name, tenant):
    """The more blocks are there, the longer it takes: those behind one that is not there are not looked for."""
    return await look_up(client, *(f"{name}-{number}" for number in range(CHAIN)), tenant=tenant)


async def look_up_claim(client, name, tenant):
    return await client.journal.LookUpClaim(state_pb2.LookUpClaimRequest(tenant=tenant, key=name))


ASKS = {"get": get_block, "look_up": look_up_chain, "look_up_claim": look_up_claim}
CONTROLS = ASKS | {"look_up_claim": get_block}
"""What shows that times can be told apart now. A claim takes no time that a tenant could see, not even its own."""


async def fill(client):
    """What the tenant has under the name `there`, for each of `ASKS`."""
    content = bytes(1 << 20)
    assert await put(client, (header("there", content), content)) == [STORED]
    part = bytes(100)
    assert set(await put(client, *((header(f"there-{n}", part), part) for n in range(CHAIN)))) == {STORED}
    claim = state_pb2.ClaimRequest(tenant=client.tenant, key="there", request_id="r1", fingerprint=bytes(100))
    assert (await client.journal.Claim(claim)).granted


@pytest.mark.parametrize("store_kind", ["redis"])
@pytest.mark.parametrize("ask", ASKS)
async def test_foreign_and_absent_are_the_same_work(client, store, store_kind, ask):
    """Redis is asked the same: as many commands of the same kinds."""
    await fill(client)
    stranger = f"{client.tenant}-other"
    with redis.Redis.from_url(store) as server:
        await ASKS[ask](client, "warm", tenant=stranger)
        work = []
        for name in ("there", "absent"):
            before = calls(server)
            await ASKS[ask](client, name, tenant=stranger)
            after = calls(server)
            work.append({kind: count - before.get(kind, 0) for kind, count in after.items()})
        assert work[0] == work[1]
        assert sum(work[0].values()) >= 1


def calls(server):
    """How often each command was called, without those that ask for this."""
    stats = server.info("commandstats")
    return {
        kind: each["calls"] for kind, each in stats.items() if kind not in ("cmdstat_info", "cmdstat_client|setinfo")
    }


@pytest.mark.parametrize("ask", ["get", *(pytest.param(ask, marks=pytest.mark.slow) for ask in ASKS if ask != "get")])
async def test_time_does_not_tell_foreign_from_absent(tmp_path, store, ask):
    """Calls in random order: how often the foreign one takes longer is as for a coin.

    The tenant's own, with its content, is the control: that one can be told apart. Where it cannot, since the machine
    is busy, the calls show nothing and are made again.
    """
    async with served(tmp_path, store=store) as client:
        await fill(client)
        stranger = f"{client.tenant}-other"
        for _ in range(TRIES):
            foreign = await compare(client, ASKS[ask], ("there", stranger), ("absent", stranger))
            own = await compare(client, CONTROLS[ask], ("there", client.tenant), ("absent", client.tenant))
            print(f"the foreign one takes longer in {foreign:.1%}, the own one in {own:.1%}")
            assert 0.35 < foreign < 0.65  # six standard deviations of a coin's
            if own > 0.75:
                break
    assert own > 0.75


async def compare(client, ask, *asked):
    """In what part of all pairs of calls the one for the first name takes longer than the one for the second."""
    order, times = [0, 1] * ROUNDS, ([], [])
    random.shuffle(order)
    for at in order:
        name, tenant = asked[at]
        began = time.perf_counter()
        await ask(client, name, tenant=tenant)
        times[at].append(time.perf_counter() - began)
    return share_above(*times)


def share_above(ones, others):
    """Of all pairs, those in which the first one is above the second one (area under the ROC curve)."""
    return sum((one > other) + (one == other) / 2 for one in ones for other in others) / (len(ones) * len(others))
