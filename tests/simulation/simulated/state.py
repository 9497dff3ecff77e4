"""The state server that routers share: its real service and memory, behind a network on virtual time.

It can be away in several ways, answer late, and forget everything. Its own rule is checked here: no write is accepted
under a lower epoch than one that was seen before.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from lockstep_api.v1 import state_pb2
from lockstep_state.backend import StoredStream, Take, Write
from lockstep_state.keys import Kind, key_of
from lockstep_state.memory import MemoryBackend
from lockstep_state.server import health_of
from lockstep_state.services.calls import Running
from lockstep_state.services.journal import Journal
from lockstep_state.settings import StateSettings

from simulated.kernel import Kernel, ProcessLoop

TARGET = "state:50053"
NOBODY = "-"
"""The tenant, at the state server, of clients without an API key."""
_LEAST_S, _JITTER_S = 0.0003, 0.002
_EXPIRE_EVERY_S = 1.0
_REQUESTS: dict[str, Any] = {
    "Append": state_pb2.AppendRequest,
    "Read": state_pb2.ReadRequest,
    "Take": state_pb2.TakeRequest,
    "Trim": state_pb2.TrimRequest,
    "Claim": state_pb2.ClaimRequest,
    "Release": state_pb2.ReleaseClaimRequest,
    "LookUpClaim": state_pb2.LookUpClaimRequest,
    "Check": health_pb2.HealthCheckRequest,
}

AWAY = ("refuses", "hears nothing", "answers nothing")
"""How it can be away. One that answers nothing does what it is asked."""


class FencedBackend:
    """Passes everything on to a backend, and watches the epochs of what is written.

    Args:
        backend: the backend.
        now: gives seconds.
        report: called with the key of a stream whose epoch went down, and the details.
    """

    def __init__(self, backend: MemoryBackend, now: Callable[[], float], report: Callable[[str, str], None]) -> None:
        self.backend = backend
        self._now = now
        self._report = report
        self._seen: dict[str, tuple[int, float, bool]] = {}
        """The newest epoch of each stream, when it may be forgotten, and whether the stream has ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    async def append(self, writes: Sequence[Write]) -> list[state_pb2.WriteResult]:
        results = await self.backend.append(writes)
        for write, result in zip(writes, results, strict=True):
            if result.outcome == state_pb2.WRITE_OUTCOME_OK:
                self._note(write.key, write.epoch, write.ttl_s, "a write", has_ended=write.seal is not None)
        return results

    async def read(self, key: str, take: Take | None = None) -> StoredStream | None:
        stored = await self.backend.read(key, take)
        if take is not None and stored is not None:
            self._note(key, stored.epoch, take.ttl_s, f"{take.owner} took it", has_ended=stored.seal is not None)
        return stored

    async def trim(self, tenant: str, keys: Sequence[str], tombstone_ttl_s: float) -> int:
        for key in keys:
            if key in self._seen:
                epoch, _, has_ended = self._seen[key]
                self._seen[key] = epoch, self._now() + tombstone_ttl_s, has_ended
        return await self.backend.trim(tenant, keys, tombstone_ttl_s)

    def _note(self, key: str, epoch: int, ttl_s: float, what: str, *, has_ended: bool) -> None:
        newest, until, had_ended = self._seen.get(key, (0, 0.0, False))
        if self._now() < until:
            if epoch < newest:
                self._report(key, f"{what} under epoch {epoch} was accepted after epoch {newest}")
            if had_ended and epoch == newest:
                return  # a repeat of its end keeps it no longer
        self._seen[key] = max(epoch, newest), self._now() + ttl_s, has_ended


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class _Context:
    """The part of a gRPC server's context that the services use."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)

    @staticmethod
    def time_remaining() -> None:
        """The caller's deadline is kept by the caller alone."""

    @staticmethod
    async def abort(code: grpc.StatusCode, details: str, _metadata: object = ()) -> None:
        raise _Aborted(code, details)


class StateServer:
    """One state server.

    Args:
        kernel: the clock.
        rng: the source of delays.
        make: makes its backend, which is in memory.
        report: called with the key of a stream whose epoch went down, and the details.
    """

    def __init__(
        self,
        kernel: Kernel,
        rng: Random,
        make: type[MemoryBackend],
        report: Callable[[str, str], None],
    ) -> None:
        self.loop = ProcessLoop(kernel, "state", 0.0)
        self.away = ""
        """One of `AWAY`; empty: it is not."""
        self.late_s = 0.0
        self.was_disturbed = False
        self._kernel = kernel
        self._rng = rng
        self._make = make
        self._report = report
        self._settings = StateSettings()
        self.forget()
        kernel.after(_EXPIRE_EVERY_S, self._expire)

    def forget(self) -> None:
        """Begin again, without a memory."""
        clock = lambda: self._kernel.now  # noqa: E731
        backend = self._make(self._settings.max_memory_bytes, self._settings.limits, clock)
        self.backend = FencedBackend(backend, clock, self._report)
        running = Running(self._settings.max_calls)
        self._journal = Journal(self.backend, self._settings, running)  # type: ignore[arg-type]
        self._health = health_of(self.backend)  # type: ignore[arg-type]

    def dial(self, loop: ProcessLoop) -> "StateChannel":
        return StateChannel(self, loop)

    @property
    def used_bytes(self) -> int:
        """What it keeps whose time is not over."""
        self.backend.expire()
        return self.backend.backend.used_bytes

    def has(self, tenant: str, stream_id: str) -> bool:
        """Whether it has a stream that has not ended."""
        key = key_of(Kind.STREAM, tenant, stream_id.encode())
        work = self.backend.backend.read(key)
        try:
            work.send(None)
        except StopIteration as stop:
            return stop.value is not None and stop.value.seal is None
        raise AssertionError("a backend in memory has waited")

    def _expire(self) -> None:
        self.backend.expire()
        self._kernel.after(_EXPIRE_EVERY_S, self._expire)

    def delay_s(self) -> float:
        return _LEAST_S + self._rng.random() * _JITTER_S

    def ask(self, method: str, data: bytes, answer: Callable[[bytes | grpc.aio.AioRpcError], None]) -> None:
        """Send a call. The answer comes later, or never."""
        self._kernel.after(self.delay_s(), lambda: self._arrive(method, data, answer))

    def _arrive(self, method: str, data: bytes, answer: Callable[[bytes | grpc.aio.AioRpcError], None]) -> None:
        if self.away == "refuses":
            error = _failed(grpc.StatusCode.UNAVAILABLE, "connection refused")
            self._kernel.after(self.delay_s(), lambda: answer(error))
        elif self.away != "hears nothing":
            is_mute, late_s = self.away == "answers nothing", self.late_s

            def send(task: asyncio.Task[bytes | grpc.aio.AioRpcError]) -> None:
                if not is_mute and not task.cancelled():
                    self._kernel.after(self.delay_s() + late_s, lambda: answer(task.result()))

            self.loop.spawn(self._serve(method, data)).add_done_callback(send)

    async def _serve(self, method: str, data: bytes) -> bytes | grpc.aio.AioRpcError:
        request = _REQUESTS[method].FromString(data)
        context: Any = _Context()
        try:
            if method == "Check":
                await self._health.check(request, context)
                return bytes(context.written[0].SerializeToString())
            return bytes((await getattr(self._journal, method)(request, context)).SerializeToString())
        except _Aborted as aborted:
            return _failed(aborted.code, str(aborted))


class StateChannel:
    """A channel of `grpc.aio` to it, as the generated stubs use it."""

    def __init__(self, server: StateServer, loop: ProcessLoop) -> None:
        self._server = server
        self._loop = loop
        self._calls: set[asyncio.Future[bytes | grpc.aio.AioRpcError]] = set()

    async def close(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def unary_stream(self, _path: str, **_: object) -> None:
        """The generated stubs make such calls, and no code uses them."""

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Callable[..., Any]:
        method = path.rpartition("/")[2]

        async def call(request: Any, timeout: float, metadata: object = ()) -> Any:
            answered: asyncio.Future[bytes | grpc.aio.AioRpcError] = self._loop.create_future()
            self._calls.add(answered)
            self._server.ask(method, request_serializer(request), lambda answer: self._pass_on(answered, answer))
            try:
                async with asyncio.timeout(timeout):
                    answer = await answered
            except TimeoutError:
                raise _failed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer") from None
            finally:
                self._calls.discard(answered)
            if isinstance(answer, grpc.aio.AioRpcError):
                raise answer
            return response_deserializer(answer)

        return call

    def _pass_on(
        self, answered: "asyncio.Future[bytes | grpc.aio.AioRpcError]", answer: bytes | grpc.aio.AioRpcError
    ) -> None:
        def give() -> None:
            if not answered.done():
                answered.set_result(answer)

        if not self._loop.is_dead and not self._loop.is_closed():
            self._loop.call_soon(give)


def _failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
