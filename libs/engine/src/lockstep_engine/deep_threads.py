"""Threads with a deep stack, for native code that recurses once for each level of its input."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

_STACK_BYTES = 256 << 20
"""Address space of a stack; only pages that were used take memory. A grammar of 64 KiB that is one chain of rules needs
up to 30 MiB to compile; with too small a stack the process dies."""

_starting = threading.Lock()
_T = TypeVar("_T")


class DeepThreads:
    """A first-in, first-out queue of work, and threads that do it. They start with the first piece of work."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._started = False
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def put(self, work: Callable[[], object]) -> None:
        """Queue work that raises nothing.

        Raises:
            RuntimeError: the threads cannot be started.
        """
        self.start()
        self._work.put(work)

    def start(self) -> None:
        """Start the threads, if they have not been started.

        Raises:
            RuntimeError: they cannot be started.
        """
        if not self._started:
            self._start()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Queue work; the future has what it returns or raises. A future that is cancelled before is skipped."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.put(run)
        return future

    def close(self) -> None:
        """End the threads after the work that is queued."""
        if self._started:
            for _ in range(self._count):
                self._work.put(None)

    def _start(self) -> None:
        with _starting:  # the size is a setting of the process, for threads that start later
            usual = threading.stack_size(_STACK_BYTES)
            try:
                for number in range(self._count):
                    threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True).start()
            finally:
                threading.stack_size(usual)
        self._started = True

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it holds what the result of the work replaces
