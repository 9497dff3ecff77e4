"""`lockstep debug` names a rank that is stopped or stuck; no log, metric or bundle has a prompt, an output or a key."""

import hashlib
import json
import os
import re
import signal
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from serving import run
from system import MODEL, REFERENCE, System

PROMPT = "canary-prompt-7f3a"
KEY = "lsk-canary-key-91cc"
HUNG_S = 120.0
"""Deadline of a step: longer than the test takes, so that the rank is found hung by this test and not killed."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Stack, Path]]:
    """A worker with two ranks behind a router that wants keys, at log level debug, and their log."""
    folder = tmp_path_factory.mktemp("debug")
    keys = folder / "keys.yaml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f"tenants:\n- name: canary\n  keys:\n  - sha256: '{digest}'\n")
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log:
        patch.setenv("LOCKSTEP_KEYS_FILE", str(keys))
        patch.setenv("LOCKSTEP_DECODE_DEADLINE_S", str(HUNG_S))
        patch.setenv("LOCKSTEP_PREFILL_DEADLINE_S", str(HUNG_S))
        settings = StackSettings(str(REFERENCE), tp=2, device="cpu", threads=1, log_level="debug")
        with Stack(settings, output=log) as stack:
            stack.wait_ready(120)
            yield System(stack.url, stack.management_url), stack, folder / "log"


def post(system: System, path: str, body: object, key: str = KEY) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{system.api}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=HUNG_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def completion(system: System, tokens: int) -> tuple[int, str]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return post(system, "/completions", body)


def bundle(path: Path, *arguments: str) -> tuple[str, dict[str, bytes]]:
    """What `lockstep debug` prints, and the parts of its bundle."""
    code, output, notes = run("debug", "--output", str(path), *arguments, within_s=60.0)
    assert code == 0, notes
    with tarfile.open(path) as tar:
        files = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar.getmembers()}
        return output, {name: file.read() for name, file in files.items() if file is not None}


def rank_pids(system: System) -> list[int]:
    return [rank["pid"] for rank in system.worker("w0")["ranks"]]


@pytest.fixture
def running(system: tuple[System, Stack, Path]) -> Iterator[threading.Thread]:
    """A request that runs for as long as the test."""
    request = threading.Thread(target=completion, args=(system[0], 600), daemon=True)
    request.start()
    system[0].until(lambda workers: workers["w0"]["running"] == 1, "the request runs")
    yield request
    request.join(HUNG_S)


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_bundle_is_complete(
    system: tuple[System, Stack, Path], running: threading.Thread, tmp_path: Path
) -> None:
    here, stack, _ = system
    victim = rank_pids(here)[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        wait_for(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED, "the rank is stopped", 10)
        output, parts = bundle(tmp_path / "stopped.tar.gz", "--url", stack.management_url)
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
def test_a_process_that_does_not_answer_is_named(system: tuple[System, Stack, Path], tmp_path: Path) -> None:
    """The whole worker is stopped: what is left of it is a part that failed, in a bundle."""
    here, stack, _ = system
    worker = stack.worker_pids["w0"]
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    try:
        output, parts = bundle(tmp_path / "driver.tar.gz", "--pid", str(os.getpid()))
    finally:
        os.kill(worker, signal.SIGCONT)
    assert f"! worker-w0 does not answer; its process {worker} is T (stopped)" in output
    assert "worker-w0/stacks-1.json" in json.loads(parts["manifest.json"])["failed"]
    here.until_ready()


@pytest.mark.slow
def test_no_signal_has_a_prompt_an_output_or_a_key(system: tuple[System, Stack, Path], tmp_path: Path) -> None:
    """After answers, refused requests of many kinds, and a rank that crashed in the middle of a request."""
    here, stack, log = system
    status, answer = completion(here, 40)
    assert status == 200
    output = json.loads(answer)["choices"][0]["text"]
    assert len(output.strip()) > 20
    refused = [
        post(here, "/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": "many"}),
        post(here, "/completions", {"model": PROMPT, "prompt": PROMPT}),
        post(here, "/completions", b'{"prompt": "' + PROMPT.encode()),
        post(here, "/completions", {"model": MODEL, "prompt": PROMPT, PROMPT: PROMPT}),
        post(here, "/completions", {"model": MODEL, "prompt": PROMPT * 2000}),
        post(here, "/completions", {"model": MODEL, "prompt": PROMPT, "regex": PROMPT + "("}),
        post(here, "/chat/completions", {"model": MODEL, "messages": [{"role": PROMPT, "content": PROMPT}]}),
        post(here, "/completions", {"model": MODEL, "prompt": PROMPT}, key=KEY + "x"),
    ]
    assert all(400 <= status < 500 for status, _ in refused), [status for status, _ in refused]
    ends = threading.Thread(target=completion, args=(here, 300), daemon=True)
    ends.start()
    here.until(lambda workers: workers["w0"]["running"] == 1, "the request runs")
    os.kill(rank_pids(here)[0], signal.SIGSEGV)
    here.until(lambda workers: workers["w0"]["epoch"] == 2, "the ranks are started again", 60)
    ends.join(HUNG_S)
    assert not ends.is_alive()
    wait_for(lambda: b"Segmentation fault" in log.read_bytes(), "the rank's last words are written")
    time.sleep(0.3)  # other lines are written up to 0.1 s late
    printed, parts = bundle(tmp_path / "canary.tar.gz", "--url", stack.management_url)
    assert "rank 0" in printed
    assert "FAILED" in printed
    signals = parts | {"the log": log.read_bytes(), "what is printed": printed.encode()}
    assert b"Segmentation fault" in signals["the log"]
    words = [output.strip()[:20], output.strip()[-20:]]
    for canary in (PROMPT, KEY, *words, json.dumps(words[0])[1:-1]):
        found = [name for name, body in signals.items() if canary.encode() in body]
        assert not found, (canary, found)
    lines = [line for line in signals["the log"].splitlines() if line]
    assert all(json.loads(line) for line in lines), "one JSON object a line"
    code, shown, _ = run("logs", str(log), "--rank", "0", "--level", "error")
    assert (code, "rank failed" in shown) == (0, True)
