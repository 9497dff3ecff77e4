"""Calls of the state server's Kv service: with a deadline each, and not at all while it is away.

After failures in a row the breaker opens. Then a probe asks the server's health twice a second; see `StateChannel`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import grpc
from lockstep_api.v1 import state_pb2, state_pb2_grpc
from lockstep_common.breaker import Breaker
from lockstep_common.grpc_tls import Dial
from lockstep_common.state_channel import StateAwayError, StateChannel, StateRefusedError, is_own_cancellation
from lockstep_common.tracing.calls import calling

from lockstep_worker import metrics

logger = logging.getLogger("lockstep.worker")

_MESSAGE_BYTES = 8 << 20
"""The server sends blocks in messages of 1 MiB."""
_FAILURES_TO_OPEN = 3
_DETAIL_CHARS = 256
_REFUSALS = frozenset(
    {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED}
)


class KvClient:
    """The state server as a worker calls it.

    Args:
        target: its address.
        dial: opens a channel to it with options.
        timeout_s: longest time of a call without content.
        identity: name that its certificate has to be for, written to the log; empty without TLS.
    """

    def __init__(self, target: str, dial: Dial, timeout_s: float, identity: str = "") -> None:
        self.timeout_s = timeout_s
        self.is_reachable = asyncio.Event()
        """Clear while the breaker is open."""
        self.is_reachable.set()
        self.on_return: Callable[[], None] = lambda: None
        """Called when it answers again after it was away."""
        self._identity = identity
        self._breaker = Breaker("kv", _FAILURES_TO_OPEN)
        self._channel = StateChannel(target, dial, "lockstep.v1.Kv", _MESSAGE_BYTES)
        self._refusals: set[str] = set()
        metrics.REMOTE_BREAKER.set(0)

    @property
    def is_away(self) -> bool:
        """Whether it is not asked now."""
        return self._breaker.is_open or self._channel.current is None

    def start(self) -> None:
        """Connect, without waiting for it."""
        self._channel.open()

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()

    async def look_up(self, request: state_pb2.LookUpBlocksRequest) -> state_pb2.LookUpBlocksResponse:
        """How many leading blocks are there.

        Raises:
            StateAwayError, StateRefusedError: it is not known.
        """
        with self._noting() as stub, calling("Kv.LookUp") as metadata:
            response: state_pb2.LookUpBlocksResponse = await stub.LookUp(
                request, timeout=self.timeout_s, metadata=metadata
            )
        return response

    async def get(
        self, request: state_pb2.GetBlocksRequest, timeout_s: float
    ) -> AsyncGenerator[state_pb2.GetBlocksResponse, None]:
        """The messages of the blocks that are there. Whoever stops early has to close the iterator.

        Raises:
            StateAwayError, StateRefusedError: there may be more.
        """
        # One that has sent something by the deadline is slower than was estimated, and not away.
        with self._noting(may_be_late=timeout_s < self.timeout_s) as stub, calling("Kv.Get") as metadata:
            call = stub.Get(request, timeout=timeout_s, metadata=metadata)
            try:
                async for message in call:
                    self._breaker.note_success()
                    yield message
            finally:
                call.cancel()

    async def put(
        self, messages: AsyncIterator[state_pb2.PutBlocksRequest], timeout_s: float
    ) -> state_pb2.PutBlocksResponse:
        """Store blocks.

        Raises:
            StateAwayError, StateRefusedError: nothing is known of what was stored.
        """
        with self._noting() as stub:
            response: state_pb2.PutBlocksResponse = await stub.Put(messages, timeout=timeout_s)
        return response

    @contextmanager
    def _noting(self, *, may_be_late: bool = False) -> Iterator[state_pb2_grpc.KvStub]:
        """A call within this block counts for the breaker, and its errors are this module's.

        Args:
            may_be_late: its deadline is so soon that missing it says nothing about the server.
        """
        channel = self._channel.current
        if self._breaker.is_open or channel is None:
            raise StateAwayError("BREAKER_OPEN")
        try:
            yield state_pb2_grpc.KvStub(channel)  # type: ignore[no-untyped-call]
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code in _REFUSALS:
                self._note_refusal(code, error.details() or code.name)
                raise StateRefusedError(code.name) from None
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED or (
                may_be_late and code is grpc.StatusCode.DEADLINE_EXCEEDED
            ):
                metrics.REMOTE_FAILURES.labels(code.name.lower()).inc()
            else:
                self._note_failure(code.name, error.details() or "")
            raise StateAwayError(code.name) from None
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            self._note_failure("CANCELLED")
            raise StateAwayError("CANCELLED") from None
        self._breaker.note_success()

    def _note_refusal(self, code: grpc.StatusCode, sentence: str) -> None:
        metrics.REMOTE_FAILURES.labels("refused").inc()
        if sentence not in self._refusals and len(self._refusals) < 16:
            self._refusals.add(sentence)
            logger.warning("the state server refuses KV blocks: %s", sentence)
        if code is grpc.StatusCode.PERMISSION_DENIED:  # the next certificate may be taken, and only a probe shows it
            self._count_failure(code.name, sentence)
        else:
            self._breaker.note_success()

    def _note_failure(self, reason: str, details: str = "") -> None:
        metrics.REMOTE_FAILURES.labels(reason.lower()).inc()
        self._count_failure(reason, details)

    def _count_failure(self, reason: str, details: str) -> None:
        if not self._breaker.note_failure():
            return
        # Only gRPC's details say that the certificate was refused, and they do not say which name was wanted.
        extra = {"reason": reason, "details": details[-_DETAIL_CHARS:], "identity": self._identity}
        logger.warning("the state server does not answer: prefixes are computed", extra=extra)
        self.is_reachable.clear()
        metrics.REMOTE_BREAKER.set(1)
        self._channel.start_probing(self._probe)

    async def _probe(self) -> None:
        while self._breaker.is_open:
            await self._channel.probe(self.timeout_s)
            logger.info("the state server answers again")
            self._breaker.close()
            self.is_reachable.set()
            metrics.REMOTE_BREAKER.set(0)
            self.on_return()
