"""Routers that share scripted workers and a state server, in one process."""

import contextlib

import httpx
from lockstep_router.faces.rest.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from router_cluster import Cluster, eventually
from scripted_worker import ScriptedWorker
from state_server import StateServer


class Sharing:
    """Makes the routers; leaving the context ends everything."""

    def __init__(self, directory, tokenizer, model=None):
        self.directory = directory
        self.tokenizer = tokenizer
        self._model = model or {}
        self.workers = []
        self.state = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self):
        self.state = await StateServer(self.directory / "state").start()
        self._stack.push_async_callback(self.state.kill)
        for index in range(2):
            worker = ScriptedWorker(f"w{index}", self.directory / f"w{index}.sock", **self._model)
            self.workers.append(await worker.start())
            self._stack.push_async_callback(worker.kill)
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()

    async def router(self, name, **settings):
        """One more router, once its workers are ready."""
        defaults = {
            "grpc_port": 0,
            "heartbeat_timeout_s": 1.0,
            "backoff_initial_s": 0.02,
            "backoff_max_s": 0.1,
            "router_id": name,
            "state_server": self.state.target,
            "state_timeout_s": 5.0,
            "state_max_lag_s": 0.01,
        }
        targets = [worker.target for worker in self.workers]
        router = Router(RouterSettings(workers=targets, **(defaults | settings)))
        await self._stack.enter_async_context(router)
        app = create_app(router)
        transport = httpx.ASGITransport(app=app)
        client = await self._stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60)
        )
        await eventually(lambda: len(router.workers.ready()) == len(self.workers))
        return Cluster(router, app, self.workers, client, self.tokenizer)

    @property
    def submits(self):
        """What all workers were asked for."""
        return [submit for worker in self.workers for submit in worker.submits]


async def mirrored(cluster):
    """Wait until the state server has everything of a router."""
    await eventually(lambda: cluster.router.mirrored.mirror.is_idle)


async def mirrored_to(cluster, stream_id, tokens):
    """Wait until the state server has so many tokens of each choice of a stream of this router, or its end."""
    entries = cluster.router.mirrored.mirror.entries
    await eventually(lambda: stream_id not in entries or min(entries[stream_id].written) >= tokens)
