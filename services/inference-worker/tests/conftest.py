"""Fixtures for the worker's tests, and the path on which they find its scripted engine."""

import argparse
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

FEWEST_DAMAGE_CASES = 8
"""The first of them without damage is the eighth."""


def damage_cases(text: str) -> int:
    """The value of an option."""
    if int(text) < FEWEST_DAMAGE_CASES:
        raise argparse.ArgumentTypeError(f"at least {FEWEST_DAMAGE_CASES}: fewer answers show nothing")
    return int(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lockstep", "the worker's tests").addoption(
        "--damage-cases",
        type=damage_cases,
        default=20,
        help="answers of test_kv_damage_engine.py, most with damaged blocks (default: %(default)s)",
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
