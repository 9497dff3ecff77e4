"""Which streams are alive, whose they are, and under which name the engine knows them."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep_worker.serve_stream import ServeStream


@dataclass(eq=False)
class LiveStream:
    """One attempt of one stream, from its acceptance by the engine to its end."""

    router: "ServeStream"
    stream_id: str
    attempt: int
    trace: str = ""
    deadline: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def request_id(self) -> str:
        """The engine's name of it: no two live streams share one, whatever their routers call them."""
        return f"{self.router.connection}:{self.stream_id}:{self.attempt}"


class StreamTable:
    """All live streams. A stream that leaves it has its deadline timer stopped."""

    def __init__(self) -> None:
        self._by_request: dict[str, LiveStream] = {}
        self._by_router: dict[int, dict[str, LiveStream]] = {}
        self.idle = asyncio.Event()
        """Set while there is no live stream."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[LiveStream]:
        return iter(tuple(self._by_request.values()))

    def add(self, stream: LiveStream) -> None:
        """Take in a stream that has no live attempt."""
        self._by_request[stream.request_id] = stream
        self._by_router.setdefault(stream.router.connection, {})[stream.stream_id] = stream
        self.idle.clear()

    def remove(self, stream: LiveStream) -> None:
        """Let a live stream go."""
        del self._by_request[stream.request_id]
        siblings = self._by_router[stream.router.connection]
        del siblings[stream.stream_id]
        if not siblings:
            del self._by_router[stream.router.connection]
        if stream.deadline is not None:
            stream.deadline.cancel()
        if not self._by_request:
            self.idle.set()

    def by_request(self, request_id: str) -> LiveStream | None:
        """The stream that the engine knows as `request_id`."""
        return self._by_request.get(request_id)

    def find(self, router: "ServeStream", stream_id: str) -> LiveStream | None:
        """The live attempt of a router's stream."""
        return self._by_router.get(router.connection, {}).get(stream_id)

    def of(self, router: "ServeStream") -> tuple[LiveStream, ...]:
        """A router's live streams."""
        return tuple(self._by_router.get(router.connection, {}).values())
