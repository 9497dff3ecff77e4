"""Health of a server without rules of its own for it: calls without a message or without a reader stay few."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lockstep_common import health_service
from lockstep_common.health_service import Health

SERVING = health_pb2.HealthCheckResponse.SERVING
PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def served(**options):
    """A channel to a server with eight calls at a time."""
    server = grpc.aio.server(maximum_concurrent_rpcs=8)
    health = Health({"": lambda: True})
    server.add_generic_rpc_handlers((health.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    given = [(name.replace("__", "."), value) for name, value in options.items()]
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=given) as channel:
        yield channel
    await server.stop(0)


async def test_states_are_told():
    async with served() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        assert (await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest())))).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["Check", "Watch"])
async def test_calls_without_a_message_end_and_leave_room_for_others(monkeypatch, name):
    monkeypatch.setattr(health_service, f"MAX_{'CHECKS' if name == 'Check' else 'WATCHES'}", 4)
    monkeypatch.setattr(health_service, "MESSAGE_S", 1.0)
    async with served() as channel:
        silent = [channel.stream_stream(f"/grpc.health.v1.Health/{name}")() for _ in range(6)]
        codes = sorted([(await call.code()).name for call in silent])
        assert codes == ["INVALID_ARGUMENT"] * 2 + ["RESOURCE_EXHAUSTED"] * 4


async def test_answers_that_nobody_reads_are_few(monkeypatch):
    monkeypatch.setattr(health_service, "MAX_CHECKS", 4)
    async with served(grpc__http2__lookahead_bytes=0, grpc__http2__bdp_probe=0) as channel:
        unread = [channel.stream_stream("/grpc.health.v1.Health/Check")() for _ in range(6)]
        for call in unread:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it is refused already
                await call.write(b"")
        while sum(not call.done() for call in unread) != 2:
            await asyncio.sleep(0.01)
        refused = {(await call.code(), await call.details()) for call in unread if call.done()}
        sentence = "2 health checks of this client are in progress already, the limit for one"
        assert refused == {(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)}
