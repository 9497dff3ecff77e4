"""Health, reflection and the management port."""

import asyncio
import urllib.request
from types import SimpleNamespace

import grpc
from backends import PATIENCE_S, eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from lockstep_api.v1 import state_pb2, state_pb2_grpc
from lockstep_common.ports import free_port
from lockstep_state.server import SERVICES, health_of
from state_serving import dial, make_settings, refused, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def look_up(channel):
    request = state_pb2.LookUpSessionRequest(tenant="tenant", session="private-session")
    return state_pb2_grpc.SessionsStub(channel).LookUp(request)


def fetch(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
        return answer.status, answer.read().decode()


async def test_all_services_are_listed_and_healthy(client):
    call = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo(timeout=PATIENCE_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health"} <= listed
    await call.done_writing()
    health = health_pb2_grpc.HealthStub(client.channel)
    for name in ("", *SERVICES):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    await refused(health.Check(health_pb2.HealthCheckRequest(service="other")), grpc.StatusCode.NOT_FOUND)


async def test_watch_ends_with_the_server(tmp_path):
    settings = make_settings(tmp_path, drain_timeout_s=PATIENCE_S)
    async with dial(settings.listen) as channel:
        async with serving(settings):
            await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
            assert (await watch.read()).status == SERVING
            later = asyncio.create_task(_rest(watch))
        assert await later == [NOT_SERVING]


async def test_watch_tells_of_an_end_that_begins_while_it_writes():
    health = health_of(SimpleNamespace(unready=None))
    statuses = []

    async def write(response):
        statuses.append(response.status)
        health.draining = True

    await health.watch(health_pb2.HealthCheckRequest(), SimpleNamespace(write=write))
    assert statuses == [SERVING, NOT_SERVING]


async def _rest(watch):
    statuses = []
    while (response := await watch.read()) is not grpc.aio.EOF:
        statuses.append(response.status)
    return statuses


async def test_store_that_does_not_answer_is_seen_in_health(tmp_path):
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    settings = make_settings(tmp_path, store=nobody)
    async with serving(settings), dial(settings.listen) as channel:
        await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
        health = health_pb2_grpc.HealthStub(channel)

        async def is_unhealthy():
            await asyncio.gather(*(look_up(channel) for _ in range(3)), return_exceptions=True)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICES[0]))
            return answer.status == NOT_SERVING

        await eventually(is_unhealthy)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_management_port_has_health_and_metrics(tmp_path):
    port = free_port()
    settings = make_settings(tmp_path, management_port=port)
    async with serving(settings), dial(settings.listen) as channel:
        await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
        await look_up(channel)
        for path in ("/healthz", "/readyz"):
            assert (await asyncio.to_thread(fetch, port, path))[0] == 200
        status, text = await asyncio.to_thread(fetch, port, "/metrics")
        assert status == 200
        assert 'lockstep_state_calls_total{code="OK",method="Sessions.LookUp"}' in text
        assert "private-session" not in text
