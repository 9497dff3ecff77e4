"""Parses bodies one after the other, so that large ones leave the event loop time for streams."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SMALL_BODY_BYTES = 64 << 10
"""Largest body that is parsed without waiting for others: parsing takes a millisecond at most."""


class Parsing:
    """Large bodies get at most half of the event loop's time together."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, size_bytes: int, parse: Callable[[], T]) -> T:
        """What `parse` returns for a body of this size. Its errors are passed on."""
        if size_bytes <= _SMALL_BODY_BYTES:
            return parse()
        async with self._turn:
            began = time.perf_counter()
            try:
                return parse()
            finally:
                # Streams continue between two large bodies.
                await asyncio.sleep(time.perf_counter() - began)
