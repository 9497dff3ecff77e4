"""Slow steps: a stream that must not end before its fault takes as long on a fast machine as on a slow one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SLOW_TOKENS = 400
"""Tokens of a stream that is slow until its fault: they last 20 s, more than all that comes before the fault."""
_PAUSE_MS = "10"
_CHANGES = Path(__file__).parent / "integration/slow_rank"


class SlowSteps:
    """While `file` exists, each step of a worker takes 50 ms longer. So do those of ranks that start meanwhile."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @contextmanager
    def during(self) -> Iterator[None]:
        """Slow from here to the end of the block, or to `end` in it."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        self.file.touch()

    def end(self) -> None:
        """After the fault, so that the rest of a stream does not take long."""
        self.file.unlink(missing_ok=True)


@contextmanager
def slow_steps_in(folder: Path) -> Iterator[SlowSteps]:
    """Of all workers that are started within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_RANK_FILE", str(folder / "slow"))
        patch.setenv("PYTHONPATH", str(_CHANGES), prepend=os.pathsep)
        yield SlowSteps(folder / "slow")


@contextmanager
def sparing_steps() -> Iterator[None]:
    """Workers that are started within the block sleep for most of each step: busy for minutes, they leave the CPU to
    other tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEP_PAUSE_MS", _PAUSE_MS)
        patch.setenv("PYTHONPATH", str(_CHANGES), prepend=os.pathsep)
        yield
