"""A private directory for sockets that is removed after its owner has ended, also when the owner was killed.

The owner holds a lock on a file in it. The next owner removes directories whose lock is free.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "lockstep-stack-"
_LOCK = "lock"
_LONGEST_PATH = 90  # a socket's path has at most 107 bytes, with its own name


class SocketDirectory:
    """A new directory that only this user can enter, with a path short enough for sockets in it."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) + len(f"/{_PREFIX}12345678") > _LONGEST_PATH:
            parent = "/tmp"  # noqa: S108 - mkdtemp makes it private
        _remove_abandoned(Path(parent))
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._lock: int | None = os.open(f"{self.path}/{_LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(f"{self.path}/{_LOCK}.new", f"{self.path}/{_LOCK}")  # it gets its name when the lock is held

    def remove(self) -> None:
        """Remove it with all that is in it; can be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
