"""The life of a process: its name in `ps`, its end when its parent ends, its stop on a signal."""

import asyncio
import ctypes
import logging
import os
import signal
import threading

from setproctitle import setproctitle

DIE_WITH_PARENT_VARIABLE = "LOCKSTEP_DIE_WITH_PARENT"
"""A parent sets this so that the kernel kills its children when it dies for any reason."""

_PR_SET_PDEATHSIG = 1
_CLOSE_S = 1.0


def name_process(name: str) -> None:
    """Show this process as `lockstep: <name>` in ps and top."""
    setproctitle(f"lockstep: {name}")


def die_with_parent(parent_pid: int | None = None) -> None:
    """Make the kernel send SIGKILL to this process when the thread that started it ends.

    Args:
        parent_pid: the expected parent. If it died before this call, the process exits at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0)


def obey_parent() -> None:
    """Call `die_with_parent` if the environment variable is set; its value is the parent's pid."""
    value = os.environ.pop(DIE_WITH_PARENT_VARIABLE, "")
    if value:
        die_with_parent(int(value))


def end_on_sigterm() -> None:
    """Exit at once on SIGTERM, until the process has something to drain (`stop_event`).

    A container's first process ignores signals without a handler: a SIGTERM during the imports would have no effect,
    and the container would be killed at the end of its grace period.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def quiet_grpc() -> None:
    """Have gRPC's core log errors alone, unless the environment says otherwise. It reads that when it is imported.

    Else it logs every failed handshake, and texts of peers as they come, line ends too: anyone could forge lines.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def stop_event() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set. A second signal ends the process at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if event.is_set():
            os._exit(130)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return event


def end_soon(code: int = 0) -> None:
    """End the process with this code in a second, if it has not ended by itself; called when all is done.

    The event loop waits, when it is closed, for what its threads still do: for look-ups of the system's resolver, which
    take minutes when no DNS server answers.
    """

    def end() -> None:
        for handler in logging.root.handlers:
            handler.flush()
        os._exit(code)

    timer = threading.Timer(_CLOSE_S, end)
    timer.daemon = True
    timer.start()
