"""Middleware that calls the handlers of the busiest routes itself.

FastAPI's way to a handler, through its router, its dependencies and its handlers of exceptions, takes about half of a
small request's CPU time. The routes named here need none of that: their handlers read the body and return the response.
They stay routes of FastAPI, which describes them in /openapi.json and answers other methods. To resume is among them,
because all clients of a router that has died do it at the same time.

`Application` puts this middleware, and the one for access, outside of FastAPI's and Starlette's own layers too.
"""

from collections.abc import Awaitable, Mapping
from typing import cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from lockstep_common.errors import LockstepError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep_router.faces.rest.generating import DirectFace
from lockstep_router.faces.rest.replies import error_reply


class Application(FastAPI):
    """FastAPI behind middleware that wraps all of it, its own layers included: `entry` gets each request first."""

    entry: ASGIApp
    direct: DirectFace
    """Serves requests that arrive in one piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        scope["app"] = self
        await self.entry(scope, receive, send)

    async def inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request as FastAPI does by itself."""
        await super().__call__(scope, receive, send)


class DirectRoutes:
    """Plain ASGI middleware, inside of the one for access."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, APIRoute], resuming: APIRoute) -> None:
        """Wrap an application.

        Args:
            app: serves all other requests.
            posts: by path, those of POST with a handler that takes the request alone.
            resuming: that of GET whose path ends with its only parameter, the id of a stream.
        """
        self._app = app
        self._posts = posts
        self._resuming = resuming
        self._streams = resuming.path.partition("{")[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        handler = self._handler(scope, receive) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler
        except LockstepError as error:
            response = error_reply(error)
        await response(scope, receive, send)

    def _handler(self, scope: Scope, receive: Receive) -> Awaitable[Response] | None:
        """The handler at work; None: FastAPI finds it."""
        path, method = scope["path"], scope["method"]
        if method == "POST" and (route := self._posts.get(path)) is not None:
            scope["route"] = route
            return cast("Awaitable[Response]", route.endpoint(Request(scope, receive)))
        if method == "GET" and path.startswith(self._streams):
            stream_id = path[len(self._streams) :]
            if stream_id and "/" not in stream_id:
                scope["route"] = self._resuming
                return cast("Awaitable[Response]", self._resuming.endpoint(Request(scope, receive), stream_id))
        return None
