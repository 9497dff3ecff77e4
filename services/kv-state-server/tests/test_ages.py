"""The age of connections: callers connect again, so that they spread over the pods, and no call is lost by that."""

import asyncio

import grpc
from backends import PATIENCE_S
from lockstep_api.v1 import state_pb2
from lockstep_state import server
from state_serving import make_settings, served
from test_kv_service import STORED, header
from test_names_service import worker_of

READY = grpc.ChannelConnectivity.READY


async def left(channel):
    """Wait until the channel does not use its connection for new calls any more."""
    while channel.get_state() is READY:
        await channel.wait_for_state_change(READY)


async def test_an_old_connection_takes_no_new_calls_and_ends_none(tmp_path, monkeypatch):
    """One call lasts from before the end of the age until after it; others come all the time."""
    monkeypatch.setattr(server, "MAX_AGE_S", 0.5)
    content = b"content"
    async with served(tmp_path) as client:

        async def parts():
            yield state_pb2.PutBlocksRequest(tenant=client.tenant, ttl_s=60, header=header("a", content))
            await asyncio.wait_for(left(client.channel), PATIENCE_S)
            await worker_of(client)  # on a new connection
            yield state_pb2.PutBlocksRequest(data=content)

        for _ in range(3):
            assert list((await client.kv.Put(parts())).outcomes) == [STORED]
        ended = asyncio.get_running_loop().time() + 2.0
        while asyncio.get_running_loop().time() < ended:
            await worker_of(client)


def test_the_longest_call_has_the_time_that_it_may_take(tmp_path):
    options = dict(server._options(make_settings(tmp_path, call_timeout_s=7, transfer_timeout_s=90)))
    assert options["grpc.max_connection_age_ms"] == 300_000
    assert options["grpc.max_connection_age_grace_ms"] > 90_000
