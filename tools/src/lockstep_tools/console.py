"""Where commands write: rich consoles that are colourful on a terminal and plain anywhere else."""

import sys
from typing import IO

from rich.console import Console

from lockstep_tools.escaping import harmless

_PLAIN_WIDTH = 160  # wide enough that a table in a log file is not folded


_TEXT = "\n\t\u200c\u200d"  # the last two join or separate letters, and make one emoji of several


def generated(text: str, file: IO[str]) -> str:
    """A model's text for a file: on a terminal with every character escaped that it would act on, else unchanged."""
    return harmless(text, keep=_TEXT) if file.isatty() else text


def output() -> Console:
    """Results, on stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def notes() -> Console:
    """Progress and remarks, on stderr."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PLAIN_WIDTH)
