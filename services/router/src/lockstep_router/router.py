"""The router itself: its workers, how much it has taken on, and whether it takes more."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.settings import RouterSettings
from lockstep_router.workers import Workers


class Router:
    """One router. Enter it to dial the workers, leave it to hang up."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.workers = Workers(settings)
        self.draining = False
        self.requests = 0
        """For tokens, under way."""
        self.streams = 0
        """Under way: one for each choice of each request."""
        self._began_at = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        self.workers.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.workers.stop()

    @property
    def uptime_s(self) -> float:
        """Since the process made this router."""
        return time.monotonic() - self._began_at

    @property
    def failovers(self) -> int:
        """Times that any stream went on to another worker."""
        return self.workers.failovers

    @property
    def is_ready(self) -> bool:
        """Whether a request for tokens would be served at once."""
        return not self.draining and bool(self.workers.ready())

    @contextmanager
    def request(self) -> Iterator[None]:
        """The time that a request for tokens is under way.

        Raises:
            LockstepError: DRAINING, no new ones are taken; OVERLOADED, there are too many.
        """
        if self.draining:
            raise LockstepError(ErrorCode.DRAINING, "this router is shutting down", retry_after_s=1)
        if self.requests >= self.settings.max_streams:
            raise self._overloaded()
        self.requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            if not self.requests:
                self._idle.set()

    @contextmanager
    def running(self, streams: int) -> Iterator[None]:
        """The time that a request's streams run.

        Raises:
            LockstepError: OVERLOADED, there are too many.
        """
        if self.streams + streams > self.settings.max_streams:
            raise self._overloaded()
        self._count(streams)
        try:
            yield
        finally:
            self._count(-streams)

    async def drain(self) -> None:
        """Take no new requests and wait for the running ones, but not longer than the settings say."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass

    def _count(self, streams: int) -> None:
        self.streams += streams
        metrics.STREAMS.set(self.streams)

    def _overloaded(self) -> LockstepError:
        return LockstepError(
            ErrorCode.OVERLOADED, f"this router runs {self.settings.max_streams} streams already", retry_after_s=1
        )
