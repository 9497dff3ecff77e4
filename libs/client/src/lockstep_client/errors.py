"""The errors of the client, from one table: by the server's code, else by the HTTP status.

No error holds a key, a header or a request's body.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import time
from typing import Any


@dataclass(frozen=True)
class Received:
    """What a client has got of an answer that it will not get whole."""

    texts: Mapping[int, str] = field(default_factory=dict, repr=False)
    """By the choice."""
    events: int = 0
    stream_id: str | None = None
    last_event_id: str | None = None


class LockstepError(Exception):
    """A request that failed."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        received: Received | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        """The server's code for the failure, else the client's."""
        self.field = field
        """The name of the invalid field or header of the request."""
        self.status = status
        """The HTTP status; None if the failure came without one."""
        self.retry_after_s = retry_after_s
        """The wait before another try, if the server named one."""
        self.request_id = request_id
        self.received = received
        """What has been received before the failure; None: nothing."""

    default_code = "error"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, code={self.code!r}, status={self.status})"


class InvalidRequestError(LockstepError):
    """The request cannot be answered as it is."""

    default_code = "invalid_request"


class AuthenticationError(LockstepError):
    """The API key is missing, unknown or not allowed to do this."""

    default_code = "invalid_api_key"


class NotFoundError(LockstepError):
    """There is no such model, stream or path."""

    default_code = "not_found"


class RateLimitError(LockstepError):
    """The tenant's limits are used up."""

    default_code = "rate_limit_exceeded"


class OverloadedError(LockstepError):
    """The routers or their workers have more requests than they can take."""

    default_code = "overloaded"


class UnavailableError(LockstepError):
    """No router, or no worker behind it, can serve the request now."""

    default_code = "unavailable"


class DeadlineExceededError(LockstepError):
    """The answer was not complete in time."""

    default_code = "deadline_exceeded"


class CancelledError(LockstepError):
    """The stream was cancelled by another request, or because no client read it."""

    default_code = "cancelled"


class InternalError(LockstepError):
    """A defect in the server."""

    default_code = "internal"


class ConnectionFailedError(LockstepError):
    """No router could be reached, each connection broke, the stream was closed while somebody read it, or the client is
    closed.
    """

    default_code = "connection_failed"


class ProtocolError(LockstepError):
    """The server's answer is not what the protocol says."""

    default_code = "protocol_error"


class StreamLost(LockstepError):  # noqa: N818 - it names what happened to the stream
    """The connection broke, and no router can continue the stream; `received` has what came before."""

    default_code = "stream_lost"


class StreamMoved(LockstepError):  # noqa: N818 - it names what happened to the stream
    """Another client reads the stream now, at another router: its newest reader has it."""

    default_code = "stream_moved"


class StreamDiverged(StreamLost):
    """The stream was begun again on another router, and the repeat differs from what had been received."""

    default_code = "stream_diverged"


_BY_CODE: Mapping[str, type[LockstepError]] = {
    "invalid_request": InvalidRequestError,
    "invalid_api_key": AuthenticationError,
    "origin_not_allowed": InvalidRequestError,
    "rate_limit_exceeded": RateLimitError,
    "context_length_exceeded": InvalidRequestError,
    "model_not_found": NotFoundError,
    "not_found": NotFoundError,
    "stream_not_found": NotFoundError,
    "stream_moved": StreamMoved,
    "idempotency_key_reused": InvalidRequestError,
    "method_not_allowed": InvalidRequestError,
    "payload_too_large": InvalidRequestError,
    "overloaded": OverloadedError,
    "resource_exhausted": InvalidRequestError,
    "unavailable": UnavailableError,
    "worker_lost": UnavailableError,
    "request_quarantined": InvalidRequestError,
    "draining": UnavailableError,
    "deadline_exceeded": DeadlineExceededError,
    "cancelled": CancelledError,
    "numerical_error": InternalError,
    "internal": InternalError,
}
_BY_STATUS: Mapping[int, type[LockstepError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    429: RateLimitError,
    502: UnavailableError,
    503: UnavailableError,
    504: DeadlineExceededError,
}
RETRYABLE_CODES = frozenset({"overloaded", "unavailable", "worker_lost", "draining"})
"""Another router, or the same one later, may succeed with the same request."""


def from_body(
    body: Any, status: int | None, headers: Mapping[str, str] | None = None, received: Received | None = None
) -> LockstepError:
    """The error that a parsed body in OpenAI's form describes, or that the status alone does."""
    given = body.get("error") if isinstance(body, dict) else None
    error = given if isinstance(given, dict) else {"message": given} if isinstance(given, str) else {}
    code = error.get("code")
    code = code if isinstance(code, str) else None
    message = error.get("message")
    headers = headers or {}
    kind = _BY_CODE.get(code or "") or _BY_STATUS.get(status or 0)
    if kind is None:
        kind = InvalidRequestError if status is not None and 400 <= status < 500 else InternalError
    param = error.get("param")
    return kind(
        message if isinstance(message, str) and message else f"the server answered with status {status}",
        code=code,
        field=param if isinstance(param, str) else None,
        status=status,
        retry_after_s=retry_after(headers.get("retry-after")),
        request_id=headers.get("x-request-id"),
        received=received,
    )


def from_response(status: int, headers: Mapping[str, str], content: bytes) -> LockstepError:
    """The error of a refused request; the names of headers are in lower case."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return from_body(body, status, headers)


def retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header: a number or a date. None if there is none, or nothing that can be read."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - time()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds)
