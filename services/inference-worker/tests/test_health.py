import asyncio
import json
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import PATIENCE_S, make_settings, served, submit, until
from lockstep_common.log_level import LOG_LEVEL
from lockstep_common.ports import free_port
from scripted_engine import Script

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(worker, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_liveness_and_readiness_through_a_workers_life(model_dir, socket_path):
    settings = make_settings(model_dir, socket_path, drain_timeout_s=60)
    async with served(settings, Script(ready_at_once=False)) as worker:

        async def states() -> tuple[int, int]:
            return await check(worker, ""), await check(worker, "lockstep.v1.Worker")

        assert await states() == (SERVING, NOT_SERVING)
        worker.engine.finish_start()
        router = await worker.greeted()
        assert await states() == (SERVING, SERVING)
        worker.engine.lose_ranks()
        assert await states() == (SERVING, NOT_SERVING)
        worker.engine.restart()
        assert await states() == (SERVING, SERVING)
        await router.send(submit=submit(max_tokens=1))
        await until(lambda: worker.engine.requests)
        worker.stop.set()
        async with asyncio.timeout(PATIENCE_S):
            while await states() != (SERVING, NOT_SERVING):
                await asyncio.sleep(0.005)
        worker.engine.step()
        assert await worker.exit_code() == 0


async def test_management_port_tells_health_and_metrics(model_dir, socket_path):
    port = free_port()

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    settings = make_settings(model_dir, socket_path, management_port=port)
    async with served(settings, Script(ready_at_once=False)) as worker:
        assert await asyncio.to_thread(get, "/healthz") == (200, '{"status":"alive"}')
        assert await asyncio.to_thread(get, "/readyz") == (503, '{"status":"the worker takes no requests"}')
        worker.engine.finish_start()
        await worker.greeted()
        assert await asyncio.to_thread(get, "/readyz") == (200, '{"status":"ready"}')
        assert "lockstep_worker_tokens_total" in (await asyncio.to_thread(get, "/metrics"))[1]
        assert (await asyncio.to_thread(get, "/status"))[0] == 404


async def test_an_unknown_service_is_not_found(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(worker, "no.such.Service")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_watching_readiness(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path), Script(ready_at_once=False)) as worker:
        watch = health_pb2_grpc.HealthStub(worker.channel).Watch(
            health_pb2.HealthCheckRequest(service="lockstep.v1.Worker")
        )
        async with asyncio.timeout(PATIENCE_S):
            assert (await watch.read()).status == NOT_SERVING
            worker.engine.finish_start()
            assert (await watch.read()).status == SERVING
            worker.engine.lose_ranks()
            assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_reflection_lists_the_services(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        call = reflection_pb2_grpc.ServerReflectionStub(worker.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert {"lockstep.v1.Worker", "grpc.health.v1.Health"} <= names
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="lockstep.v1.Worker"))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()


async def test_the_ranks_follow_the_level_of_the_process(model_dir, socket_path):
    LOG_LEVEL.configure("info")
    async with served(make_settings(model_dir, socket_path)) as worker:
        await worker.greeted()
        LOG_LEVEL.change("debug", 60)
        await until(lambda: worker.engine.log_levels == ["debug"])
    LOG_LEVEL.configure("info")  # nobody listens any more
    assert worker.engine.log_levels == ["debug"]


async def test_operators_see_the_ranks(model_dir, socket_path):
    port = free_port()
    async with served(make_settings(model_dir, socket_path, management_port=port)) as worker:
        await worker.greeted()

        def get(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return json.loads(answer.read())

        stacks = await asyncio.to_thread(get, "/debug/stacks")
        settings = await asyncio.to_thread(get, "/debug/settings")
    assert stacks["engine"] == {"state": "ready", "epoch": 1, "ranks": []}
    assert settings["settings"]["management_port"] == port
