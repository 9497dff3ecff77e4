import asyncio
import socket
import urllib.request

import pytest
from harness import make_settings, served, submit, until
from lockstep_common.errors import LockstepError
from lockstep_common.telemetry import REGISTRY
from lockstep_worker.metrics import serve_metrics


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"lockstep_worker_{name}", labels) or 0.0


async def test_what_happens_is_counted(model_dir, socket_path):
    names = ("tokens_total", "steps_total", "restarts_total", "submitted_total")
    before = {name: value(name) for name in names}
    lost_before = value("rejected_total", code="worker_lost")
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        await until(lambda: (value("ready"), value("routers"), value("epoch")) == (1, 1, 1))
        assert (value("rank_up", rank="0"), value("rank_up", rank="1")) == (1, 1)
        for name in ("a", "b"):
            await router.send(submit=submit(name, max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 2)
        for _ in range(3):
            worker.engine.step()
        await until(lambda: value("running") == 2)
        assert (value("streams"), value("free_blocks"), value("total_blocks")) == (2, 62, 64)
        worker.engine.lose_ranks()
        assert (value("ready"), value("epoch"), value("rank_up", rank="1")) == (0, 2, 0)
        worker.engine.restart()
        await router.ready()
    grown = {name: value(name) - before[name] for name in names}
    assert grown == {"tokens_total": 6, "steps_total": 3, "restarts_total": 1, "submitted_total": 2}
    assert value("rejected_total", code="worker_lost") - lost_before == 2


async def test_they_are_served_over_http(model_dir, socket_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with served(make_settings(model_dir, socket_path, metrics_port=port)):
        body = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        )
    assert "lockstep_worker_tokens_total" in body
    serve_metrics(port)()


def test_a_taken_port_is_refused():
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(LockstepError, match="metrics on port"):
        serve_metrics(taken.getsockname()[1])
