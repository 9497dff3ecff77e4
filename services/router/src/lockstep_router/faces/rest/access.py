"""Middleware for every request: its API key, its id, its log lines, its metrics, and a 500 for unexpected errors.

If the router has keys, nothing behind this module gets an HTTP request without a valid one: the exceptions are listed
here, and everything else is refused, whether it exists or not. Nothing behind it gets the key either.
"""

import logging
import math
import time

from lockstep_common.errors import ErrorCode, LockstepError
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep_router.faces.access import NOBODY, Call, authenticate, report
from lockstep_router.faces.rest import identity
from lockstep_router.faces.rest.record import Record
from lockstep_router.faces.rest.replies import error_reply
from lockstep_router.faces.websocket.handshake import SUBPROTOCOL_HEADER, keys_in_subprotocols, without_key
from lockstep_router.router import Router

logger = logging.getLogger("lockstep.router")

_QUIET_ENDPOINTS = frozenset({"/healthz", "/readyz"})
"""Endpoints that probes request every few seconds: logged at debug level. Load balancers send no keys, so these need
none; they tell nothing but whether the router serves.
"""

_AUTHORIZATION = b"authorization"


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
        record = Record(identity.request_id(Headers(scope=scope)), self._router.limits.account(NOBODY))
        scope.setdefault("state", {})["record"] = record
        begin = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                for what, standing in record.account.standings.items():
                    headers[f"x-ratelimit-limit-{what}"] = str(standing.limit)
                    headers[f"x-ratelimit-remaining-{what}"] = str(standing.remaining)
                    headers[f"x-ratelimit-reset-{what}"] = f"{math.ceil(standing.reset_s)}s"
                if self._router.leaving:
                    # The client's next request should go to another router: this connection will close soon.
                    headers["connection"] = "close"
                record.status = message["status"]
                record.started = True
            await send(message)

        try:
            refusal = self._identify(scope, record)
            app = self._app if refusal is None else error_reply(refusal)
            await app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("request failed", extra={"request_id": record.request_id})
            await _send_internal_error(record, send_with_headers)
        finally:
            record.release_body()
            report(_call(scope), record, time.perf_counter() - begin, is_audited=self._needs_key(scope))

    def _needs_key(self, scope: Scope) -> bool:
        is_probe = scope["method"] == "GET" and scope["path"] in _QUIET_ENDPOINTS
        return self._router.keys is not None and not is_probe

    def _identify(self, scope: Scope, record: Record) -> LockstepError | None:
        """Find out whose request it is; the error if it must not be served."""
        if self._router.keys is None or not self._needs_key(scope):
            return None
        given = [value for name, value in scope["headers"] if name == _AUTHORIZATION]
        try:
            access = authenticate(self._router.keys, given or keys_in_subprotocols(scope))
        except LockstepError as error:
            return error
        scope["headers"] = [
            (name, without_key(value) if name == SUBPROTOCOL_HEADER else value)
            for name, value in scope["headers"]
            if name != _AUTHORIZATION
        ]
        record.access = access
        record.account, record.key_id = self._router.limits.account(access.tenant), access.key_id
        return None


async def _send_internal_error(record: Record, send: Send) -> None:
    if record.started:
        # The answer stays unfinished, so the server closes the connection and the client sees that it is incomplete.
        record.status = 500
        return
    body = to_json(LockstepError(ErrorCode.INTERNAL, "something went wrong in the router").openai_body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _call(scope: Scope) -> Call:
    # The route's pattern, not the path: the set of labels is bounded and never comes from clients.
    endpoint = getattr(scope.get("route"), "path", "other")
    return Call(
        "http",
        endpoint,
        scope["method"] if scope["method"] in ("GET", "POST", "DELETE") else "other",
        logging.DEBUG if endpoint in _QUIET_ENDPOINTS else logging.INFO,
    )
