"""What all calls have in common: a deadline, metrics, and the translation of errors to statuses of gRPC."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.tracing.calls import end_called

from lockstep_state import metrics
from lockstep_state.services.decoding import decoded

logger = logging.getLogger("lockstep.state")


class Timed(Protocol):
    """A service whose calls have a greatest time."""

    timeout_s: float


Service = TypeVar("Service", bound=Timed)
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
            async with call(context, method, self.timeout_s):
                return await work(self, decoded(request))
            raise AssertionError("`call` has ended the call")

        return handler

    return decorate


@asynccontextmanager
async def call(context: grpc.aio.ServicerContext, method: str, timeout_s: float) -> AsyncIterator[None]:
    """Run a call's work within its deadline, and end it with a typed status if that fails.

    Args:
        context: of the call.
        method: in metrics, `Service.Method`.
        timeout_s: the longest time for it.
    """
    began = time.monotonic()
    left_s = context.time_remaining()
    error: LockstepError | None = None
    status = "CANCELLED"
    try:
        async with asyncio.timeout(timeout_s if left_s is None else min(left_s, timeout_s)):
            yield
        status = "OK"
    except LockstepError as failure:
        error = failure
    except TimeoutError:
        error = LockstepError(ErrorCode.DEADLINE_EXCEEDED, "the call took too long")
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


async def _abort(context: grpc.aio.ServicerContext, error: LockstepError) -> None:
    metadata = [("lockstep-error-code", str(error.code))]
    if error.field:
        metadata.append(("lockstep-field", error.field))
    if error.retry_after_s:
        metadata.append(("retry-after", f"{error.retry_after_s:g}"))
    await context.abort(grpc.StatusCode[error.meaning.grpc_status], error.message, tuple(metadata))
