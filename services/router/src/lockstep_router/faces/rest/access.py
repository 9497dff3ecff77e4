"""Middleware for every request: its API key, its id, its log lines, its metrics, and a 500 for unexpected errors.

If the router has keys, nothing behind this module gets an HTTP request without a valid one: the exceptions are listed
here, and everything else is refused, whether it exists or not. Nothing behind it gets the key either.
"""

import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from lockstep_common.errors import ErrorCode, LockstepError
from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep_router.console import files
from lockstep_router.faces import identity
from lockstep_router.faces.access import NOBODY, Call, authenticate, report
from lockstep_router.faces.forwarded import ForwardedClients
from lockstep_router.faces.origins import check_page
from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.header_fields import header_fields
from lockstep_router.faces.rest.replies import Headers, error_reply, send_response
from lockstep_router.faces.websocket.handshake import SUBPROTOCOL_HEADER, keys_in_subprotocols, without_key
from lockstep_router.router import Router
from lockstep_router.traces import begin_request

logger = logging.getLogger("lockstep.router")

_QUIET_ENDPOINTS = frozenset({"/healthz", "/readyz"})
"""Endpoints that probes request every few seconds: logged at debug level. Load balancers send no keys, so these need
none; they show nothing but whether the router serves.
"""

_DEBUG_ENDPOINTS = _QUIET_ENDPOINTS | {files.ROUTE}
"""Endpoints whose requests are logged at debug level; the console asks once a second."""

_RESUMED = "/v1/streams/"
"""Paths of streams to come back to, which have traces, as all requests with POST have."""

_AUTHORIZATION = b"authorization"


class Exchange:
    """One request and its answer: the facts, and what the heads of all answers have."""

    def __init__(self, fields: Mapping[str, str], record: Record, router: Router, send: Send) -> None:
        self.fields = fields
        """The request's headers, without an API key that this router knows."""
        self.record = record
        self._router = router
        self._send = send

    async def send(self, message: Message) -> None:
        """Send a message of ASGI, a head with the further headers."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self.begin(message["status"])]
        await self._send(message)

    def begin(self, status: int) -> Headers:
        """Note that an answer begins; the further headers of its head."""
        record = self.record
        record.status, record.started = status, True
        headers = [(b"x-request-id", record.request_id.encode())]
        for what, standing in record.account.standings.items():
            headers += [
                (f"x-ratelimit-limit-{what}".encode(), b"%d" % standing.limit),
                (f"x-ratelimit-remaining-{what}".encode(), b"%d" % standing.remaining),
                (f"x-ratelimit-reset-{what}".encode(), b"%ds" % math.ceil(standing.reset_s)),
            ]
        if self._router.leaving:
            # The client's next request should go to another router: this connection will close soon.
            headers.append((b"connection", b"close"))
        return headers


class AccessMiddleware:
    """Plain ASGI middleware, so that streams pass through unbuffered."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        self._app = app
        self._router = router
        self._pages = files.of("public") if router.settings.console == "public" else {}
        proxies = router.settings.trusted_proxies
        self._forwarded = ForwardedClients(proxies) if proxies else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def respond(exchange: Exchange) -> None:
            scope.setdefault("state", {})["record"] = exchange.record
            await self._app(scope, receive, exchange.send)

        await self.serve(scope, send, respond)

    async def serve(self, scope: Scope, send: Send, respond: Callable[[Exchange], Awaitable[None]]) -> None:
        """Let `respond` answer a request, unless its key or its web page is refused, and report it."""
        began, fields, needs_key = time.perf_counter(), header_fields(scope["headers"]), self._needs_key(scope)
        record = Record(identity.request_id(fields), self._router.limits.account(NOBODY))
        exchange = Exchange(fields, record, self._router, send)
        if self._forwarded is not None:
            await self._forwarded.name(scope)
        try:
            refusal = self._identify(scope, exchange) if needs_key else self._refuse_page(scope, fields)
            if refusal is None:
                if scope["method"] == "POST" or scope["path"].startswith(_RESUMED):
                    record.trace = begin_request(self._router.tracing, fields)
                await respond(exchange)
            else:
                await send_response(error_reply(refusal), exchange.send)
        except Exception:
            logger.exception("request failed", extra=record.log_fields())
            await _send_internal_error(record, exchange.send)
        finally:
            record.release_body()
            report(_call(scope), record, time.perf_counter() - began, is_audited=needs_key)

    def _needs_key(self, scope: Scope) -> bool:
        if self._router.keys is None:
            return False
        path, method = scope["path"], scope["method"]
        if method == "GET" and path in _QUIET_ENDPOINTS:
            return False
        # The page has to be there before anyone can type a key into it, and is the same for everyone.
        return not (method in ("GET", "HEAD") and path in self._pages)

    def _refuse_page(self, scope: Scope, fields: Mapping[str, str]) -> LockstepError | None:
        """The error if a web page sends the request that may not."""
        if self._router.keys is None:
            try:
                check_page(scope["method"], fields, self._router.settings.websocket_origins)
            except LockstepError as error:
                return error
        return None

    def _identify(self, scope: Scope, exchange: Exchange) -> LockstepError | None:
        """Find out whose request it is; the error if it must not be served."""
        assert self._router.keys is not None
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
        exchange.fields, record = header_fields(scope["headers"]), exchange.record
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
    method = scope["method"] if scope["method"] in ("GET", "POST", "DELETE") else "other"
    return _call_of(getattr(scope.get("route"), "path", "other"), method)


@functools.cache
def _call_of(endpoint: str, method: str) -> Call:
    return Call("http", endpoint, method, logging.DEBUG if endpoint in _DEBUG_ENDPOINTS else logging.INFO)
