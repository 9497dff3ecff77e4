"""Middleware for every request: its id, its log line, its metrics, and a 500 for unexpected errors."""

import logging
import time
from dataclasses import dataclass

from lockstep_common.errors import ErrorCode, LockstepError
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep_router import metrics
from lockstep_router.faces.rest import identity
from lockstep_router.faces.rest.bodies import Reservation
from lockstep_router.router import Router

logger = logging.getLogger("lockstep.router")

_QUIET_ENDPOINTS = frozenset({"/healthz", "/readyz"})
"""Endpoints that probes request every few seconds: logged at debug level."""


@dataclass
class Record:
    """The facts about a request that are logged when it ends."""

    request_id: str
    status: int = 0
    """The status sent, or the error's status if a stream fails after 200."""
    started: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failovers: int = 0
    body: Reservation | None = None
    """The body's share of the budget for bodies."""

    def release_body(self) -> None:
        """Return the body's memory to the budget."""
        if self.body is not None:
            self.body.release()


class AccessMiddleware:
    """Plain ASGI middleware, so that streams pass through unbuffered."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        self._app = app
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(identity.request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["record"] = record
        begin = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if self._router.leaving:
                    # The client's next request should go to another router: this connection will close soon.
                    headers["connection"] = "close"
                record.status = message["status"]
                record.started = True
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("request failed", extra={"request_id": record.request_id})
            await _send_internal_error(record, send_with_headers)
        finally:
            record.release_body()
            _report(scope, record, time.perf_counter() - begin)


async def _send_internal_error(record: Record, send: Send) -> None:
    if record.started:
        # The answer stays unfinished, so the server closes the connection and the client sees that it is incomplete.
        record.status = 500
        return
    body = to_json(LockstepError(ErrorCode.INTERNAL, "something went wrong in the router").openai_body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _report(scope: Scope, record: Record, seconds: float) -> None:
    # The route's pattern, not the path: the set of labels is bounded and never comes from clients.
    endpoint = getattr(scope.get("route"), "path", "other")
    metrics.REQUESTS.labels(endpoint, str(record.status)).inc()
    metrics.REQUEST_SECONDS.labels(endpoint).observe(seconds)
    logger.log(
        logging.DEBUG if endpoint in _QUIET_ENDPOINTS else logging.INFO,
        "request",
        extra={
            "request_id": record.request_id,
            "method": scope["method"] if scope["method"] in ("GET", "POST") else "other",
            "endpoint": endpoint,
            "status": record.status,
            "duration_ms": round(seconds * 1000, 1),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "failovers": record.failovers,
        },
    )
