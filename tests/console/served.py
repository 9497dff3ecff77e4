"""A router with a console and two scripted workers, in a thread of its own, so that tests can wait for the browser."""

import asyncio
import contextlib
import socket
import sys
import threading
from pathlib import Path

from lockstep_common.management import Reports, managed

sys.path.append(str(Path(__file__).parents[2] / "services/router/tests"))

from lockstep_router.console import files
from lockstep_router.console.others import OtherRouters
from lockstep_router.console.state import ConsoleState
from lockstep_router.router import Router
from lockstep_router.server import Server, http_config
from lockstep_router.settings import RouterSettings
from router_cluster import eventually
from scripted_worker import Script, ScriptedWorker

DEADLINE_S = 120


class Served:
    """The router's addresses, and what happens to its workers. Its methods may be called in any thread."""

    def __init__(self, directory: Path, **settings):
        self._directory = directory
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._down = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self.public = self.management = self.management_address = ""
        self.workers = []
        self.router = None
        self._client_port = 0

    def __enter__(self):
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """End the router and its workers; nothing if they have ended."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._down.set)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def call(self, function, *args):
        """Call a function in the loop of the router."""

        async def run():
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(DEADLINE_S)

    def script(self, **changes):
        """Set what the workers do from now on."""
        for worker in self.workers:
            worker.script = Script(**changes)

    def worker_with_streams(self):
        """The worker that runs streams, once there is one."""

        def find():
            return next((worker for worker in self.workers if worker.seats.running), None)

        async def wait():
            await eventually(lambda: find() is not None, DEADLINE_S)
            return find()

        return self.call(wait)

    def break_clients(self):
        """Close the connections of clients that read an answer, as a router does that dies."""

        def close():
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

        self._loop.call_soon_threadsafe(close)

    async def _run(self):
        self._down = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            for index in range(2):
                worker = ScriptedWorker(f"w{index}", self._directory / f"w{index}.sock")
                self.workers.append(await worker.start())
                stack.push_async_callback(worker.kill)
            defaults = {"console": "public", "backoff_initial_s": 0.02, "backoff_max_s": 0.1, "router_id": "router-a"}
            targets = [worker.target for worker in self.workers]
            settings = RouterSettings(workers=targets, **(defaults | self._settings))
            self.router = router = await stack.enter_async_context(Router(settings))
            await eventually(lambda: len(router.workers.ready()) == 2, DEADLINE_S)
            others = OtherRouters(settings)
            stack.push_async_callback(others.close)
            console = ConsoleState(router, others=others)
            reports = Reports(
                unready=lambda: router.unready,
                files=files.of(settings.console),
                views={files.STATE: console.on_management, files.ROUTER: console.of_router},
            )
            port = await stack.enter_async_context(managed("127.0.0.1", 0, reports, liveness_timeout_s=60))
            self.management_address = f"127.0.0.1:{port}"
            self.management = f"http://127.0.0.1:{port}/console/"
            listener = socket.create_server(("127.0.0.1", 0))
            self._server = server = Server(http_config(router))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            self.public = f"http://127.0.0.1:{listener.getsockname()[1]}/console/"
            await eventually(lambda: server.started, DEADLINE_S)
            self._up.set()
            await self._down.wait()
            server.end()
            await serving
