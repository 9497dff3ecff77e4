"""Notices on their way to whoever posts them. Putting never waits: when there are too many, the oldest goes."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from lockstep_worker import metrics
from lockstep_worker.chronicle import Notice


class NoticeQueue:
    """A bounded queue with one reader."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._notices: deque[Notice] = deque()
        self._closed = False
        self._wake = asyncio.Event()

    def put(self, notice: Notice) -> None:
        """Append a notice."""
        if len(self._notices) >= self._limit:
            self._notices.popleft()
            metrics.EVENTS.labels("dropped").inc()
        self._notices.append(notice)
        self._wake.set()

    def close(self) -> None:
        """Let `notices` end after what is in it now."""
        self._closed = True
        self._wake.set()

    async def notices(self) -> AsyncIterator[Notice]:
        """Take the notices out, waiting for more until the queue is closed."""
        while True:
            while self._notices:
                yield self._notices.popleft()
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()
