"""The route of the WebSocket face. Its handshake is an HTTP request, so keys, limits and the access log hold for it."""

from fastapi import FastAPI, Request
from lockstep_common.errors import ErrorCode, LockstepError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.body_turns import BodyTurns
from lockstep_router.faces.websocket.handshake import EXTENSION, PATH, SwitchableConnection, shake_hands
from lockstep_router.faces.websocket.session import Client, Session
from lockstep_router.faces.websocket.socket import Socket, SocketLimits
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings

_SWITCHING_STATUS = 101


def add_stream(app: FastAPI, router: Router, bodies: BodyBudget, turns: BodyTurns) -> None:
    """Serve WebSockets at `/v1/stream`."""

    @app.get(PATH, response_class=Response, responses={_SWITCHING_STATUS: {"description": "The WebSocket is open."}})
    async def stream(request: Request) -> Response:
        """Open a WebSocket for many requests at a time."""
        head = shake_hands(request.scope, router.settings.websocket_origins)
        if router.draining:
            raise LockstepError(ErrorCode.DRAINING, "this router is shutting down", retry_after_s=1)
        connection: SwitchableConnection | None = request.scope.get("extensions", {}).get(EXTENSION)
        if connection is None:
            raise LockstepError(ErrorCode.INVALID_REQUEST, "this connection cannot become a WebSocket")
        socket = Socket(_limits(router.settings), bodies, connection)
        connection.switch(socket, head)
        request.state.record.status = _SWITCHING_STATUS
        address = "" if request.client is None else request.client.host
        return _Serving(Session(router, socket, turns, Client(request.headers, address, request.state.record.access)))


class _Serving(Response):
    """A response that has been sent already: it lasts as long as the socket."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await self._session.run()


def _limits(settings: RouterSettings) -> SocketLimits:
    return SocketLimits(
        max_message_bytes=settings.max_body_bytes,
        message_timeout_s=settings.body_timeout_s,
        write_timeout_s=settings.write_timeout_s,
        ping_interval_s=settings.keepalive_interval_s,
        pong_timeout_s=settings.websocket_pong_timeout_s,
        idle_timeout_s=settings.websocket_idle_timeout_s,
    )
