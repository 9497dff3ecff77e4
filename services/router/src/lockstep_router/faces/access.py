"""The sender of a request, and what is reported of it when it ends: the same for every face.

Log lines and metrics never hold keys, prompts or answers. The audit log has one line for each request that needs a key.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep_common.distributions import Distribution
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.tallies import Tally
from lockstep_common.telemetry import log_line

from lockstep_router import metrics
from lockstep_router.faces.record import Record
from lockstep_router.tenants import Access, KeyFile, Tenant

logger = logging.getLogger("lockstep.router")
audit = logging.getLogger("lockstep.audit")
audit.setLevel(logging.INFO)  # whatever the setting `log_level` is

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/{model:path}",
    "/v1/stream",
    "/v1/streams",
    "/v1/streams/{stream_id}",
)
"""The routes of the REST API whose answers alerts watch."""

for _face in ("http", "websocket", "grpc"):
    for _endpoint in ENDPOINTS:
        for _status in ("500", "503", "504"):
            metrics.REQUESTS.labels(_face, _endpoint, _status)  # from 0

NOBODY = Tenant("")
"""The tenant of all requests to a router without keys."""


@dataclass
class Call:
    """What was called, in words of a bounded set that never come from clients."""

    face: str
    """`http`, `websocket` or `grpc`."""
    endpoint: str
    """The route of the REST API that does the same."""
    method: str = "POST"
    level: int = logging.INFO
    """Of the access log."""
    _answers: dict[int, Tally] = field(default_factory=dict)
    """Counters of its answers, by the status."""
    _seconds: Distribution | None = None

    def count(self, status: int, seconds: float, trace_id: int = 0) -> None:
        """Count an answer; `trace_id` is of a trace that is kept, 0 without one."""
        answers = self._answers.get(status)
        if answers is None:
            answers = self._answers[status] = metrics.REQUESTS.labels(self.face, self.endpoint, str(status))
        answers.value += 1
        if self._seconds is None:
            self._seconds = metrics.REQUEST_SECONDS.labels(self.face, self.endpoint)
        self._seconds.observe(seconds, 1, trace_id)


def authenticate(keys: KeyFile, given: Sequence[bytes]) -> Access:
    """Whose request it is.

    Args:
        keys: the router's.
        given: the values of all `authorization` headers of the request.

    Raises:
        LockstepError: INVALID_API_KEY.
    """
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    if scheme.lower() != b"bearer" or not key.strip():
        raise LockstepError(ErrorCode.INVALID_API_KEY, "an API key is needed: Authorization: Bearer KEY")
    return keys.authenticate(key.strip())


def report(call: Call, record: Record, seconds: float, *, is_audited: bool) -> None:
    """Log and count a request that has ended."""
    if record.trace is None:
        call.count(record.status, seconds)
    else:
        call.count(record.status, seconds, record.trace.end(call, record, seconds))
    if (tenant := record.account.tenant.name) != NOBODY.name:
        metrics.TENANT_REQUESTS.add(tenant, (str(record.status),), 1)
        metrics.TENANT_TOKENS.add(tenant, ("in",), record.prompt_tokens)
        metrics.TENANT_TOKENS.add(tenant, ("out",), record.completion_tokens)
    log_line(
        logger,
        call.level,
        "request",
        record.log_fields()
        | {
            "face": call.face,
            "method": call.method,
            "endpoint": call.endpoint,
            "status": record.status,
            "duration_ms": round(seconds * 1000, 1),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "failovers": record.failovers,
            "resumed": record.resumed,
        },
    )
    if is_audited:
        log_line(
            audit,
            logging.INFO,
            "audit",
            {
                "tenant": record.account.tenant.name,
                "key_id": record.key_id,
                "request_id": record.request_id,
                "face": call.face,
                "endpoint": call.endpoint,
                "status": record.status,
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
            },
        )
