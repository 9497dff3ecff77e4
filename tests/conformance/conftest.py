"""One system of two workers for all conformance tests, and the official client in front of it."""

import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from system import REFERENCE, Json, System, is_idle


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    with Stack(StackSettings(str(REFERENCE), workers=2, threads=1, device="cpu")) as running:
        running.wait_ready(60)
        yield running


@pytest.fixture(scope="package")
def system(stack: Stack) -> System:
    return System(stack.url, stack.management_url)


@pytest.fixture
def steps_at_rest(system: System) -> Callable[[], int]:
    """Waits until no stream runs and all blocks are free, and returns how many steps the workers have made.

    A worker's last report may be from before the last stream, or from its first half: what it says counts when it has
    come after the router had no stream any more.
    """

    def steps_at_rest() -> int:
        system.until(lambda workers: not any(each["streams"] for each in workers.values()), "no stream runs")
        ended_s = time.monotonic()

        def workers_at_rest() -> list[Json]:
            asked_s = time.monotonic()
            workers = list(system.workers().values())
            are_at_rest = all(
                not each["streams"] and is_idle(each) and each["last_seen_s"] < asked_s - ended_s for each in workers
            )
            return workers if are_at_rest else []

        return sum(each["steps"] for each in wait_for(workers_at_rest, "all blocks are free"))

    return steps_at_rest


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=system.api, api_key="anybody", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(system: System) -> Iterator[httpx.Client]:
    """A plain HTTP client, for what the official client hides."""
    with httpx.Client(base_url=system.api, timeout=60, trust_env=False, verify=False) as client:
        yield client
