"""Experiments with the state server and its Redis: what they need of a release, and the programs of their faults."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis
import yaml
from lockstep_tools.chaos.experiments import EXPERIMENTS, Breaks, scripts
from lockstep_tools.chaos.laboratory import expected, lacks
from lockstep_tools.chaos.release import REDIS, ROUTER, STATE, WORKER
from redis_server import RedisServer

OF_STATE = {"state-kill": STATE, "redis-kill": REDIS, "redis-stop": REDIS, "redis-full": REDIS}
PATIENCE_S = 30.0


def test_experiments_with_a_state_server_need_one() -> None:
    assert {name: each.component for name, each in EXPERIMENTS.items() if each.component} == OF_STATE
    assert lacks(EXPERIMENTS["redis-kill"], {ROUTER, WORKER, STATE})
    assert not lacks(EXPERIMENTS["redis-kill"], {ROUTER, WORKER, STATE, REDIS})
    assert not lacks(EXPERIMENTS["rank-kill"], {ROUTER, WORKER})


def test_an_experiment_that_the_release_cannot_have_is_refused_by_name(lockstep, cluster: Path) -> None:
    result = lockstep("chaos", "rank-kill", "redis-stop", "-n", "serving")
    assert (result.returncode, result.stderr) == (2, "lockstep: redis-stop: the release has no redis\n")


@pytest.mark.parametrize(
    ("components", "resume", "breaks"),
    [
        ({ROUTER, WORKER, STATE}, True, Breaks.NONE),
        ({ROUTER, WORKER, STATE}, False, Breaks.OF_THE_ROUTER),
        ({ROUTER, WORKER}, True, Breaks.OF_THE_ROUTER),
    ],
)
def test_clients_that_resume_excuse_no_broken_stream_where_routers_share_them(components, resume, breaks) -> None:
    assert expected(EXPERIMENTS["router-kill"], components, resume=resume).breaks is breaks
    assert expected(EXPERIMENTS["node-cut"], components, resume=resume).breaks is Breaks.OF_THE_NODE


def freezer(folder: Path, container: str, seconds: int) -> str:
    """The program of the pod that stops a container, with processes in `folder` instead of /proc."""
    kubectl = folder / "bin/kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f"#!/bin/sh\ncase $* in *apply*) cat >{folder}/applied ;; esac\n")
    kubectl.chmod(0o755)
    environment = os.environ | {"PATH": f"{kubectl.parent}:{os.environ['PATH']}", "NAMESPACE": "serving"}
    command = f'source {scripts() / "lib.sh"}; freezer_pod name node image "{container}" {seconds}'
    subprocess.run(["bash", "-c", command], env=environment, timeout=PATIENCE_S, check=True)
    pod = yaml.safe_load((folder / "applied").read_text())
    assert pod["spec"]["hostPID"] is True
    return str(pod["spec"]["containers"][0]["args"][0]).replace("/proc/", f"{folder}/proc/")


@pytest.fixture
def victim(tmp_path: Path):
    """A process that is the only one of container `abc` in the folder that stands for /proc."""
    process = psutil.Popen(["sleep", "600"])
    entry = tmp_path / "proc" / str(process.pid)
    entry.mkdir(parents=True)
    (entry / "cgroup").write_text("0::/../pod7/abc\n")
    (entry / "status").symlink_to(f"/proc/{process.pid}/status")
    other = tmp_path / "proc/1"
    other.mkdir()
    (other / "cgroup").write_text("0::/../pod7/def\n")
    yield process
    process.kill()
    process.wait(PATIENCE_S)


def await_status(process: psutil.Process, *statuses: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while process.status() not in statuses:
        assert time.monotonic() < until_s, process.status()
        time.sleep(0.01)


def test_a_container_is_stopped_and_continues(tmp_path: Path, victim: psutil.Popen) -> None:
    program = freezer(tmp_path, "abc", 5)
    with subprocess.Popen(["sh", "-ec", program], stdout=subprocess.PIPE, text=True) as running:
        await_status(victim, psutil.STATUS_STOPPED)
        output, _ = running.communicate(timeout=PATIENCE_S)
    assert [line.split()[0] for line in output.splitlines()] == ["fault", "continued"]
    await_status(victim, psutil.STATUS_SLEEPING)


def test_a_program_that_is_ended_lets_it_continue(tmp_path: Path, victim: psutil.Popen) -> None:
    program = freezer(tmp_path, "abc", 600)
    with subprocess.Popen(["sh", "-ec", program], stdout=subprocess.DEVNULL, start_new_session=True) as running:
        await_status(victim, psutil.STATUS_STOPPED)
        try:
            running.terminate()
            running.wait(PATIENCE_S)
            await_status(victim, psutil.STATUS_SLEEPING)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # in a pod its `sleep` ends with the container


def test_a_program_that_was_killed_lets_it_continue_when_it_starts_again(tmp_path: Path, victim: psutil.Popen) -> None:
    program = freezer(tmp_path, "abc", 600)
    victim.send_signal(signal.SIGSTOP)
    await_status(victim, psutil.STATUS_STOPPED)
    done = subprocess.run(["sh", "-ec", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.startswith("continued ")
    await_status(victim, psutil.STATUS_SLEEPING)


def test_a_container_that_is_gone_is_said_to_be(tmp_path: Path, victim: psutil.Popen) -> None:
    program = freezer(tmp_path, "another", 600)
    done = subprocess.run(["sh", "-ec", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "no process of the container is on this node\n"
    assert victim.status() != psutil.STATUS_STOPPED


def fill(address: str, folder: Path, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    environment = os.environ | {f"LOCKSTEP_{name.upper()}": value for name, value in settings.items()}
    command = [sys.executable, str(scripts() / "redis-full/fill.py"), *arguments]
    return subprocess.Popen(
        command,
        env=environment | {"LOCKSTEP_STORE": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
class TestRedisFull:
    """The program that fills Redis, as the state server's user."""

    def test_redis_is_full_and_then_as_before(self, tmp_path: Path) -> None:
        (tmp_path / "password").write_text("a-password\n")
        rights = "+@read +@write +@scripting +@connection +time -@dangerous +info"
        user = f"--user state on >a-password ~own:* {rights}".split()
        server = RedisServer(tmp_path / "redis", None, *user, "--maxmemory", "16mb", "--maxmemory-policy", "noeviction")
        login = {
            "store_username": "state",
            "store_password_file": str(tmp_path / "password"),
            "store_prefix": "own:",
        }
        try:
            with (
                redis.Redis.from_url(server.address) as client,
                fill(server.address, tmp_path, "6", "64", **login) as it,
            ):
                client.set("before", 1)
                assert it.stdout is not None
                line = it.stdout.readline()
                assert line.startswith("fault "), (line, it.communicate(timeout=PATIENCE_S))
                with pytest.raises(redis.exceptions.OutOfMemoryError):
                    client.set("more", bytes(4096))
                assert min(client.ttl(key) for key in client.scan_iter("own:chaos:*", count=10_000)) > 0
                output, errors = it.communicate(timeout=PATIENCE_S)
                assert (it.returncode, output.startswith("emptied: ")) == (0, True), errors
                assert client.keys() == [b"before"]
        finally:
            server.kill()

    def test_a_redis_without_a_bound_is_not_filled_for_ever(self, tmp_path: Path) -> None:
        server = RedisServer(tmp_path / "redis")
        try:
            with fill(server.address, tmp_path, "2", "8") as it:
                _, errors = it.communicate(timeout=PATIENCE_S)
            assert it.returncode == 1
            assert errors.strip() == "Redis is not full after 8 MiB: its maxmemory is larger, or not set"
            with redis.Redis.from_url(server.address) as client:
                assert client.keys() == []
        finally:
            server.kill()
