"""The path on which these tests find their helpers, and the collectors of their traces."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from jaeger import jaeger, jaeger_program
from otlp_receiver import grpc_receiver
from slow_steps import sparing_steps
from spans import Collecting, Collector


@pytest.fixture(scope="module", params=["double", pytest.param("jaeger", marks=pytest.mark.exhaustive)])
def collecting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collecting]:
    """The double, and a real Jaeger where there is one."""
    with ExitStack() as end:
        if request.param == "double":
            receiver: Collector = end.enter_context(grpc_receiver())
        elif program := jaeger_program():
            receiver = end.enter_context(jaeger(program, tmp_path_factory.mktemp("jaeger")))
        else:
            pytest.skip("jaeger is not on PATH, and there is no kit for clusters (KUBE_KIT) that has it")
        yield Collecting(receiver, end)


@pytest.fixture(scope="module")
def receiver(collecting: Collecting) -> Collector:
    """What the collector has got."""
    return collecting.receiver


@pytest.fixture(scope="module")
def spares_cpu() -> Iterator[None]:
    """For a fixture that starts workers which are busy for minutes while their tests wait."""
    with sparing_steps():
        yield
