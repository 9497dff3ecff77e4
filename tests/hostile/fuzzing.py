"""Runs the cases of a fuzz."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a connection of HTTP/2 begins with."""
_AT_ONCE = 8


async def run_cases(config: pytest.Config, case: Callable[[], Awaitable[None]], *, share: int, timeout_s: float) -> int:
    """Run cases, some at once, as long as `--fuzz-seconds` says, or one `share`-th of `--fuzz-cases`; returns how many.

    They draw in turns, so that a seed makes the same cases.
    """
    seconds = config.getoption("--fuzz-seconds")
    end_s = float("inf") if seconds is None else time.monotonic() + seconds
    count = config.getoption("--fuzz-cases") // share
    left: Iterator[int] = iter(range(count)) if seconds is None else itertools.count()
    done = 0

    async def runner() -> None:
        nonlocal done
        for _ in left:
            if time.monotonic() > end_s:
                return
            async with asyncio.timeout(timeout_s):
                await case()
            done += 1

    await asyncio.gather(*(runner() for _ in range(_AT_ONCE)))
    return done
