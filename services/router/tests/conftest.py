"""A router with scripted workers in one process, and clients for it."""

import contextlib
import logging
import sys
from pathlib import Path

import httpx
import pytest

# The helpers of these tests are no package: several services have a tests folder.
sys.path.insert(0, str(Path(__file__).parent))

from lockstep_router.faces.rest.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.text.tokenizer import Tokenizer
from router_cluster import Cluster, eventually
from scripted_worker import ScriptedWorker, tokenizer_files

logging.getLogger("lockstep").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(tokenizer_files())


@pytest.fixture
async def make_cluster(tmp_path, tokenizer):
    async with contextlib.AsyncExitStack() as stack:

        async def make(workers=2, *, ready=True, model=None, **settings):
            started = []
            for index in range(workers):
                worker = ScriptedWorker(f"w{index}", tmp_path / f"w{index}.sock", **(model or {}))
                started.append(await worker.start())
                stack.push_async_callback(worker.kill)
            targets = [worker.target for worker in started] or [f"unix:{tmp_path}/nobody.sock"]
            defaults = {"grpc_port": 0, "heartbeat_timeout_s": 1.0, "backoff_initial_s": 0.02, "backoff_max_s": 0.1}
            router = Router(RouterSettings(workers=targets, **(defaults | settings)))
            await stack.enter_async_context(router)
            app = create_app(router)
            transport = httpx.ASGITransport(app=app)
            client = await stack.enter_async_context(
                httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60)
            )
            if ready:
                await eventually(lambda: len(router.workers.ready()) == workers)
            return Cluster(router, app, started, client, Tokenizer(model["files"]) if model else tokenizer)

        yield make


@pytest.fixture
async def cluster(make_cluster):
    return await make_cluster()
