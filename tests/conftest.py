"""Options, fixtures and paths of the tests that span services. They run real processes on the reference model."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machine import be_subreaper
from slow_steps import SlowSteps, slow_steps_in

_SUMMARY = "summary"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lockstep", "faults (tests/chaos, tests/cluster, tests/hostile)")
    group.addoption("--kills", type=int, default=3, help="processes to kill under load (default: %(default)s)")
    group.addoption("--phase-streams", type=int, default=80, help="before, in, after a fault (default: %(default)s)")
    group.addoption("--restarts", type=int, default=3, help="starts and stops of a stack (default: %(default)s)")
    group.addoption("--chaos-seed", type=int, default=None, help="seed of the random choices (default: a new one)")
    group.addoption("--fuzz-cases", type=int, default=1000, help="requests from the schema (default: %(default)s)")
    group.addoption("--fuzz-seconds", type=float, default=None, help="instead of so many cases, where doors are fuzzed")
    group.addoption("--fuzz-seed", type=int, default=None, help="of these requests (default: a new one)")
    group.addoption("--times", type=int, default=1, help="trials of each experiment (default: %(default)s)")
    simulation = parser.getgroup("lockstep", "simulation (tests/simulation)")
    simulation.addoption("--simulated-streams", type=int, default=None, help="streams (default: some thousand)")
    simulation.addoption("--simulation-seed", type=int, default=0, help="the first seed (default: %(default)s)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, line in report.user_properties:
                    if name == _SUMMARY:
                        terminalreporter.write_line(line)


@pytest.fixture
def summarize(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Adds a line to the end of pytest's output, also where pytest-xdist runs the test in another process."""
    return partial(record_property, _SUMMARY)


@pytest.fixture(scope="session", autouse=True)
def _subreaper() -> None:
    be_subreaper()


@pytest.fixture(scope="module")
def slow_steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowSteps]:
    """Of the workers of this module. A fixture that starts them has to ask for it."""
    with slow_steps_in(tmp_path_factory.mktemp("slow-steps")) as steps:
        yield steps


@pytest.fixture(scope="module")
def private_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory for temporary files of this module's processes: short enough for sockets, and private."""
    tmp_path_factory.getbasetemp()  # its path must be fixed before TMPDIR changes
    with tempfile.TemporaryDirectory(prefix="ls-") as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", path)
        patch.setattr(tempfile, "tempdir", path)
        yield Path(path)
