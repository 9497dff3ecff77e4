"""The live streams: each one's router connection, and its id in the engine."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep_api.v1 import worker_pb2
from lockstep_common.trace_context import trace_fields

from lockstep_worker.attempt_ranks import AttemptRanks
from lockstep_worker.router_connection import RouterConnection
from lockstep_worker.traces import AttemptTrace


@dataclass(eq=False)
class LiveStream:
    """One attempt of one stream, from its acceptance by the engine to its end."""

    router: RouterConnection
    stream_id: str
    attempt: int
    ranks: AttemptRanks = field(repr=False)
    trace: str = ""
    """`traceparent` of the router's attempt, or empty."""
    handle: int = 0
    """The attempt's name in columns of tokens; 0: it has none."""
    suspicion: worker_pb2.Suspicion = worker_pb2.SUSPICION_NONE
    """Its router's, that it makes workers die."""
    client_request_id: str = ""
    """The client's request that it belongs to, for log lines."""
    is_running: bool = False
    """Whether the ranks compute it, as the engine has last reported."""
    spans: AttemptTrace | None = field(default=None, repr=False)
    """None: it has no trace here."""
    deadline: asyncio.TimerHandle | None = field(default=None, repr=False)
    arrived_at: float = field(default_factory=time.monotonic)
    """`time.monotonic` in seconds, like the two below."""
    started_at: float | None = None
    """When the engine first reported that the ranks compute it."""
    first_token_at: float | None = None

    def log_fields(self) -> dict[str, str | int]:
        """What each log line about it says; the span is the router's attempt."""
        fields: dict[str, str | int] = {"request_id": self.client_request_id} if self.client_request_id else {}
        fields |= trace_fields(self.trace)
        return fields | {"stream": self.stream_id, "attempt": self.attempt, "router": self.router.router_id}

    @property
    def kept_id(self) -> int:
        """The id of its trace, which an example of a histogram names, if that is kept; 0 if not."""
        return 0 if self.spans is None else self.spans.kept_id

    @property
    def request_id(self) -> str:
        """Its id in the engine, unique among live streams: two routers may use the same stream id."""
        return f"{self.router.number}:{self.stream_id}:{self.attempt}"


class StreamTable:
    """All live streams. Removing a stream stops its deadline timer."""

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
        """Add a stream that has no live attempt."""
        self._by_request[stream.request_id] = stream
        self._by_router.setdefault(stream.router.number, {})[stream.stream_id] = stream
        self.idle.clear()

    def remove(self, stream: LiveStream) -> None:
        """Remove a live stream."""
        del self._by_request[stream.request_id]
        siblings = self._by_router[stream.router.number]
        del siblings[stream.stream_id]
        if not siblings:
            del self._by_router[stream.router.number]
        if stream.deadline is not None:
            stream.deadline.cancel()
        if not self._by_request:
            self.idle.set()

    def by_request(self, request_id: str) -> LiveStream | None:
        """The stream with this id in the engine."""
        return self._by_request.get(request_id)

    def find(self, router: RouterConnection, stream_id: str) -> LiveStream | None:
        """The live attempt of a router's stream."""
        return self._by_router.get(router.number, {}).get(stream_id)

    def of(self, router: RouterConnection) -> tuple[LiveStream, ...]:
        """A router's live streams."""
        return tuple(self._by_router.get(router.number, {}).values())
