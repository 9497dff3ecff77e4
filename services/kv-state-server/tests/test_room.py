"""Blocks leave room for journals: a tenant that is full of blocks, and a store that is, still take streams."""

import dataclasses

import pytest
import redis
from backends import LIMITS, OPTIONS, TTL_S, keep, piece
from lockstep_api.v1 import state_pb2
from lockstep_state.backend import Binding, Block
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
async def bounded(kind, address, request):
    """A backend whose store has so much memory, and the servers that it is in."""
    limits = dataclasses.replace(LIMITS, tenant_block_bytes=1 << 40)
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
    assert (await kept.backend.bind(kept.key("n"), Binding(b"w"), TTL_S, None))[0]
    assert (await kept.backend.acquire(kept.key("l"), "a", TTL_S))[0]
