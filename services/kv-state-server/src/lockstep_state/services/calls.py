"""What all calls have in common: a deadline, metrics, and the translation of errors to statuses of gRPC."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

import grpc
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_decoding import decoded
from lockstep_common.tracing.calls import end_called

from lockstep_state import metrics

logger = logging.getLogger("lockstep.state")

_NOT_SENT = 'Failed "execute_batch"'
"""How gRPC's error begins; one for a wrong use of gRPC begins otherwise."""


class Running:
    """How many calls run, of all services that share it.

    Args:
        most: more are refused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """While it is entered, one more call runs.

        Raises:
            LockstepError: OVERLOADED, there are as many as there may be.
        """
        if self._count >= self._most:
            raise LockstepError(ErrorCode.OVERLOADED, f"the state server has {self._most} calls at a time (max_calls)")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class Limited(Protocol):
    """A service whose calls have a greatest time and a greatest number."""

    timeout_s: float
    running: Running


Service = TypeVar("Service", bound=Limited)
Request = TypeVar("Request")
Response = TypeVar("Response")


def unary(
    method: str,
) -> Callable[
    [Callable[[Service, Request], Awaitable[Response]]],
    Callable[[Service, Request, grpc.aio.ServicerContext], Awaitable[Response]],
]:
    """Makes the handler of a method, `Service.Method`, with one request and one response, of what does its work."""

    def decorate(
        work: Callable[[Service, Request], Awaitable[Response]],
    ) -> Callable[[Service, Request, grpc.aio.ServicerContext], Awaitable[Response]]:
        async def handler(self: Service, request: Request, context: grpc.aio.ServicerContext) -> Response:
            async with call(context, method, self.running, self.timeout_s):
                return await work(self, decoded(request))
            raise AssertionError("`call` has ended the call")

        return handler

    return decorate


@asynccontextmanager
async def call(
    context: grpc.aio.ServicerContext,
    method: str,
    running: Running,
    timeout_s: float,
    *,
    gives_stream: bool = False,
) -> AsyncIterator[None]:
    """Run a call's work within its deadline, and end it with a typed status if that fails.

    Args:
        context: of the call.
        method: in metrics, `Service.Method`.
        running: the calls of all services.
        timeout_s: the longest time for it.
        gives_stream: it has many responses. The time may be over while one waits to be sent.
    """
    began = time.monotonic()
    left_s = context.time_remaining()
    error: LockstepError | None = None
    status = "CANCELLED"
    try:
        if gives_stream:
            # With the first response they would be sent again with a status that interrupts it, which gRPC refuses.
            await context.send_initial_metadata(())
        with running.one_more():
            async with asyncio.timeout(timeout_s if left_s is None else min(left_s, timeout_s)):
                yield
        status = "OK"
    except LockstepError as failure:
        error = failure
    except TimeoutError:
        error = LockstepError(ErrorCode.DEADLINE_EXCEEDED, "the call took too long")
    except grpc.aio.InternalError:  # nothing can be sent, as the caller has cancelled or its deadline is over
        raise
    except Exception as defect:  # its own words may have values
        logger.error("a call failed", extra={"method": method, "error": type(defect).__name__})
        error = LockstepError(ErrorCode.INTERNAL, "the state server has a defect")
    finally:
        if error is not None:
            status = error.meaning.grpc_status
        metrics.CALLS.labels(method, status).inc()
        metrics.CALL_SECONDS.labels(method).observe(time.monotonic() - began)
        end_called(status, time.monotonic() - began)
    if error is not None:
        await _abort(context, error)


def is_news(record: logging.LogRecord) -> bool:
    """A filter of gRPC's log. It leaves out what could not be sent because the caller has gone: gRPC logs that, with a
    traceback, if it learns of the caller's end only after the failure.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, grpc.aio.InternalError) and str(error).startswith(_NOT_SENT))


async def _abort(context: grpc.aio.ServicerContext, error: LockstepError) -> None:
    metadata = [("lockstep-error-code", str(error.code))]
    if error.field:
        metadata.append(("lockstep-field", error.field))
    if error.retry_after_s:
        metadata.append(("retry-after", f"{error.retry_after_s:g}"))
    await context.abort(grpc.StatusCode[error.meaning.grpc_status], error.message, tuple(metadata))
