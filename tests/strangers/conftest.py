"""Other projects' clients against real systems. They run in an environment of their own: `make test-strangers`.

The systems run in the project's environment (`LOCKSTEP_PYTHON`, by default .venv's). Nothing here imports the project.
"""

import importlib.metadata
import importlib.util
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices when it is imported
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["NO_PROXY"] = "127.0.0.1"

sys.path.insert(0, str(Path(__file__).parent))

_ROOT = Path(__file__).resolve().parents[2]
_PYTHON = os.environ.get("LOCKSTEP_PYTHON") or str(_ROOT / ".venv/bin/python")
_START_S = 180.0
_END_S = 30.0

if any(importlib.util.find_spec(name) is None for name in ("litellm", "langchain_openai", "instructor")):
    collect_ignore_glob = ["test_*.py"]  # the project's own environment does not have them


@pytest.fixture(scope="session")
def urls() -> Iterator[dict[str, str]]:
    """The base URLs of the two systems of `server.py`."""
    command = [_PYTHON, str(Path(__file__).with_name("server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(server.stdout, selectors.EVENT_READ)
                assert selector.select(_START_S), "the systems did not start in time"
            line = server.stdout.readline()
            assert line, "the systems did not start: see above"
            yield json.loads(line)
            server.stdin.close()
            assert server.wait(_END_S) == 0
        finally:
            if server.poll() is None:
                server.kill()


@pytest.fixture(scope="session")
def real(urls: dict[str, str]) -> str:
    return urls["real"]


@pytest.fixture(scope="session")
def scripted(urls: dict[str, str]) -> str:
    return urls["scripted"]


def pytest_report_header() -> list[str]:
    """The versions of the tested clients of others."""
    versions = (f"{name} {_version(name)}" for name in ("litellm", "langchain-openai", "instructor", "openai"))
    return [f"strangers: {', '.join(versions)}", f"systems run with {_PYTHON}, tests with {sys.executable}"]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
