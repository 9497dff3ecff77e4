"""What is special of the backend in memory: it stays as small as it says."""

import tracemalloc

import pytest
from backends import TTL_S
from lockstep_api.v1.state_pb2 import WRITE_OUTCOME_OK, WRITE_OUTCOME_STALE, WRITE_OUTCOME_UNKNOWN
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.telemetry import REGISTRY
from lockstep_state.backend import Binding, Block, Limits, Opening, Take, Write
from lockstep_state.memory import MemoryBackend
from lockstep_state.memory.journals import MAX_TOMBSTONES
from lockstep_state.memory.shelf import ENTRY_BYTES

LIMITS = Limits(stream_bytes=1 << 20, tenant_bytes=1 << 30, tenant_streams=1000, tenant_block_bytes=1 << 30)


async def test_what_is_replaced_and_removed_leaves_nothing():
    """Not even the reminders of when it would have expired."""
    backend = MemoryBackend(64 << 20, LIMITS)
    _, lease = await backend.acquire("lease", "a", TTL_S)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20_000):
            await backend.renew("lease", "a", lease.epoch, TTL_S)
            await backend.bind("t", "name", Binding(b"a"), TTL_S, None)
            await backend.bind("t", f"name-{number}", Binding(b"a"), TTL_S, None)
            await backend.unbind("t", f"name-{number}", None)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 200_000
    backend.expire()
    assert await backend.bound("name") is not None


async def test_what_was_replaced_expires_at_its_new_time():
    now = 0.0
    backend = MemoryBackend(64 << 20, LIMITS, clock=lambda: now)
    for number in range(1000):
        for ttl_s in (500.0, 100.0, 300.0 + number):
            await backend.bind("t", f"name-{number}", Binding(b"a"), ttl_s, None)
    full_bytes = backend.used_bytes
    now = 299.0
    backend.expire()
    assert backend.used_bytes == full_bytes
    now = 300.0 + 500
    backend.expire()
    assert backend.used_bytes == full_bytes * 499 // 1000
    now = 1e6
    backend.expire()
    assert backend.used_bytes == 0


async def test_tombstones_of_trimmed_streams_are_bounded_and_expire():
    now = 0.0
    backend = MemoryBackend(64 << 20, LIMITS, clock=lambda: now)
    for number in range(MAX_TOMBSTONES + 10):
        await backend.append([Write("t", f"s{number}", 1, TTL_S, Opening(b"r", 1, "r"))])
        await backend.read(f"s{number}", Take("other", TTL_S))
        await backend.trim("t", [f"s{number}"], TTL_S)
    assert backend.used_bytes == MAX_TOMBSTONES * ENTRY_BYTES
    last = MAX_TOMBSTONES + 9
    oldest, newest = await backend.append([Write("t", f"s{number}", 1, TTL_S) for number in (0, last)])
    assert (oldest.outcome, newest.outcome) == (WRITE_OUTCOME_UNKNOWN, WRITE_OUTCOME_STALE)
    now = TTL_S + 1
    backend.expire()
    assert backend.used_bytes == 0


async def fill_with_ended(backend, count, size_bytes=60_000):
    """So many streams that have ended, of other tenants."""
    for number in range(count):
        opening = Opening(bytes(size_bytes), 1, "r")
        (result,) = await backend.append([Write(f"t{number}", f"filling-{number}", 1, TTL_S, opening, seal=b"end")])
        assert result.outcome == WRITE_OUTCOME_OK
        assert backend.used_bytes <= 1 << 20


async def test_taken_stream_that_is_evicted_stays_fenced_as_long_as_it_would_have_been_there():
    now = 0.0
    backend = MemoryBackend(1 << 20, LIMITS, clock=lambda: now)
    for key in ("taken", "not taken"):
        await backend.append([Write("t", key, 1, TTL_S, Opening(b"r", 1, "first"))])
    taken = await backend.read("taken", Take("second", TTL_S))
    for key, epoch in (("taken", taken.epoch), ("not taken", 1)):
        await backend.append([Write("t", key, epoch, TTL_S, seal=b"removed")])
    now = TTL_S / 2
    await fill_with_ended(backend, 40)
    assert await backend.read("taken") is None
    assert await backend.read("not taken") is None
    late = [Write("t", key, 1, TTL_S, Opening(b"r", 1, "first")) for key in ("taken", "not taken")]
    assert [each.outcome for each in await backend.append(late)] == [WRITE_OUTCOME_STALE, WRITE_OUTCOME_OK]
    now = TTL_S
    assert (await backend.append(late[:1]))[0].outcome == WRITE_OUTCOME_OK


async def test_tombstones_of_evicted_streams_give_way_to_streams_that_run():
    backend = MemoryBackend(1 << 20, LIMITS)
    for number in range(5000):
        await backend.append([Write(f"t{number}", f"s{number}", 1, TTL_S, Opening(b"r", 1, "first"))])
        taken = await backend.read(f"s{number}", Take("second", TTL_S))
        (result,) = await backend.append([Write(f"t{number}", f"s{number}", taken.epoch, TTL_S, seal=b"removed")])
        assert result.outcome == WRITE_OUTCOME_OK
        assert backend.used_bytes <= 1 << 20
    opening = Opening(bytes((1 << 20) - 2000), 1, "r")
    assert (await backend.append([Write("t", "large", 1, TTL_S, opening)]))[0].outcome == WRITE_OUTCOME_OK
    assert backend.used_bytes <= 1 << 20


async def test_memory_of_blocks_is_told_apart():
    backend = MemoryBackend(64 << 20, LIMITS)
    await backend.append([Write("t", "s", 1, TTL_S, Opening(bytes(5000), 1, "r"))])
    backend.expire()
    assert REGISTRY.get_sample_value("lockstep_state_block_memory_bytes") == 0
    assert await backend.put([Block("t", "b", bytes(3000), TTL_S)]) == [True]
    backend.expire()
    assert REGISTRY.get_sample_value("lockstep_state_block_memory_bytes") == ENTRY_BYTES + 3000
    assert REGISTRY.get_sample_value("lockstep_state_memory_bytes") == backend.used_bytes > 8000


async def test_lease_without_room_is_refused_as_full_and_not_as_held():
    backend = MemoryBackend(1 << 20, LIMITS)
    size = (1 << 20) - 1000  # streams that run are not evicted
    (result,) = await backend.append([Write("t", "s", 1, TTL_S, Opening(bytes(size), 1, "r"))])
    assert result.outcome == 1
    with pytest.raises(LockstepError) as caught:
        await backend.acquire("lease", "a", TTL_S)
    assert caught.value.code is ErrorCode.OVERLOADED
    await backend.trim("t", ["s"], TTL_S)
    assert (await backend.acquire("lease", "a", TTL_S))[0]
