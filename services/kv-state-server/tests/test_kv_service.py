"""The Kv service over gRPC, on memory and on a real Redis."""

import asyncio
import hashlib
import logging

import grpc
import pytest
import redis
import xxhash
from backends import eventually
from lockstep_api.v1 import state_pb2
from lockstep_common.telemetry import REGISTRY
from state_serving import refused, served

INVALID = grpc.StatusCode.INVALID_ARGUMENT
STORED = state_pb2.PUT_OUTCOME_STORED
FULL = state_pb2.PUT_OUTCOME_FULL
CHUNK = 1 << 20


def block_hash(name):
    return hashlib.sha256(str(name).encode()).digest()


def key(name, first=0, count=4):
    return state_pb2.BlockKey(hash=block_hash(name), heads=state_pb2.HeadRange(first=first, count=count))


def header(name, content, **fields):
    values = {
        "schema": 1,
        "key": key(name),
        "dtype": "float8_e4m3fn",
        "shape": [2, len(content) // 2],
        "length": len(content),
        "checksum": xxhash.xxh3_64_intdigest(content),
    }
    return state_pb2.BlockHeader(**values | fields)


def messages(tenant, *blocks, chunk=CHUNK, ttl_s=60.0):
    """What puts these (header, content)."""
    made = []
    for head, content in blocks:
        parts = [content[start : start + chunk] for start in range(0, len(content), chunk)] or [b""]
        for at, part in enumerate(parts):
            made.append(state_pb2.PutBlocksRequest(header=None if at else head, data=part))
    made[0].tenant, made[0].ttl_s = tenant, ttl_s
    return made


async def put(client, *blocks, **options):
    return list((await client.kv.Put(iter(messages(client.tenant, *blocks, **options)))).outcomes)


async def get(client, *keys, tenant=None):
    """The content of each block that is there, by its index."""
    found = {}
    request = state_pb2.GetBlocksRequest(tenant=tenant or client.tenant, keys=keys)
    async for message in client.kv.Get(request):
        if message.HasField("header"):
            assert message.index not in found
            found[message.index] = (message.header, bytearray())
        found[message.index][1].extend(message.data)
    for head, content in found.values():
        assert len(content) == head.length
    return {index: bytes(content) for index, (_, content) in found.items()}


async def look_up(client, *names, heads=((0, 4),), tenant=None):
    return await client.kv.LookUp(
        state_pb2.LookUpBlocksRequest(
            tenant=tenant or client.tenant,
            hashes=[block_hash(name) for name in names],
            heads=[state_pb2.HeadRange(first=first, count=count) for first, count in heads],
        )
    )


@pytest.mark.parametrize("chunk", [1000, CHUNK])
async def test_blocks_come_back_as_they_were_put(client, chunk):
    contents = [bytes([number]) * size for number, size in enumerate((1, 4096, 70_000, 3 * CHUNK + 5))]
    blocks = [(header(number, content), content) for number, content in enumerate(contents)]
    assert await put(client, *blocks, chunk=chunk) == [STORED] * 4
    assert await get(client, key("none"), *map(key, range(4))) == dict(enumerate(contents, 1))


async def test_look_up_counts_leading_blocks_of_all_heads(client):
    content = bytes(100)
    for name, first in (("a", 0), ("a", 4), ("b", 0), ("b", 4), ("c", 0), ("d", 0), ("d", 4)):
        assert await put(client, (header(name, content, key=key(name, first)), content)) == [STORED]
    both = await look_up(client, *"abcd", heads=((0, 4), (4, 4)))
    assert both.present == 2
    assert both.stored_bytes >= 400
    assert (await look_up(client, *"abcde")).present == 4
    assert (await look_up(client, "x", "a")).present == 0
    assert (await look_up(client, "a", heads=((0, 8),))).present == 0
    many = await look_up(client, "a", "b", *["a"] * 100)
    assert many.present == 102


async def test_foreign_tenant_gets_no_block(client):
    content = b"private"
    await put(client, (header("a", content), content))
    stranger = f"{client.tenant}-other"
    assert await get(client, key("a"), tenant=stranger) == {}
    assert (await look_up(client, "a", tenant=stranger)).present == 0
    assert (await look_up(client, "a")).present == 1


async def test_content_that_is_not_what_its_header_says_is_not_stored(client):
    content = bytes(1000)
    wrong = header("wrong", content, checksum=1)
    right = header("right", content)
    assert await put(client, (wrong, content), (right, content)) == [state_pb2.PUT_OUTCOME_INVALID, STORED]
    assert await get(client, key("wrong"), key("right")) == {1: content}


async def test_wrong_headers_are_refused_by_field_and_nothing_is_stored(client):
    content = bytes(1000)
    heads = state_pb2.HeadRange(first=0, count=0)
    wrong = {
        "header.schema": header("a", content, schema=9),
        "header.key.hash": header("a", content, key=state_pb2.BlockKey(hash=b"short", heads=key("a").heads)),
        "header.key.heads": header("a", content, key=state_pb2.BlockKey(hash=block_hash("a"), heads=heads)),
        "header.dtype": header("a", content, dtype="; drop"),
        "header.shape": header("a", content, shape=[]),
        "header.length": header("a", content, length=0),
        "data": header("a", content, length=999),
    }
    for field, head in wrong.items():
        await refused(client.kv.Put(iter(messages(client.tenant, (head, content)))), INVALID, field)
    longer = header("a", content, length=1001)
    await refused(client.kv.Put(iter(messages(client.tenant, (longer, content)))), INVALID, "data")
    huge = header("a", content, length=1 << 40)
    error = await refused(client.kv.Put(iter(messages(client.tenant, (huge, content)))), INVALID, "header.length")
    assert ("lockstep-error-code", "payload_too_large") in tuple(error.trailing_metadata())
    assert await get(client, key("a")) == {}
    assert await put(client, (header("a", content), content)) == [STORED]


async def test_wrong_order_of_messages_is_refused(client):
    content = bytes(1000)
    good = messages(client.tenant, (header("a", content), content))
    await refused(client.kv.Put(iter([state_pb2.PutBlocksRequest(header=header("a", content))])), INVALID, "tenant")
    no_header = state_pb2.PutBlocksRequest(tenant=client.tenant, data=b"x")
    await refused(client.kv.Put(iter([no_header])), INVALID, "data")
    begun = state_pb2.PutBlocksRequest(tenant=client.tenant, header=header("b", content), data=b"x")
    await refused(client.kv.Put(iter([begun, *good])), INVALID, "header")
    assert await get(client, key("a"), key("b")) == {}


async def test_wrong_requests_are_refused_by_field(client):
    kv = client.kv
    hashes = [block_hash("a")]
    heads = [state_pb2.HeadRange(first=0, count=1)]
    await refused(kv.LookUp(state_pb2.LookUpBlocksRequest(hashes=hashes, heads=heads)), INVALID, "tenant")
    await refused(kv.LookUp(state_pb2.LookUpBlocksRequest(tenant="t", heads=heads)), INVALID, "hashes")
    await refused(kv.LookUp(state_pb2.LookUpBlocksRequest(tenant="t", hashes=hashes)), INVALID, "heads")
    short = state_pb2.LookUpBlocksRequest(tenant="t", hashes=[b"short"], heads=heads)
    await refused(kv.LookUp(short), INVALID, "hashes")
    for keys, field in (
        ([], "keys"),
        ([state_pb2.BlockKey(hash=b"x")], "keys.hash"),
        ([key("a", count=0)], "keys.heads"),
    ):
        call = kv.Get(state_pb2.GetBlocksRequest(tenant="t", keys=keys))
        await refused(call.read(), INVALID, field)


async def test_tenant_has_so_many_bytes_and_others_have_theirs(tmp_path, store):
    async with served(tmp_path, store=store, max_tenant_block_bytes=250_000, max_block_bytes=100_000) as client:
        content = bytes(100_000)
        blocks = [(header(number, content), content) for number in range(4)]
        assert await put(client, *blocks) == [STORED, STORED, FULL, FULL]
        assert await put(client, blocks[0]) == [STORED], "a repeat needs no room"
        assert await get(client, *map(key, range(4))) == {0: content, 1: content}
        large = header("large", bytes(100_001))
        await refused(client.kv.Put(iter(messages(client.tenant, (large, b"x")))), INVALID, "header.length")
        client.tenant += "-other"
        assert await put(client, *blocks) == [STORED, STORED, FULL, FULL]


async def test_calls_that_move_blocks_are_limited(tmp_path):
    async with served(tmp_path, max_transfers=1) as client:
        content = bytes(10)
        first, *_ = messages(client.tenant, (header("a", content), content), chunk=5)
        open_call = client.kv.Put()
        await open_call.write(first)
        status = grpc.StatusCode.RESOURCE_EXHAUSTED

        async def is_refused():
            try:
                await get(client, key("a"))
            except grpc.aio.AioRpcError as error:
                return error.code() == status
            return False

        await eventually(is_refused)
        await open_call.write(state_pb2.PutBlocksRequest(data=bytes(5)))
        await open_call.done_writing()
        assert list((await open_call).outcomes) == [STORED]
        assert await get(client, key("a")) == {0: content}


def ended(code):
    """How many calls of Get have ended with this status."""
    return REGISTRY.get_sample_value("lockstep_state_calls_total", {"method": "Kv.Get", "code": code}) or 0


def large(*names):
    """Blocks that no socket takes at once, so that their sender waits for the reader."""
    content = bytes(3 * CHUNK)
    return [(header(name, content), content) for name in names]


@pytest.mark.parametrize("has_deadline", [False, True])
async def test_callers_that_give_up_are_counted_and_no_errors(tmp_path, store, has_deadline, caplog):
    before = {code: ended(code) for code in ("CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL")}
    async with served(tmp_path, store=store) as client:
        assert await put(client, *large("a", "b")) == [STORED] * 2
        request = state_pb2.GetBlocksRequest(tenant=client.tenant, keys=[key("a"), key("b")])
        for number in range(20):
            call = client.kv.Get(request, timeout=0.002 * number if has_deadline else None)
            if has_deadline:
                await call.code()
            else:
                await call.read()
                await asyncio.sleep(0.02)  # mostly, the sender waits by now
                call.cancel()
    after = {code: ended(code) - count for code, count in before.items()}
    assert after["INTERNAL"] == 0
    assert after["CANCELLED"] + after["DEADLINE_EXCEEDED"] > 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("store_kind", ["redis"])
@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "junk"])
async def test_damaged_value_is_a_miss_and_is_forgotten(tmp_path, store, store_kind, damage):
    prefix = f"damage-{damage}:"
    async with served(tmp_path, store=store, store_prefix=prefix) as client:
        contents = {"a": b"a" * 500, "b": b"b" * 500}
        assert await put(client, *[(header(name, each), each) for name, each in contents.items()]) == [STORED] * 2
        with redis.Redis.from_url(store) as server:
            first, second = sorted(server.scan_iter(f"{prefix}block:*"))
            value = server.get(first)
            middle = len(value) // 2
            flipped = value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
            other = {"flip": flipped, "cut": value[:-7], "swap": server.get(second), "junk": b"\0"}[damage]
            server.set(first, other)
            found = await get(client, key("a"), key("b"))
            assert len(found) == 1
            assert all(content == contents["ab"[index]] for index, content in found.items())
            names = [name for at, name in enumerate("ab") if at not in found]
            assert (await put(client, (header(names[0], contents[names[0]]), contents[names[0]]))) == [STORED]
        assert len(await get(client, key("a"), key("b"))) == 2


async def test_calls_beyond_the_most_are_refused_and_counted(tmp_path):
    async with served(tmp_path, max_calls=2) as client:
        content = bytes(10)
        uploads = []
        for name in ("a", "b"):
            first, *_ = messages(client.tenant, (header(name, content), content), chunk=5)
            uploads.append(client.kv.Put())
            await uploads[-1].write(first)
        before, seen = ended("RESOURCE_EXHAUSTED"), []

        async def is_refused():
            try:
                await get(client, key("a"))
            except grpc.aio.AioRpcError as error:
                seen.append(error.details())
            return seen

        await eventually(is_refused)
        assert "max_calls" in seen[0]
        assert ended("RESOURCE_EXHAUSTED") == before + 1
        for upload in uploads:
            await upload.write(state_pb2.PutBlocksRequest(data=bytes(5)))
            await upload.done_writing()
            assert list((await upload).outcomes) == [STORED]
        assert await get(client, key("a")) == {0: content}
