"""The stack with a stub router and stub workers: what starts, what ends, what is left."""

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from lockstep_tools.arguments import cores
from lockstep_tools.demo.demonstration import Demo
from lockstep_tools.failure import CommandError
from lockstep_tools.serving.stack import Stack, StackSettings, share
from rich.console import Console


def wait_until(holds: Callable[[], object], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def pids_noted(stubs: Path) -> list[int]:
    return [int(line.split()[1]) for file in stubs.glob("*.starts") for line in file.read_text().splitlines()]


def socket_of(worker_pid: int) -> Path:
    """Where a worker listens, by its command line."""
    flag = "--listen=unix:"
    return Path(next(word for word in psutil.Process(worker_pid).cmdline() if word.startswith(flag)).removeprefix(flag))


def router_pids(stack: Stack) -> list[int]:
    """Of each router, by its port in the command lines of this process's children, of which another test's may end."""
    words: dict[int, list[str]] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # its subclass ZombieProcess, too
            words[child.pid] = child.cmdline()
    return [next(pid for pid, each in words.items() if f"--port={port}" in each) for port in stack.ports]


def test_a_stack_comes_up_and_leaves_nothing(stubs: Path, model: str) -> None:
    with Stack(StackSettings(model, workers=2)) as stack:
        seen: list[dict[str, str]] = []
        stack.wait_ready(10, on_status=lambda states: seen.append(dict(states)))
        assert seen[-1] == {"router": "ready", "w0": "ready", "w1": "ready"}
        pids = [stack.router_pid, *stack.worker_pids.values()]
        assert len(set(pids)) == 3
        assert None not in pids
        path = socket_of(stack.worker_pids["w1"])
        assert (path.name, path.is_socket()) == ("w1.sock", True)
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not path.parent.exists()
    with socket.create_server(("127.0.0.1", stack.port)):
        pass


def test_workers_keep_cold_prefixes_in_a_state_server(stubs: Path, model: str) -> None:
    with Stack(StackSettings(model, host_cache="64Mi", remote_cache=True)) as stack:
        stack.wait_ready(30)
        words = psutil.Process(stack.worker_pids["w0"]).cmdline()
        directory = socket_of(stack.worker_pids["w0"]).parent
        assert {"--host-cache-bytes=64Mi", f"--state-server=unix:{directory}/state.sock"} <= set(words)
        assert (directory / "state.sock").is_socket()


def test_a_worker_alone_has_no_state_server(stubs: Path, model: str) -> None:
    with Stack(StackSettings(model, state="memory")) as stack:
        stack.wait_ready(30)
        assert not any("state-server" in word for word in psutil.Process(stack.worker_pids["w0"]).cmdline())


def test_routers_share_a_state_server(stubs: Path, model: str) -> None:
    events: list[str] = []
    with Stack(StackSettings(model, routers=3), on_event=events.append) as stack:
        seen: list[dict[str, str]] = []
        stack.wait_ready(30, on_status=lambda states: seen.append(dict(states)))
        assert list(seen[-1]) == ["router", "router 2", "router 3", "state server", "w0"]
        assert len({*stack.ports, *stack.management_ports}) == 6
        pids = router_pids(stack)
        flags = [psutil.Process(pid).cmdline() for pid in pids]
        (target,) = {word for each in flags for word in each if word.startswith("--state-server=unix:")}
        assert Path(target.removeprefix("--state-server=unix:")).is_socket()
        routers = ",".join(f"127.0.0.1:{port}" for port in stack.management_ports)
        assert all(f"--console-routers={routers}" in each for each in flags)
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: events)
        stack.wait_ready(10)
        again = router_pids(stack)
        assert (again[::2], again[1] != pids[1]) == (pids[::2], True)
    assert events == ["router 2 was killed by SIGKILL; starting it again"]


@pytest.mark.parametrize(("host", "is_public"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_the_console_can_chat_only_where_no_other_machine_reaches_it(
    stubs: Path, model: str, host: str, is_public: bool
) -> None:
    with Stack(StackSettings(model, host=host)) as stack:
        stack.wait_ready(30)
        flags = psutil.Process(stack.router_pid).cmdline()
        assert ("--console=public" in flags) is is_public
        assert stack.console_url == f"{stack.url if is_public else stack.management_url}/console/"
        # The demo says where it is as soon as its stack is ready; `lockstep serve`'s own line is in tests/integration.
        out = io.StringIO()
        Demo(stack, Console(file=out, width=200), prompt="", max_tokens=None, temperature=0.0, seed=0).start()
        assert out.getvalue().endswith(f"  watch it in a browser: {stack.console_url}\n")


def test_one_router_has_no_state_server_unless_asked_for(stubs: Path, model: str) -> None:
    assert StackSettings(model).store is None
    assert StackSettings(model, state="redis://localhost:1/0").store == "redis://localhost:1/0"
    with Stack(StackSettings(model)) as stack:
        stack.wait_ready(10)
        assert not [word for word in psutil.Process(stack.router_pid).cmdline() if "state" in word]


def test_routers_get_ports_in_steps(stubs: Path, model: str) -> None:
    first = 24_000 + os.getpid() % 4000 * 2
    with Stack(StackSettings(model, routers=2, port=first)) as stack:
        assert stack.ports == [first, first + 2]
    with (
        pytest.raises(CommandError, match="another router's port"),
        Stack(StackSettings(model, routers=2, port=first, management_port=first + 2)),
    ):
        pass


def test_a_killed_worker_comes_back(stubs: Path, model: str) -> None:
    events: list[str] = []
    with Stack(StackSettings(model, workers=2), on_event=events.append) as stack:
        stack.wait_ready(10)
        before = stack.worker_pids
        os.kill(before["w0"], signal.SIGKILL)
        wait_until(lambda: stack.worker_pids["w0"] not in (None, before["w0"]))
        stack.wait_ready(10)
        assert stack.worker_pids["w1"] == before["w1"]
    assert events == ["worker w0 was killed by SIGKILL; starting it again"]


def test_a_worker_that_cannot_run_ends_the_stack(stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_PLAN", json.dumps({"w1": {"exits": [2]}}))
    with Stack(StackSettings(model, workers=2)) as stack:
        with pytest.raises(CommandError, match="worker w1 cannot run") as raised:
            stack.wait_ready(10)
        assert raised.value.exit_code == 2
    assert not any(psutil.pid_exists(pid) for pid in pids_noted(stubs))


def test_a_stack_that_is_not_ready_in_time_says_what_is_missing(
    stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_PLAN", json.dumps({"w0": {"exits": [1, 1, 1]}}))
    with Stack(StackSettings(model)) as stack, pytest.raises(CommandError, match=r"not ready after 0.5 s: .*w0 is"):
        stack.wait_ready(0.5)


def test_a_long_temporary_directory_is_not_used_for_sockets(
    stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with Stack(StackSettings(model)) as stack:
        stack.wait_ready(10)
    assert list(deep.iterdir()) == []


def test_threads_are_the_cores_divided_by_the_ranks() -> None:
    assert (share(16, 4), share(16, 32), share(7, 2)) == (4, 1, 3)
    assert StackSettings("m", workers=1, tp=1).rank_threads == cores()
    assert StackSettings("m", workers=8, tp=8 * cores()).rank_threads == 1
    assert StackSettings("m", workers=8, tp=4, threads=3).rank_threads == 3


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("h", "http://h:9"),
    ],
)
def test_the_url_can_be_used_on_this_machine(host: str, url: str) -> None:
    assert Stack(StackSettings("m", host=host, port=9)).url == url


class Serve:
    """`lockstep serve` in a process of its own."""

    def __init__(self, model: str, *flags: str, before: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "lockstep_tools.cli", "serve", model, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.shown: list[str] = []

    def see(self, text: str) -> None:
        """Read stdout up to a line with `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.shown.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} was not shown: {self.shown} {self.process.stderr.read()}")

    def hear(self, text: str) -> None:
        """Read stderr up to a line with `text`."""
        assert self.process.stderr is not None
        heard: list[str] = []
        for line in self.process.stderr:
            heard.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} was not said: {heard}")

    def end(self, within_s: float = 10) -> tuple[int, str]:
        """Exit code and stderr."""
        try:
            output, errors = self.process.communicate(timeout=within_s)
        finally:
            self.process.kill()
        self.shown += output.splitlines(keepends=True)
        return self.process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_ends_with_one_signal(stubs: Path, model: str, number: signal.Signals) -> None:
    serve = Serve(model, "--workers", "2", "--name", "the writer's")
    serve.see("stop")
    shown = "".join(serve.shown)
    assert "\x1b" not in shown
    command = shlex.split(next(line for line in shown.splitlines() if "curl http://127.0.0.1:" in line))
    assert json.loads(command[-1])["model"] == "the writer's"
    pids = pids_noted(stubs)
    assert len(pids) == 2
    assert all(str(pid) in shown for pid in pids)
    path = socket_of(pids[0])
    serve.process.send_signal(number)
    code, errors = serve.end()
    assert code == 0
    assert "w1 ready after" in errors
    assert "stopping" in errors
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not path.parent.exists()


def test_streams_end_although_the_reader_of_stderr_has_ended_first(
    stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `serve 2>&1 | tee log` ends both; the deaf worker shows that there is time to end."""
    monkeypatch.setenv("STUB_PLAN", json.dumps({"w0": {"deaf": True}}))
    serve = Serve(model)
    serve.see("stop")
    assert serve.process.stderr is not None
    serve.process.stderr.close()
    serve.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        serve.process.wait(1.0)
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(10) == 0
    serve.process.stdout.close()


def test_serve_started_by_nohup_outlives_its_terminal(stubs: Path, model: str) -> None:
    serve = Serve(model, before=["nohup"])
    serve.see("stop")
    serve.process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        serve.process.wait(1.0)
    serve.process.send_signal(signal.SIGTERM)
    assert serve.end()[0] == 0


def test_serve_ends_at_once_with_a_second_signal(stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_PLAN", json.dumps({"w0": {"deaf": True, "child": True}}))
    serve = Serve(model)
    serve.see("stop")
    began_s = time.monotonic()
    serve.process.send_signal(signal.SIGINT)
    serve.hear("stopping")  # else a process that has not run since has both signals as one
    time.sleep(0.5)
    assert serve.process.poll() is None
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 0
    assert time.monotonic() - began_s < 8, "the time that processes have to end by themselves"
    child = int((stubs / "w0.child").read_text())
    assert not any(psutil.pid_exists(pid) for pid in [*pids_noted(stubs), child])


STARTS_FOR_EVER = {"exits": [1], "silent": True}
"""A worker that is started again once, and is never ready, however late the signal comes."""


def test_serve_can_be_stopped_while_it_starts(stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_PLAN", json.dumps({"w1": STARTS_FOR_EVER}))
    serve = Serve(model, "--workers", "2")
    wait_until(lambda: len(pids_noted(stubs)) >= 3, within_s=60)
    serve.process.send_signal(signal.SIGTERM)
    assert serve.end()[0] == 0
    assert not any(psutil.pid_exists(pid) for pid in pids_noted(stubs))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_demo_can_be_stopped_while_it_starts(
    stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setenv("STUB_PLAN", json.dumps({"w1": STARTS_FOR_EVER}))
    demo = subprocess.Popen([sys.executable, "-m", "lockstep_tools.cli", "demo", model], stdout=subprocess.DEVNULL)
    wait_until(lambda: len(pids_noted(stubs)) >= 3, within_s=60)
    demo.send_signal(number)
    assert demo.wait(30) == code


@pytest.mark.parametrize("plan", [{"w0": {"exits": [2]}}, {"router": 2}])
def test_serve_ends_with_the_exit_code_of_a_service_that_cannot_run(
    stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch, plan: dict[str, object]
) -> None:
    monkeypatch.setenv("STUB_PLAN", json.dumps(plan))
    code, errors = Serve(model, "--workers", "2").end()
    assert code == 2
    said = [line for line in errors.splitlines() if "ready after" not in line]
    assert said == [f"stub {next(iter(plan))} cannot go on"]
    assert not any(psutil.pid_exists(pid) for pid in pids_noted(stubs))


def test_nothing_outlives_a_killed_serve(stubs: Path, model: str) -> None:
    serve = Serve(model, "--workers", "2")
    serve.see("stop")
    children = psutil.Process(serve.process.pid).children(recursive=True)
    assert len(children) == 3
    abandoned = socket_of(pids_noted(stubs)[0]).parent
    serve.process.kill()
    serve.end()
    assert psutil.wait_procs(children, timeout=5)[1] == []
    with Stack(StackSettings(model)) as stack:
        stack.wait_ready(10)
        assert not abandoned.exists()


def test_serve_reports_a_dead_worker_and_continues(stubs: Path, model: str) -> None:
    serve = Serve(model)
    serve.see("stop")
    os.kill(pids_noted(stubs)[0], signal.SIGKILL)
    wait_until(lambda: len(pids_noted(stubs)) == 2)
    serve.process.send_signal(signal.SIGTERM)
    code, errors = serve.end()
    assert code == 0
    assert "worker w0 was killed by SIGKILL; starting it again" in errors
