"""Keys that are renewed in a state server: more than the mirror has room for at once, and those that are released."""

import asyncio

import pytest
from lockstep_router.journals.mirror import _MAX_CHORES
from lockstep_router.journals.shared_keys import SharedKeys
from lockstep_router.journals.stored_form import Key

KEYS = 3 * _MAX_CHORES


class Renewals:
    """In place of the mirror and of the client: does a second's chores at the end of it, and notes them."""

    def __init__(self):
        self.chores = []
        self.renewed = []
        self.calls = []
        """In the order of their ends."""
        self.timeout_s = 5.0
        self.answers = asyncio.Event()
        self.answers.set()

    def add_chore(self, work):
        self.chores.append(work)

    async def renew(self, request):
        self.renewed.append(request.request_id)
        await self.answers.wait()
        self.calls.append("renew")

    async def release(self, request):
        self.calls.append(f"release {request.request_id} {request.key}")

    async def second_passes(self, keys):
        keys.tend(lambda _: True)
        assert len(self.chores) <= _MAX_CHORES, "the mirror would leave some out"
        for work in self.chores:
            await work()
        self.chores.clear()


async def test_after_the_state_server_was_away_every_key_is_renewed():
    renewals = Renewals()
    keys = SharedKeys(renewals, renewals, ttl_s=3600.0)
    for number in range(KEYS):
        keys.adopt(f"r-{number}", Key(f"tenant/{number}", "ab"))
    keys.renew_soon()
    keys.forget("r-7")
    for _ in range(KEYS):
        await renewals.second_passes(keys)
        if len(renewals.renewed) >= KEYS - 1:
            break
    await renewals.second_passes(keys)
    assert sorted(renewals.renewed) == sorted(f"r-{number}" for number in range(KEYS) if number != 7)


KEY = Key("tenant/key", "ab")
RELEASED = "release r-1 tenant/key"


@pytest.fixture
def renewals():
    return Renewals()


@pytest.fixture
async def keys(renewals):
    keys = SharedKeys(renewals, renewals, ttl_s=3600.0)
    keys.adopt("r-1", KEY)
    return keys


async def test_renewal_that_waits_does_not_take_a_released_key(keys, renewals):
    keys.expire_in("r-1", 60.0)
    await keys.release("r-1", KEY)
    for work in renewals.chores:
        await work()
    assert renewals.calls == [RELEASED]


async def test_key_is_released_after_the_renewal_that_is_on_its_way(keys, renewals):
    keys.expire_in("r-1", 60.0)
    renewals.answers.clear()
    renewing = asyncio.create_task(renewals.chores[0]())
    await asyncio.sleep(0)
    releasing = asyncio.create_task(keys.release("r-1", KEY))
    await asyncio.sleep(0.01)
    assert not releasing.done()
    renewals.answers.set()
    await asyncio.gather(renewing, releasing)
    assert renewals.calls[0] == "renew"
    assert renewals.calls[-1] == RELEASED


async def test_late_renewal_is_not_waited_for_and_releases_the_key_itself(keys, renewals):
    keys.expire_in("r-1", 60.0)
    renewals.timeout_s = 0.01
    renewals.answers.clear()
    renewing = asyncio.create_task(renewals.chores[0]())
    await asyncio.sleep(0)
    await keys.release("r-1", KEY)
    assert renewals.calls == [RELEASED]
    renewals.answers.set()
    await renewing
    assert renewals.calls == [RELEASED, "renew", RELEASED]


async def test_key_that_is_adopted_again_is_renewed(keys, renewals):
    keys.expire_in("r-1", 60.0)
    await keys.release("r-1", KEY)
    keys.adopt("r-1", KEY)
    keys.expire_in("r-1", 60.0)
    for work in renewals.chores:
        await work()
    assert renewals.calls == [RELEASED, "renew"]
