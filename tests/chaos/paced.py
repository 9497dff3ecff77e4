"""Real router processes before scripted workers, each a process: streams of a steady pace, to see what a fault adds.

As a script it is such a worker: `paced.py TESTS_OF_THE_ROUTER SOCKET WORKER_ID TOKEN_EVERY_S`, until stdin is closed.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
_ROUTER_TESTS = ROOT / "services/router/tests"
_START_S = 90.0
_END_S = 30.0


class Paced:
    """Workers and routers; runs as long as it is entered. `workers` and `routers` are their processes, to be killed.

    Args:
        workers: their number.
        routers: their number.
        token_every_s: the pace of each stream.
        store: where the routers' state server keeps everything; None: there is no state server.
        state_timeout_s: how long routers' requests wait for it; None: the default.
    """

    def __init__(
        self,
        *,
        workers: int,
        routers: int,
        token_every_s: float,
        store: str | None = None,
        state_timeout_s: float | None = None,
    ) -> None:
        self._counts = workers, routers
        self.token_every_s = token_every_s
        self._store = store
        self._state_timeout_s = state_timeout_s
        self._flags: list[str] = []
        self._state_flags: list[str] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ls-")
        self.workers: list[subprocess.Popen[str]] = []
        self.routers: list[subprocess.Popen[str]] = []
        self.state: subprocess.Popen[str] | None = None
        """The state server."""
        self.urls: list[str] = []
        """Base URLs of the routers."""
        self.management_urls: list[str] = []

    def __enter__(self) -> Self:
        workers, routers = self._counts
        sockets = [f"{self._directory.name}/w{number}.sock" for number in range(workers)]
        for number, socket in enumerate(sockets):
            command = [sys.executable, __file__, str(_ROUTER_TESTS), socket, f"w{number}", str(self.token_every_s)]
            self.workers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            )
        for worker in self.workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        self._flags = ["--workers", ",".join(f"unix:{socket}" for socket in sockets)]
        if self._store is not None:
            target = f"unix:{self._directory.name}/state"
            self._state_flags = ["--listen", target, "--store", self._store]
            self.state = self._start("state", "lockstep_state", *self._state_flags)
            self._flags += ["--state-server", target]
            if self._state_timeout_s is not None:
                self._flags += ["--state-timeout-s", str(self._state_timeout_s)]
        for number in range(routers):
            self.routers.append(self._start(f"router{number}", "lockstep_router", "--port", "0", *self._flags))
        if self.state is not None:
            self._listening("state", self.state)
        for number, router in enumerate(self.routers):
            entry = self._listening(f"router{number}", router)
            self.urls.append(f"http://127.0.0.1:{entry['port']}/v1")
            self.management_urls.append(f"http://127.0.0.1:{entry['management_port']}")
        return self

    def restart_router(self, number: int) -> None:
        """Start a router again that was killed, at its address."""
        self.routers[number].wait(_END_S)
        port = self.urls[number].removesuffix("/v1").rpartition(":")[2]
        router = self._start(f"router{number}", "lockstep_router", "--port", port, *self._flags)
        self.routers[number] = router
        entry = self._listening(f"router{number}", router)
        self.management_urls[number] = f"http://127.0.0.1:{entry['management_port']}"

    def restart_state(self) -> None:
        """Start the state server again that was killed."""
        assert self.state is not None
        self.state.wait(_END_S)
        self.state = self._start("state", "lockstep_state", *self._state_flags)
        self._listening("state", self.state)

    def _start(self, name: str, module: str, *flags: str) -> subprocess.Popen[str]:
        with self._log(name).open("wb") as output:
            environment = os.environ | {"LOCKSTEP_MANAGEMENT_PORT": "0"}
            command = [sys.executable, "-m", module, *flags]
            return subprocess.Popen(command, stderr=output, env=environment, text=True)

    def _log(self, name: str) -> Path:
        return Path(self._directory.name, f"{name}.log")

    def _listening(self, name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait until a process listens; its log entry about that."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            for line in self._log(name).read_text().splitlines():
                entry: dict[str, Any] = json.loads(line)
                if entry["message"] == "listening":
                    return entry
            assert process.poll() is None, self._log(name).read_text()
            time.sleep(0.05)
        raise AssertionError("the process does not listen")

    def __exit__(self, *_: object) -> None:
        processes = [*self.routers, *([] if self.state is None else [self.state]), *self.workers]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(_END_S)
        for worker in self.workers:
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                pipe.close()
        self._directory.cleanup()


async def _work(arguments: Sequence[str]) -> None:
    tests, socket, name, token_every_s = arguments
    sys.path.insert(0, tests)
    from scripted_worker import Script, ScriptedWorker, model_card  # noqa: PLC0415 - its path is an argument

    script = Script(delay_s=float(token_every_s), in_steps=True)
    worker = ScriptedWorker(name, Path(socket), card=model_card(context_length=2048), script=script)
    await worker.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1:]))
