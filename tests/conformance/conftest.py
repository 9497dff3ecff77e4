"""One system of two workers for all conformance tests, and the official client in front of it."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from system import REFERENCE, System


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    with Stack(StackSettings(str(REFERENCE), workers=2, threads=1, device="cpu")) as running:
        running.wait_ready(60)
        yield running


@pytest.fixture(scope="package")
def system(stack: Stack) -> System:
    return System(stack.url, stack.management_url)


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=system.api, api_key="anybody", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(system: System) -> Iterator[httpx.Client]:
    """A plain HTTP client, for what the official client hides."""
    with httpx.Client(base_url=system.api, timeout=60, trust_env=False, verify=False) as client:
        yield client
