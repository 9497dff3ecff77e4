"""A router and its workers as child processes of this machine, on Unix sockets in a private directory.

`lockstep serve`, the demo, the bench and the integration tests start the system with it.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

import httpx
from lockstep_common.errors import LockstepError

from lockstep_tools.arguments import cores
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.serving.directory import SocketDirectory
from lockstep_tools.serving.processes import Supervisor
from lockstep_tools.serving.status import READY, fetch, state_of

ROUTER = "router"

_DRAIN_S = 5.0  # time for running streams to end
_GRACE_S = 8.0  # time for processes to end: the drain, and the end of ranks after it
_POLL_S = 0.1
_LOOPBACK = "127.0.0.1"
_MOST_PORT = 65535
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - recognised, not bound


@dataclass(frozen=True)
class StackSettings:
    """What to run."""

    model: str
    workers: int = 1
    tp: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    """The router's port; 0: any free one."""
    management_port: int | None = None
    """The router's management port, on the loopback interface; when None the one after `port`, or any free one."""
    name: str | None = None
    """Served model name; the directory's base name when None."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    """CPU threads of each rank; when None the cores divided by the ranks, at least 1."""
    kv_memory: str | None = None
    """KV cache of a rank, e.g. 512Mi."""
    max_context: int | None = None
    log_level: str = "error"

    @property
    def rank_threads(self) -> int:
        """CPU threads of each rank."""
        return self.threads or share(cores(), self.workers * self.tp)


def share(count: int, ranks: int) -> int:
    """CPU cores of each rank when so many ranks share `count`: at least one."""
    return max(1, count // ranks)


class Stack:
    """A running router with workers w0, w1, …; a worker that dies is started again.

    Used as `with Stack(settings) as stack: stack.wait_ready(60)`; nothing is left when the block is left.
    """

    def __init__(
        self,
        settings: StackSettings,
        *,
        output: IO[bytes] | None = None,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare.

        Args:
            settings: what to run.
            output: file for the processes' output; this process's when None.
            on_event: called with a message for each death, on a thread.
        """
        self.settings = settings
        self.port = settings.port
        self.management_port = settings.management_port or 0
        self._output = output
        self._on_event = on_event
        self._directory: SocketDirectory | None = None
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(0.0 if kind is not None else _GRACE_S)

    @property
    def url(self) -> str:
        """The router's address as clients on this machine use it, without /v1."""
        host = _WILDCARDS.get(self.settings.host, self.settings.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def management_url(self) -> str:
        """The address of the router's health, metrics and status."""
        return f"http://{_LOOPBACK}:{self.management_port}"

    @property
    def started(self) -> bool:
        """It has been started and not stopped."""
        return self._supervisor is not None

    @property
    def worker_ids(self) -> list[str]:
        """The workers' ids: w0, w1 and so on."""
        return [f"w{number}" for number in range(self.settings.workers)]

    @property
    def worker_pids(self) -> dict[str, int | None]:
        """The process id of each worker, None while it is down."""
        return {worker: self._running.pid(f"worker {worker}") for worker in self.worker_ids}

    @property
    def router_pid(self) -> int | None:
        """The router's process id, None while it is down."""
        return self._running.pid(ROUTER)

    @property
    def exit_code(self) -> int | None:
        """Set when the stack has ended by itself."""
        return self._running.exit_code

    @property
    def reason(self) -> str:
        """Why it has ended by itself."""
        return self._running.reason

    def start(self) -> None:
        """Check model and port, then start all processes; does not wait until they are ready.

        Raises:
            CommandError: the model or the port cannot be used. Nothing has been started then.
        """
        check_model(self.settings)
        self.port = free_port(self.settings.host, self.settings.port)
        self.management_port = self._choose_management_port()
        self._directory = SocketDirectory()
        self._supervisor = Supervisor(self._stages(self._directory.path), output=self._output, on_event=self._on_event)
        self._supervisor.start()

    def status(self) -> dict[str, Any] | None:
        """The router's status (GET /status); None while it does not answer."""
        with httpx.Client(timeout=2.0, trust_env=False) as client, suppress(CommandError):
            return fetch(client, self.management_url)
        return None

    def wait_ready(
        self,
        timeout_s: float | None = None,
        *,
        on_status: Callable[[Mapping[str, str]], None] = lambda _: None,
    ) -> None:
        """Wait until every worker is ready.

        Args:
            timeout_s: None: no limit.
            on_status: called repeatedly with the state of each process.

        Raises:
            CommandError: the stack ended (with its exit code), or the time is over.
        """
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            states = self._states()
            on_status(states)
            if all(state == READY for state in states.values()):
                return
            if self._running.wait(_POLL_S):
                raise CommandError(f"{self.reason}: its message is above", self.exit_code or FAILED)
            if time.monotonic() > deadline_s:
                waiting = ", ".join(f"{name} is {state}" for name, state in states.items() if state != READY)
                raise CommandError(f"not ready after {timeout_s:g} s: {waiting}")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the stack has ended, by `terminate` or by itself; false after the timeout."""
        return self._running.wait(timeout_s)

    def terminate(self, grace_s: float = _GRACE_S) -> None:
        """Ask all processes to end, and kill after `grace_s` what has not; does not wait."""
        self._running.stop(grace_s)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """End all processes, wait for their end, and remove the sockets. Can be called again."""
        if self._supervisor is not None:
            self._supervisor.stop(grace_s)
            self._supervisor.wait()
            self._supervisor.close()
        if self._directory is not None:
            self._directory.remove()

    @property
    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the stack has not been started")
        return self._supervisor

    def _states(self) -> dict[str, str]:
        status = self.status()
        states = {ROUTER: "starting" if status is None else READY} | dict.fromkeys(self.worker_ids, "starting")
        for worker in (status or {}).get("workers", []):
            if worker.get("id") in states:
                reason = worker.get("reason")
                state = state_of(worker)
                states[worker["id"]] = f"{state} ({reason})" if reason and state != READY else state
        return states

    def _choose_management_port(self) -> int:
        if self.settings.management_port is not None:
            return free_port(_LOOPBACK, self.settings.management_port)
        if 0 < self.settings.port < _MOST_PORT:
            with suppress(CommandError):
                return free_port(_LOOPBACK, self.port + 1)
        while (port := free_port(_LOOPBACK, 0)) == self.port:
            pass
        return port

    def _stages(self, directory: str) -> list[dict[str, list[str]]]:
        """Commands in the order in which they end. The router ends first: so its streams can end."""
        sockets = {worker: f"unix:{directory}/{worker}.sock" for worker in self.worker_ids}
        router = _command(
            "lockstep_router",
            {
                "host": self.settings.host,
                "port": self.port,
                "management-port": self.management_port,
                "workers": ",".join(sockets.values()),
                "drain-timeout-s": _DRAIN_S,
                "log-level": self.settings.log_level,
            },
        )
        workers = {f"worker {worker}": self._worker(worker, target) for worker, target in sockets.items()}
        return [{ROUTER: router}, workers]

    def _worker(self, worker: str, target: str) -> list[str]:
        settings = self.settings
        flags: dict[str, object] = {
            "model": os.path.abspath(settings.model),
            "name": settings.name,
            "worker-id": worker,
            "listen": target,
            "tp": settings.tp,
            "device": settings.device,
            "dtype": settings.dtype,
            "threads": settings.rank_threads,
            "kv-memory": settings.kv_memory,
            "max-context": settings.max_context,
            "drain-timeout-s": _DRAIN_S,
            "management-port": 0,
            "log-level": settings.log_level,
        }
        return _command("lockstep_worker", flags)


def _command(module: str, flags: Mapping[str, object]) -> list[str]:
    """Python's command line for a service; flags that are None are left to its defaults."""
    given = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
    return [sys.executable, "-m", module, *given]


def check_model(settings: StackSettings) -> None:
    """Read what the model's directory says, before anything is started.

    Raises:
        CommandError: the model is missing, broken, or cannot be split over `tp`.
    """
    from lockstep_engine.config import EngineConfig  # noqa: PLC0415 - only those who start a stack need the engine
    from lockstep_engine.model_config import inspect_model  # noqa: PLC0415

    try:
        inspect_model(EngineConfig(model=settings.model, tp=settings.tp, max_context=settings.max_context))
    except LockstepError as error:
        raise CommandError(error.message, UNUSABLE) from None


def free_port(host: str, port: int) -> int:
    """`port` if it is free on `host`, any free one for 0.

    Raises:
        CommandError: it is taken, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections of an earlier server in TIME_WAIT do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error.strerror or error}", UNUSABLE) from None
