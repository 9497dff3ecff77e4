"""Blocks leave room for journals: a tenant that is full of blocks, and a store that is, still take streams."""

import asyncio
import dataclasses

import pytest
import redis
from backends import LIMITS, OPTIONS, PATIENCE_S, TTL_S, keep, piece
from lockstep_api.v1 import state_pb2
from lockstep_state.backend import Binding, Block, Opening
from lockstep_state.memory import MemoryBackend

OK = state_pb2.WRITE_OUTCOME_OK
BLOCK = bytes(256 << 10)
MAX_BYTES = 32 << 20


def block(kept, number, tenant):
    return Block(tenant, kept.key(f"b{number}"), BLOCK, TTL_S)


async def streams_are_taken(kept, count=40):
    for number in range(count):
        assert (await kept.open(f"s{number}", 1)).outcome == OK
        assert (await kept.append(f"s{number}", pieces=[piece(0, 0, *range(1000))])).outcome == OK
    stored = await kept.backend.read(kept.key(f"s{count - 1}"))
    assert list(stored.logs[0].ids) == list(range(1000))


async def test_a_tenant_full_of_blocks_still_opens_and_appends_streams(kept):
    stored = [(await kept.backend.put([block(kept, number, kept.tenant)]))[0] for number in range(6)]
    assert not stored[-1]
    await streams_are_taken(kept)


@pytest.fixture
def tenant_block_bytes():
    """Quota of a tenant's blocks."""
    return 1 << 40


@pytest.fixture
async def bounded(kind, address, request, tenant_block_bytes):
    """A backend whose store has so much memory, and the servers that it is in."""
    limits = dataclasses.replace(LIMITS, tenant_block_bytes=tenant_block_bytes)
    if kind == "memory":
        async with keep(kind, address, OPTIONS, limits) as kept:
            kept.backend = MemoryBackend(MAX_BYTES, limits)
            yield kept, []
        return
    nodes = (
        request.getfixturevalue("redis_cluster").nodes
        if kind == "cluster"
        else [request.getfixturevalue("redis_server")]
    )
    servers = [redis.Redis(port=node.port) for node in nodes]
    for server in servers:
        server.flushall()
        server.config_set("maxmemory", MAX_BYTES)
    try:
        async with keep(kind, address, OPTIONS, limits) as kept:
            yield kept, servers
    finally:
        for server in servers:
            server.config_set("maxmemory", 0)
            server.flushall()
            server.close()


async def test_a_store_filled_by_blocks_still_takes_journals(bounded):
    """Journals, names and leases: what blocks may not take the room of."""
    kept, servers = bounded
    for number in range(3 * (len(servers) or 1) * MAX_BYTES // len(BLOCK) // 2):
        await kept.backend.put([block(kept, number, f"tenant-{number % 20}")])
    for server in servers:
        used = server.info("memory")["used_memory"] / MAX_BYTES
        assert 0.6 < used < 0.8, "blocks fill their part and no more"
    await streams_are_taken(kept)
    assert (await kept.backend.bind(kept.tenant, kept.key("n"), Binding(b"w"), TTL_S, None))[0]
    assert (await kept.backend.acquire(kept.key("l"), "a", TTL_S))[0]


async def leave_room(servers, spare_bytes):
    """Let blocks have so many bytes more than each server has in use."""
    for server in servers:
        server.config_set("maxmemory", int((await settled_bytes(server) + spare_bytes) / 0.75))


async def settled_bytes(server):
    """Memory in use once a server has freed the buffers of what it was sent."""
    last = [0, 1 << 40]
    async with asyncio.timeout(PATIENCE_S):
        while max(last) - min(last) > 4096:
            await asyncio.sleep(0.15)
            last = [*last[-2:], server.info("memory")["used_memory"]]
    return last[-1]


@pytest.mark.parametrize("kind", ["redis", "encrypted", "cluster"])
async def test_a_block_that_is_stored_again_needs_no_room_of_its_own(bounded):
    """Otherwise the blocks in use would expire, as soon as the store is as full as it may be."""
    kept, servers = bounded
    assert await kept.backend.put([block(kept, 0, "t"), block(kept, 1, "t")]) == [True, True]
    await leave_room(servers, len(BLOCK) // 2)
    assert await kept.backend.put([block(kept, 0, "t"), block(kept, 2, "t")]) == [True, False]
    larger = dataclasses.replace(block(kept, 1, "t"), value=bytes(2 * len(BLOCK)))
    assert await kept.backend.put([larger]) == [False]
    sizes = await kept.backend.sizes([kept.key(f"b{number}") for number in range(3)])
    assert [size >= len(BLOCK) for size in sizes] == [True, True, False]


@pytest.mark.parametrize("kind", ["redis", "encrypted", "cluster"])
@pytest.mark.parametrize("tenant_block_bytes", [3 * len(BLOCK) + 1000], ids=["three"])
async def test_a_block_that_cannot_be_stored_again_still_counts_and_a_new_one_does_not(bounded):
    kept, servers = bounded
    tenant = kept.tenant
    assert await kept.backend.put([block(kept, 0, tenant), block(kept, 1, tenant)]) == [True, True]
    await leave_room(servers, -len(BLOCK) // 2)
    assert await kept.backend.put([block(kept, number, tenant) for number in (0, 1, 2)]) == [False, False, False]
    await leave_room(servers, MAX_BYTES)
    assert await kept.backend.put([block(kept, number, tenant) for number in (3, 4, 5)]) == [True, False, False]


@pytest.mark.parametrize("kind", ["memory"])
async def test_blocks_in_memory_take_the_room_of_blocks_alone(bounded):
    kept, _ = bounded
    ended = 0
    while kept.backend.used_bytes < MAX_BYTES - 4 * len(BLOCK):
        opening = Opening(bytes(60_000), 1, "r")
        assert (await kept.append(f"s{ended}", opening=opening, seal=b"end", tenant=f"t{ended}")).outcome == OK
        ended += 1
    stored = [(await kept.backend.put([block(kept, number, "t")]))[0] for number in range(8)]
    assert all(stored)
    too_large = dataclasses.replace(block(kept, 7, "t"), value=bytes(MAX_BYTES // 2))
    assert await kept.backend.put([too_large]) == [False]
    assert await kept.backend.get([kept.key("b7")]) == [BLOCK], "it stays as it was"
    for number in range(ended):
        assert await kept.backend.read(kept.key(f"s{number}")) is not None
