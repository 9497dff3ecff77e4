"""A router with scripted workers in one process, and clients for it."""

import asyncio
import contextlib
import json
import logging
import sys
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

# The helpers of these tests are no package: several services have a tests folder.
sys.path.insert(0, str(Path(__file__).parent))

from lockstep_router import Router, RouterSettings, create_app
from scripted_worker import ScriptedWorker, token_at, tokenizer_files
from lockstep_router.tokenizer import Tokenizer

logging.getLogger("lockstep").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(tokenizer_files())


async def eventually(condition, timeout_s=5.0):
    """Wait until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.005)


class Cluster:
    """A router, its workers, and an HTTP client that talks to it without a network."""

    def __init__(self, router, app, workers, client, tokenizer):
        self.router = router
        self.app = app
        self.workers = workers
        self.client = client
        self.tokenizer = tokenizer

    def worker_of(self, session):
        """The worker that the session's streams go to, and the others."""
        chosen = self.router.workers.pick(session, self.router.workers.ready()).worker_id
        return [w for w in self.workers if w.worker_id == chosen][0], [w for w in self.workers if w.worker_id != chosen]

    def undisturbed(self, prompt, seed, max_tokens):
        """The text that a stream has when nothing happens."""
        ids = self.tokenizer.encode(prompt)
        return self.tokenizer.decode([token_at(ids, seed, position) for position in range(max_tokens)])

    async def complete(self, prompt="hello world", *, headers=None, **fields):
        body = {"model": "reference", "prompt": prompt, "max_tokens": 12, "seed": 7, "user": "u"} | fields
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def chat(self, **fields):
        body = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 7}
        return await self.client.post("/v1/chat/completions", json=body | fields)

    @contextlib.asynccontextmanager
    async def over_http(self):
        """A client over a real connection to a real server."""
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.create_task(server.serve())
        await eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client
        server.should_exit = True
        await serving


@pytest.fixture
async def make_cluster(tmp_path, tokenizer):
    async with contextlib.AsyncExitStack() as stack:

        async def make(workers=2, *, ready=True, **settings):
            started = []
            for index in range(workers):
                worker = ScriptedWorker(f"w{index}", tmp_path / f"w{index}.sock")
                started.append(await worker.start())
                stack.push_async_callback(worker.kill)
            targets = [worker.target for worker in started] or [f"unix:{tmp_path}/nobody.sock"]
            defaults = {"heartbeat_timeout_s": 1.0, "backoff_initial_s": 0.02, "backoff_max_s": 0.1}
            router = Router(RouterSettings(workers=targets, **(defaults | settings)))
            await stack.enter_async_context(router)
            app = create_app(router)
            transport = httpx.ASGITransport(app=app)
            client = await stack.enter_async_context(
                httpx.AsyncClient(transport=transport, base_url="http://router", timeout=20)
            )
            if ready:
                await eventually(lambda: len(router.workers.ready()) == workers)
            return Cluster(router, app, started, client, tokenizer)

        yield make


@pytest.fixture
async def cluster(make_cluster):
    return await make_cluster()


def events_of(response):
    """The server-sent events of a response as (id, data) pairs; data is parsed unless it is [DONE]."""
    events = []
    for block in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields:
            data = fields["data"]
            events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events
