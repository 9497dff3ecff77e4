"""Fixtures for the worker's tests, and the path on which they find its scripted engine."""

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from harness import Served, make_settings, served, tokenizer_json
from scripted_kv import ScriptedKv, serving


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lockstep", "the worker's tests").addoption(
        "--damage-cases", type=int, default=20, help="answers with damaged blocks, at least 8 (default: %(default)s)"
    )


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory with the files that the worker itself reads."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "tokenizer.json").write_text(tokenizer_json("hello"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "{{ messages }}"}')
    return directory


@pytest.fixture
def socket_path() -> Iterator[str]:
    """A path short enough for a unix socket."""
    directory = tempfile.mkdtemp(prefix="lockstep-")
    yield f"{directory}/s"
    shutil.rmtree(directory)


@pytest.fixture
async def worker(model_dir: Path, socket_path: str) -> AsyncIterator[Served]:
    """A worker with a scripted engine."""
    async with served(make_settings(model_dir, socket_path)) as running:
        yield running


@pytest.fixture
def target(socket_path: str) -> str:
    """The address of a scripted state server."""
    return f"unix:{socket_path}"


@pytest.fixture
async def kv(target: str) -> AsyncIterator[ScriptedKv]:
    """A scripted state server."""
    async with serving(ScriptedKv(), target) as running:
        yield running
