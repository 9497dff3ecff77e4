"""Files that are read again when they change: the check for a change, and the task that makes it once a second.

cert-manager and the kubelet replace files by swapping a symbolic link, so a path is followed at each check. The module
reads no contents.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

logger = logging.getLogger("lockstep.files")

Signature = tuple[int, int, int] | None


class Watched(Protocol):
    """What is made of one or several files."""

    @property
    def check_s(self) -> float:
        """Shortest interval between two checks of the files, in seconds."""

    def check(self) -> None:
        """Read the files if they have changed. Called in a thread; problems are reported by the object itself."""


def signature_of(path: str | None) -> Signature:
    """What changes with a file: its inode, time and size; None for no path, or no such file."""
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@asynccontextmanager
async def watched(*objects: Watched) -> AsyncIterator[None]:
    """Check the files periodically, so that a problem is reported before something needs them."""
    failing: set[int] = set()

    async def check(number: int, each: Watched) -> None:
        try:
            await asyncio.to_thread(each.check)
        except Exception:  # for example, no thread can be started: the next check may succeed
            if number not in failing:
                logger.exception("files not checked")
            failing.add(number)
        else:
            failing.discard(number)

    async def watch() -> None:
        while True:
            await asyncio.sleep(min(each.check_s for each in objects))
            for number, each in enumerate(objects):
                await check(number, each)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
