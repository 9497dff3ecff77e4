"""The router itself: its workers, how much it has taken on, and whether it takes more."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.discovery import Discovery, choose_discovery
from lockstep_router.settings import RouterSettings
from lockstep_router.workers import Workers

logger = logging.getLogger("lockstep.router")


class Router:
    """One router. Enter it to dial the workers, leave it to hang up."""

    def __init__(self, settings: RouterSettings, discovery: Discovery | None = None) -> None:
        self.settings = settings
        self.workers = Workers(settings, discovery or choose_discovery(settings))
        self.leaving = False
        """Nobody should count on this router for long: it will drain."""
        self.draining = False
        """No new requests are taken."""
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
        """Whether requests for tokens should be sent here: they would be served at once, and this router stays."""
        return not self.leaving and bool(self.workers.ready())

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

    async def leave(self, *, on_drain: Callable[[], None] = lambda: None) -> None:
        """Go: first in name alone, until everyone knows; then take nothing new and let what runs finish, for a time.

        `on_drain` is called in between: no connection may be used for another request from then on.
        """
        self.leaving = True
        logger.info("leaving", extra={"streams": self.streams, "lame_duck_s": self.settings.lame_duck_s})
        await asyncio.sleep(self.settings.lame_duck_s)
        self.draining = True
        on_drain()
        logger.info("draining", extra={"streams": self.streams})
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
