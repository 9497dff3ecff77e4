"""Middleware that calls the handlers of the busiest routes itself.

FastAPI's way to a handler, through its router, its dependencies and its handlers of exceptions, takes about half of a
small request's CPU time. The routes named here need none of that: their handlers read the body and return the response.
They stay routes of FastAPI, which describes them in /openapi.json and answers other methods.

`Application` puts this middleware, and the one for access, outside of FastAPI's and Starlette's own layers too.
"""

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.routing import APIRoute
from lockstep_common.errors import LockstepError
from starlette.requests import Request
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

    def __init__(self, app: ASGIApp, routes: Mapping[str, APIRoute]) -> None:
        """Wrap an application.

        Args:
            app: serves all other requests.
            routes: by path, those of POST with a handler that takes the request alone.
        """
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.endpoint(Request(scope, receive))
        except LockstepError as error:
            response = error_reply(error)
        await response(scope, receive, send)
