"""`lockstep profile` of a real worker that serves: it names a slow rank, and no stream changes."""

import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lockstep_tools.debug.local import from_router
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from serving import run
from system import MODEL, REFERENCE, System

pytestmark = pytest.mark.slow

WAIT_S = 120.0
BODY = {"model": MODEL, "prompt": "canary-prompt-31c7 it was", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, rank 1 is slow."""
    return tmp_path_factory.mktemp("slow") / "is-slow"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, a profile waits for a second for the first step."""
    return tmp_path_factory.mktemp("hasty") / "is-hasty"


@pytest.fixture(scope="module")
def system(slow: Path, hasty: Path) -> Iterator[System]:
    """A worker with two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_RANK_FILE", str(slow))
        patch.setenv("HASTY_FILE", str(hasty))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "slow_rank"), prepend=os.pathsep)
        with Stack(StackSettings(str(REFERENCE), tp=2, device="cpu", threads=1, log_level="warning")) as stack:
            stack.wait_ready(WAIT_S)
            yield System(stack.url, stack.management_url)


def completion(system: System, tokens: int) -> str:
    body = BODY | {"max_tokens": tokens}
    with httpx.Client(timeout=WAIT_S, trust_env=False, verify=False) as client:
        text: str = client.post(f"{system.api}/completions", json=body).raise_for_status().json()["choices"][0]["text"]
        return text


class Load:
    """Requests that follow each other, and whether all had the same answer."""

    def __init__(self, system: System, tokens: int) -> None:
        self.answers: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(system, tokens), daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self, system: System, tokens: int) -> None:
        while not self._is_over.is_set():
            self.answers.append(completion(system, tokens))


def profiled(system: System, path: Path, steps: int = 10) -> tuple[int, str, str]:
    path.unlink(missing_ok=True)
    arguments = ("--url", system.management_url, "--steps", str(steps), "--out", str(path))
    return run("profile", *arguments, within_s=WAIT_S)


def profiles_begun(logs_url: str) -> int:
    """How many profiles the worker's newest log lines report."""
    answer = httpx.get(logs_url, timeout=WAIT_S, trust_env=False).raise_for_status()
    return answer.text.count("an operator has asked for a profile of the ranks")


def until_it_says(what: str, system: System, path: Path) -> str:
    """Profiles, until one says this: other processes of the machine can slow one rank for a moment."""
    ends_at = time.monotonic() + WAIT_S
    while True:
        code, output, notes = profiled(system, path)
        assert code == 0, notes
        if what in output:
            return output
        assert time.monotonic() < ends_at, output


def test_a_slow_rank_is_named_and_streams_do_not_change(system: System, slow: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    expected = completion(system, 40)
    with Load(system, 40) as load:
        until_it_says("balanced: no rank is clearly slower", system, path)
        slow.touch()
        try:
            output = until_it_says("bottleneck: rank 1: it computes ", system, path)
        finally:
            slow.unlink()
    assert set(load.answers) == {expected}
    assert "worker-w0: 10 steps" in output
    assert system.worker("w0")["epoch"] == 1, "no step was late to its deadline"
    trace = gzip.decompress(path.read_bytes())
    assert b"canary" not in trace
    events = json.loads(trace)["traceEvents"]
    assert {each["pid"] for each in events} == {0, 1}
    steps = [
        [each["name"] for each in events if each["name"].startswith("step ") and each["pid"] == rank] for rank in (0, 1)
    ]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 10
    collectives = [
        [each["name"] for each in events if each.get("args", {}).get("number") is not None and each["pid"] == rank]
        for rank in (0, 1)
    ]
    assert collectives[0] == collectives[1]
    assert {"all_reduce", "all_gather"} <= set(collectives[0])


def test_an_idle_engine_and_a_dead_rank_end_it_with_a_sentence(system: System, hasty: Path, tmp_path: Path) -> None:
    system.until_idle(30.0)
    hasty.touch()
    code, _, notes = profiled(system, tmp_path / "idle")
    hasty.unlink()
    assert (code, "no steps ran within 1 s; send requests meanwhile" in notes) == (1, True), notes
    assert completion(system, 4) == completion(system, 4)
    found: list[tuple[int, str, str]] = []
    profiling = threading.Thread(target=lambda: found.append(profiled(system, tmp_path / "dead")), daemon=True)
    with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        worker = next(each for each in from_router(client, system.management_url) if each.name == "worker-w0")
    logs_url, pid = f"{worker.url}/debug/logs", system.worker("w0")["ranks"][1]["pid"]
    before = profiles_begun(logs_url)
    profiling.start()
    wait_for(lambda: profiles_begun(logs_url) > before, "a profile runs", WAIT_S)
    os.kill(pid, signal.SIGKILL)
    profiling.join(WAIT_S)
    ((code, _, notes),) = found
    assert code == 1
    assert any(reason in notes for reason in ("the ranks were lost", "profile it when it is ready")), notes
    system.until_ready(WAIT_S)
    assert completion(system, 4)
