"""The console on the public port: its files for everyone who reaches the port, its state for those with a key."""

from fastapi import FastAPI, Request
from lockstep_common.answers import Answer
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.operations import names_this_host
from starlette.responses import Response

from lockstep_router.console import files
from lockstep_router.console.state import ConsoleState
from lockstep_router.faces.rest.replies import json_reply
from lockstep_router.router import Router

_UNSTORED = {"Cache-Control": "no-store", **dict(files.SECURITY_HEADERS)}


def add_console(app: FastAPI, router: Router) -> None:
    """Add the console's routes."""
    state, pages = ConsoleState(router), files.of(router.settings.console)

    async def console(request: Request) -> Response:
        """The console's page and its state."""
        path = request.scope["path"]  # the one that the key was checked for; a URL would also take in the Host header
        if router.keys is None and not names_this_host(request.headers.get("host", "")):
            # Without keys the port is for this machine alone, but another site's name may have been made to point here.
            raise LockstepError(ErrorCode.NOT_FOUND, "the console is for this machine")
        if path == files.STATE:
            reply = json_reply(state.on_public(request.state.record.account.tenant.name))
            reply.headers.update(_UNSTORED)
            return reply
        page = pages.get(path)
        if page is None:
            raise LockstepError(ErrorCode.NOT_FOUND, "there is nothing at this address")
        return _reply(page.unless_known(request.headers.get("if-none-match", "")))

    for route in (files.ROOT.rstrip("/"), files.ROUTE):
        app.add_api_route(route, console, methods=["GET", "HEAD"], include_in_schema=False)


def _reply(answer: Answer) -> Response:
    headers = dict(answer.headers)
    return Response(answer.body, answer.status, headers, media_type=answer.content_type)
