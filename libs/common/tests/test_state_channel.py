"""The channel to the state server: replaced by each probe that fails, until the server is well."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lockstep_common import state_channel
from lockstep_common.grpc_tls import dial_plain
from lockstep_common.state_channel import StateChannel, is_own_cancellation

SERVICE = "lockstep.v1.Journal"
PATIENCE_S = 60.0


class Health(health_pb2_grpc.HealthServicer):
    """Is well after so many probes."""

    def __init__(self, failures):
        self.failures = failures
        self.services = []

    async def Check(self, request, context):
        self.services.append(request.service)
        is_well = len(self.services) > self.failures
        status = health_pb2.HealthCheckResponse
        return health_pb2.HealthCheckResponse(status=status.SERVING if is_well else status.NOT_SERVING)


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(state_channel, "PROBE_EVERY_S", 0.01)
    return f"unix:{tmp_path}/state"


@pytest.fixture
async def health(target):
    server, health = grpc.aio.server(), Health(failures=2)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(target)
    await server.start()
    yield health
    await server.stop(0)


async def test_probe_asks_over_a_new_channel_until_the_server_is_well(target, health):
    dialled = []

    def dial(target, options):
        dialled.append((target, dict(options)["grpc.max_receive_message_length"]))
        return dial_plain(target, options)

    channel = StateChannel(target, dial, SERVICE, 1000)
    channel.open()
    first = channel.current
    took_s = await channel.probe(PATIENCE_S)
    assert 0 <= took_s < PATIENCE_S
    assert health.services == [SERVICE] * 3
    assert dialled == [(target, 1000)] * 3
    assert channel.current is not first
    await channel.close()
    assert channel.current is None


async def test_probe_goes_on_while_nobody_answers(target):
    dialled = []
    third = asyncio.Event()

    def dial(target, options):
        dialled.append(target)
        if len(dialled) >= 3:
            third.set()
        return dial_plain(target, options)

    channel = StateChannel(target, dial, SERVICE, -1)
    probing = asyncio.create_task(channel.probe(0.05))
    async with asyncio.timeout(PATIENCE_S):
        await third.wait()
    assert not probing.done()
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    await channel.close()


async def test_a_task_that_is_cancelled_is_told_apart_from_a_call_that_is():
    seen = []

    async def wait_for(call):
        try:
            await call
        except asyncio.CancelledError:
            seen.append(is_own_cancellation())

    call = asyncio.get_running_loop().create_future()
    call.cancel()
    await wait_for(call)
    task = asyncio.create_task(wait_for(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert seen == [False, True]
