"""A slow client, a slow Redis, a long prompt: the drawing of `lockstep trace` says which of them it was."""

import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from redis_server import RedisServer
from serving import run
from system import MODEL, REFERENCE, System
from tcp_proxy import TcpProxy, proxy_before

KEY = "lsk-for-the-tests-of-causes"
PROMPT_TOKENS = 1900
BATCH_TOKENS = 256
PATIENCE_S = 120.0
REDIS_TIMEOUT_S = 10
"""The longest that can be set."""
SAMPLED = "00-{:032x}-00000000000000aa-01"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpProxy]:
    """The way to a Redis for the limits."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    with proxy_before(server.port) as proxy:
        yield proxy
    server.kill()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, redis: TcpProxy) -> Iterator[System]:
    """A worker behind a router that counts limits in Redis; traces stay in their memory."""
    keys = tmp_path_factory.mktemp("causes") / "keys.yaml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f"tenants:\n- name: search\n  requests_per_minute: 1000\n  keys:\n  - sha256: '{digest}'\n")
    settings = {
        "OTEL_TRACES_EXPORTER": "memory",
        "OTEL_TRACES_SAMPLER_ARG": "0",
        "LOCKSTEP_KEYS_FILE": str(keys),
        "LOCKSTEP_LIMITS_STORAGE": f"redis://127.0.0.1:{redis.port}/0",
        "LOCKSTEP_LIMITS_STORAGE_TIMEOUT_S": str(REDIS_TIMEOUT_S),
        "LOCKSTEP_WRITE_TIMEOUT_S": "600",
        "LOCKSTEP_MAX_BATCH_TOKENS": str(BATCH_TOKENS),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with Stack(StackSettings(str(REFERENCE), device="cpu", threads=1, log_level="warning")) as stack:
            stack.wait_ready(PATIENCE_S)
            yield System(stack.url, stack.management_url)


def headers(number: int, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}", "X-Request-ID": name, "traceparent": SAMPLED.format(number)}


def complete(system: System, number: int, name: str, **fields: Any) -> float:
    """The seconds that an answer takes."""
    began_s = time.monotonic()
    body = {"model": MODEL, "ignore_eos": True} | fields
    answer = httpx.post(
        f"{system.api}/completions", json=body, headers=headers(number, name), timeout=PATIENCE_S, trust_env=False
    )
    answer.raise_for_status()
    return time.monotonic() - began_s


def drawing(system: System, name: str, folder: Path) -> tuple[str, list[str]]:
    """What a request's drawing names as the cause, and its lines for spans. The page says the same."""
    page = folder / f"{name}.html"

    def drawn_whole() -> str:
        code, output, notes = run("trace", name, "--url", system.management_url, "--html", str(page), within_s=60.0)
        assert code == 0 or "no spans of" in notes, notes
        return output if code == 0 and re.search(r"^ *request ", output, re.MULTILINE) else ""

    # The span of a request ends when its client has the answer already.
    _, causes, *drawn = wait_for(drawn_whole, "the request is in the router's memory").splitlines()
    assert causes.split("; ")[0].replace("&", "&amp;") in page.read_text()
    return causes.removeprefix("its time: ").split(" (")[0], drawn


@pytest.mark.slow
def test_a_slow_redis(system: System, redis: TcpProxy, tmp_path: Path) -> None:
    fields = {"prompt": "canary", "max_tokens": 5}
    complete(system, 1, "usual", **fields)  # connects to Redis
    # Each way; a use of Redis has two ways, so it takes 4.8 s: longer than a pause of a process of a busy machine.
    delay_s = 0.24 * REDIS_TIMEOUT_S
    redis.delay_s = (delay_s, delay_s)
    try:
        complete(system, 3, "slow-redis", **fields)
    finally:
        redis.delay_s = (0.0, 0.0)
    cause, drawn = drawing(system, "slow-redis", tmp_path)
    assert cause == "Redis of the limits"
    assert [line.split()[0] for line in drawn[:2]] == ["request", "limits"]


@pytest.mark.slow
def test_a_long_prompt(system: System, tmp_path: Path) -> None:
    complete(system, 4, "long-prompt", prompt=[100 + each % 50 for each in range(PROMPT_TOKENS)], max_tokens=1)
    cause, drawn = drawing(system, "long-prompt", tmp_path)
    assert cause == "computing the prompt"
    chunks = -(-PROMPT_TOKENS // BATCH_TOKENS)
    assert any(re.match(rf" +prefill in {chunks} chunks ", line) for line in drawn), drawn


@pytest.mark.slow
def test_a_slow_client(system: System, tmp_path: Path) -> None:
    """It reads nothing until the worker has nothing to do any more, and for twice as long after that. The answer has
    4 MB, more than the buffers on its way.
    """
    fields = {"n": 8, "max_tokens": 300, "logprobs": True, "top_logprobs": 20, "stream": True, "ignore_eos": True}
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "canary"}]} | fields).encode()
    lines = [f"{name}: {value}" for name, value in headers(5, "slow-client").items()]
    head = "\r\n".join(
        ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines, "\r\n"]
    )
    address = httpx.URL(system.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect((address.host, address.port))
        began_s = time.monotonic()
        client.sendall(head.encode() + body)
        system.until(lambda workers: workers["w0"]["running"], "the answers are computed", PATIENCE_S)
        system.until(lambda workers: not workers["w0"]["running"], "nothing runs", PATIENCE_S)
        resumed_s = time.monotonic() + 2 * (time.monotonic() - began_s)
        wait_for(lambda: time.monotonic() > resumed_s, "the client reads again", PATIENCE_S)
        answer = b""
        while b"data: [DONE]" not in answer[-100:]:
            answer += client.recv(1 << 16)
    wait_for(lambda: system.router()["streams"] == 0, "the request has ended")
    cause, drawn = drawing(system, "slow-client", tmp_path)
    assert cause == "waiting for the client to read"
    assert any(re.match(r" +client was slow (once|\d+ times) ", line) for line in drawn), drawn
