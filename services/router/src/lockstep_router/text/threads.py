"""Threads for texts so long that encoding or decoding them would block the event loop.

Texts have threads by their length, so that long ones do not delay shorter ones. It never starts more threads than its
limit, and refuses a text that would have to wait too long for its turn.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.memory import MemoryTrimmer

Result = TypeVar("Result")

INLINE_CHARS = 1024
"""Up to here, encoding takes 0.1 to 0.5 ms, on slow machines 2 ms, and is done on the event loop."""
_MEDIUM_CHARS = 16 << 10
_LONG_CHARS = 256 << 10
_MAX_WAIT_S = 10.0
"""Estimated wait for a thread above which a text is refused: until then, its body takes a part of the budget."""
_CHARS_PER_S = 1_000_000.0
"""Of one thread, until it has been measured."""
_MEASURE_SHARE = 0.2
"""Weight of the newest measurement in the average."""


class TextThreads:
    """Runs work on texts: short ones at once, others in threads."""

    def __init__(self, threads: int, memory: MemoryTrimmer) -> None:
        self._memory = memory
        self._medium = _Pool(threads, "text")
        self._long = _Pool(threads, "long-text")
        self._longest = _Pool(1, "longest-text")

    async def run(self, work: Callable[[], Result], chars: int, *, chars_together: int = 0) -> Result:
        """The result of the work. When the caller is cancelled before the work has begun, it is never done.

        Args:
            work: takes time that is about proportional to `chars`.
            chars: length of the text.
            chars_together: length of all texts of the request, if it has several. What is done on the event loop is
                limited for the request, not for each text.

        Raises:
            LockstepError: OVERLOADED, the texts that wait already take too long.
        """
        if max(chars, chars_together) <= INLINE_CHARS:
            return work()
        if chars <= _LONG_CHARS:
            return await (self._medium if chars <= _MEDIUM_CHARS else self._long).run(work, chars)
        loop = asyncio.get_running_loop()

        def trim() -> None:
            # When the work has ended, however long that is after a caller that has gone.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._memory.trim_soon)

        return await self._longest.run(work, chars, on_end=trim)

    def stop(self) -> None:
        """Begin nothing more. What runs ends by itself."""
        for pool in (self._medium, self._long, self._longest):
            pool.stop()


class _Pool:
    """Threads with a queue whose length in seconds is estimated and limited."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._threads = threads
        self._lock = Lock()
        self._waiting_chars = 0
        self._chars_per_s = _CHARS_PER_S

    async def run(self, work: Callable[[], Result], chars: int, *, on_end: Callable[[], None] = lambda: None) -> Result:
        """The result of the work, after those of all earlier callers.

        Args:
            work: takes time that is about proportional to `chars`.
            chars: length of the text.
            on_end: called in any thread when the work has ended or will never be done.

        Raises:
            LockstepError: OVERLOADED, that would take too long.
        """
        wait_s = self._waiting_chars / (self._chars_per_s * self._threads)
        if wait_s > _MAX_WAIT_S:
            sentence = f"the texts of other requests take this router {wait_s:.0f} s; this one's would wait for them"
            raise LockstepError(ErrorCode.OVERLOADED, sentence, retry_after_s=math.ceil(wait_s - _MAX_WAIT_S))
        with self._lock:
            self._waiting_chars += chars

        def measured() -> Result:
            began = time.perf_counter()
            try:
                return work()
            finally:
                seconds = time.perf_counter() - began
                with self._lock:
                    self._chars_per_s += _MEASURE_SHARE * (chars / max(seconds, 1e-6) - self._chars_per_s)

        def end(_: Future[Result]) -> None:
            with self._lock:
                self._waiting_chars -= chars
            on_end()

        future = self._executor.submit(measured)
        future.add_done_callback(end)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
