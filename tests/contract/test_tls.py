"""Router and worker admit each other by their certificates: both real services, with one authority."""

import asyncio
from pathlib import Path

import httpx
from authority import ROUTER, WORKER, Authority, Mounted
from harness import make_settings, served
from lockstep_router.faces.rest.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.tls import RouterTls
from router_cluster import eventually
from scripted_engine import Script
from system import REFERENCE


async def test_request_crosses_mutual_tls(tmp_path_factory, tmp_path: Path) -> None:
    authority = Authority()
    router_files = Mounted(tmp_path / "router", authority, ROUTER)
    worker_files = Mounted(tmp_path / "worker", authority, WORKER)
    path = tmp_path_factory.mktemp("w") / "s"
    worker_settings = make_settings(REFERENCE, str(path), **worker_files.settings(ROUTER))
    async with served(worker_settings, Script(step_s=0.01)) as worker:
        settings = RouterSettings(workers=[worker.address], backoff_max_s=0.2, **router_files.settings(WORKER))
        tls = RouterTls.load(settings)
        async with Router(settings, dial=tls.dial) as router:
            await eventually(router.workers.ready)
            transport = httpx.ASGITransport(app=create_app(router))
            async with asyncio.timeout(30), httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                model = (await client.get("/v1/models")).json()["data"][0]["id"]
                body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
