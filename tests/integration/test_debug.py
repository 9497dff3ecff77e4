"""`lockstep debug` names a rank that is stopped or stuck."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from serving import debug_bundle
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL, REFERENCE, System

HUNG_S = 120.0
"""Deadline of a step: longer than the test takes, so that the rank is found hung by this test and not killed."""


@pytest.fixture(scope="module")
def system(slow_steps: SlowSteps) -> Iterator[tuple[System, Stack]]:
    """A worker with two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_DECODE_DEADLINE_S", str(HUNG_S))
        patch.setenv("LOCKSTEP_PREFILL_DEADLINE_S", str(HUNG_S))
        with Stack(StackSettings(str(REFERENCE), tp=2, device="cpu", threads=1)) as stack:
            stack.wait_ready(120)
            yield System(stack.url, stack.management_url), stack


def complete(system: System, tokens: int) -> None:
    body = {"model": MODEL, "prompt": "It was", "max_tokens": tokens, "ignore_eos": True}
    httpx.post(f"{system.api}/completions", json=body, timeout=HUNG_S, trust_env=False).raise_for_status()


def rank_pids(system: System) -> list[int]:
    return [rank["pid"] for rank in system.worker("w0")["ranks"]]


@pytest.fixture
def running(system: tuple[System, Stack], slow_steps: SlowSteps) -> Iterator[threading.Thread]:
    """A request that runs for as long as the test."""
    request = threading.Thread(target=complete, args=(system[0], SLOW_TOKENS), daemon=True)
    with slow_steps.during():
        request.start()
        system[0].until(lambda workers: workers["w0"]["running"] == 1, "the request runs")
        yield request
    request.join(HUNG_S)


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_bundle_is_complete(
    system: tuple[System, Stack], running: threading.Thread, tmp_path: Path
) -> None:
    here, stack = system
    victim = rank_pids(here)[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        wait_for(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED, "the rank is stopped", 10)
        output, parts = debug_bundle(tmp_path / "stopped.tar.gz", "--url", stack.management_url)
        wait_for(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED, "it is stopped again", 10)
    finally:
        os.kill(victim, signal.SIGCONT)
    assert running.is_alive()
    assert f"! worker-w0: rank 1 (pid {victim}) is STOPPED after " in output
    places = re.split("^! ", output, flags=re.MULTILINE)[1:]
    of_victim, of_other = (next(each for each in places if f"rank {number} (pid" in each[:40]) for number in (1, 0))
    assert re.search(r'^ +File ".*lockstep_engine/\w+\.py", line \d+ in ', of_victim, re.MULTILINE), "its place"
    assert "distributed.py" in of_other, "where the other rank waits"
    assert "not collected" not in output
    expected = {"stacks-1.json", "stacks-2.json", "metrics.txt", "settings.json", "log.jsonl", "readiness.json"}
    assert {name.partition("/")[2] for name in parts if name.startswith("worker-w0/")} == expected
    assert {"router/status.json", "summary.txt", "manifest.json"} <= parts.keys()
    assert json.loads(parts["router/stacks-1.json"])["tasks"]


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_named(system: tuple[System, Stack], tmp_path: Path) -> None:
    """The whole worker is stopped: what is left of it is a part that failed, in a bundle."""
    here, stack = system
    worker = stack.worker_pids["w0"]
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    try:
        output, parts = debug_bundle(tmp_path / "driver.tar.gz", "--pid", str(os.getpid()))
    finally:
        os.kill(worker, signal.SIGCONT)
    assert f"! worker-w0 does not answer; its process {worker} is T (stopped)" in output
    assert "worker-w0/stacks-1.json" in json.loads(parts["manifest.json"])["failed"]
    here.until_ready()
