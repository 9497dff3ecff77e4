"""The servers that `router.py` compares, each as processes with its backend: their ports, CPU time and memory."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from measure import ROOT

sys.path.insert(0, str(ROOT / "tests/hostile"))

from target import Target

_HERE = Path(__file__).parent
_START_S = 120.0
_MOST = "16384"
"""Connections and requests at a time that every router is set to allow."""

RUST_ROUTERS = {
    "vllm-router": ("vllm_router.launch_router", "error"),
    "sglang-router": ("sglang_router.launch_router", "error"),
}
LITELLM = "litellm"
LITELLM_CONFIG = {
    "model_list": [
        {
            "model_name": "reference",
            "litellm_params": {"model": "text-completion-openai/reference", "api_key": "none", "api_base": ""},
        }
    ],
    "litellm_settings": {"drop_params": True, "telemetry": False},
    "general_settings": {"disable_spend_logs": True, "disable_error_logs": True},
}


@dataclass(frozen=True)
class Side:
    """A running server."""

    port: int
    pid: int
    """The first process of the server; its children count as the server's too."""
    processes: int = 1
    """Those of a router that share the clients."""

    def _tree(self) -> list[psutil.Process]:
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def cpu_s(self) -> dict[int, float]:
        """CPU time that each of its processes has used, in seconds, by its id: also in threads that have ended, such as
        those of scrapes.
        """
        found = {}
        for process in self._tree():
            with contextlib.suppress(OSError):  # it has ended
                found[process.pid] = time.clock_gettime(_cpu_clock(process.pid))
        return found

    def memory_bytes(self) -> int:
        """Memory that only its processes have: what the machine would get back without them."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().uss
        return total


@dataclass(frozen=True)
class Trees:
    """Where the sources of the servers are."""

    before: Path | None = None
    """An older checkout of this repository."""
    peers: Path | None = None
    """The interpreter of an environment with the routers of other projects."""


def names(trees: Trees, processes: int) -> list[str]:
    """The servers to compare, in the order in which they take turns."""
    found = ["direct", "lockstep"]
    if trees.before is not None:
        found.append("before")
    if processes > 1:
        found.append(f"lockstep x{processes}")
    if trees.peers is not None:
        found += [*RUST_ROUTERS, LITELLM]
    return found


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, in nanoseconds: Linux's clock_getcpuclockid(3), which Python does not have."""
    return (~pid << 3) | 2


@contextlib.contextmanager
def running(name: str, step_s: float, trees: Trees) -> Iterator[Side]:
    """Start a server with a backend of its own, and end both."""
    if name.startswith("lockstep") or name == "before":
        tree = trees.before if name == "before" else ROOT
        assert tree is not None
        flags = ["--max-streams", _MOST, *(["--max-connections", _MOST] if name != "before" else [])]
        processes = int(name.partition(" x")[2] or 1)
        flags += ["--processes", str(processes)] if processes > 1 else []
        with Target(tree, token_every_s=step_s, script=_HERE / "router_worker.py", workers=1, flags=flags) as target:
            side = Side(target.address[1], target.router_pid, processes)
            _wait_until_serving(side.port)
            yield side
        return
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(_process([sys.executable, str(_HERE / "router_backend.py"), str(step_s)]))
        assert backend.stdout is not None
        port = int(backend.stdout.readline())
        if name == "direct":
            yield Side(port, backend.pid)
            return
        assert trees.peers is not None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ls-")))
        command, own_port = _command(name, trees.peers, port, folder)
        log = stack.enter_context((folder / "log").open("wb"))
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
        # Without it LiteLLM does not start without a key, which the others do not have either.
        environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
        process = stack.enter_context(_process(command, environment, log.fileno()))
        try:
            _wait_until_serving(own_port, process)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}\n{(folder / 'log').read_text()[-2000:]}") from None
        yield Side(own_port, process.pid)


def _command(name: str, peers: Path, backend: int, folder: Path) -> tuple[list[str], int]:
    """The command of a peer, and the port that it will listen on."""
    port = _free_port()
    url = f"http://127.0.0.1:{backend}"
    if name in RUST_ROUTERS:
        module, level = RUST_ROUTERS[name]
        flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())]
        flags += ["--worker-urls", url, "--policy", "round_robin", "--log-level", level]
        flags += ["--max-concurrent-requests", _MOST, "--queue-size", _MOST]
        return [str(peers), "-m", module, *flags], port
    config = json.loads(json.dumps(LITELLM_CONFIG))
    config["model_list"][0]["litellm_params"]["api_base"] = f"{url}/v1"
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    flags = ["--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--num_workers", "1", "--keepalive_timeout", "600", "--telemetry", "False"]
    return [str(peers.parent / "litellm"), *flags], port


@contextlib.contextmanager
def _process(
    command: list[str], variables: dict[str, str] | None = None, errors: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, all of which is killed in the end."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE if errors is None else errors,
        stderr=errors,
        text=True,
        env=os.environ | (variables or {}),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_until_serving(port: int, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until the server answers a completion."""
    body = json.dumps({"model": "reference", "prompt": "a", "max_tokens": 1}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end, reason = time.monotonic() + _START_S, ""
    while time.monotonic() < end and (process is None or process.poll() is None):
        try:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with opener.open(request, timeout=10) as answer:
                answer.read()
            return
        except OSError as error:
            reason = str(error)
        time.sleep(0.1)
    raise AssertionError(f"does not serve: {reason}")
