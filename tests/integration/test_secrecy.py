"""No signal has a prompt, an output or a key: logs, metrics, spans, drawings of traces, status, console, profiles and
debug bundles of all processes, with traces on and a state server. Requests succeed, are refused, and meet errors whose
messages quote them.
"""

import gzip
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from lockstep_tools.debug import local
from lockstep_tools.serving.stack import MEMORY, Stack, StackSettings
from machine import wait_for
from redis_server import RedisServer
from serving import debug_bundle, run
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL, REFERENCE, System

PROMPT = "canary-prompt-7f3a"
"""Requests repeat it, so that it fills blocks."""
KEY = "lsk-canary-key-91cc"
PASSWORD = "canary-password-e02d"
ENCRYPTION_KEY = hashlib.sha256(b"canary-encryption-key").hexdigest()
PATIENCE_S = 120.0
TRACE = "00-{:032x}-00000000000000aa-01"
FAILING = "canary {} " + PROMPT * 8
"""The prompt of a request that fails in a process: computed from its first token on, since no other one begins so."""
FAILURES = (("router", True), ("router", False), ("worker", True), ("rank", True))
"""Processes that `quoting_errors` makes fail, and whether others may ask for the answer: two ways in the router."""


class Watched(NamedTuple):
    system: System
    log: Path
    failures: Path
    """The folder of `quoting_errors`."""
    slow_steps: SlowSteps


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, slow_steps: SlowSteps) -> Iterator[Watched]:
    """A worker with two ranks, a state server that encrypts what it keeps in Redis (in its memory, where there is no
    Redis), and a router that wants keys.
    """
    folder = tmp_path_factory.mktemp("secrecy")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    settings = {
        "LOCKSTEP_KEYS_FILE": f"tenants:\n- name: canary\n  keys:\n  - sha256: '{digest}'\n",
        "LOCKSTEP_ENCRYPTION_KEY_FILE": ENCRYPTION_KEY,
        "LOCKSTEP_STORE_PASSWORD_FILE": PASSWORD,
    }
    failures = folder / "failures"
    failures.mkdir()
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log, ExitStack() as end:
        state = MEMORY
        if shutil.which("redis-server"):
            redis = RedisServer(folder / "redis", PASSWORD)
            end.callback(redis.kill)
            state = redis.address
        for name, content in settings.items():
            (folder / name).write_text(content)
            patch.setenv(name, str(folder / name))
        patch.setenv("OTEL_TRACES_EXPORTER", "memory")
        patch.setenv("QUOTING_ERRORS", str(failures))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "quoting_errors"), prepend=os.pathsep)
        stack_settings = StackSettings(
            str(REFERENCE), tp=2, device="cpu", threads=1, host_cache="64Mi", remote_cache=True, state=state,
            log_level="debug",
        )  # fmt: skip
        with Stack(stack_settings, output=log) as stack:
            stack.wait_ready(PATIENCE_S)
            yield Watched(System(stack.url, stack.management_url), folder / "log", failures, slow_steps)


class Client:
    """Sends requests, each with a trace and an id of its own."""

    def __init__(self, system: System) -> None:
        self._url = system.url
        self.requests: list[str] = []
        """Their ids. The number of a request's trace is its place here, counted from 1."""

    def post(self, path: str, body: object, key: str = KEY, is_kept: bool = True) -> httpx.Response:
        self.requests.append(f"request-{len(self.requests) + 1}")
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {key}",
            "X-Request-ID": self.requests[-1],
            "traceparent": TRACE.format(len(self.requests)),
        }
        if is_kept:  # the router asks the state server for this key
            headers["Idempotency-Key"] = self.requests[-1]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(
            f"{self._url}{path}", content=content, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=False
        )

    def complete(self, tokens: int, is_kept: bool = True, **more: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": PROMPT * 8, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", body | more, is_kept=is_kept)


def refused(client: Client) -> list[int]:
    """The statuses of requests that quote the prompt where something is wrong with them."""
    completions = "/v1/completions"
    answers = [
        client.post(completions, {"model": MODEL, "prompt": PROMPT, "max_tokens": "many"}),
        client.post(completions, {"model": MODEL, "prompt": PROMPT, "max_tokens": PROMPT}),
        client.post(completions, {"model": PROMPT, "prompt": PROMPT}),
        client.post(completions, b'{"prompt": "' + PROMPT.encode()),
        client.post(completions, {"model": MODEL, "prompt": PROMPT, PROMPT: PROMPT}),
        client.post(completions, {"model": MODEL, "prompt": PROMPT * 2000}),
        client.post(completions, {"model": MODEL, "prompt": PROMPT, "regex": PROMPT + "("}),
        client.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": PROMPT, "content": PROMPT}]}),
        client.post(completions, {"model": MODEL, "prompt": PROMPT}, key=KEY + "x"),
    ]
    return [answer.status_code for answer in answers]


def failed(client: Client, watched: Watched) -> None:
    """Each process in turn raises an error that quotes a request; at last a rank crashes in the middle of one."""
    for place, is_kept in FAILURES:
        (watched.failures / place).touch()
        epoch = watched.system.worker("w0")["epoch"]
        answer = client.complete(4, is_kept=is_kept, prompt=FAILING.format(place))
        assert not (watched.failures / place).exists(), f"nothing has failed in the {place}"
        assert answer.status_code == (200 if place == "rank" else 500), (place, answer.text)
        watched.system.until(
            lambda workers, epoch=epoch + (place == "rank"): workers["w0"]["epoch"] == epoch,
            "the epoch of the ranks",
            60,
        )
        watched.system.until_ready()
    watched.system.until_idle()  # else the worker's last status may be that of the request before
    running = threading.Thread(target=client.complete, args=(SLOW_TOKENS,), daemon=True)
    with watched.slow_steps.during():
        running.start()
        watched.system.until(lambda workers: workers["w0"]["running"] == 1, "the request runs")
        epoch = watched.system.worker("w0")["epoch"]
        os.kill(watched.system.worker("w0")["ranks"][0]["pid"], signal.SIGSEGV)
    watched.system.until(lambda workers: workers["w0"]["epoch"] == epoch + 1, "the ranks are started again", 60)
    running.join(PATIENCE_S)
    assert not running.is_alive()
    wait_for(lambda: b"Segmentation fault" in watched.log.read_bytes(), "the rank's last words are written")


def pages(watched: Watched, traces: int) -> dict[str, bytes]:
    """What all processes of the system answer to operators."""
    found = {}
    with httpx.Client(timeout=PATIENCE_S, trust_env=False, verify=False) as client:
        processes = list(local.below(client, os.getpid()))
        assert {process.name.partition("-")[0] for process in processes} == {"router", "worker", "state"}
        for process in processes:
            for path in ("/metrics", "/status", "/loglevel", "/debug/logs", "/debug/stacks", "/debug/settings"):
                found[f"{process.name} {path}"] = client.get(f"{process.url}{path}").content
            open_metrics = {"Accept": "application/openmetrics-text"}
            found[f"{process.name} exemplars"] = client.get(f"{process.url}/metrics", headers=open_metrics).content
            spans = [client.get(f"{process.url}/debug/trace/{number + 1:032x}").content for number in range(traces)]
            found[f"{process.name} spans"] = b"\n".join(spans)
        for path in ("/status", "/console/state"):
            found[path] = client.get(f"{watched.system.management_url}{path}").raise_for_status().content
        public = client.get(f"{watched.system.url}/console/state", headers={"Authorization": f"Bearer {KEY}"})
        found["the public console"] = public.raise_for_status().content
    for name in ("router", "worker", "state"):
        (spans,) = (body for each, body in found.items() if each.startswith(name) and each.endswith(" spans"))
        assert b'"span_id"' in spans, f"no spans of the {name}"
    return found


def drawings(watched: Watched, requests: list[str], folder: Path) -> dict[str, bytes]:
    """What `lockstep trace` prints and writes of each request, `lockstep status`, and a profile with its summary."""
    url, found = watched.system.management_url, {}
    drawn = 0
    for request in requests:
        page = folder / f"{request}.html"
        code, output, notes = run("trace", request, "--url", url, "--html", str(page), within_s=60.0)
        found[f"trace of {request}"] = (output + notes).encode()
        if code == 0:
            found[f"page of {request}"] = page.read_bytes()
            drawn += "decode" in output
    assert drawn >= 3, "the one that was answered, and those whose ranks failed"
    _, *shown = run("status", "--url", url, within_s=60.0)
    return found | {"lockstep status": "".join(shown).encode()}


def profile(watched: Watched, client: Client, path: Path) -> dict[str, bytes]:
    """A profile of the steps of requests, and its summary."""
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            client.complete(40)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    try:
        arguments = ("--url", watched.system.management_url, "--steps", "10", "--out", str(path))
        code, *printed = run("profile", *arguments, within_s=PATIENCE_S)
    finally:
        is_over.set()
        loading.join(PATIENCE_S)
    assert code == 0, printed
    return {"a profile": gzip.decompress(path.read_bytes()), "a profile's summary": "".join(printed).encode()}


def canaries(texts: list[str], prompts: list[list[int]]) -> dict[str, bytes]:
    """What must be nowhere: the prompt and the ids of each prompt, the key, the secrets of the state server, parts of
    each output.
    """
    found = {"prompt": PROMPT, "key": KEY, "password": PASSWORD, "encryption key": ENCRYPTION_KEY}
    for number, ids in enumerate(prompts):
        found |= {f"ids of prompt {number} {mark!r}": mark.join(map(str, ids[:8])) for mark in (", ", ",", " ")}
    for text in texts:
        pieces = {text[begin : begin + 20] for begin in range(0, len(text) - 19, 10)}
        found |= {f"output {piece!r}": piece for piece in pieces if len(set(piece)) > 5}
    found |= {f"{name} in JSON": json.dumps(value)[1:-1] for name, value in found.items()}
    return {name: value.encode() for name, value in found.items()} | {"raw key": bytes.fromhex(ENCRYPTION_KEY)}


@pytest.mark.slow
def test_no_signal_has_a_prompt_an_output_or_a_key(watched: Watched, tmp_path: Path) -> None:
    """After answers, refused requests of many kinds, errors that quote requests, and a rank that crashed."""
    client = Client(watched.system)
    answers = [client.complete(40), client.complete(40, n=2, temperature=1.0, seed=5)]
    texts = [choice["text"] for answer in answers for choice in answer.raise_for_status().json()["choices"]]
    assert all(len(text.strip()) > 40 for text in texts)
    prompts = [
        client.post("/tokenize", {"model": MODEL, "prompt": prompt}).raise_for_status().json()["tokens"]
        for prompt in (PROMPT, *(FAILING.format(place) for place, _ in FAILURES))
    ]
    assert all(len(ids) > 8 for ids in prompts)
    statuses = refused(client)
    assert all(400 <= status < 500 for status in statuses), statuses
    failed(client, watched)
    asked = list(client.requests)
    signals = profile(watched, client, tmp_path / "profile.json.gz")
    time.sleep(0.3)  # lines of the log are written up to 0.1 s late
    signals |= pages(watched, len(asked)) | drawings(watched, [asked[0], *asked[-6:]], tmp_path)
    printed, parts = debug_bundle(tmp_path / "canary.tar.gz", "--pid", str(os.getpid()))
    signals |= parts | {"what the bundle says": printed.encode(), "the log": watched.log.read_bytes()}
    assert "rank 0" in printed
    assert "FAILED" in printed
    for said in (
        b"Segmentation fault",
        b"resumable stream failed",
        b"request failed",
        b"submit failed",
        b"rank failed in a step",
    ):
        assert said in signals["the log"], said
    leaks = [
        (what, name)
        for what, canary in canaries(texts, prompts).items()
        for name, body in signals.items()
        if canary in body
    ]
    assert not leaks
    lines = [line for line in signals["the log"].splitlines() if line]
    assert all(json.loads(line) for line in lines), "one JSON object a line"
    code, shown, _ = run("logs", str(watched.log), "--rank", "0", "--level", "error")
    assert (code, "rank failed" in shown) == (0, True)
