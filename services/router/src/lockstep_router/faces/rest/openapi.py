"""The request bodies and the errors in /openapi.json. Routes read bodies themselves, and their errors have OpenAI's
shape, so FastAPI cannot know them.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from lockstep_common.errors import ErrorCode
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

_ERROR_NAME = "Error"
_ERROR = {
    "type": "object",
    "description": "OpenAI's error object.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, for people."},
                "type": {"type": "string", "description": "OpenAI's kind of the error."},
                "param": {
                    "anyOf": [{"type": "string"}, {"type": "null"}],
                    "description": "The field, header or limit that the error is about.",
                },
                "code": {"type": "string", "enum": [str(code) for code in ErrorCode]},
            },
        }
    },
}
_ERROR_CONTENT = {"application/json": {"schema": {"$ref": _REF.format(model=_ERROR_NAME)}}}
_PROBES = frozenset({"/healthz", "/readyz"})
"""Paths whose answers have a status in place of an error."""
_UNUSED = ("HTTPValidationError", "ValidationError")
"""FastAPI's own forms of errors, which no route answers with."""


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
    """Add the schemas that `described` refers to, and that of errors, to the application's description."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas |= definitions["$defs"] | {_ERROR_NAME: _ERROR}
            for name in _UNUSED:
                schemas.pop(name, None)
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    _describe_errors(path, operation["responses"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_errors(path: str, responses: dict[str, Any]) -> None:
    """Put the form of a route's errors in the place of FastAPI's own."""
    if _UNUSED[0] in str(responses.get("422")):
        del responses["422"]
    if path in _PROBES:
        return
    responses["default"] = {"description": "An error."}
    for status, response in responses.items():
        if not status.startswith(("1", "2")):
            responses[status] = response | {"content": _ERROR_CONTENT}
