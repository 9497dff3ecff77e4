"""After a scripted load over all services each query of each dashboard and rule returns data in a real Prometheus."""

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from dashboard_table import AFTER_FAULTS, OTHER_STACK
from lockstep_tools.debug.local import below
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from minutes import until_room_s
from redis_server import RedisServer
from scraper import PATIENCE_S, Prometheus, queries
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL, REFERENCE, System

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("private_tmp")]

RELEASE = "main"
KEY, LIMITED_KEY = "lsk-for-dashboards", "lsk-for-dashboards-limited"
RANKS = 2
HEADERS = {"authorization": f"Bearer {KEY}"}
MOST_STREAMS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboards")


@pytest.fixture(scope="module")
def redis(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder / "redis")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def stack(redis: RedisServer, folder: Path, slow_steps: SlowSteps) -> Iterator[Stack]:
    """Two routers with keys of two tenants, two workers of two ranks, and a state server with Redis."""
    tenants = [tenant("search", KEY, 100_000), tenant("limited", LIMITED_KEY, 1)]
    keys = folder / "keys.yaml"
    keys.write_text(json.dumps({"tenants": tenants}))
    settings = StackSettings(
        str(REFERENCE), workers=2, tp=RANKS, routers=2, device="cpu", threads=1, host_cache="32Mi", kv_memory="8Mi",
        remote_cache=True, state=redis.address, log_level="warning",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_KEYS_FILE", str(keys))
        patch.setenv("LOCKSTEP_MAX_STREAMS", str(MOST_STREAMS))
        patch.setenv("LOCKSTEP_LIMITS_STORAGE", redis.address)
        with Stack(settings) as running:
            running.wait_ready(PATIENCE_S)
            yield running


def tenant(name: str, key: str, requests_per_minute: int) -> dict[str, object]:
    keys = [{"sha256": hashlib.sha256(key.encode()).hexdigest()}]
    return {"name": name, "keys": keys, "requests_per_minute": requests_per_minute}


@pytest.fixture(scope="module")
def system(stack: Stack) -> System:
    return System(stack.url, stack.management_url)


@pytest.fixture(scope="module")
def prometheus(stack: Stack, folder: Path) -> Iterator[Prometheus]:
    with httpx.Client(timeout=PATIENCE_S, trust_env=False, verify=False) as client:
        services = [(each.name, each.url.removeprefix("http://")) for each in below(client, os.getpid())]
    targets = {}
    for number, (name, address) in enumerate(services):
        labels = {"model": MODEL} if name.startswith("worker") else {}
        targets[address] = {"release": RELEASE, "pod": f"{name.replace(' ', '-')}-{number}", **labels}
    assert len(targets) == 2 + 2 + 1
    with Prometheus(folder / "prometheus", targets) as running:
        running.until_scraped(targets)
        yield running


def ask(url: str, key: str = KEY, **fields: object) -> int:
    """The status of an answer that is read to its end."""
    body = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": 40, "ignore_eos": True} | fields
    answer = httpx.post(
        f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"},
        timeout=PATIENCE_S, trust_env=False, verify=False,
    )  # fmt: skip
    return answer.status_code


def load(stack: Stack) -> None:
    """What clients of a healthy service do: at both routers a plain request, a stream that can be resumed and is read
    at the other router too, and a prompt of several blocks.
    """
    prompt = "It was night, and the rain fell on the house by the sea. " * 12
    for url, other in (stack.urls, stack.urls[::-1]):
        assert ask(url) == 200
        assert ask(url, prompt=prompt) == 200
        with begun(url, 60) as (answer, lines):
            stream_id = answer.headers["x-lockstep-stream-id"]
            for _ in lines:
                pass
        assert resume(url, stream_id) == 200
        # The copy comes a little later: after up to 50 ms, and what the state server takes for it.
        wait_for(partial(is_known, other, stream_id), "the stream is mirrored", PATIENCE_S)


def resume(url: str, stream_id: str) -> int:
    answer = httpx.get(
        f"{url}/v1/streams/{stream_id}", headers=HEADERS, timeout=PATIENCE_S, trust_env=False, verify=False
    )
    return answer.status_code


def is_known(url: str, stream_id: str) -> bool:
    status = resume(url, stream_id)
    assert status in (200, 404)
    return status == 200


@contextmanager
def begun(url: str, tokens: int) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    """A stream of which something has come."""
    body = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": tokens, "ignore_eos": True}
    headers = HEADERS | {"x-lockstep-resumable": "true"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True}, headers=headers, timeout=PATIENCE_S,
        trust_env=False, verify=False,
    ) as answer:  # fmt: skip
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        yield answer, lines


def harm(stack: Stack, system: System, slow_steps: SlowSteps) -> None:
    """What goes wrong: a rank dies below a stream, a tenant is at its limit, and a router is full."""
    with slow_steps.during(), begun(stack.url, SLOW_TOKENS) as (_, lines):
        psutil.Process(system.serving(PATIENCE_S)["ranks"][1]["pid"]).kill()
        slow_steps.end()
        for _ in lines:
            pass
    time.sleep(until_room_s())
    assert [ask(stack.url, LIMITED_KEY) for _ in range(2)] == [200, 429]
    with slow_steps.during(), ExitStack() as held:
        for _ in range(MOST_STREAMS):
            held.enter_context(begun(stack.url, SLOW_TOKENS))
        assert ask(stack.url) == 503
    system.until_ready(PATIENCE_S)


def without_data(prometheus: Prometheus, stack: Stack, known: Collection[str]) -> set[str]:
    """What returns no data, but for names that begin as one of `known`, and those of `known` that
    name only what returns some.
    """
    missing = queries(RELEASE)

    def found() -> bool:
        # Windows of rules are 10 s here, which a slow machine takes for all queries, and of nothing there is no rate.
        ask(stack.url)
        for where in [where for where, query in missing.items() if prometheus.has_data(query)]:
            del missing[where]
        return all(where.startswith(tuple(known)) for where in missing)

    # Two scrapes after a change there is a rate.
    with suppress(AssertionError):
        wait_for(found, "data", 45.0, every_s=1.0)
    unknown = {where for where in missing if not where.startswith(tuple(known))}
    return unknown | {each for each in known if not any(where.startswith(each) for where in missing)}


def test_each_query_returns_data(stack: Stack, system: System, prometheus: Prometheus, slow_steps: SlowSteps) -> None:
    """In a healthy service all but those of faults, too: a panel that is empty until something fails says nothing."""
    load(stack)
    # A rate needs a change between two scrapes, and all of this load may have come before the first.
    counted = "lockstep_router_request_duration_seconds_count"
    wait_for(lambda: prometheus.has_data(counted), "requests are scraped", PATIENCE_S)
    load(stack)
    assert without_data(prometheus, stack, AFTER_FAULTS.keys() | OTHER_STACK.keys()) == set()
    harm(stack, system, slow_steps)
    assert without_data(prometheus, stack, OTHER_STACK.keys()) == set()
