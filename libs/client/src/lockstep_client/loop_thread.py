"""An event loop in a thread of its own, for blocking callers of what exists with asyncio only. One for the process."""

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def run_in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs in the thread's loop, which is started when it is needed first.

    A caller that is interrupted cancels the coroutine.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="lockstep-client", daemon=True).start()
            _loops.append(loop)
        return _loops[0]


def _begin_anew() -> None:
    """Forget the loop in a forked process: its thread runs in the parent alone, where the lock may be held, too."""
    global _lock  # noqa: PLW0603 - there is one in a process
    _lock = threading.Lock()
    _loops.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_begin_anew)
