"""The request bodies in /openapi.json. Routes read bodies themselves, so FastAPI cannot know them."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lockstep_router.faces.openai.embeddings import EmbeddingBody
from lockstep_router.faces.openai.responses.schemas import ResponsesRequest
from lockstep_router.faces.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/{model}"
_MODELS = (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingBody,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def described(model: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description that names its body's schema."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_EVENT_ID = {"type": "string", "example": "r-0123456789abcdef0123456789abcdef:12,7f"}
_EVENT_IDS = {
    "name": "X-Lockstep-Event-IDs",
    "in": "header",
    "description": "`true`: the events of a stream have ids that count its tokens, also if it is not resumable.",
    "schema": {"type": "string", "enum": ["true", "false"]},
}
_STREAM_ERRORS = {
    str(status): {"description": text}
    for status, text in ((400, "The event is none of this stream."), (404, "There is no such stream."))
}

RESUMING: dict[str, Any] = {
    "parameters": [
        {
            "name": "Last-Event-ID",
            "in": "header",
            "description": "Id of the last event that the client has; without it the answer comes from its beginning.",
            "schema": _EVENT_ID,
        },
        {
            "name": "last_event_id",
            "in": "query",
            "description": "The same, for clients that cannot set the header.",
            "schema": _EVENT_ID,
        },
    ],
    "responses": _STREAM_ERRORS,
}
"""The part of the description of a route that resumes a stream."""


CANCELLING: dict[str, Any] = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": True,
            "description": "Of the request.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255},
        }
    ],
    "responses": {"404": {"description": "No stream of this client has the key."}},
}
"""The part of the description of the route that ends a request by its key."""


def resumable(model: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description that names its body's schema, and the headers of clients that may come back."""
    parameters = [
        {
            "name": "X-Lockstep-Resumable",
            "in": "header",
            "description": "`true`: the generation goes on when the client leaves, and /v1/streams/{id} resumes it. "
            "The id is in the header X-Lockstep-Stream-ID of the answer, and in the events' ids.",
            "schema": {"type": "string", "enum": ["true", "false"]},
        },
        {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "Requests with the same key and an equal body get one answer: later ones join the first.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255},
        },
        {
            "name": "Last-Event-ID",
            "in": "header",
            "description": "With Idempotency-Key: id of the last event that the client has.",
            "schema": _EVENT_ID,
        },
    ]
    reused = {"422": {"description": "The key was used for a request with another body."}}
    return described(model) | {"parameters": parameters, "responses": reused}


def generating(model: type[BaseModel]) -> dict[str, Any]:
    """The same, and the header of clients that want ids of events whether they may come back or not."""
    description = resumable(model)
    return description | {"parameters": [*description["parameters"], _EVENT_IDS]}


def describe(app: FastAPI) -> None:
    """Add the schemas that `described` refers to to the application's description."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
