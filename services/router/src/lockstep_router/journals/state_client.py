"""Calls the state server: with a deadline each, and not at all while it is away.

Two breakers stand before it. `requests` is for calls that a client's request waits for: a server that is merely slow
opens it. `mirror` is for all other calls, which have ten times as long. While one is open, a probe asks the server's
health twice a second; see `StateChannel`. A stream that is late in being read or taken may only be long: that counts as
a failure if the server does not answer a question for its health either.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from lockstep_api.v1 import state_pb2, state_pb2_grpc
from lockstep_common.breaker import Breaker
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_tls import Dial
from lockstep_common.state_channel import StateAwayError, StateChannel, StateRefusedError, is_own_cancellation
from lockstep_common.tracing.calls import Metadata, calling

from lockstep_router import metrics

logger = logging.getLogger("lockstep.router")

_PATIENCE = 10
"""Calls that no request waits for have so many times as long."""
_FAILURES_TO_OPEN = {"requests": 3, "mirror": 2}
_MAX_CALLS = 256
"""Calls at a time for requests of clients; more are refused."""
_REFUSALS = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED})
_LATE = grpc.StatusCode.DEADLINE_EXCEEDED.name


class StateClient:
    """The state server as a router calls it.

    Args:
        target: its address.
        dial: opens a channel to it with options.
        timeout_s: longest time of a call that a request waits for.
    """

    def __init__(
        self,
        target: str,
        dial: Dial,
        timeout_s: float,
    ) -> None:
        self.target = target
        self.requests = Breaker("requests", _FAILURES_TO_OPEN["requests"])
        self.mirror = Breaker("mirror", _FAILURES_TO_OPEN["mirror"])
        self.on_return: Callable[[], None] = lambda: None
        """Called when it answers again after it was away."""
        self.is_reachable = asyncio.Event()
        """Clear while the breaker of the mirror is open."""
        self.is_reachable.set()
        self.timeout_s = timeout_s
        # A stream's journal may be long; the server bounds it.
        self._channel = StateChannel(target, dial, "lockstep.v1.Journal", -1)
        self._calls = 0
        self._failures_beside = 0
        """Failures that were counted of calls that run beside others of their kind."""
        self._doubting: asyncio.Task[None] | None = None
        self._measure()

    @property
    def patient_s(self) -> float:
        """Longest time of a call that no request waits for."""
        return _PATIENCE * self.timeout_s

    def start(self) -> None:
        """Connect, without waiting for it."""
        self._channel.open()

    async def close(self) -> None:
        """Disconnect."""
        if self._doubting is not None:
            self._doubting.cancel()
            await asyncio.gather(self._doubting, return_exceptions=True)
        await self._channel.close()

    # The mirror's calls.

    async def append(self, request: state_pb2.AppendRequest) -> state_pb2.AppendResponse:
        """Write to streams.

        Raises:
            StateAwayError, StateRefusedError: nothing is known of what was written.
        """
        count = len(request.writes)

        def flaw(response: state_pb2.AppendResponse) -> str:
            if len(response.results) != count:
                return "MALFORMED"
            is_away = all(each.outcome == state_pb2.WRITE_OUTCOME_UNAVAILABLE for each in response.results)
            return "STORE_UNAVAILABLE" if is_away else ""

        response: state_pb2.AppendResponse = await self._call(
            "Append", request, self.mirror, self.patient_s, flaw, is_beside_others=True
        )
        return response

    async def renew(self, request: state_pb2.ClaimRequest) -> None:
        """Let the time of an idempotency key begin again.

        Raises:
            StateAwayError, StateRefusedError: it is not known whether that was done.
        """
        await self._call("Claim", request, self.mirror, self.patient_s, may_be_full=True)

    # Calls that a client's request waits for.

    async def claim(self, request: state_pb2.ClaimRequest) -> state_pb2.ClaimResponse:
        """Give an idempotency key to a request.

        Raises:
            StateAwayError, StateRefusedError: it is not known whether it has the key.
        """
        response: state_pb2.ClaimResponse = await self._call_for_request(
            "Claim", request, self.requests, self.timeout_s
        )
        return response

    async def release(self, request: state_pb2.ReleaseClaimRequest) -> None:
        """Free an idempotency key.

        Raises:
            StateAwayError, StateRefusedError: it is not known whether that was done.
        """
        await self._call_for_request("Release", request, self.requests, self.timeout_s)

    async def trim(self, request: state_pb2.TrimRequest) -> None:
        """Forget streams.

        Raises:
            StateAwayError, StateRefusedError: it is not known whether that was done.
        """
        await self._call_for_request("Trim", request, self.requests, self.timeout_s)

    async def look_up_claim(self, request: state_pb2.LookUpClaimRequest) -> state_pb2.ClaimResponse:
        """The request that has an idempotency key.

        Raises:
            StateAwayError, StateRefusedError: it is not known.
        """
        response: state_pb2.ClaimResponse = await self._call_for_request(
            "LookUpClaim", request, self.requests, self.timeout_s
        )
        return response

    async def read(self, request: state_pb2.ReadRequest) -> state_pb2.ReadResponse | None:
        """A stream; None: there is none.

        Raises:
            StateAwayError, StateRefusedError: it is not known.
            LockstepError: OVERLOADED, too many clients resume at a time.
        """
        return await self._stream("Read", request)

    async def take(self, request: state_pb2.TakeRequest) -> state_pb2.ReadResponse | None:
        """A stream, which has a higher epoch now; None: there is none.

        Raises:
            StateAwayError, StateRefusedError: it is not known.
            LockstepError: OVERLOADED, too many clients resume at a time.
        """
        return await self._stream("Take", request)

    async def _stream(self, method: str, request: Any) -> state_pb2.ReadResponse | None:
        # Resuming has the patience of the mirror: the client's stream has broken already, and a stream may be large.
        if self._calls >= _MAX_CALLS:
            raise LockstepError(ErrorCode.OVERLOADED, "too many clients resume streams at a time", retry_after_s=1)
        self._calls += 1
        try:
            response: state_pb2.ReadResponse = await self._call_for_request(
                method, request, self.mirror, 2 * self.patient_s, may_be_long=True
            )
        except _NotFoundError:
            return None
        finally:
            self._calls -= 1
        return response

    async def _call_for_request(
        self, method: str, request: Any, breaker: Breaker, timeout_s: float, *, may_be_long: bool = False
    ) -> Any:
        """A call that is a part of a request's trace. Those of the mirror are for many streams at once."""
        with calling(f"Journal.{method}") as metadata:
            return await self._call(
                method, request, breaker, timeout_s, metadata=metadata, may_be_full=True, may_be_long=may_be_long
            )

    async def _call(
        self,
        method: str,
        request: Any,
        breaker: Breaker,
        timeout_s: float,
        flaw: Callable[[Any], str] = lambda _response: "",
        metadata: Metadata = (),
        *,
        may_be_full: bool = False,
        may_be_long: bool = False,
        is_beside_others: bool = False,
    ) -> Any:
        """Args:
        may_be_full: a server without room for this call is no server that is away; others' calls go on.
        may_be_long: nor is one that is late with this call, if it answers others.
        is_beside_others: calls that run at the same time and fail have one reason, and count once.
        """
        channel = self._channel.current
        if breaker.is_open or channel is None:
            raise StateAwayError
        stub = state_pb2_grpc.JournalStub(channel)  # type: ignore[no-untyped-call]
        fail = partial(self._fail, breaker, failures=self._failures_beside if is_beside_others else None)
        try:
            response = await getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                breaker.note_success()
                raise _NotFoundError from None
            if error.code() in _REFUSALS:
                breaker.note_success()
                raise StateRefusedError(error.details() or error.code().name) from None
            if may_be_full and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                metrics.STATE_FAILURES.labels(error.code().name.lower()).inc()
                breaker.note_success()
                raise StateAwayError(error.code().name) from None
            if error.code().name == _LATE and may_be_long:
                self._doubt(breaker)
            else:
                fail(error.code().name)
            raise StateAwayError(error.code().name) from None
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            fail("CANCELLED")
            raise StateAwayError from None
        if reason := flaw(response):
            fail(reason)
            raise StateAwayError
        breaker.note_success()
        return response

    def _fail(self, breaker: Breaker, reason: str, *, failures: int | None) -> None:
        """Count a failure; not for the breaker if another one has been counted since `failures`."""
        if failures is None:
            self.note_failure(breaker, reason)
        elif failures == self._failures_beside:
            self._failures_beside += 1
            self.note_failure(breaker, reason)
        else:
            metrics.STATE_FAILURES.labels(reason.lower()).inc()

    def note_failure(self, breaker: Breaker, reason: str) -> None:
        """Count a failure of the server."""
        metrics.STATE_FAILURES.labels(reason.lower()).inc()
        if not breaker.note_failure():
            return
        logger.warning(
            "the state server does not answer: this router serves without it",
            extra={"calls": breaker.name, "reason": reason},
        )
        if breaker is self.mirror:
            self.is_reachable.clear()
            self.requests.is_open = True
        self._measure()
        self._channel.start_probing(self._probe)

    def _doubt(self, breaker: Breaker) -> None:
        """Find out whether a server that was late is away. Nobody waits for that."""
        if breaker.is_open or (self._doubting is not None and not self._doubting.done()):
            metrics.STATE_FAILURES.labels(_LATE.lower()).inc()
        else:
            self._doubting = asyncio.create_task(self._check(breaker))

    async def _check(self, breaker: Breaker) -> None:
        try:
            is_healthy = await self._channel.is_healthy(self.patient_s)
        except asyncio.CancelledError:  # also if a probe has closed the channel meanwhile
            if is_own_cancellation():
                raise
            is_healthy = False
        if is_healthy:
            metrics.STATE_FAILURES.labels(_LATE.lower()).inc()
            return
        for _ in range(2):  # the call that was late, and this one
            self.note_failure(breaker, _LATE)

    async def _probe(self) -> None:
        while self.requests.is_open or self.mirror.is_open:
            if await self._channel.probe(self.patient_s) <= self.timeout_s:
                self.requests.close()
            if self.mirror.is_open:
                logger.info("the state server answers again")
                self.mirror.close()
                self.is_reachable.set()
                self.on_return()
            self._measure()

    def _measure(self) -> None:
        for breaker in (self.requests, self.mirror):
            metrics.STATE_BREAKER.labels(breaker.name).set(breaker.is_open)


class _NotFoundError(Exception):
    """There is no such stream."""
