"""A router with scripted workers, as tests see it."""

import asyncio
import contextlib
import functools
import json
import socket
import time

import grpc
import httpx
from lockstep_router.faces.grpc.server import GrpcServer
from lockstep_router.policies import RequestFacts
from lockstep_router.server import Server, http_config
from lockstep_router.text.pieces import Pieces
from lockstep_router.text.tokenizer import Tokenizer
from scripted_worker import token_at, tokenizer_files


async def eventually(condition, timeout_s=30.0):
    """Wait until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.005)


async def least_mean_s(ask):
    """The mean time of 20 calls, one after the other. The least of five such means: others' work on the machine may
    disturb some of them.
    """
    loop, means_s = asyncio.get_running_loop(), []
    for _ in range(5):
        began = loop.time()
        for _ in range(20):
            await ask()
        means_s.append((loop.time() - began) / 20)
    return min(means_s)


class FailingTokenizer(Tokenizer):
    """A tokenizer that fails unexpectedly in one of its decodings of an answer."""

    def __init__(self, files, decodings):
        super().__init__(files)
        self._decodings = decodings
        token_text = self.token_text

        @functools.cache
        def counted(token_id):
            self._count()
            return token_text(token_id)

        self.token_text, self.pieces = counted, Pieces(counted)

    def decode(self, ids):
        self._count()
        return super().decode(ids)

    def _count(self):
        self._decodings -= 1
        if self._decodings < 0:
            raise RuntimeError("secret detail")


class Cluster:
    """A router, its workers, and an HTTP client that talks to it without a network."""

    def __init__(self, router, app, workers, client, tokenizer):
        self.router = router
        self.app = app
        self.workers = workers
        self.client = client
        self.tokenizer = tokenizer
        self.connections = set()
        """Of the server of `over_http`."""
        self.grpc_address = ""
        """Of the server of `over_grpc`."""

    def worker_of(self, session):
        """The worker that the session's streams go to, and the others."""
        chosen = self.router.workers.pick("reference", RequestFacts(session), self.router.workers.ready()).worker_id
        own = next(worker for worker in self.workers if worker.worker_id == chosen)
        return own, [worker for worker in self.workers if worker is not own]

    def fail_after(self, decodings):
        """Give the router a tokenizer that fails after so many decodings."""
        tokenizers = self.router.workers.tokenizers
        tokenizers.keep_only(())
        tokenizers.add(FailingTokenizer(tokenizer_files(), decodings))

    def undisturbed(self, prompt, seed, max_tokens):
        """The text that a stream has when nothing happens."""
        ids = self.tokenizer.encode(prompt)
        return self.tokenizer.decode([token_at(ids, seed, position) for position in range(max_tokens)])

    async def complete(self, prompt="hello world", *, headers=None, **fields):
        body = {"model": "reference", "prompt": prompt, "max_tokens": 12, "seed": 7, "user": "u"} | fields
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def chat(self, *, headers=None, **fields):
        body = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 7}
        return await self.client.post("/v1/chat/completions", json=body | fields, headers=headers)

    @contextlib.asynccontextmanager
    async def over_grpc(self, **options):
        """A channel to a real gRPC server; the router's setting `grpc_port` is 0."""
        server = GrpcServer(self.router, self.app.state.bodies, self.app.state.turns)
        await server.start()
        self.grpc_address = f"127.0.0.1:{server.port}"
        given = [(name.replace("__", "."), value) for name, value in options.items()]
        try:
            async with grpc.aio.insecure_channel(self.grpc_address, options=given) as channel:
                yield channel
        finally:
            await server.stop(0)

    @contextlib.asynccontextmanager
    async def over_http(self, listener=None):
        """A client over a real connection to a real server, on a listener of its own unless one is given."""
        if listener is None:
            listener = socket.create_server(("127.0.0.1", 0))
        server = Server(http_config(self.router))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        self.connections = server.server_state.connections
        port = listener.getsockname()[1]
        # To load the system's certificates, which plain HTTP does not need, takes 30 ms.
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as client:
            yield client
        server.end()
        await serving


EVENT_IDS = {"X-Lockstep-Event-IDs": "true"}
"""Header of a request whose events have ids, though no client can come back to them."""


def events_of(response):
    """The server-sent events of a response as (id, data) pairs; data is parsed unless it is [DONE]."""
    events = []
    for block in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            data = fields["data"]
            events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


def leaves_as_it_begins(router, monkeypatch, leave):
    """Have a client leave so that its request is cancelled in the turn of the event loop in which its stream begins.

    Args:
        router: the router.
        monkeypatch: undoes it.
        leave: what the client does.
    """
    run = router.run

    @contextlib.asynccontextmanager
    async def run_late(*args, **options):
        async with run(*args, **options) as generation:
            await leave()
            of_client = {task for task in asyncio.all_tasks() if task.cancelling()}
            while not any(task.cancelling() for task in asyncio.all_tasks() - of_client):
                await asyncio.sleep(0)  # a task that is cancelled now learns of it in the next turn
            yield generation

    monkeypatch.setattr(router, "run", run_late)
