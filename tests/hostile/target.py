"""A router and scripted workers as processes, to be attacked or measured. The sources may be another checkout's."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
_WORKERS = Path(__file__).with_name("workers.py")
_START_S = 60.0


def environment_of(tree: Path) -> dict[str, str]:
    """In which `python -m lockstep_router` is that of a checkout."""
    sources = [str(tree / part / "src") for part in ("services/router", "libs/common", "libs/api")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(sources)}


class Target:
    """Runs as long as it is entered.

    Args:
        tree: the checkout.
        token_every_s: interval between two tokens of a stream.
        max_tokens: of a stream; None: as many as it wants.
        script: runs the workers, with the arguments of `workers.py`.
        workers: their number.
        grpc: whether the router serves gRPC too, which older checkouts cannot.
        flags: further ones of the router.
    """

    def __init__(
        self,
        tree: Path = ROOT,
        *,
        token_every_s: float = 0.05,
        max_tokens: int | None = None,
        script: Path = _WORKERS,
        workers: int = 2,
        grpc: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        self._tree = tree
        self._script = script
        self._count = workers
        self._flags = ["--port", "0", *(["--grpc-port", "0"] if grpc else []), *flags]
        self._pace = [str(token_every_s), *([str(max_tokens)] if max_tokens else [])]
        self._directory = tempfile.TemporaryDirectory(prefix="ls-")
        self._workers: subprocess.Popen[str] | None = None
        self._router: subprocess.Popen[str] | None = None
        self.address = ("127.0.0.1", 0)
        self.grpc_port = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        environment = environment_of(self._tree) | {"LOCKSTEP_MANAGEMENT_PORT": "0"}
        tests = self._tree / "services/router/tests"
        self._workers = subprocess.Popen(
            [sys.executable, str(self._script), str(tests), self._directory.name, *self._pace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        assert self._workers.stdout is not None
        assert self._workers.stdout.readline() == "ready\n"
        targets = ",".join(f"unix:{self._directory.name}/w{index}.sock" for index in range(self._count))
        log = (Path(self._directory.name) / "log").open("w+")
        self._router = subprocess.Popen(
            [sys.executable, "-m", "lockstep_router", "--workers", targets, *self._flags],
            stderr=log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        listening = self._find_listening(Path(log.name))
        self.address = ("127.0.0.1", int(listening["port"]))
        self.grpc_port = int(listening.get("grpc_port", 0))

    def __exit__(self, *_: object) -> None:
        for process in (self._router, self._workers):
            if process is not None:
                process.kill()
                process.wait(10)
        self._directory.cleanup()

    @property
    def is_alive(self) -> bool:
        """Whether the router has not ended."""
        return self._router is not None and self._router.poll() is None

    @property
    def router_pid(self) -> int:
        """The router's process."""
        assert self._router is not None
        return self._router.pid

    def memory_bytes(self) -> int:
        """What the router has of the machine's memory: nothing once it has ended."""
        assert self._router is not None
        try:
            rss: int = psutil.Process(self._router.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0
        return rss

    def cpu_s(self) -> float:
        """CPU time that the router has used."""
        assert self._router is not None
        times = psutil.Process(self._router.pid).cpu_times()
        return float(times.user + times.system)

    def streams(self) -> int:
        """How many streams the workers run."""
        assert self._workers is not None
        assert self._workers.stdin is not None
        assert self._workers.stdout is not None
        self._workers.stdin.write("\n")
        self._workers.stdin.flush()
        return int(self._workers.stdout.readline())

    def log(self) -> list[dict[str, Any]]:
        """The lines that the router has logged."""
        return [json.loads(line) for line in (Path(self._directory.name) / "log").read_text().splitlines()]

    def _find_listening(self, log: Path) -> dict[str, Any]:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            for line in log.read_text().splitlines():
                if '"listening"' in line:
                    entry: dict[str, Any] = json.loads(line)
                    return entry
            assert self.is_alive, log.read_text()
            time.sleep(0.05)
        raise AssertionError("the router did not start")
