"""The Sessions and Leases services over gRPC, on memory and on a real Redis."""

import asyncio

import grpc
from backends import eventually
from lockstep_api.v1 import state_pb2
from state_serving import refused

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def bind(client, worker_id, **fields):
    values = {"tenant": client.tenant, "session": "session", "ttl_s": 60}
    return client.sessions.Bind(state_pb2.BindRequest(worker_id=worker_id, **values | fields))


async def worker_of(client, tenant=None):
    request = state_pb2.LookUpSessionRequest(tenant=tenant or client.tenant, session="session")
    return (await client.sessions.LookUp(request)).worker_id


async def test_session_is_bound_moved_and_expired(client):
    assert await worker_of(client) == ""
    assert (await bind(client, "w1", if_worker="")).bound
    taken = await bind(client, "w2", if_worker="")
    assert (taken.bound, taken.worker_id) == (False, "w1")
    assert (await bind(client, "w2", if_worker="w1")).bound
    assert await worker_of(client) == "w2"
    assert (await bind(client, "w3")).bound
    expire = state_pb2.ExpireSessionRequest(tenant=client.tenant, session="session")
    assert (await client.sessions.Expire(expire)).expired
    assert not (await client.sessions.Expire(expire)).expired
    assert await worker_of(client) == ""


async def test_touched_session_outlives_its_time(client):
    touch = state_pb2.TouchSessionRequest(tenant=client.tenant, session="session", ttl_s=600)

    async def is_touched():
        """A busy machine may take so long that the session has expired in between."""
        await bind(client, "w1", ttl_s=0.4)
        return (await client.sessions.Touch(touch)).worker_id == "w1"

    await eventually(is_touched)
    await bind(client, "w1", ttl_s=0.4, session="short")
    look_up = state_pb2.LookUpSessionRequest(tenant=client.tenant, session="short")

    async def is_gone():
        return (await client.sessions.LookUp(look_up)).worker_id == ""

    await eventually(is_gone)
    assert await worker_of(client) == "w1"
    touch.session = "short"
    assert (await client.sessions.Touch(touch)).worker_id == ""


async def test_foreign_tenant_finds_no_session(client):
    await bind(client, "w1")
    stranger = f"{client.tenant}-other"
    assert await worker_of(client, stranger) == ""
    expire = state_pb2.ExpireSessionRequest(tenant=stranger, session="session")
    assert not (await client.sessions.Expire(expire)).expired
    assert await worker_of(client) == "w1"


async def test_invalid_sessions_are_refused_by_field(client):
    await refused(bind(client, ""), INVALID, "worker_id")
    await refused(bind(client, "w", tenant=""), INVALID, "tenant")
    await refused(bind(client, "w", session=""), INVALID, "session")
    await refused(bind(client, "w", ttl_s=-1), INVALID, "ttl_s")
    await refused(bind(client, "w", ttl_s=1e9), INVALID, "ttl_s")
    await refused(bind(client, "w", if_worker="x" * 513), INVALID, "if_worker")
    assert await worker_of(client) == ""


def acquire(client, owner, ttl_s=60.0):
    return client.leases.Acquire(state_pb2.AcquireLeaseRequest(name=client.tenant, owner=owner, ttl_s=ttl_s))


def renew(client, owner, epoch):
    return client.leases.Renew(state_pb2.RenewLeaseRequest(name=client.tenant, owner=owner, epoch=epoch, ttl_s=60))


def release(client, owner, epoch):
    return client.leases.Release(state_pb2.ReleaseLeaseRequest(name=client.tenant, owner=owner, epoch=epoch))


async def test_lease_has_one_holder_and_growing_epochs(client):
    first = await acquire(client, "a")
    assert (first.granted, first.owner) == (True, "a")
    assert 0 < first.expires_in_s <= 60
    other = await acquire(client, "b")
    assert (other.granted, other.owner, other.epoch) == (False, "a", first.epoch)
    second = await acquire(client, "a")
    assert second.epoch > first.epoch
    assert not (await renew(client, "a", first.epoch)).granted
    assert (await renew(client, "a", second.epoch)).granted
    assert not (await release(client, "b", second.epoch)).granted
    assert (await release(client, "a", second.epoch)).granted
    now = await client.leases.LookUp(state_pb2.LookUpLeaseRequest(name=client.tenant))
    assert (now.granted, now.owner, now.epoch) == (False, "", second.epoch)
    third = await acquire(client, "b")
    assert third.granted
    assert third.epoch > second.epoch


async def test_expired_lease_is_taken_and_its_holder_fenced(client):
    first = await acquire(client, "a", ttl_s=0.3)

    async def stolen():
        answer = await acquire(client, "b")
        return answer if answer.granted else None

    second = await eventually(stolen)
    assert second.epoch > first.epoch
    assert not (await renew(client, "a", first.epoch)).granted


async def test_of_many_that_want_a_lease_one_gets_it(client):
    answers = await asyncio.gather(*(acquire(client, f"r{n}") for n in range(16)))
    assert [answer.granted for answer in answers].count(True) == 1
    assert len({answer.owner for answer in answers}) == 1


async def test_invalid_leases_are_refused_by_field(client):
    await refused(acquire(client, ""), INVALID, "owner")
    await refused(acquire(client, "a", ttl_s=float("inf")), INVALID, "ttl_s")
    await refused(renew(client, "a", 0), INVALID, "epoch")
    await refused(release(client, "a", 1 << 53), INVALID, "epoch")
    await refused(client.leases.LookUp(state_pb2.LookUpLeaseRequest()), INVALID, "name")
    assert (await acquire(client, "a")).granted
