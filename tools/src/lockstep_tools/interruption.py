"""Signals that end a command: SIGTERM, and SIGHUP of a terminal that is closed."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ONE_END_S = 2.0
"""A signal that follows another within this time belongs to it: shells send SIGHUP again to what has it already."""


def stopping_signals(*numbers: signal.Signals) -> tuple[signal.Signals, ...]:
    """These signals, and SIGHUP unless the command was started to ignore it, as `nohup` does."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return numbers if is_ignored else (*numbers, signal.SIGHUP)


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command like an exception, so that it removes its processes and unfinished files.

    The exit code is the one that shells report for the signal. It is no KeyboardInterrupt, since commands that go on
    after Ctrl-C must not go on after these. A command can set handlers of its own meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    last_s = -_ONE_END_S

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if last_s - before_s >= _ONE_END_S:
            sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in stopping_signals(signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)
