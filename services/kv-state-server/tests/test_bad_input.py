"""Bad input gets a typed status, stores nothing, and does not disturb other calls."""

import random
import secrets
from collections import Counter

import grpc
import odd_requests
import pytest
import redis
from lockstep_api.v1 import state_pb2
from state_serving import Client, refused, served
from test_journal_service import OK, append_one, reading, record
from test_kv_service import STORED, get, header, key, put

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def was_refused(request: odd_requests.Request, status: str, answer: bytes) -> bool:
    """Whether all of it was refused as invalid."""
    if request.method == "Journal/Append" and status == "OK":
        results = state_pb2.AppendResponse.FromString(answer).results
        return all(result.outcome == state_pb2.WRITE_OUTCOME_INVALID for result in results)
    return status == "INVALID_ARGUMENT" and request.method != "Kv/Put"


def test_odd_requests_are_made_of_every_method():
    services = state_pb2.DESCRIPTOR.services_by_name.values()
    methods = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    assert set(odd_requests.METHODS) == methods


def contents(server: redis.Redis, prefix: str) -> dict[bytes, bytes]:
    dumps = {name: server.dump(name) for name in server.scan_iter(f"{prefix}*")}
    return {name: dump for name, dump in dumps.items() if dump is not None}  # the others have expired meanwhile


@pytest.mark.parametrize("store_kind", ["redis"])
async def test_what_is_refused_has_stored_nothing(tmp_path, store, store_kind):
    seed = secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    draw, statuses, prefix = random.Random(seed), Counter(), f"odd-{seed}:"
    async with served(tmp_path, store=store, store_prefix=prefix) as client:
        with redis.Redis.from_url(store) as server:
            for _ in range(500):
                request = odd_requests.make(draw, client.tenant)
                before = contents(server, prefix)
                status, answer = await odd_requests.send(client.channel, request)
                assert status in odd_requests.ANSWERS, request
                statuses[status] += 1
                if was_refused(request, status, answer):
                    assert contents(server, prefix).items() <= before.items(), request  # some have expired
    assert statuses["OK"] > 50
    assert statuses["INVALID_ARGUMENT"] > 100


async def test_block_that_is_refused_is_not_stored_and_the_next_one_is(client: Client):
    content = bytes(1000)
    wrong = header("a", content, schema=2)
    await refused(
        client.kv.Put(iter([state_pb2.PutBlocksRequest(tenant=client.tenant, header=wrong)])), INVALID, "header.schema"
    )
    assert await get(client, key("a")) == {}
    assert await put(client, (header("a", content), content)) == [STORED]


async def test_record_of_an_unknown_schema_is_refused_by_field(client: Client):
    result = await append_one(client, record=record(schema=2))
    assert (result.outcome, result.field) == (state_pb2.WRITE_OUTCOME_INVALID, "record.schema")
    await refused(reading(client), grpc.StatusCode.NOT_FOUND)
    assert (await append_one(client, record=record())).outcome == OK


async def test_message_that_is_too_large_is_refused_and_the_connection_goes_on(client: Client):
    huge = state_pb2.AppendRequest(writes=[state_pb2.StreamWrite(tenant="x" * (17 << 20))])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.journal.Append(huge)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await append_one(client, record=record())).outcome == OK


@pytest.mark.parametrize(
    "method", ["Journal/Append", "Sessions/Bind", "Leases/Acquire", "Kv/LookUp", "Kv/Get", "Kv/Put"]
)
async def test_what_is_no_message_is_invalid(client: Client, method: str):
    status, _ = await odd_requests.send(client.channel, odd_requests.Request(method, (b"\xff\xff\xff",), client.tenant))
    assert status == "INVALID_ARGUMENT"
