"""What a rank's process says that is no result: lines on its stderr, and its stacks when they are wanted.

The driver's end. Neither can delay the rank: its stderr is a pipe that drops what does not fit, and its stacks go to a
file in memory.
"""

import contextlib
import fcntl
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from lockstep_engine import flight_record
from lockstep_engine.allowance import Allowance
from lockstep_engine.mailbox import Mailbox

logger = logging.getLogger("lockstep.rank")

_MAX_LINE_BYTES = 4096
_LAST_LINES = 60
_READ_BYTES = 1 << 16
"""Size of a pipe."""
_MAX_STACK_BYTES = 16 << 10
"""Of a rank's stacks, the last ones: faulthandler writes the main thread's at the end. A log line can hold them."""
_PROFILER_MARK = b"USDT:"
"""Torch's profiler says so when it starts and stops. It is no warning, and whoever profiles knows."""
_BURST, _PER_S = 400, 50.0
_POLL_S = 0.01
CONTINUED_S = 0.2
"""Longest time that a stopped rank runs so that it can write its stacks; it takes some 20 ms."""

STOPPED = "stopped"
DEBUGGED = "stopped by a debugger"
_PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting in the kernel",
    "T": STOPPED,
    "t": DEBUGGED,
    "Z": "ended",
    "X": "ended",
}
"""The letters of /proc/PID/stat (man 5 proc)."""


@dataclass(frozen=True)
class RankView:
    """A rank as it is now, for people who search for the cause of a hang."""

    rank: int
    pid: int
    state: str
    """starting, ready or dead, as the supervisor knows it"""
    process_state: str
    """The kernel's state of the process; one that a debugger has stopped cannot write its stack."""
    waits_in: str
    """The kernel's function that the process waits in; empty: none, or unknown."""
    steps: int
    """Steps finished in this epoch."""
    collectives: int
    """Collectives that the host has entered in this epoch. In a hang on the CPU the others wait for the rank with the
    fewest."""
    stack: str
    """Of all its threads, the innermost frame first; empty: it did not answer in time."""
    flight_record: str
    """Torch's record of its collectives, as JSON; empty: it does not use torch.distributed, or did not answer."""
    launched: int = 0
    """The last mark that the host has launched; 0: the device writes none (see `lockstep_common.hang`)."""
    reached: int = 0
    """The last mark that the device has reached. In a hang on GPUs the others wait for the rank with the least."""


class RankOutput:
    """The driver's ends for one rank. Methods about its stacks and its process may be called in any thread.

    Attributes:
        stderr: the rank's end of the pipe; the caller closes it with `close_theirs` once the rank has it.
        stacks: the file that the rank writes its stacks to.
        flight: the file that it writes its flight record to.
        has_flight_record: whether it does.
    """

    def __init__(self, rank: int, *, has_flight_record: bool = False) -> None:
        self.rank = rank
        self.has_flight_record = has_flight_record
        with contextlib.ExitStack() as on_failure:  # the process may have no more files
            self.read_end, self.stderr = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            on_failure.callback(os.close, self.read_end)
            on_failure.callback(os.close, self.stderr)
            self.stacks = Mailbox.create(0, "stacks")
            on_failure.callback(os.close, self.stacks)
            self.flight = Mailbox.create(0, "flight")
            on_failure.pop_all()
        for file in (self.stacks, self.flight):
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        self._pidfd: int | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._is_open = True
        self._is_flight_asked = False
        self._last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._partial = b""
        self._allowance = Allowance(_BURST, _PER_S)

    def started(self, pid: int) -> None:
        """Note the rank's process. A pid could be another process's by the time it is used, a descriptor cannot."""
        self._pid = pid
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)

    def close_theirs(self) -> None:
        """Close the rank's end of the pipe, which the rank has by now."""
        if self.stderr >= 0:
            os.close(self.stderr)
            self.stderr = -1

    def read_lines(self) -> tuple[list[str], bool]:
        """The complete lines that the rank has written, and whether there will be more. Does not wait."""
        data = b""
        is_ended = False
        while len(data) < _READ_BYTES:
            try:
                chunk = os.read(self.read_end, _READ_BYTES)
            except BlockingIOError:
                break
            is_ended = not chunk
            data += chunk
            if is_ended:
                break
        *lines, self._partial = (self._partial + data).split(b"\n")
        if is_ended or len(self._partial) > _MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        lines = [line[:_MAX_LINE_BYTES] for line in lines if line.strip() and not line.startswith(_PROFILER_MARK)]
        self._last_lines.extend(lines)
        # The allowance comes first: lines that are not shown cost no decoding.
        return [line.decode(errors="replace") for line in lines if self._allowance.take()], not is_ended

    @property
    def dropped(self) -> int:
        """How many lines were too many since `take_dropped`."""
        return self._allowance.dropped

    def last_words(self, most_chars: int) -> str:
        """The newest lines of its stderr: why it has crashed, if it has."""
        return b"\n".join(self._last_lines).decode(errors="replace")[-most_chars:]

    def take_dropped(self) -> int:
        """How many lines were too many since the last call."""
        dropped, self._allowance.dropped = self._allowance.dropped, 0
        return dropped

    def ask_stack(self) -> None:
        """Make the rank write its stacks; one that is stopped does so as soon as it goes on."""
        with self._lock:
            if self._is_open:
                os.ftruncate(self.stacks, 0)
                os.ftruncate(self.flight, 0)
            self._is_flight_asked = False
        self._send(signal.SIGUSR1)

    def ask_flight_record(self) -> None:
        """Make it write its flight record, too, once for each `ask_stack`. A rank that is to live writes one after the
        other: faulthandler reads the frames of all threads without Python's lock, and the rank may crash if the thread
        that writes the record wakes up meanwhile.
        """
        with self._lock:
            is_asked, self._is_flight_asked = self._is_flight_asked, True
        if self.has_flight_record and not is_asked:
            self._send(flight_record.SIGNAL)

    def _send(self, number: signal.Signals) -> None:
        with self._lock:
            if self._is_open and self._pidfd is not None:
                with contextlib.suppress(OSError):  # it has ended
                    signal.pidfd_send_signal(self._pidfd, number)

    def end(self, until: float) -> bool:
        """Kill the process, if it runs, and wait until it has ended, or until a monotonic time; whether it has."""
        if self._pidfd is None:
            return True
        self._send(signal.SIGKILL)
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, until - time.monotonic())))

    def stack(self, until: float) -> str:
        """What the rank has written since `ask_stack`: waits until it is complete, or until a monotonic time."""
        return self._written(self.stacks, until, _MAX_STACK_BYTES)

    def flight_record(self, until: float) -> str:
        """The same of its flight record, since `ask_flight_record`. A rank whose main thread holds Python's lock writes
        none.
        """
        return self._written(self.flight, until, flight_record.MAX_RECORD_BYTES) if self.has_flight_record else ""

    def _written(self, file: int, until: float, most_bytes: int) -> str:
        size = 0
        while True:
            with self._lock:
                if not self._is_open:
                    return ""
                before, size = size, os.fstat(file).st_size
                if (size and size == before) or time.monotonic() >= until:
                    return os.pread(file, most_bytes, max(0, size - most_bytes)).decode(errors="replace")
            time.sleep(_POLL_S)

    def place(self, until: float) -> tuple[str, str, str]:
        """Where the rank is: what `process_state` says, and what it has written since `ask_stack`, until a monotonic
        time. A stopped rank is continued for that, and stopped again. It acts on signals first when it goes on, so
        these are the frames in which it was stopped.
        """
        process, waits_in = self.process_state()
        if process != STOPPED:
            stack = "" if process == DEBUGGED else self.stack(until)
            self.ask_flight_record()
            return process, waits_in, stack
        self._send(signal.SIGCONT)
        try:
            ends_at = time.monotonic() + CONTINUED_S
            stack = self.stack(ends_at)
            self.ask_flight_record()
            self.flight_record(ends_at)  # it is written now or never
            return process, waits_in, stack
        finally:
            self._send(signal.SIGSTOP)

    def process_state(self) -> tuple[str, str]:
        """What the kernel says of the process, and the function of the kernel that it waits in."""
        process = Path("/proc", str(self._pid))
        try:
            letter = process.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "ended", ""
        waits_in = ""
        with contextlib.suppress(OSError):
            waits_in = process.joinpath("wchan").read_text().strip("0\n")
        return _PROCESS_STATES.get(letter, letter), waits_in

    def close(self) -> None:
        """Close everything. Can be called again."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self.close_theirs()
            os.close(self.read_end)
            os.close(self.stacks)
            os.close(self.flight)
            if self._pidfd is not None:
                os.close(self._pidfd)
