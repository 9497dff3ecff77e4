"""A real Prometheus that asks for native histograms gets them from a router of two processes and from a worker.

With Prometheus 2.42 that is a flag for all of its targets, and each histogram is stored in one form only: with the flag
as a native one, without it in its buckets.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from scraper import LONGEST, PATIENCE_S, Prometheus, service_targets
from system import MODEL, REFERENCE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("private_tmp")]

RELEASE = "main"
BEFORE, AFTER, TOKENS = 3, 4, 24
REQUESTS = 'lockstep_router_requests_total{endpoint="/v1/completions",code="200"}'
FIRST_TOKEN, BETWEEN, QUEUE = (
    "lockstep_router_time_to_first_token_seconds",
    "lockstep_router_inter_token_latency_seconds",
    "lockstep_worker_queue_seconds",
)
NATIVE = "native-histograms"
ABOVE_BASE = 2 ** (1 / 8)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A router of two processes and a worker."""
    settings = StackSettings(str(REFERENCE), router_processes=2, device="cpu", threads=1, log_level="warning")
    with Stack(settings) as running:
        running.wait_ready(PATIENCE_S)
        yield running


def ask(stack: Stack) -> None:
    """A request on a connection of its own, so that both processes may get some."""
    body = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False, verify=False)
    assert answer.status_code == 200


def value(prometheus: Prometheus, query: str) -> float:
    """The number that a query returns. After a scrape that has failed there is none until the next one."""
    return float(wait_for(lambda: prometheus.query(query), f"{query} has a value", PATIENCE_S)[0]["value"][1])


def until(prometheus: Prometheus, query: str, expected: float) -> None:
    wait_for(lambda: value(prometheus, query) == expected, f"{query} is {expected}", PATIENCE_S)


def test_both_forms_have_the_same_counts(stack: Stack, tmp_path: Path):
    for _ in range(BEFORE):
        ask(stack)
    # The processes of a router have no management port of their own: the parent answers for them.
    router = stack.management_url.removeprefix("http://")
    found = service_targets(os.getpid(), RELEASE, MODEL)
    targets = {each: labels for each, labels in found.items() if each == router or "model" in labels}
    assert len(targets) == 2
    with (
        Prometheus(tmp_path / "native", targets, features=(NATIVE,)) as native,
        Prometheus(tmp_path / "classic", targets) as classic,
    ):
        for each in (native, classic):
            each.until_scraped(targets)
        for name in (FIRST_TOKEN, QUEUE):
            until(native, f"sum(histogram_count({name}))", BEFORE)  # what was counted before the first scrape
        began = time.monotonic()
        for _ in range(AFTER):
            ask(stack)
        took_s = time.monotonic() - began
        for each in (native, classic):  # counted when a request has ended, and with it all of its values
            until(each, f"sum({REQUESTS})", BEFORE + AFTER)
        for name in (FIRST_TOKEN, QUEUE):
            until(native, f"sum(histogram_count({name}))", BEFORE + AFTER)
            until(classic, f"sum({name}_count)", BEFORE + AFTER)
        assert value(native, f"sum(histogram_sum({FIRST_TOKEN}))") == pytest.approx(
            value(classic, f"sum({FIRST_TOKEN}_sum)")
        )

        # How many deliveries there were is not known beforehand: the classic form says it.
        between = value(classic, f"sum({BETWEEN}_count)")
        until(native, f"sum(histogram_count({BETWEEN}))", between)
        median_s = value(native, f"histogram_quantile(0.5, sum(rate({BETWEEN}[{LONGEST}])))")
        assert 0 < median_s < took_s
        below = f'sum(rate({BETWEEN}_bucket{{le="%s"}}[{LONGEST}])) / sum(rate({BETWEEN}_count[{LONGEST}]))'
        bounds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
        shares = {bound: value(classic, below % bound) for bound in bounds}
        upper = next(bound for bound, share in shares.items() if share >= 0.5)
        lower = max((bound for bound, share in shares.items() if share < 0.5), default=0.0)
        assert lower / ABOVE_BASE <= median_s <= upper * ABOVE_BASE

        # Each process of the router has series of its own, beside what the supervisor knows.
        until(native, "sum(lockstep_router_process_up)", 2)
        wait_for(
            lambda: {each["metric"]["process"] for each in native.query(FIRST_TOKEN)} == {"0", "1"},
            "both processes have series",
            PATIENCE_S,
        )
        assert value(native, "sum(lockstep_router_generated_tokens_total)") == (BEFORE + AFTER) * TOKENS
        assert native.query(f"{FIRST_TOKEN}_bucket") == native.query(f"{FIRST_TOKEN}_count") == []
        assert classic.query(f"histogram_count({FIRST_TOKEN})") == []
