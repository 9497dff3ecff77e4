"""Routers, their workers and their state server as child processes of this machine; sockets are in a private directory.

`lockstep serve`, the demo, the bench and the integration tests start the system with it.
"""

import os
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

import httpx
from lockstep_common import ports
from lockstep_common.address import check_host, join_host_port
from lockstep_common.errors import LockstepError

from lockstep_tools.arguments import cores
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.serving import gpus
from lockstep_tools.serving.directory import SocketDirectory
from lockstep_tools.serving.processes import Supervisor
from lockstep_tools.serving.status import READY, fetch, state_of

ROUTER = "router"
STATE_SERVER = "state server"
MEMORY = "memory"
"""What the state server keeps is in its memory."""

_DRAIN_S = 5.0  # time for running streams to end
_GRACE_S = 8.0  # time for processes to end: the drain, and the end of ranks after it
_POLL_S = 0.1
_LOOPBACK = "127.0.0.1"
_LOOPBACKS = ("127.0.0.1", "::1", "localhost")
_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts no authority. To load the system's certificates, which plain HTTP does not need, takes 30 ms."""
_MAX_PORT = 65535
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
    router_processes: int = 1
    """Processes of each router, which share its port."""
    routers: int = 1
    """Routers, which share a state server if there are several. They have the ports `port`, `port` + 2 and so on, or
    any free ones if `port` is 0.
    """
    state: str | None = None
    """What the routers' state server keeps is in its `memory`, or in Redis at this address; None: there is no state
    server, unless there are several routers, or workers keep blocks there.
    """
    name: str | None = None
    """Served model name; the directory's base name when None."""
    device: str = "auto"
    """cuda: each worker uses GPUs of its own. auto: the same if there are GPUs for one worker's ranks, else the CPU."""
    dtype: str = "auto"
    threads: int | None = None
    """CPU threads of each rank; when None the cores divided by the ranks, at least 1."""
    kv_memory: str | None = None
    """KV cache of a rank, e.g. 512Mi."""
    host_cache: str | None = None
    """Host memory of a rank for cached prefixes, e.g. 4Gi."""
    remote_cache: bool = False
    """Workers keep cold blocks of their prefix caches in the state server. Needs `host_cache`."""
    max_context: int | None = None
    log_level: str = "error"

    @property
    def store(self) -> str | None:
        """Where the state server keeps everything; None: there is no state server."""
        return self.state or (MEMORY if self.routers > 1 or self.remote_cache else None)

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
        self.ports = [settings.port]
        """Of the routers."""
        self.management_ports = [settings.management_port or 0]
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
    def port(self) -> int:
        """The port of the first router."""
        return self.ports[0]

    @property
    def management_port(self) -> int:
        """The management port of the first router."""
        return self.management_ports[0]

    @property
    def url(self) -> str:
        """The first router's address as clients on this machine use it, without /v1."""
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """The routers' addresses as clients on this machine use them, without /v1."""
        host = _WILDCARDS.get(self.settings.host, self.settings.host)
        return [f"http://{join_host_port(host, port)}" for port in self.ports]

    @property
    def management_url(self) -> str:
        """The address of the first router's health, metrics and status."""
        return self.management_urls[0]

    @property
    def management_urls(self) -> list[str]:
        """The same of all routers."""
        return [f"http://{_LOOPBACK}:{port}" for port in self.management_ports]

    @property
    def console_url(self) -> str:
        """The address of the first router's console: with chat, if only this machine reaches the router."""
        return f"{self.url if self._is_for_this_machine else self.management_url}/console/"

    @property
    def _is_for_this_machine(self) -> bool:
        return self.settings.host in _LOOPBACKS

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
        """The first router's process id, None while it is down."""
        return self._running.pid(ROUTER)

    @property
    def _router_names(self) -> list[str]:
        return [ROUTER, *(f"{ROUTER} {number}" for number in range(2, self.settings.routers + 1))]

    @property
    def exit_code(self) -> int | None:
        """Set when the stack has ended by itself."""
        return self._running.exit_code

    @property
    def reason(self) -> str:
        """Why it has ended by itself."""
        return self._running.reason

    def start(self) -> None:
        """Check model, GPUs and port, then start all processes; does not wait until they are ready.

        Raises:
            CommandError: the model or the port cannot be used, or GPUs are missing. Nothing has been started then.
        """
        check_model(self.settings)
        environments = self._environments()
        self._choose_ports()
        self._directory = SocketDirectory()
        self._supervisor = Supervisor(
            self._stages(self._directory.path),
            environments=environments,
            output=self._output,
            on_event=self._on_event,
        )
        self._supervisor.start()

    def status(self) -> dict[str, Any] | None:
        """The first router's status (GET /status); None while it does not answer."""
        return self._status(self.management_url)

    @staticmethod
    def _status(management_url: str) -> dict[str, Any] | None:
        with httpx.Client(timeout=2.0, trust_env=False, verify=_PLAIN) as client, suppress(CommandError):
            return fetch(client, management_url)
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
        states = {}
        workers: dict[str, str] = dict.fromkeys(self.worker_ids, READY)
        for name, url in zip(self._router_names, self.management_urls, strict=True):
            status = self._status(url)
            states[name] = "starting" if status is None else READY
            seen = {each.get("id"): each for each in (status or {}).get("workers", [])}
            for worker in self.worker_ids:
                if workers[worker] == READY:  # what the first router says that cannot use it
                    workers[worker] = _described(seen.get(worker))
        if self.settings.store is not None:
            states[STATE_SERVER] = READY if os.path.exists(self._state_socket) else "starting"
        return states | workers

    @property
    def _state_socket(self) -> str:
        assert self._directory is not None
        return f"{self._directory.path}/state.sock"

    def _choose_ports(self) -> None:
        """Find a port and a management port for each router.

        Raises:
            CommandError: one that was asked for is taken.
        """
        wanted, management = self.settings.port, self.settings.management_port
        self.ports, self.management_ports = [], []
        for step in range(0, 2 * self.settings.routers, 2):
            port = self._free_port(self.settings.host, wanted + step if wanted else 0)
            self.ports.append(port)
            if management is not None:
                self.management_ports.append(self._free_port(_LOOPBACK, management + step if management else 0))
            else:
                self.management_ports.append(self._port_beside(port if wanted else _MAX_PORT))

    def _free_port(self, host: str, port: int) -> int:
        if port > _MAX_PORT:
            raise CommandError(f"there is no port {port} for a further router: ports end at {_MAX_PORT}", UNUSABLE)
        while (found := free_port(host, port)) in (*self.ports, *self.management_ports):
            if port:
                raise CommandError(f"cannot listen on {host}:{port}: it is another router's port", UNUSABLE)
        return found

    def _port_beside(self, port: int) -> int:
        """The port after another one, or any free one."""
        if port < _MAX_PORT:
            with suppress(CommandError):
                return self._free_port(_LOOPBACK, port + 1)
        return self._free_port(_LOOPBACK, 0)

    def _environments(self) -> dict[str, dict[str, str]]:
        """What a worker's process has in its environment of its own: its GPUs."""
        devices = gpus.of_workers(self.settings.device, self.settings.workers, self.settings.tp)
        return {
            f"worker {worker}": {gpus.VARIABLE: names}
            for worker, names in zip(self.worker_ids, devices, strict=False)  # none on the CPU
        }

    def _stages(self, directory: str) -> list[dict[str, list[str]]]:
        """Commands in the order in which they end. Routers end first: so their streams can end."""
        sockets = {worker: f"unix:{directory}/{worker}.sock" for worker in self.worker_ids}
        consoles = ",".join(f"{_LOOPBACK}:{port}" for port in self.management_ports)
        routers = {
            name: _command(
                "lockstep_router",
                {
                    "host": self.settings.host,
                    "port": port,
                    "management-port": management_port,
                    "workers": ",".join(sockets.values()),
                    "console": "public" if self._is_for_this_machine else None,
                    "console-routers": consoles if len(self.management_ports) > 1 else None,
                    "processes": self.settings.router_processes,
                    "state-server": None if self.settings.store is None else f"unix:{self._state_socket}",
                    "drain-timeout-s": _DRAIN_S,
                    "log-level": self.settings.log_level,
                },
            )
            for name, port, management_port in zip(self._router_names, self.ports, self.management_ports, strict=True)
        }
        others = {f"worker {worker}": self._worker(worker, target) for worker, target in sockets.items()}
        if self.settings.store is not None:
            others[STATE_SERVER] = _command(
                "lockstep_state",
                {
                    "listen": f"unix:{self._state_socket}",
                    "store": self.settings.store,
                    "management-port": 0,
                    "log-level": self.settings.log_level,
                },
            )
        return [routers, others]

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
            "host-cache-bytes": settings.host_cache,
            "state-server": f"unix:{self._state_socket}" if settings.remote_cache else None,
            "max-context": settings.max_context,
            "drain-timeout-s": _DRAIN_S,
            "management-port": 0,
            "log-level": settings.log_level,
        }
        return _command("lockstep_worker", flags)


def _described(worker: Mapping[str, Any] | None) -> str:
    """The state of a worker as a router reports it."""
    if worker is None:
        return "starting"
    state, reason = state_of(worker), worker.get("reason")
    return f"{state} ({reason})" if reason and state != READY else state


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
        check_host(host)
        return ports.probe(host, port) if port else ports.free_port(host)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot listen on {host}:{port}: {reason}", UNUSABLE) from None
