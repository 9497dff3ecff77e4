"""Fixtures for the tests of the command line, and the path on which they find the fake endpoint."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MODEL = TESTS.parents[1] / "models/reference"

sys.path[:0] = [str(TESTS), str(TESTS.parent / "bench")]

import scripted_cluster  # noqa: E402
from fake_openai import FakeOpenAI  # noqa: E402


@pytest.fixture
def model() -> str:
    """A directory that `lockstep serve` accepts as a model."""
    return str(MODEL)


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    """An OpenAI endpoint with scripted answers."""
    with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replaces the services by the stub router and worker; returns the directory in which they record their starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "stubs"), *filter(None, sys.path)]))
    monkeypatch.setenv("STUB_NOTES", str(tmp_path))
    monkeypatch.setenv("STUB_PLAN", "{}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine may have too few GPUs for a test's workers
    return tmp_path


@pytest.fixture
def lockstep() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in a separate process."""

    def run(*arguments: str, stdin: str = "", timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lockstep_tools.cli", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ,
        )

    return run


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces kubectl by a scripted cluster; returns the directory of its state."""
    monkeypatch.setenv("PATH", f"{scripted_cluster.install(tmp_path)}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLUSTER", str(tmp_path))
    monkeypatch.setenv("SECONDS_CUT", "1")
    return tmp_path
