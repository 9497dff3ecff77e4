"""What every backend does with sessions, idempotency keys and leases."""

import asyncio
import dataclasses

import pytest
from backends import LIMITS, OPTIONS, TTL_S, eventually, keep
from lockstep_api.v1.state_pb2 import WRITE_OUTCOME_FULL as FULL
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_state.backend import Binding, Opening

ONE = Binding(b"worker-1", b"note")
TWO = Binding(b"worker-2")
SAME_SIZE = Binding(b"worker-2", b"note")
NONE = Binding(b"")


async def test_name_is_bound_to_the_last(kept):
    assert await kept.backend.bound(kept.key()) is None
    assert await kept.backend.bind(kept.tenant, kept.key(), ONE, TTL_S, None) == (True, ONE)
    assert await kept.backend.bind(kept.tenant, kept.key(), TWO, TTL_S, None) == (True, TWO)
    assert await kept.backend.bound(kept.key()) == TWO
    assert await kept.backend.bound(kept.key("other")) is None


async def test_expected_target_decides(kept):
    assert await kept.backend.bind(kept.tenant, kept.key(), ONE, TTL_S, b"worker-2") == (False, NONE)
    assert await kept.backend.bound(kept.key()) is None
    assert await kept.backend.bind(kept.tenant, kept.key(), ONE, TTL_S, b"") == (True, ONE)
    assert await kept.backend.bind(kept.tenant, kept.key(), TWO, TTL_S, b"") == (False, ONE)
    assert await kept.backend.bind(kept.tenant, kept.key(), ONE, TTL_S, b"") == (True, ONE), "a repeat"
    assert await kept.backend.bind(kept.tenant, kept.key(), TWO, TTL_S, b"worker-1") == (True, TWO)
    assert await kept.backend.bound(kept.key()) == TWO


async def test_of_many_that_claim_a_name_one_gets_it(kept):
    claims = [kept.backend.bind(kept.tenant, kept.key(), Binding(b"%d" % n), TTL_S, b"") for n in range(16)]
    results = await asyncio.gather(*claims)
    assert [done for done, _ in results].count(True) == 1
    assert len({now for _, now in results}) == 1


async def test_name_is_unbound(kept):
    await kept.backend.bind(kept.tenant, kept.key(), ONE, TTL_S, None)
    assert not await kept.backend.unbind(kept.tenant, kept.key(), b"worker-2")
    assert await kept.backend.unbind(kept.tenant, kept.key(), b"worker-1")
    assert not await kept.backend.unbind(kept.tenant, kept.key(), None)
    assert await kept.backend.bound(kept.key()) is None


async def test_name_expires_and_is_touched(kept):
    await kept.backend.bind(kept.tenant, kept.key("short"), ONE, 0.4, None)

    async def is_touched():
        """A busy machine may take so long that the name has expired in between."""
        await kept.backend.bind(kept.tenant, kept.key("touched"), ONE, 0.4, None)
        return await kept.backend.touch(kept.tenant, kept.key("touched"), TTL_S) == ONE

    await eventually(is_touched)

    async def is_gone():
        return await kept.backend.bound(kept.key("short")) is None

    await eventually(is_gone)
    assert await kept.backend.bound(kept.key("touched")) == ONE
    assert await kept.backend.touch(kept.tenant, kept.key("none"), TTL_S) is None


async def test_lease_has_one_holder(kept):
    done, lease = await kept.backend.acquire(kept.key(), "a", TTL_S)
    assert done
    assert lease.owner == "a"
    assert 0 < lease.expires_in_s <= TTL_S
    done, other = await kept.backend.acquire(kept.key(), "b", TTL_S)
    assert not done
    assert (other.owner, other.epoch) == ("a", lease.epoch)
    assert (await kept.backend.lease(kept.key())).owner == "a"


async def test_another_life_of_the_holder_has_a_higher_epoch(kept):
    _, first = await kept.backend.acquire(kept.key(), "a", TTL_S)
    done, second = await kept.backend.acquire(kept.key(), "a", TTL_S)
    assert done
    assert second.epoch > first.epoch
    assert not (await kept.backend.renew(kept.key(), "a", first.epoch, TTL_S))[0]
    assert not (await kept.backend.release(kept.key(), "a", first.epoch))[0]
    assert (await kept.backend.renew(kept.key(), "a", second.epoch, TTL_S))[0]


async def test_released_lease_is_free_and_its_epoch_is_used_up(kept):
    _, first = await kept.backend.acquire(kept.key(), "a", TTL_S)
    assert not (await kept.backend.release(kept.key(), "b", first.epoch))[0]
    assert (await kept.backend.release(kept.key(), "a", first.epoch))[0]
    now = await kept.backend.lease(kept.key())
    assert (now.owner, now.epoch, now.expires_in_s) == ("", first.epoch, 0.0)
    assert not (await kept.backend.renew(kept.key(), "a", first.epoch, TTL_S))[0]
    done, second = await kept.backend.acquire(kept.key(), "b", TTL_S)
    assert done
    assert second.epoch > first.epoch


async def test_expired_lease_can_be_taken(kept):
    _, first = await kept.backend.acquire(kept.key(), "a", 0.3)

    async def stolen():
        done, lease = await kept.backend.acquire(kept.key(), "b", TTL_S)
        return lease if done else None

    second = await eventually(stolen)
    assert second.epoch > first.epoch
    assert not (await kept.backend.renew(kept.key(), "a", first.epoch, TTL_S))[0]
    assert (await kept.backend.lease(kept.key())).owner == "b"


async def test_renewing_prolongs(kept):
    _, lease = await kept.backend.acquire(kept.key(), "a", TTL_S / 2)
    done, renewed = await kept.backend.renew(kept.key(), "a", lease.epoch, TTL_S)
    assert done
    assert renewed.epoch == lease.epoch
    assert renewed.expires_in_s > TTL_S / 2


async def test_nobody_holds_an_unknown_lease(kept):
    now = await kept.backend.lease(kept.key())
    assert (now.owner, now.epoch, now.expires_in_s) == ("", 0, 0.0)
    assert not (await kept.backend.renew(kept.key(), "a", 1, TTL_S))[0]


async def test_of_many_that_want_a_lease_one_gets_it(kept):
    results = await asyncio.gather(*(kept.backend.acquire(kept.key(), f"r{n}", TTL_S) for n in range(16)))
    assert [done for done, _ in results].count(True) == 1


SMALL = dataclasses.replace(LIMITS, tenant_bytes=16 << 10)


async def bind_until_refused(kept, most=200):
    """How many names the tenant gets."""
    for number in range(most):
        try:
            await kept.backend.bind(kept.tenant, kept.key(f"n{number}"), ONE, TTL_S, b"")
        except LockstepError:
            return number
    return most


async def test_names_count_in_the_bytes_of_their_tenant(kind, address):
    async with keep(kind, address, OPTIONS, SMALL) as kept:
        count = await bind_until_refused(kept)
        assert 16 <= count <= 40
        with pytest.raises(LockstepError, match="max_tenant_bytes") as refused:
            await kept.backend.bind(kept.tenant, kept.key("more"), ONE, TTL_S, b"")
        assert refused.value.code is ErrorCode.OVERLOADED
        opening = Opening(bytes(1000), 1, "router-1")
        assert (await kept.append(opening=opening)).outcome == FULL, "streams have the same quota"
        assert await kept.backend.bound(kept.key(f"n{count}")) is None
        first, last = kept.key("n0"), kept.key(f"n{count - 1}")
        assert await kept.backend.bind(kept.tenant, first, ONE, TTL_S, b"") == (True, ONE), "a repeat needs no room"
        assert await kept.backend.touch(kept.tenant, first, TTL_S) == ONE
        assert await kept.backend.bind(kept.tenant, last, SAME_SIZE, TTL_S, b"") == (False, ONE)
        stranger = f"{kept.tenant}-other"
        assert await kept.backend.bind(stranger, kept.key("theirs"), ONE, TTL_S, b"") == (True, ONE)

        assert await kept.backend.unbind(kept.tenant, first, b"worker-1")
        again = kept.key("again")
        assert await kept.backend.bind(kept.tenant, again, ONE, TTL_S, b"") == (True, ONE)
        assert await kept.backend.bound(last) == ONE


async def test_a_name_that_is_not_bound_takes_nothing(kind, address):
    async with keep(kind, address, OPTIONS, SMALL) as kept:
        for number in range(100):
            assert await kept.backend.bind(kept.tenant, kept.key(f"x{number}"), ONE, TTL_S, b"else") == (False, NONE)
        assert await bind_until_refused(kept) >= 16


async def test_names_that_have_expired_are_counted_no_more(kind, address):
    async with keep(kind, address, OPTIONS, SMALL) as kept:
        for number in range(16):
            await kept.backend.bind(kept.tenant, kept.key(f"x{number}"), ONE, 0.2, b"")

        async def is_free():
            return await bind_until_refused(kept) >= 16

        await eventually(is_free)


async def test_refused_claims_of_a_name_do_not_shorten_what_is_counted(kind, address):
    async with keep(kind, address, OPTIONS, SMALL) as kept:
        count = await bind_until_refused(kept)
        for number in range(count):
            answer = await kept.backend.bind(kept.tenant, kept.key(f"n{number}"), SAME_SIZE, 0.001, b"")
            assert answer == (False, ONE)
        await asyncio.sleep(0.1)
        with pytest.raises(LockstepError):
            await kept.backend.bind(kept.tenant, kept.key("more"), ONE, TTL_S, b"")
