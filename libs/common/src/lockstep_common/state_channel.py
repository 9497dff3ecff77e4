"""The channel to the state server, the probes that find out when a server that was away is there again, and the errors
of calls.

What the calls are, and when the server counts as away, is decided by those that call. It is for services that have gRPC
among their dependencies: this package has not.
"""

import asyncio
from collections.abc import Callable, Coroutine

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep_common.grpc_tls import Dial

PROBE_EVERY_S = 0.5

_OPTIONS: tuple[tuple[str, object], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class StateAwayError(Exception):
    """The state server does not answer, has no room for the call, or is not asked because it did not answer.

    Args:
        reason: name of gRPC's status, or of another reason; empty: not given.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.is_late = reason == grpc.StatusCode.DEADLINE_EXCEEDED.name
        """It has not answered in time, on a connection that may be in order."""
        self.is_full = reason == grpc.StatusCode.RESOURCE_EXHAUSTED.name
        """It has answered that there is no room: in the store, or for the tenant."""


class StateRefusedError(Exception):
    """The state server takes no such call; another try would not help."""


class StateChannel:
    """One channel, which a probe that fails replaces: the next one has the newest certificates and addresses.

    Args:
        target: the state server's address.
        dial: opens a channel to it with options.
        service: the gRPC service whose health counts.
        max_message_bytes: the longest answer that is taken; -1: any.
    """

    def __init__(self, target: str, dial: Dial, service: str, max_message_bytes: int) -> None:
        self.current: grpc.aio.Channel | None = None
        """None: it is closed."""
        self._target = target
        self._dial = dial
        self._service = service
        self._probing: asyncio.Task[None] | None = None
        self._options = (("grpc.max_receive_message_length", max_message_bytes), *_OPTIONS)

    def open(self) -> None:
        """Connect, without waiting for it."""
        self.current = self._dial(self._target, self._options)

    async def close(self) -> None:
        """End the probing and disconnect."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        channel, self.current = self.current, None
        if channel is not None:
            await channel.close()

    def start_probing(self, probing: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `probing`, which calls `probe`, in a task that ends with this channel. Does nothing while it runs."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(probing())

    async def probe(self, timeout_s: float) -> float:
        """Ask the server's health, every `PROBE_EVERY_S`, until it is well; how long the last answer took, in seconds.

        Args:
            timeout_s: longest wait for an answer.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            began_at = loop.time()
            if await self.is_healthy(timeout_s):
                return loop.time() - began_at
            await self._redial()

    async def is_healthy(self, timeout_s: float) -> bool:
        """Ask the server's health once; False without an answer in this time."""
        if self.current is None:
            return False
        stub = health_pb2_grpc.HealthStub(self.current)
        request = health_pb2.HealthCheckRequest(service=self._service)
        try:
            answer = await stub.Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _redial(self) -> None:
        old = self.current
        self.open()
        if old is not None:
            await old.close()


def is_own_cancellation() -> bool:
    """Whether a call that ended with CancelledError did so because its task was cancelled. One that ends with its
    channel, which a probe has replaced, looks the same.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
