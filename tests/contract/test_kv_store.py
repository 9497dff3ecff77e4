"""The worker's store of cold KV blocks on the real state server, in memory and on Redis: what goes in comes back, for
its tenant only, and a server that is stopped, killed or damaged costs no more than a miss.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import redis
from harness import PATIENCE_S, until
from lockstep_engine.remote_store import BlockForm
from redis_server import RedisServer
from scripted_kv import FORM, HEADS, Memory, fetch, opened, parts_of
from state_in_process import serving
from state_server_process import StateProcess

NAMES = [str(number) for number in range(40)]
SEED = 20_240_601


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(params=["memory", "redis"])
async def target(request, private_tmp: Path) -> AsyncIterator[str]:
    store = "memory" if request.param == "memory" else request.getfixturevalue("redis_server").address
    async with serving(private_tmp, store=store, store_prefix="worker:") as target:
        yield target


async def put(store, names, tenant="t", form=FORM) -> None:
    parts = parts_of(names, form)
    assert store.offer(tenant, parts) == len(parts)
    await store.flush(PATIENCE_S)


async def test_blocks_come_back_for_another_worker_and_for_their_tenant_only(target: str) -> None:
    async with opened(target) as first, opened(target, name="w1") as second:
        await put(first, NAMES)
        await put(first, ["0"], tenant="")
        memory = Memory()
        result = await fetch(second, [*NAMES, "none"], memory)
        assert (result.blocks, result.outcome) == (len(NAMES), "fetched")
        assert memory.has(NAMES, len(NAMES))
        assert (await fetch(second, NAMES, Memory(), tenant="")).blocks == 1
        for tenant in ("u", "-probe", "T"):
            assert (await fetch(second, NAMES, Memory(), tenant=tenant)).outcome == "absent"


async def test_parts_larger_than_a_message(target: str) -> None:
    form = BlockForm("bfloat16", (3, 1 << 19), 3 << 19)
    async with opened(target) as store:
        await put(store, "ab", form=form)
        memory = Memory(form.length)
        assert (await fetch(store, "ab", memory, form=form)).blocks == 2
        assert memory.has("ab", 2)


async def test_a_prefix_ends_where_one_rank_lacks_its_part(target: str) -> None:
    async with opened(target) as store:
        parts = parts_of("abc")
        del parts[1 * len(HEADS)]  # the first rank's of the second block
        assert store.offer("t", parts) == len(parts)
        await store.flush(PATIENCE_S)
        assert (await fetch(store, "abc", Memory())).blocks == 1


async def test_values_damaged_in_redis_are_a_miss(private_tmp: Path, redis_server: RedisServer) -> None:
    rng = Random(SEED)
    with redis.Redis(port=redis_server.port) as client:
        settings = {"store": redis_server.address, "store_prefix": "damage:"}
        async with serving(private_tmp, **settings) as target, opened(target) as store:
            for number in range(40):
                name = f"damaged {number}"
                await put(store, [name])
                # The values of this block are those as large as a part.
                keys = [key for key in client.scan_iter("damage:*", count=1000) if client.type(key) == b"string"]
                sizes = {key: client.strlen(key) for key in keys}
                key = rng.choice([each for each in keys if FORM.length < sizes[each] < 4 * FORM.length])
                offset = rng.randrange(sizes[key])
                byte = client.getrange(key, offset, offset)
                client.setrange(key, offset, bytes([byte[0] ^ (1 << rng.randrange(8))]))
                memory = Memory()
                result = await fetch(store, [name], memory)
                assert result.blocks == 0, f"seed {SEED}, case {number}"
                for each in keys:
                    if FORM.length < sizes[each] < 4 * FORM.length:
                        client.delete(each)


async def test_a_server_that_is_stopped_and_one_that_is_killed_cost_a_miss(private_tmp: Path) -> None:
    process = StateProcess(private_tmp).start()
    try:
        async with opened(process.target, timeout_s=1.0) as store:
            await put(store, "ab")
            assert (await fetch(store, "ab", Memory())).blocks == 2
            process.stop()
            outcomes = set()
            while not store.client.is_away:
                outcomes.add((await fetch(store, "ab", Memory())).outcome)
            assert outcomes == {"deadline"}
            process.go_on()
            await until(lambda: not store.client.is_away)
            async with asyncio.timeout(PATIENCE_S):
                while (await fetch(store, "ab", Memory())).blocks != 2:
                    await asyncio.sleep(0.01)
            process.kill()
            while not store.client.is_away:
                assert (await fetch(store, "ab", Memory())).blocks == 0
            process.start()
            await until(lambda: not store.client.is_away)
            await put(store, "ab")
            async with asyncio.timeout(PATIENCE_S):
                while (await fetch(store, "ab", Memory())).blocks != 2:
                    await asyncio.sleep(0.01)
    finally:
        process.kill()
