"""The three workers that the contract holds for: the router's double, the worker on a scripted engine, the real one."""

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "services/router/tests"))
sys.path.append(str(Path(__file__).parents[2] / "services/inference-worker/tests"))

from implementations import DOUBLE, REAL, SCRIPTED, Implementation, RealProcess, double, real, scripted


@pytest.fixture(scope="module")
def real_process(private_tmp: Path) -> Iterator[RealProcess]:
    """A worker process with two ranks; started for the first test that wants it."""
    process = RealProcess(private_tmp / "real.sock")
    yield process
    process.stop()


@pytest.fixture
async def worker(
    request: pytest.FixtureRequest, real_process: RealProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Implementation]:
    """The implementation that the test is run against."""
    path = tmp_path_factory.mktemp("w") / "s"
    assert len(os.fsencode(path)) < 100
    context = {DOUBLE: double, SCRIPTED: scripted}.get(request.param)
    async with context(path) if context else real(real_process) as implementation:
        yield implementation


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module's IMPLEMENTATIONS names the workers for its tests; all three by default."""
    if "worker" in metafunc.fixturenames:
        chosen = getattr(metafunc.module, "IMPLEMENTATIONS", (DOUBLE, SCRIPTED, REAL))
        metafunc.parametrize("worker", chosen, indirect=True)
