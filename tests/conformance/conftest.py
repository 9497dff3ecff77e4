"""One system of two workers for all conformance tests, and the official client in front of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import httpx
import openai
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import standing_still
from system import REFERENCE, System

_IN_FLIGHT = 16
"""More than the steps whose results may come after the last stream has been cancelled. A stream that goes on makes
hundreds."""
_TRIES = 5


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        # Tests stop ranks, and a machine may pause a test meanwhile: no rank must count as one that hangs.
        patch.setenv("LOCKSTEP_DECODE_DEADLINE_S", "600")
        patch.setenv("LOCKSTEP_PREFILL_DEADLINE_S", "600")
        with Stack(StackSettings(str(REFERENCE), workers=2, threads=1, device="cpu")) as running:
            running.wait_ready(60)
            yield running


@pytest.fixture(scope="package")
def system(stack: Stack) -> System:
    return System(stack.url, stack.management_url)


@pytest.fixture
def steps_at_rest(system: System) -> Callable[[], int]:
    """Waits until no stream runs and all blocks are free, and returns how many steps the workers have made."""
    return lambda: sum(each["steps"] for each in system.until_at_rest().values())


@pytest.fixture
def ranks_stand(system: System, steps_at_rest: Callable[[], int]) -> Callable[[], AbstractContextManager[None]]:
    """No rank makes a step while what this gives is entered, so that no stream ends by itself, however long the machine
    pauses a process. Leaving it waits until every stream has been cancelled, lets the ranks go on, and checks that they
    make no further step but those in flight.
    """

    @contextmanager
    def ranks_stand() -> Iterator[None]:
        with standing_still([rank["pid"] for worker in system.until_ready().values() for rank in worker["ranks"]]):
            yield
            steps = steps_at_rest()
        assert steps_at_rest() - steps <= _IN_FLIGHT

    return ranks_stand


@pytest.fixture
def standing_stream(
    system: System, ranks_stand: Callable[[], AbstractContextManager[None]]
) -> Callable[[Callable[[], Any]], AbstractContextManager[Any]]:
    """Begins a stream and stops the ranks in the middle of it, as `ranks_stand` does. The test has to close it."""

    def runs() -> bool:
        """Once the worker's report shows the stream too, unless the stream has ended."""
        workers = system.until(
            lambda all_: all(not each["streams"] or each["running"] for each in all_.values()),
            "the worker has reported",
        )
        return any(each["streams"] for each in workers.values())

    @contextmanager
    def standing_stream(begin: Callable[[], Any]) -> Iterator[Any]:
        for _ in range(_TRIES):  # where the machine pauses the test, the stream may end before the ranks stand
            with closing(begin()) as stream, ranks_stand():
                if runs():
                    yield stream
                    return
        pytest.fail("the stream has ended before the ranks stood, in every try")

    return standing_stream


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=system.api, api_key="anybody", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(system: System) -> Iterator[httpx.Client]:
    """A plain HTTP client, for what the official client hides."""
    with httpx.Client(base_url=system.api, timeout=60, trust_env=False, verify=False) as client:
        yield client
