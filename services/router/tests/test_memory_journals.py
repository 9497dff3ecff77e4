"""The store of journals in memory: the contract, and its bounds."""

import random

import pytest
from journal_store_contract import KEEP_S, JournalStoreContract, logprobs, record
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.journals import Claim, MemoryJournalStore, Outcome, Piece


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    return MemoryJournalStore(max_streams=4, max_bytes=1 << 20, clock=clock)


@pytest.fixture
def advance(clock):
    async def advance(seconds):
        clock.now += seconds

    return advance


class TestContract(JournalStoreContract):
    """The contract holds."""


async def finish(store, request_id, **changes):
    await store.open(record(request_id, **changes))
    await store.seal(request_id, Outcome(), KEEP_S)


async def readable(store):
    return [f"r-{n}" for n in range(10) if await store.read(f"r-{n}") is not None]


async def test_those_that_ended_first_are_evicted_first(store):
    for n in (3, 0, 2, 1):
        await finish(store, f"r-{n}")
    await finish(store, "r-4")
    assert await readable(store) == ["r-0", "r-1", "r-2", "r-4"]
    await store.open(record("r-5"))
    assert await readable(store) == ["r-1", "r-2", "r-4", "r-5"]


async def test_running_ones_are_never_evicted(store):
    for n in range(4):
        await store.open(record(f"r-{n}"))
    with pytest.raises(LockstepError) as refused:
        await store.open(record("r-4"))
    assert refused.value.code is ErrorCode.OVERLOADED
    await store.seal("r-2", Outcome(), KEEP_S)
    await store.open(record("r-4"))
    assert await readable(store) == ["r-0", "r-1", "r-3", "r-4"]


async def test_bytes_are_bounded(store, clock):
    large = [1] * 100_000
    await finish(store, "r-0", prompt=large)
    await finish(store, "r-1", prompt=large)
    assert 800_000 < store.size_bytes < 1 << 20
    await finish(store, "r-2", prompt=large)
    assert await readable(store) == ["r-1", "r-2"]
    with pytest.raises(LockstepError, match="as many resumable streams"):
        await store.open(record("r-3", prompt=[1] * 300_000))
    assert await readable(store) == []


async def test_growing_streams_take_the_room_of_finished_ones(store):
    await finish(store, "r-0", prompt=[1] * 200_000)
    await store.open(record("r-1"))
    store.append("r-1", Piece(0, 0, [5] * 100_000))
    assert await readable(store) == ["r-1"]


async def test_tenants_share_the_room_evenly(store):
    """A tenant that comes later gets its share of what the greedy one has; the greedy one gets no more of it back."""
    for n in range(4):
        await finish(store, f"r-{n}", tenant="greedy")
    await finish(store, "r-4", tenant="late")
    await finish(store, "r-5", tenant="late")
    assert await readable(store) == ["r-2", "r-3", "r-4", "r-5"]
    await finish(store, "r-6", tenant="greedy")
    assert await readable(store) == ["r-3", "r-4", "r-5", "r-6"]


async def test_tenant_whose_streams_run_gets_no_room_of_a_smaller_one(store):
    await finish(store, "r-0", tenant="small")
    for n in range(1, 4):
        await store.open(record(f"r-{n}", tenant="greedy"))
    with pytest.raises(LockstepError):
        await store.open(record("r-4", tenant="greedy"))
    assert await readable(store) == ["r-0", "r-1", "r-2", "r-3"]
    await store.open(record("r-5", tenant="third"))
    assert await readable(store) == ["r-1", "r-2", "r-3", "r-5"]


async def test_memory_that_others_need_is_freed(store):
    for n in range(3):
        await finish(store, f"r-{n}", prompt=[1] * 10_000)
    await store.open(record("r-3"))
    store.shrink(50_000)
    assert await readable(store) == ["r-2", "r-3"]
    store.shrink(1 << 30)
    assert await readable(store) == ["r-3"]


class CountingTime(float):
    """A time that counts the times that are compared with it."""

    compared = 0

    def __ge__(self, other):
        CountingTime.compared += 1
        return super().__ge__(other)


async def test_streams_whose_time_is_not_over_cost_nothing():
    """Each request looks for those whose time is over."""
    now = 0.0
    store = MemoryJournalStore(max_streams=1000, max_bytes=64 << 20, clock=lambda: CountingTime(now))
    for n in range(1000):
        now = float(n)
        await finish(store, f"r-{n}")
        store.expire()
        CountingTime.compared = 0
        assert store.kept == min(n + 1, KEEP_S)
        await store.find("key")
        assert CountingTime.compared <= 2


async def test_streams_that_are_forgotten_early_leave_few_reminders_of_their_time():
    now = 0.0
    store = MemoryJournalStore(max_streams=1000, max_bytes=64 << 20, clock=lambda: CountingTime(now))
    for n in range(1000):
        await finish(store, f"r-{n}")
        await store.remove(f"r-{n}")
    now = KEEP_S
    CountingTime.compared = 0
    store.expire()
    assert CountingTime.compared < 100


async def test_stream_that_goes_on_and_ends_again_is_kept_from_its_last_end(store, clock):
    await finish(store, "r-0")
    for _ in range(1000):
        clock.now += KEEP_S / 4
        assert store.reopen("r-0") is not None
        store.expire()
        await store.seal("r-0", Outcome(), KEEP_S)
        await finish(store, "r-1")
        await store.remove("r-1")
    clock.now += KEEP_S * 0.9
    assert await readable(store) == ["r-0"]
    clock.now += KEEP_S * 0.1
    assert await readable(store) == []


async def test_nothing_is_left_of_streams_that_are_gone(store, clock):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for n in range(300):
        request_id = f"r-{n}"
        await store.claim(f"key-{n}", Claim(request_id, b""))
        try:
            await store.open(record(request_id))
        except LockstepError:
            await store.remove(request_id)
            continue
        for position in range(chance.randrange(5)):
            store.append(request_id, Piece(chance.randrange(2), 0, [5] * position, logprobs(*[5] * position)))
        if chance.random() < 0.7:
            await store.seal(request_id, Outcome(), KEEP_S)
        elif chance.random() < 0.7:
            await store.remove(request_id)
        clock.now += chance.random() * KEEP_S / 2
    for n in range(300):
        await store.seal(f"r-{n}", Outcome(), KEEP_S)
    assert store.kept <= 4
    clock.now += KEEP_S
    store.expire()
    assert (store.kept, store.size_bytes) == (0, 0)
    for n in range(300):
        assert await store.claim(f"key-{n}", Claim(f"s-{n}", b"")) is None
