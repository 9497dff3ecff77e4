"""The HTTP face: routes, and errors in one shape. Handlers delegate to other modules."""

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lockstep_router.faces.rest.access import AccessMiddleware
from lockstep_router.faces.rest.answers import answer, answer_ids, answer_text
from lockstep_router.faces.rest.bodies import BodyBudget
from lockstep_router.faces.rest.completions import (
    chat_request,
    chat_style,
    completion_request,
    completion_style,
    conversation,
)
from lockstep_router.faces.rest.direct_routes import Application, DirectRoutes
from lockstep_router.faces.rest.embeddings import EmbeddingBody, answer_embeddings, embedding_request
from lockstep_router.faces.rest.fields import Model, parse
from lockstep_router.faces.rest.identity import Origin
from lockstep_router.faces.rest.openai_format import model_body
from lockstep_router.faces.rest.openapi import RESUMING, describe, described, resumable
from lockstep_router.faces.rest.parsing import Parsing
from lockstep_router.faces.rest.replies import Client, LiveReply, error_reply, json_reply
from lockstep_router.faces.rest.responses.answers import answer_response
from lockstep_router.faces.rest.responses.requests import responses_request
from lockstep_router.faces.rest.responses.schemas import ResponsesRequest
from lockstep_router.faces.rest.resumable import (
    KEY_HEADER,
    RESUMABLE_HEADER,
    Return,
    answer_resumable,
    answer_resumed,
    last_event,
    owner_of,
    wanted_return,
)
from lockstep_router.faces.rest.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lockstep_router.faces.websocket.route import add_stream
from lockstep_router.generation.request import GenerationRequest, PromptSource, TextPrompt
from lockstep_router.generation.style import Style
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
    app.state.parsing = Parsing()
    app.add_exception_handler(LockstepError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_generation(app)
    routes = {route.path: route for route in app.routes if isinstance(route, APIRoute)}
    app.entry = AccessMiddleware(DirectRoutes(app.inner, routes), router)
    _add_streams(app)
    _add_models(app)
    _add_tokens(app)
    _add_operation(app)
    add_stream(app, router, app.state.bodies, app.state.parsing)
    describe(app)
    return app


def _add_generation(app: FastAPI) -> None:
    @app.post("/v1/chat/completions", openapi_extra=resumable(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await _body(request, ChatCompletionRequest)
        origin = _origin(request)
        generation_request = chat_request(body, origin, _router(request).settings)
        return _answer(request, generation_request, chat_style(body), wanted_return(body, "chat", origin))

    @app.post("/v1/completions", openapi_extra=resumable(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        body = await _body(request, CompletionRequest)
        origin = _origin(request)
        generation_request = completion_request(body, origin, _router(request).settings)
        return _answer(request, generation_request, completion_style(body), wanted_return(body, "text", origin))

    @app.post("/v1/responses", openapi_extra=described(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation with items: messages, reasoning, calls of functions."""
        for name in (KEY_HEADER, RESUMABLE_HEADER):
            if name in request.headers:
                raise invalid(name, "is not supported by this endpoint")
        body = await _body(request, ResponsesRequest)
        generation_request = responses_request(body, _origin(request), _router(request).settings)
        run = partial(answer_response, _router(request), generation_request, body, request.state.record)
        return _live(request, run)


def _add_streams(app: FastAPI) -> None:
    @app.get("/v1/streams/{stream_id}", openapi_extra=RESUMING)
    async def resume(request: Request, stream_id: str) -> Response:
        """Give the answer of a resumable request after the last event that the client has."""
        record = request.state.record
        record.resumed = True
        await record.account.admit_reading()
        after = last_event(request.headers, request.query_params)
        owner = owner_of(_origin(request))
        return _live(request, partial(answer_resumed, _router(request), stream_id, owner, after, record))

    @app.delete("/v1/streams/{stream_id}")
    async def cancel(request: Request, stream_id: str) -> Response:
        """End a resumable request and forget its answer."""
        await request.state.record.account.admit_reading()
        await _router(request).runs.cancel(stream_id, owner_of(_origin(request)))
        return json_reply({"id": stream_id, "object": "stream.deleted", "deleted": True})

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
        source: PromptSource
        if body.messages is not None and body.prompt is None:
            source = conversation(body.messages, _router(request).settings)
        elif body.prompt is not None and body.messages is None:
            source = TextPrompt(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            raise invalid("prompt", "or messages is required, and not both")
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
        """Report whether requests for tokens are served now."""
        reason = _router(request).unready
        return json_reply({"status": "ready"}) if reason is None else json_reply({"status": reason}, 503)


def _router(request: Request) -> Router:
    router: Router = request.app.state.router
    return router


def _origin(request: Request) -> Origin:
    separates_by_address = _router(request).settings.anonymous_cache == "address"
    address = request.client.host if request.client is not None and separates_by_address else ""
    return Origin(request.headers, address, request.state.record.account.tenant.name)


async def _body(request: Request, model: type[Model]) -> Model:
    settings, state = _router(request).settings, request.app.state
    account = request.state.record.account
    # A request with a key may be answered by an earlier one, which is among the tenant's streams.
    await (account.admit_reading() if KEY_HEADER in request.headers else account.admit())
    reservation = request.state.record.body = state.bodies.reserve()
    content = await reservation.read(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    parsed: Model = await state.parsing.run(
        len(content), partial(parse, model, content, max_values=settings.max_body_values)
    )
    return parsed


def _answer(
    request: Request, generation_request: GenerationRequest, style: Style, coming_back: Return | None
) -> Response:
    if coming_back is not None:
        run = partial(answer_resumable, _router(request), generation_request, style, coming_back, request.state.record)
        return _live(request, run)
    return _live(request, partial(answer, _router(request), generation_request, style, request.state.record))


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
