"""The list of all errors, and the table that translates them to HTTP, OpenAI's error body and gRPC.

Every failure that leaves a process has an `ErrorCode`. Only the services' edges translate it, with this table.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """The kind of a failure; the same on every protocol."""

    INVALID_REQUEST = "invalid_request"
    INVALID_API_KEY = "invalid_api_key"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    STREAM_NOT_FOUND = "stream_not_found"
    STREAM_MOVED = "stream_moved"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    OVERLOADED = "overloaded"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNAVAILABLE = "unavailable"
    WORKER_LOST = "worker_lost"
    REQUEST_QUARANTINED = "request_quarantined"
    DRAINING = "draining"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    NUMERICAL_ERROR = "numerical_error"
    INTERNAL = "internal"


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
    ErrorCode.RATE_LIMIT_EXCEEDED: Meaning(429, "rate_limit_error", "RESOURCE_EXHAUSTED"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Meaning(400, "invalid_request_error", "INVALID_ARGUMENT"),
    ErrorCode.MODEL_NOT_FOUND: Meaning(404, "invalid_request_error", "NOT_FOUND"),
    ErrorCode.NOT_FOUND: Meaning(404, "invalid_request_error", "NOT_FOUND"),
    ErrorCode.STREAM_NOT_FOUND: Meaning(404, "invalid_request_error", "NOT_FOUND"),
    # Not retryable: who resumes the stream takes it from the reader that has it now.
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
