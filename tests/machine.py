"""What a system leaves behind on this machine: processes, shared memory, files for sockets, ports.

With `be_subreaper` orphans of whatever a test started become children of the test's own process, so that all are
found. Other processes of the machine are ignored.
"""

import ctypes
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

Found = TypeVar("Found")

PATIENCE_S = 30.0
"""When a test gives up that waits for something of which no time is demanded; machines may be slow and busy."""

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SHARED_MEMORY = Path("/dev/shm")


def wait_for(find: Callable[[], Found], what: str, within_s: float = PATIENCE_S, *, every_s: float = 0.01) -> Found:
    """The first true value of `find`; fails the test when there is none in time."""
    deadline_s = time.monotonic() + within_s
    while not (found := find()):
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return found


def be_subreaper() -> None:
    """Orphans among this process's descendants become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True)
class Traces:
    """What is on the machine at one time."""

    processes: frozenset[psutil.Process]
    """Descendants of this process, zombies too."""
    shared_memory: frozenset[str]
    temporary: frozenset[str]
    """Files of Lockstep in the directory for temporary files."""

    def __sub__(self, other: "Traces") -> list[str]:
        """Descriptions of what is here and not in `other`."""
        return [
            *(f"process {describe(process)}" for process in self.processes - other.processes),
            *(f"shared memory {name}" for name in self.shared_memory - other.shared_memory),
            *(f"temporary {name}" for name in self.temporary - other.temporary),
        ]


def traces() -> Traces:
    """The current state."""
    return Traces(
        frozenset(descendants(os.getpid())),
        frozenset(path.name for path in _SHARED_MEMORY.iterdir()),
        frozenset(path.name for path in Path(tempfile.gettempdir()).glob("lockstep*")),
    )


def left_since(before: Traces, within_s: float = PATIENCE_S) -> list[str]:
    """What has come since `before` and has not gone after `within_s`, in words."""
    deadline_s = time.monotonic() + within_s
    while (left := traces() - before) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one; none if it is gone."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill(pid: int) -> bool:
    """SIGKILL a descendant of this process; false if there is none of this number (any more)."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if any(parent.pid == os.getpid() for parent in process.parents()):
            process.kill()
            return True
    return False


@contextmanager
def standing_still(pids: Collection[int]) -> Iterator[None]:
    """Processes are stopped while this is entered."""
    stopped: list[int] = []
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def bury_orphans(others: Collection[psutil.Process], within_s: float = 2.0) -> list[str]:
    """Wait for the ends of what is below this process beside `others`; those that still run after `within_s`, in words.

    Orphans of a killed process come here, those too that it started last. A zombie does not run: the kernel keeps it
    unreaped while a thread of it waits for a slow disk, so it has until PATIENCE_S.
    """
    began_s = time.monotonic()
    while True:
        orphans = set(descendants(os.getpid())).difference(others)
        for process in orphans:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        running = [describe(process) for process in orphans if process.is_running() and not is_zombie(process)]
        took_s = time.monotonic() - began_s
        if not orphans or took_s > (within_s if running else PATIENCE_S):
            return running
        time.sleep(0.01)


def is_zombie(process: psutil.Process) -> bool:
    """Whether a process has ended and is not reaped yet."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


def describe(process: psutil.Process) -> str:
    """`lockstep: rank w0/1 (pid 123, sleeping)`."""
    try:
        return f"{title(process)} (pid {process.pid}, {process.status()})"
    except psutil.NoSuchProcess:
        return f"(pid {process.pid}, just gone)"


def title(process: psutil.Process) -> str:
    """What `ps` shows of a process."""
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def quiet_port() -> int:
    """A free port outside of the range that the kernel assigns."""
    return next(port for port in range(20_000 + os.getpid() % 10_000, 32_000) if port_is_free(port))


def port_is_free(port: int) -> bool:
    """Whether a server can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
