"""The HTTP face: routes, and errors in one shape. Handlers delegate to other modules."""

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.body_turns import BodyTurns
from lockstep_router.faces.idempotency import scope_of
from lockstep_router.faces.identity import Origin, owner_of
from lockstep_router.faces.openai.completions import tokenize_source
from lockstep_router.faces.openai.embeddings import EmbeddingBody, embedding_request
from lockstep_router.faces.openai.fields import Model, parse
from lockstep_router.faces.openai.format import model_body
from lockstep_router.faces.openai.responses.requests import responses_request, responses_style
from lockstep_router.faces.openai.responses.schemas import ResponsesRequest
from lockstep_router.faces.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lockstep_router.faces.rest.access import AccessMiddleware
from lockstep_router.faces.rest.answers import answer_ids, answer_text
from lockstep_router.faces.rest.console import add_console
from lockstep_router.faces.rest.direct_routes import Application, DirectRoutes
from lockstep_router.faces.rest.embeddings import answer_embeddings
from lockstep_router.faces.rest.generating import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    Answer,
    DirectFace,
    Endpoint,
    admit,
    origin_of,
)
from lockstep_router.faces.rest.header_fields import header_fields
from lockstep_router.faces.rest.openapi import CANCELLING, RESUMING, describe, described, generating, resumable
from lockstep_router.faces.rest.replies import Client, LiveReply, error_reply, json_reply
from lockstep_router.faces.rest.responses import answer_response
from lockstep_router.faces.rest.resumable import (
    KEY_HEADER,
    KEY_NAME,
    answer_resumable,
    answer_resumed,
    last_event,
    wanted_return,
)
from lockstep_router.faces.websocket.route import add_stream
from lockstep_router.router import Router


def create_app(router: Router) -> FastAPI:
    """The ASGI application of a router."""
    app = Application(
        title="Lockstep",
        description="OpenAI-compatible API of the Lockstep router.",
        docs_url=None,  # the documentation pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    settings = router.settings
    app.state.router = router
    app.state.bodies = BodyBudget(settings.max_bodies_bytes, settings.bodies_bytes_per_s, router.memory)
    app.state.turns = BodyTurns()
    app.add_exception_handler(LockstepError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_generation(app)
    routes = {route.path: route for route in app.routes if isinstance(route, APIRoute)}
    _add_resuming(app)
    resuming = app.routes[-1]
    assert isinstance(resuming, APIRoute)
    app.entry = access = AccessMiddleware(DirectRoutes(app.inner, routes, resuming), router)
    app.direct = DirectFace(
        router,
        app.state.bodies,
        app.state.turns,
        access,
        {path: (endpoint, routes[path]) for path, endpoint in ENDPOINTS.items()},
    )
    _add_streams(app)
    _add_models(app)
    _add_tokens(app)
    _add_operation(app)
    add_stream(app, router, app.state.bodies, app.state.turns)
    if settings.console == "public":
        add_console(app, router)
    describe(app)
    return app


def _add_generation(app: FastAPI) -> None:
    @app.post("/v1/chat/completions", openapi_extra=generating(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _generate(request, CHAT)

    @app.post("/v1/completions", openapi_extra=generating(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await _generate(request, COMPLETIONS)

    @app.post("/v1/responses", openapi_extra=resumable(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation with items: messages, reasoning, calls of functions."""
        body, origin = await _body(request, ResponsesRequest), _origin(request)
        wanted = responses_request(body, origin, _router(request).settings)
        style, coming_back = responses_style(body), wanted_return(body, "responses", origin)
        del body
        record = request.state.record
        if coming_back is not None:
            return _live(request, partial(answer_resumable, _router(request), wanted, style, coming_back, record))
        return _live(request, partial(answer_response, _router(request), wanted, style, record))


def _add_resuming(app: FastAPI) -> None:
    @app.get("/v1/streams/{stream_id}", openapi_extra=RESUMING)
    async def resume(request: Request, stream_id: str) -> Response:
        """Give the answer of a resumable request after the last event that the client has."""
        record = request.state.record
        record.come_back()
        await record.account.admit_reading()
        after = last_event(request.headers, request.query_params)
        owner = owner_of(_origin(request))
        return _live(request, partial(answer_resumed, _router(request), stream_id, owner, after, record))


def _add_streams(app: FastAPI) -> None:
    @app.delete("/v1/streams", openapi_extra=CANCELLING)
    async def cancel_key(request: Request) -> Response:
        """End the resumable request that has an idempotency key, and forget its answer."""
        await request.state.record.account.admit_reading()
        origin = _origin(request)
        key = origin.headers.get(KEY_NAME)
        if key is None:
            raise invalid(KEY_HEADER, "is required")
        stream_id = await _router(request).runs.cancel_key(scope_of(key, KEY_HEADER, origin), owner_of(origin))
        return _deleted(stream_id)

    @app.delete("/v1/streams/{stream_id}")
    async def cancel(request: Request, stream_id: str) -> Response:
        """End a resumable request and forget its answer."""
        await request.state.record.account.admit_reading()
        await _router(request).runs.cancel(stream_id, owner_of(_origin(request)))
        return _deleted(stream_id)

    @app.post("/v1/embeddings", openapi_extra=described(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        """Turn texts into vectors."""
        body = await _body(request, EmbeddingBody)
        wanted = embedding_request(body, _origin(request), _router(request).settings)
        as_base64 = body.encoding_format == "base64"
        del body
        record = request.state.record
        return _live(
            request,
            lambda client: answer_embeddings(
                _router(request), wanted, as_base64=as_base64, record=record, client=client
            ),
        )


def _add_models(app: FastAPI) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """List the models."""
        return json_reply({"object": "list", "data": [model_body(card) for card in _router(request).models()]})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        """Describe one model."""
        return json_reply(model_body(_router(request).model(model)))


def _add_tokens(app: FastAPI) -> None:
    @app.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Turn a prompt or a conversation into token ids."""
        body = await _body(request, TokenizeRequest)
        source = tokenize_source(body, _router(request).settings)
        return _live(request, partial(answer_ids, _router(request), body.model, source, request.state.record))

    @app.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Turn token ids into text."""
        body = await _body(request, DetokenizeRequest)
        return _live(request, partial(answer_text, _router(request), body.model, body.tokens, request.state.record))


def _add_operation(app: FastAPI) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        """Report that the process is alive."""
        return json_reply({"status": "alive"})

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Report whether requests for tokens are served now or, because there is no worker at all, wait for one."""
        reason = _router(request).unready
        return json_reply({"status": "ready"}) if reason is None else json_reply({"status": reason}, 503)


def _deleted(stream_id: str) -> Response:
    return json_reply({"id": stream_id, "object": "stream.deleted", "deleted": True})


def _router(request: Request) -> Router:
    router: Router = request.app.state.router
    return router


def _origin(request: Request) -> Origin:
    return origin_of(request.scope, _fields(request), request.state.record, _router(request))


def _fields(request: Request) -> dict[str, str]:
    return header_fields(request.scope["headers"])


async def _generate(request: Request, endpoint: Endpoint) -> Response:
    content = await _content(request)
    run: Callable[[bytearray], Answer] = partial(
        endpoint.answer, _router(request), origin=_origin(request), record=request.state.record
    )
    return _live(request, await request.app.state.turns.run(len(content), partial(run, content)))


async def _body(request: Request, model: type[Model]) -> Model:
    content, max_values = await _content(request), _router(request).settings.max_body_values
    parsed: Model = await request.app.state.turns.run(
        len(content), partial(parse, model, content, max_values=max_values)
    )
    return parsed


async def _content(request: Request) -> bytearray:
    settings, state, record = _router(request).settings, request.app.state, request.state.record
    await admit(record, request.scope["path"], _fields(request))
    record.body = state.bodies.reserve()
    content: bytearray = await record.body.read(
        request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
    )
    return content


def _live(request: Request, run: Callable[[Client], Awaitable[None]]) -> Response:
    return LiveReply(run, record=request.state.record, settings=_router(request).settings)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LockstepError)
    return error_reply(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        code, sentence = ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not allowed here"
    else:
        code, sentence = ErrorCode.NOT_FOUND, "there is nothing at this address"
    reply = error_reply(LockstepError(code, sentence))
    reply.headers.update(error.headers or {})
    return reply
