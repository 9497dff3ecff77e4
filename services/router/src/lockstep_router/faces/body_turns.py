"""Parses bodies on the event loop so that streams keep half of its time, however many bodies arrive at once."""

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SMALL_BODY_BYTES = 64 << 10
_TINY_BODY_BYTES = 512
"""A body that is no larger takes 0.3 ms at most, so its time is not measured: that takes two system calls."""
_SHORT_S = 0.001
"""A small body that takes no more CPU time than this has no effect on others; most take a tenth of it."""
_S_PER_BYTE = 0.1 / 1024
"""By how much earlier another body may have come for each byte that this one is smaller, to be parsed after it."""
_MOST_OVERTAKEN_S = 10.0


class BodyTurns:
    """After a body that took long to parse, all others wait for as long: the event loop is free for streams.

    Small ones overtake larger ones, so that a client's large bodies do not delay the short requests of others; none
    waits without end for smaller ones. The time is measured, because a body's size says little: a message of many
    fields takes a hundred times as long as a text of the same size. It is CPU time: other threads do not count.
    """

    def __init__(self) -> None:
        self._free_at = 0.0
        """When the next body may be parsed, as `time.perf_counter()` counts."""
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap: time of arrival with the size added, a number that differs, and what is set when it is its turn."""
        self._arrived = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, size_bytes: int, parse: Callable[[], T]) -> T:
        """What `parse` returns for a body of this size. Its errors are passed on."""
        if self._waiting or time.perf_counter() < self._free_at:
            await self._turn(size_bytes)
        if size_bytes <= _TINY_BODY_BYTES:
            return parse()
        began = time.thread_time()
        try:
            return parse()
        finally:
            took_s = time.thread_time() - began
            if size_bytes > _SMALL_BODY_BYTES or took_s > _SHORT_S:
                self._free_at = time.perf_counter() + took_s

    async def _turn(self, size_bytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._arrived += 1
        rank = time.perf_counter() + min(size_bytes * _S_PER_BYTE, _MOST_OVERTAKEN_S)
        heapq.heappush(self._waiting, (rank, self._arrived, turn))
        self._plan()
        await turn

    def _plan(self) -> None:
        """Come back when the next body may be parsed."""
        if self._timer is None and self._waiting:
            wait_s = max(0.0, self._free_at - time.perf_counter())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._give)

    def _give(self) -> None:
        """Let those that wait parse, one for each call, until one of them takes long."""
        self._timer = None
        while self._waiting and time.perf_counter() >= self._free_at:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # its client may have left
                turn.set_result(None)
                break
        self._plan()
