"""The HTTP face: routes, and errors in one shape. Everything they do is elsewhere."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.telemetry import METRICS_CONTENT_TYPE, exposition
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lockstep_router import prompts
from lockstep_router.access import AccessMiddleware
from lockstep_router.bodies import read_body
from lockstep_router.completions import Caller, answer_chat, answer_completion
from lockstep_router.fields import Model, parse
from lockstep_router.openai_format import model_body
from lockstep_router.openapi import describe, described
from lockstep_router.replies import Client, LiveReply, error_reply, json_reply
from lockstep_router.router import Router
from lockstep_router.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from lockstep_router.status import status_body


def create_app(router: Router) -> FastAPI:
    """The ASGI application of a router."""
    app = FastAPI(
        title="Lockstep",
        description="OpenAI-compatible API of the Lockstep router.",
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.router = router
    app.add_middleware(AccessMiddleware, router=router)
    app.add_exception_handler(LockstepError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_generation(app)
    _add_models(app)
    _add_tokens(app)
    _add_operation(app)
    describe(app)
    return app


def _add_generation(app: FastAPI) -> None:
    @app.post("/v1/chat/completions", openapi_extra=described(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        params = await _params(request, ChatCompletionRequest)
        return _live(request, partial(answer_chat, _router(request), _caller(request), params))

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        params = await _params(request, CompletionRequest)
        return _live(request, partial(answer_completion, _router(request), _caller(request), params))


def _add_models(app: FastAPI) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """List the models."""
        cards = _router(request).workers.models.values()
        return json_reply({"object": "list", "data": [model_body(card) for card in cards]})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        """Describe one model."""
        card = _router(request).workers.models.get(model)
        if card is None:
            raise LockstepError(ErrorCode.MODEL_NOT_FOUND, f"the model {model!r} does not exist", field="model")
        return json_reply(model_body(card))


def _add_tokens(app: FastAPI) -> None:
    @app.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Turn a prompt or a conversation into token ids."""
        params = await _params(request, TokenizeRequest)
        if (params.prompt is None) == (params.messages is None):
            raise LockstepError(
                ErrorCode.INVALID_REQUEST, "exactly one of prompt and messages is required", field="prompt"
            )
        card, tokenizer = await _router(request).workers.model(params.model, "")
        if params.messages is not None:
            encoded = await prompts.encode_messages(params.messages, tokenizer, card)
        else:
            encoded = await prompts.encode_text(
                params.prompt or "", tokenizer, card, add_special_tokens=params.add_special_tokens
            )
        return json_reply({"tokens": encoded.ids, "count": len(encoded.ids), "max_model_len": card.context_length})

    @app.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Turn token ids into text."""
        params = await _params(request, DetokenizeRequest)
        card, tokenizer = await _router(request).workers.model(params.model, "")
        prompts.check_ids(params.tokens, card, "tokens")
        return json_reply({"prompt": tokenizer.decode(params.tokens)})


def _add_operation(app: FastAPI) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        """Say whether the process lives."""
        return json_reply({"status": "alive"})

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Say whether requests for tokens are served now."""
        router = _router(request)
        if router.is_ready:
            return json_reply({"status": "ready"})
        return json_reply({"status": "draining" if router.leaving else "no worker is ready"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Give Prometheus its metrics."""
        return Response(exposition(), media_type=METRICS_CONTENT_TYPE)

    @app.get("/status")
    async def status(request: Request) -> Response:
        """Describe the router, its workers and their ranks."""
        return json_reply(status_body(_router(request)))


def _router(request: Request) -> Router:
    router: Router = request.app.state.router
    return router


def _caller(request: Request) -> Caller:
    return Caller(request.headers, request.state.record)


async def _params(request: Request, model: type[Model]) -> Model:
    settings = _router(request).settings
    body = await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    return parse(model, body)


def _live(request: Request, answer: Any) -> Response:
    settings = _router(request).settings

    async def write(client: Client) -> None:
        await answer(client)

    return LiveReply(write, record=request.state.record, write_timeout_s=settings.write_timeout_s)


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
