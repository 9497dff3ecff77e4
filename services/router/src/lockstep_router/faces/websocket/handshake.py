"""The opening handshake of a WebSocket: an HTTP request that was accepted like any other, and the switch after it.

The request has passed the limits of connections and headers, and its API key has been checked. It never reads a frame.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol as Interface

from lockstep_common.errors import ErrorCode, LockstepError
from starlette.types import Scope
from websockets.datastructures import Headers
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from lockstep_router.faces.origins import is_listed, is_own, not_allowed
from lockstep_router.faces.websocket.socket import Holder, Socket, frames_logger

PATH = "/v1/stream"
EXTENSION = "lockstep.connection"
"""The key in a scope's `extensions` of the connection that can switch."""
SUBPROTOCOL_HEADER = b"sec-websocket-protocol"
SUBPROTOCOL = "lockstep.v1"
_KEY_MARK = b"lockstep.key."
"""Precedes an API key among the subprotocols: browsers can set no header `Authorization`."""


class SwitchableConnection(Holder, Interface):
    """A connection of HTTP that can become one of another protocol."""

    def switch(self, socket: Socket, head: bytes) -> None:
        """Send the head of the answer, and give the connection to the socket for good.

        Raises:
            LockstepError: INVALID_REQUEST, the client has not waited for the answer.
        """


def keys_in_subprotocols(scope: Scope) -> list[bytes]:
    """The API key among the subprotocols of a WebSocket's handshake, as a value of `Authorization`."""
    if scope["path"] != PATH:
        return []
    offered = _tokens(value for name, value in scope["headers"] if name == SUBPROTOCOL_HEADER)
    return [b"Bearer " + token.removeprefix(_KEY_MARK) for token in offered if token.startswith(_KEY_MARK)]


def without_key(subprotocols: bytes) -> bytes:
    """The header's value without the API key."""
    return b", ".join(token for token in _tokens([subprotocols]) if not token.startswith(_KEY_MARK))


def shake_hands(scope: Scope, origins: Iterable[str]) -> bytes:
    """The head of the answer to a handshake, without its empty line.

    Args:
        scope: of the request.
        origins: the origins of web pages that may connect, besides the router's own; `*`: all.

    Raises:
        LockstepError: INVALID_REQUEST, it is no handshake of a WebSocket; ORIGIN_NOT_ALLOWED, a web page of another
            origin sends it.
    """
    headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])
    _check_origin(headers, origins)
    protocol = ServerProtocol(select_subprotocol=_select, logger=frames_logger)
    request = Request(scope["path"], headers, scope["method"], f"HTTP/{scope['http_version']}")
    response = protocol.accept(request)
    if response.status_code != 101:
        reason = "no handshake" if protocol.handshake_exc is None else str(protocol.handshake_exc)
        raise LockstepError(ErrorCode.INVALID_REQUEST, f"a WebSocket's handshake of version 13 is needed: {reason}")
    lines = [f"{name}: {value}\r\n" for name, value in response.headers.raw_items()]
    return b"HTTP/1.1 101 Switching Protocols\r\n" + "".join(lines).encode("latin-1")


def _select(_: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return Subprotocol(SUBPROTOCOL) if SUBPROTOCOL in offered else None


def _check_origin(headers: Headers, origins: Iterable[str]) -> None:
    # Of a router without keys, `check_page` has been asked before, which trusts fewer.
    given, hosts = headers.get_all("Origin"), headers.get_all("Host")
    if given and not (
        len(given) == 1 and (is_listed(given[0], origins) or (len(hosts) == 1 and is_own(given[0], hosts[0])))
    ):
        raise not_allowed()


def _tokens(values: Iterable[bytes]) -> list[bytes]:
    return [token.strip() for value in values for token in value.split(b",")]
