"""Fixtures for the worker's tests, and the path on which they find its scripted engine."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from harness import tokenizer_json


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
