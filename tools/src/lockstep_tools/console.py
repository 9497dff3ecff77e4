"""Where commands write: rich consoles that are colourful on a terminal and plain anywhere else."""

import sys

from rich.console import Console

_PLAIN_WIDTH = 160  # wide enough that a table in a log file is not folded


def output() -> Console:
    """Results, on stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def notes() -> Console:
    """Progress and remarks, on stderr."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PLAIN_WIDTH)
