"""Keeps a set of child processes running, and leaves none behind: the embedded mode's stand-in for a kubelet.

A process that dies is started again after a growing delay. Exit code 2 means that trying again cannot help, and ends
the set. Each child leads its own session: the terminal's Ctrl-C reaches only this process, and when a child ends, all
other processes of its session are killed and waited for.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import IO

from lockstep_common.lifecycle import DIE_WITH_PARENT_VARIABLE

from lockstep_tools.failure import FAILED, UNUSABLE

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PR_GET_CHILD_SUBREAPER = 37

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 5.0
STEADY_S = 10.0
"""A process that has run for this long starts again with the first delay."""
MAX_FAILED_STARTS = 5
"""The set ends when a process ends by itself this often in a row, each time before it is steady."""


class Supervisor:
    """The processes, by name. One thread starts, watches and ends them: the kernel ties children to that thread."""

    def __init__(
        self,
        stages: Sequence[Mapping[str, Sequence[str]]],
        *,
        environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        output: IO[bytes] | None = None,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare.

        Args:
            stages: commands by name. All start together; a stage is asked to end when the one before it has ended.
            environments: by name, what a process has in its environment besides this process's, at each start.
            output: file for the processes' output; this process's when None.
            on_event: called with a message for each death, on the thread.
        """
        self.exit_code: int | None = None
        """Set when the set has ended by itself."""
        self.reason = ""
        """Why the set has ended by itself."""
        self._stages = [
            [_Child(name, command, environments.get(name, {}), output) for name, command in stage.items()]
            for stage in stages
        ]
        self._children = [child for stage in self._stages for child in stage]
        self._on_event = on_event
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self._closed = False
        self._grace_ends_s = 0.0
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start all processes."""
        self._thread.start()
        self._started.wait()

    def pid(self, name: str) -> int | None:
        """The process id, None while the process is down."""
        return next(child.pid for child in self._children if child.name == name)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the set has ended, by `stop` or by itself; false after the timeout."""
        return self._ended.wait(timeout_s)

    def stop(self, grace_s: float) -> None:
        """SIGTERM to all, SIGKILL to the rest after `grace_s`; does not wait. A second call can shorten the grace."""
        self._grace_ends_s = time.monotonic() + grace_s
        self._stopping = True
        with contextlib.suppress(OSError):  # a full pipe wakes the thread too; a closed one means that it has ended
            os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Kill what still runs and wait for its end."""
        if self._thread.is_alive():
            self.stop(0.0)
            self._thread.join()
        if not self._closed:
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        was_subreaper = _be_subreaper(True)
        try:
            for child in self._children:
                child.start()
            self._started.set()
            while not self._stopping and self.exit_code is None:
                self._sleep(min((child.due_s for child in self._children if child.due_s is not None), default=None))
                for child in self._children:
                    self._look_after(child)
        finally:
            self._started.set()
            self._end_all()
            _be_subreaper(was_subreaper)
            self._ended.set()

    def _sleep(self, until_s: float | None) -> None:
        """Wait until a process ends, the pipe is written, or a process is due."""
        descriptors = [child.pidfd for child in self._children if child.pidfd is not None]
        wait([self._wake_read, *descriptors], None if until_s is None else max(0.0, until_s - time.monotonic()))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _look_after(self, child: "_Child") -> None:
        if child.due_s is not None and time.monotonic() >= child.due_s:
            child.start()
        code = child.reap()
        if code is None or self._stopping:
            return
        if code == UNUSABLE:
            self.exit_code, self.reason = UNUSABLE, f"{child.name} cannot run"
        elif child.failed_starts >= MAX_FAILED_STARTS:
            self.exit_code, self.reason = FAILED, f"{child.name} {_ending(code)} {child.failed_starts} times in a row"
        else:
            self._on_event(f"{child.name} {_ending(code)}; starting it again")

    def _end_all(self) -> None:
        if not self._stopping:
            self._grace_ends_s = time.monotonic() + LAST_DELAY_S
        for stage in self._stages:
            for child in stage:
                child.signal(signal.SIGTERM)
            while self._is_alive(stage):
                if time.monotonic() < self._grace_ends_s:
                    self._sleep(self._grace_ends_s)
                else:
                    self._kill_all()
                    self._sleep(None)

    def _is_alive(self, stage: list["_Child"]) -> bool:
        for child in self._children:  # of other stages too: a dead one would wake this thread again and again
            child.reap()
        return any(child.is_running for child in stage)

    def _kill_all(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)


class _Child:
    """One process and its restarts."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None
    ) -> None:
        self.name = name
        self.pidfd: int | None = None
        """The process, while it runs."""
        self.due_s: float | None = None
        """When it starts next, while it does not run."""
        self.failed_starts = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._delay_s = FIRST_DELAY_S

    @property
    def is_running(self) -> bool:
        return self.pidfd is not None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and self.pidfd is not None else None

    def start(self) -> None:
        self.due_s = None
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            env={**os.environ, **self._environment, DIE_WITH_PARENT_VARIABLE: str(os.getpid())},
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    def reap(self) -> int | None:
        """The exit code (negative: the signal) if the process has just been found dead; it is due again then."""
        if self._process is None or self.pidfd is None:
            return None
        # Until it is waited for, no other process or session gets its id.
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        _reap_group(self._process.pid)
        os.close(self.pidfd)
        self.pidfd = None
        self._plan_restart(code)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, or SIGKILL to its whole session."""
        if self._process is None or self.pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                os.kill(self._process.pid, number)

    def _plan_restart(self, code: int) -> None:
        now_s = time.monotonic()
        if now_s - self._started_s >= STEADY_S:
            self._delay_s = FIRST_DELAY_S
            self.failed_starts = 0
        # Death by a signal comes from outside and says nothing about the next start.
        self.failed_starts += code >= 0
        self.due_s = now_s + self._delay_s
        self._delay_s = min(2 * self._delay_s, LAST_DELAY_S)


def _be_subreaper(wanted: bool) -> bool:
    """Set whether orphaned descendants become children of this process, to wait for them; returns the old value."""
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


def _reap_group(group: int) -> None:
    """Wait for the orphans of a process group that has been killed."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
