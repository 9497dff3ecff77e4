"""The two endpoints that generate text: from a body's bytes to the computation of its answer.

Most requests of a router are theirs. They need no routing and no dependencies, so FastAPI only describes them: a
request that arrives in one piece is served without the messages of ASGI, and its answer has the same bytes.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.types import Scope, Send

from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.body_turns import BodyTurns
from lockstep_router.faces.identity import Origin
from lockstep_router.faces.openai.completions import (
    chat_request,
    chat_style,
    completion_request,
    completion_style,
)
from lockstep_router.faces.openai.fields import parse
from lockstep_router.faces.openai.plain import PlainChat, PlainCompletion, decode
from lockstep_router.faces.openai.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.access import AccessMiddleware, Exchange
from lockstep_router.faces.rest.answers import answer
from lockstep_router.faces.rest.channel import Channel
from lockstep_router.faces.rest.replies import Client, Headers, run_live
from lockstep_router.faces.rest.resumable import KEY_NAME, answer_resumable, wanted_return, wants_event_ids
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.router import Router

Answer = Callable[[Client], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """What differs between the two endpoints."""

    kind: str
    model: type[SamplingFields]
    decoder: msgspec.json.Decoder[Any]
    request: Callable[[Any, Origin, Any], GenerationRequest]
    style: Callable[[Any], Style]

    def answer(self, router: Router, content: bytes | bytearray, origin: Origin, record: Record) -> Answer:
        """The computation of the answer to a body.

        Raises:
            LockstepError: INVALID_REQUEST, naming the field.
        """
        settings = router.settings
        # A key covers all fields of the body, so it needs them in the general form.
        body = None if KEY_NAME in origin.headers else decode(self.decoder, content, settings.max_body_values)
        if body is None:
            body = parse(self.model, content, max_values=settings.max_body_values)
        request, style = self.request(body, origin, settings), self.style(body)
        has_event_ids = wants_event_ids(origin.headers)
        coming_back = wanted_return(body, self.kind, origin)
        if coming_back is not None:
            return partial(answer_resumable, router, request, style, coming_back, record)
        return partial(answer, router, request, style, record, has_event_ids=has_event_ids)


CHAT = Endpoint("chat", ChatCompletionRequest, msgspec.json.Decoder(PlainChat), chat_request, chat_style)
COMPLETIONS = Endpoint(
    "text", CompletionRequest, msgspec.json.Decoder(PlainCompletion), completion_request, completion_style
)

ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}

_JOINABLE = frozenset({*ENDPOINTS, "/v1/responses"})
"""The paths where an idempotency key can join an earlier answer."""


async def admit(record: Record, path: str, fields: Mapping[str, str]) -> None:
    """Count a request against its tenant's limits before its body is read.

    Raises:
        LockstepError: RATE_LIMIT_EXCEEDED.
    """
    # A request with a key may be answered by an earlier one, which is among the tenant's streams.
    may_join = KEY_NAME in fields and path in _JOINABLE
    await (record.account.admit_reading() if may_join else record.account.admit())


def origin_of(scope: Scope, fields: Mapping[str, str], record: Record, router: Router) -> Origin:
    """The sender of a request."""
    address, shares = scope["client"][0] if scope.get("client") else "", router.settings.anonymous_cache == "shared"
    return Origin(fields, address, record.account.tenant.name, record.trace, record.request_id, shares)


class DirectFace:
    """Serves requests that have arrived in one piece, for the server that has such connections."""

    def __init__(
        self,
        router: Router,
        bodies: BodyBudget,
        turns: BodyTurns,
        access: AccessMiddleware,
        routes: dict[str, tuple[Endpoint, Any]],
    ) -> None:
        """Make the face.

        Args:
            router: serves the requests.
            bodies: the budget that all bodies share.
            turns: in which all bodies are parsed.
            access: wraps each request.
            routes: by path, the endpoint and FastAPI's route of it.
        """
        self._router = router
        self._bodies = bodies
        self._turns = turns
        self._access = access
        self._routes = routes
        self.paths = {path.encode(): path for path in routes}
        """The paths of requests with POST that it serves, if the body is small and arrives with the head."""

    async def serve(self, scope: Scope, send: Send, channel: Channel) -> None:
        """Serve one request, whose body is complete and small.

        Args:
            scope: of ASGI.
            send: of ASGI, for answers that are not written at once.
            channel: has the body and takes the answer.
        """
        endpoint, scope["route"] = self._routes[scope["path"]]

        async def respond(exchange: Exchange) -> None:
            def reply_at_once(status: int, headers: Headers, body: bytes) -> bool:
                if not channel.takes_whole:
                    return False
                channel.write_whole(status, headers + exchange.begin(status), body)
                return True

            def begin_at_once(status: int, headers: Headers, data: bytes) -> bool:
                if not channel.takes_chunks:
                    return False
                channel.begin(status, headers + exchange.begin(status), data)
                return True

            record = exchange.record
            router = self._router
            client = Client(
                exchange.send,
                record,
                router.settings,
                channel,
                reply_at_once,
                begin_at_once,
                router.workers.loop,
            )
            await run_live(self._answer(endpoint, scope, exchange, client, channel), client, channel, record)

        await self._access.serve(scope, send, respond)

    async def _answer(
        self, endpoint: Endpoint, scope: Scope, exchange: Exchange, client: Client, channel: Channel
    ) -> None:
        record, fields = exchange.record, exchange.fields
        await admit(record, scope["path"], fields)
        content = channel.take_body()
        record.body = self._bodies.take(len(content), max_bytes=self._router.settings.max_body_bytes)
        origin = origin_of(scope, fields, record, self._router)
        parse = partial(endpoint.answer, self._router, content, origin, record)
        run = await self._turns.run(len(content), parse)
        # Neither the body nor the request is kept while the answer is computed.
        computation = run(client)
        del content, parse, run
        await computation
