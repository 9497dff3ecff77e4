"""The list of all errors, and the table that translates them to HTTP, OpenAI's error body and gRPC.

Every failure that leaves a process has an `ErrorCode`. Only the services' edges translate it, with this table.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class ErrorCode(StrEnum):
    """The kind of a failure, the same on every protocol; below each, what it means and whether to try again."""

    INVALID_REQUEST = "invalid_request"
    """A field, a header or the form of the request is wrong, and `param` names it if it has a name; correct it, since
    the same request fails again.
    """
    INVALID_API_KEY = "invalid_api_key"
    """The API key is missing, unknown or expired; try again only with a valid one."""
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    """A browser sends the request for a web page of an origin that may not; the same request fails again."""
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    """The tenant has reached the limit that `param` names; try again after `Retry-After`."""
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    """The prompt, alone or together with the tokens asked for, does not fit into the model's context; send less, since
    the same request fails again.
    """
    MODEL_NOT_FOUND = "model_not_found"
    """No worker has reported a model of this name; try again only if such a worker is about to come."""
    NOT_FOUND = "not_found"
    """There is nothing at this address, or a WebSocket has no request in progress with this id; another try does not
    help.
    """
    STREAM_NOT_FOUND = "stream_not_found"
    """This client has no resumable stream with this id or key, or the time to resume it is over; begin a new request.
    """
    STREAM_MOVED = "stream_moved"
    """A client has resumed the stream at another router, which has it now; this is final for this reader, since another
    try would take the stream from that client.
    """
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    """The idempotency key was used for a request with another body; try again with another key."""
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """There is something at this address, but not with this method, or there is no such gRPC call; another try does not
    help.
    """
    PAYLOAD_TOO_LARGE = "payload_too_large"
    """The body or the headers are larger than this router takes; send less, since the same request fails again."""
    OVERLOADED = "overloaded"
    """The router or the model's workers have no room for the request now; try again after `Retry-After`."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    """The request alone needs more than its tenant's limits or a worker's memory allow; send less, since waiting does
    not help.
    """
    UNAVAILABLE = "unavailable"
    """No worker could run the request in time, or another part of the system does not answer; try again after
    `Retry-After`.
    """
    WORKER_LOST = "worker_lost"
    """Several attempts in a row have failed on workers that live on; try again after `Retry-After`."""
    REQUEST_QUARANTINED = "request_quarantined"
    """Several workers died while they ran this request, so it is refused for some minutes; do not try it again."""
    DRAINING = "draining"
    """This router is shutting down; try again after `Retry-After`, over a new connection."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The time that the client has set for its request is over; try again only with more time."""
    CANCELLED = "cancelled"
    """The request was ended: its client has deleted or cancelled it, has left, or has read nothing for too long; it is
    final.
    """
    NUMERICAL_ERROR = "numerical_error"
    """The model's numbers became NaN or infinite for this request; the same request fails again."""
    INTERNAL = "internal"
    """The router or a worker has a defect, and its log has more under the request's id; one more try may succeed."""


@dataclass(frozen=True)
class Meaning:
    """The translation of an error code to each protocol."""

    http_status: int
    openai_type: str
    grpc_status: str
    retryable: bool = False
    """Whether another worker may succeed with the same request."""


MEANINGS: dict[ErrorCode, Meaning] = {
    ErrorCode.INVALID_REQUEST: Meaning(400, "invalid_request_error", "INVALID_ARGUMENT"),
    ErrorCode.INVALID_API_KEY: Meaning(401, "invalid_request_error", "UNAUTHENTICATED"),
    ErrorCode.ORIGIN_NOT_ALLOWED: Meaning(403, "invalid_request_error", "PERMISSION_DENIED"),
    ErrorCode.RATE_LIMIT_EXCEEDED: Meaning(429, "rate_limit_error", "RESOURCE_EXHAUSTED"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Meaning(400, "invalid_request_error", "INVALID_ARGUMENT"),
    ErrorCode.MODEL_NOT_FOUND: Meaning(404, "invalid_request_error", "NOT_FOUND"),
    ErrorCode.NOT_FOUND: Meaning(404, "invalid_request_error", "NOT_FOUND"),
    ErrorCode.STREAM_NOT_FOUND: Meaning(404, "invalid_request_error", "NOT_FOUND"),
    # Not retryable: a client that resumes the stream takes it from the reader that has it now.
    ErrorCode.STREAM_MOVED: Meaning(409, "invalid_request_error", "ABORTED"),
    ErrorCode.IDEMPOTENCY_KEY_REUSED: Meaning(422, "invalid_request_error", "FAILED_PRECONDITION"),
    ErrorCode.METHOD_NOT_ALLOWED: Meaning(405, "invalid_request_error", "UNIMPLEMENTED"),
    ErrorCode.PAYLOAD_TOO_LARGE: Meaning(413, "invalid_request_error", "INVALID_ARGUMENT"),
    ErrorCode.OVERLOADED: Meaning(503, "overloaded_error", "RESOURCE_EXHAUSTED", retryable=True),
    ErrorCode.RESOURCE_EXHAUSTED: Meaning(400, "invalid_request_error", "RESOURCE_EXHAUSTED"),
    ErrorCode.UNAVAILABLE: Meaning(503, "service_unavailable_error", "UNAVAILABLE", retryable=True),
    ErrorCode.WORKER_LOST: Meaning(503, "service_unavailable_error", "UNAVAILABLE", retryable=True),
    # Not 5xx: clients retry those automatically, and this request kills workers.
    ErrorCode.REQUEST_QUARANTINED: Meaning(422, "invalid_request_error", "FAILED_PRECONDITION"),
    ErrorCode.DRAINING: Meaning(503, "service_unavailable_error", "UNAVAILABLE", retryable=True),
    ErrorCode.DEADLINE_EXCEEDED: Meaning(504, "timeout_error", "DEADLINE_EXCEEDED"),
    ErrorCode.CANCELLED: Meaning(499, "cancelled_error", "CANCELLED"),
    # Not retryable: the same tokens give the same logits on the next worker.
    ErrorCode.NUMERICAL_ERROR: Meaning(500, "server_error", "INTERNAL"),
    ErrorCode.INTERNAL: Meaning(500, "server_error", "INTERNAL"),
}


class LockstepError(Exception):
    """A failure with a code, a message for people, and the name of the invalid field if there is one."""

    def __init__(
        self, code: ErrorCode, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def copied(self) -> Self:
        """The same error with all its attributes, without its traceback, cause and context. Raising an error adds the
        frames that it passes to its traceback, and these hold all that their functions have. So code that keeps an
        error keeps a copy, and raises another copy to each caller that gets it.
        """
        other = type(self).__new__(type(self), *self.args)
        other.__dict__.update(self.__dict__)
        return other

    @property
    def meaning(self) -> Meaning:
        """The row of the table for this error's code."""
        return MEANINGS[self.code]

    @property
    def retry_after_whole_s(self) -> int | None:
        """`retry_after_s` as answers say it: in whole seconds, at least 1, never earlier."""
        return None if self.retry_after_s is None else max(1, math.ceil(self.retry_after_s))

    def openai_body(self) -> dict[str, Any]:
        """OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""
        return {
            "error": {
                "message": self.message,
                "type": self.meaning.openai_type,
                "param": self.field,
                "code": str(self.code),
            }
        }


def invalid(field: str, sentence: str) -> LockstepError:
    """The error for a field that cannot be used. The message is the field's name and the sentence."""
    return LockstepError(ErrorCode.INVALID_REQUEST, f"{field} {sentence}", field=field)


def cannot_listen(field: str, address: str, reason: str) -> LockstepError:
    """The error for an address that a server cannot listen on. `field` is the setting with the address."""
    return LockstepError(ErrorCode.INVALID_REQUEST, f"cannot listen on {address}: {reason}", field=field)


def parse_code(text: str) -> ErrorCode:
    """The code that a peer sent; INTERNAL for a code that this version does not know."""
    try:
        return ErrorCode(text)
    except ValueError:
        return ErrorCode.INTERNAL
