"""The sender of a request that comes through a proxy. Only proxies that are named in the settings are believed."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import Scope
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware


class ForwardedClients:
    """Puts the client that a trusted proxy names in the place of the proxy.

    Args:
        proxies: addresses and networks of those that are trusted.
    """

    def __init__(self, proxies: Sequence[str]) -> None:
        self._middleware = ProxyHeadersMiddleware(_nothing, list(proxies))

    async def name(self, scope: Scope) -> None:
        """Name the client in a scope of ASGI, by X-Forwarded-For; of connections of others nothing is read."""
        given: Any = scope
        await self._middleware(given, _never, _never)

    async def address(self, address: str, forwarded: Iterable[bytes]) -> str:
        """The client's address, by the same rules, for servers without ASGI.

        Args:
            address: of the connection; empty: it is not known.
            forwarded: the values of X-Forwarded-For, as they came.
        """
        scope: Scope = {
            "type": "http",
            "client": (address, 0) if address else None,
            "headers": [(b"x-forwarded-for", value) for value in forwarded],
        }
        await self.name(scope)
        return scope["client"][0] if scope["client"] else ""


async def _nothing(*_: object) -> None:
    """Do nothing: the scope is all that is wanted of uvicorn's middleware."""


async def _never(*_: object) -> Any:
    raise AssertionError("nothing is read or sent here")
