"""What is special of the backend in memory: it stays as small as it says."""

import tracemalloc
from contextlib import suppress

import pytest
from backends import TTL_S
from lockstep_api.v1 import state_pb2
from lockstep_api.v1.state_pb2 import (
    WRITE_OUTCOME_FULL,
    WRITE_OUTCOME_OK,
    WRITE_OUTCOME_STALE,
    WRITE_OUTCOME_UNKNOWN,
)
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.telemetry import REGISTRY
from lockstep_state.backend import Binding, Block, Limits, Opening, Take, Write
from lockstep_state.memory import MemoryBackend
from lockstep_state.memory.journals import MAX_TOMBSTONES
from lockstep_state.memory.names import CLAIMED_S
from lockstep_state.memory.shelf import ENTRY_BYTES
from state_serving import make_settings, served_by

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


async def test_lease_that_is_there_needs_no_room():
    backend = MemoryBackend(1 << 20, LIMITS)
    _, first = await backend.acquire("lease", "a", TTL_S)
    size = (1 << 20) - 1200
    (result,) = await backend.append([Write("t", "s", 1, TTL_S, Opening(bytes(size), 1, "r"))])
    assert result.outcome == 1
    with pytest.raises(LockstepError):
        await backend.acquire("other", "a", TTL_S)
    done, second = await backend.acquire("lease", "a", TTL_S)
    assert done
    assert second.epoch > first.epoch
    assert (await backend.release("lease", "a", second.epoch))[0]
    assert (await backend.acquire("lease", "b", TTL_S))[0]


async def fill_with_running(backend, prefix):
    """Streams that run, until there is no room for more."""
    outcome, count = WRITE_OUTCOME_OK, 0
    while outcome == WRITE_OUTCOME_OK:
        opening = Opening(bytes(2000), 1, "r")
        (result,) = await backend.append([Write("others", f"{prefix}-{count}", 1, TTL_S, opening)])
        outcome, count = result.outcome, count + 1
        assert backend.used_bytes <= 1 << 20
    assert outcome == WRITE_OUTCOME_FULL


async def test_key_of_a_stream_that_runs_is_not_evicted_before_the_stream_has_ended():
    now = 0.0
    backend = MemoryBackend(1 << 20, LIMITS, clock=lambda: now)
    claim = Binding(b"request", b"fingerprint")
    assert (await backend.bind("t", "key", claim, TTL_S, b"", "stream"))[0]
    await backend.append([Write("t", "stream", 1, TTL_S, Opening(b"r", 1, "router"))])
    for number in range(200):
        await backend.bind("t", f"session-{number}", Binding(b"worker"), TTL_S, None)
    now = CLAIMED_S + 1
    backend.expire()
    await fill_with_running(backend, "first")
    assert await backend.bound("session-0") is None, "names that no stream needs make room"
    assert await backend.bind("t", "key", Binding(b"other"), TTL_S, b"", "other") == (False, claim)
    assert await backend.bind("t", "key", claim, TTL_S, b"", "stream") == (True, claim), "it needs no more room"
    now += CLAIMED_S + 1
    backend.expire()
    await fill_with_running(backend, "second")
    assert await backend.bound("key") == claim
    assert backend.used_bytes <= 1 << 20


@pytest.mark.parametrize("how", ["sealed", "trimmed", "expired"])
async def test_key_makes_room_once_its_stream_runs_no_more(how):
    now = 0.0
    backend = MemoryBackend(1 << 20, LIMITS, clock=lambda: now)
    await backend.bind("t", "key", Binding(b"request"), 10 * TTL_S, b"", "stream")
    await backend.append([Write("t", "stream", 1, TTL_S, Opening(b"r", 1, "router"))])
    now = CLAIMED_S
    if how == "sealed":
        await backend.append([Write("t", "stream", 1, TTL_S, seal=b"end")])
    elif how == "trimmed":
        await backend.trim("t", ["stream"], TTL_S)
    else:
        now = TTL_S
    backend.expire()
    assert await backend.bound("key") is not None
    opening = Opening(bytes((1 << 20) - 800), 1, "r")
    large = Write("t", "large", 1, TTL_S, opening)
    assert [each.outcome for each in await backend.append([large])] == [WRITE_OUTCOME_OK]
    assert await backend.bound("key") is None


async def test_key_of_a_request_without_a_stream_is_kept_as_long_as_it_is_marked():
    """Also if there is no room for the marks."""
    now = 0.0
    backend = MemoryBackend(1 << 20, LIMITS, clock=lambda: now)
    await backend.bind("t", "key", Binding(b"request"), TTL_S, b"", "stream")
    await fill_with_running(backend, "first")
    for _ in range(10):
        now += 1.0
        with suppress(LockstepError):
            await backend.bind("t", "mark", Binding(b"request"), CLAIMED_S, b"", "stream")
        backend.expire()
        await fill_with_running(backend, f"at-{now}")
        assert await backend.bound("key") is not None
    now += CLAIMED_S
    backend.expire()
    for number in range(20):  # no stream fits, but names may
        with suppress(LockstepError):
            await backend.bind("t", f"filling-{number}", Binding(b"worker"), TTL_S, None)
    assert await backend.bound("key") is None


async def test_names_of_requests_leave_nothing():
    now = 0.0
    backend = MemoryBackend(64 << 20, LIMITS, clock=lambda: now)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20_000):
            now += 0.1
            await backend.bind("t", f"key-{number}", Binding(b"a"), TTL_S, b"", f"stream-{number}")
            await backend.unbind("t", f"key-{number}", None)
            if number % 10 == 0:
                backend.expire()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 200_000
    assert backend.used_bytes == 0


async def test_claim_of_a_stream_that_runs_is_kept_over_grpc(tmp_path):
    now = 0.0
    backend = MemoryBackend(1 << 20, make_settings(tmp_path).limits, clock=lambda: now)
    async with served_by(tmp_path, backend) as client:
        journal = client.journal
        for request in ("runs", "idle"):
            claim = state_pb2.ClaimRequest(tenant="t", key=f"key of {request}", request_id=request)
            assert (await journal.Claim(claim)).granted
        record = state_pb2.StreamRecord(schema=1, choices=[{}], prompts=[{}])
        write = state_pb2.StreamWrite(tenant="t", stream_id="runs", epoch=1, record=record, owner="router")
        assert (await journal.Append(state_pb2.AppendRequest(writes=[write]))).results[0].outcome == 1
        now = CLAIMED_S
        backend.expire()
        await fill_with_running(backend, "filling")
        for number in range(20):  # no stream fits, but sessions may
            with suppress(LockstepError):
                await backend.bind("t", f"session-{number}", Binding(b"worker"), TTL_S, None)
        lookups = [state_pb2.LookUpClaimRequest(tenant="t", key=f"key of {each}") for each in ("runs", "idle")]
        assert [(await journal.LookUpClaim(each)).request_id for each in lookups] == ["runs", ""]
