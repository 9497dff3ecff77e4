"""Requests and answers of the REST API as messages of `lockstep.v1.Inference` and back.

So one set of rules sends, resumes and repeats requests, whichever way a router is spoken to.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from lockstep_api.v1 import inference_pb2 as pb

from lockstep_client.errors import InvalidRequestError
from lockstep_client.grpc_answers import Embeddings, Streamed, Whole, model_list, single_model
from lockstep_client.sse import ServerSentEvent
from lockstep_client.steps import Outgoing

Body = Mapping[str, Any]

KEY_HEADER = "idempotency-key"
_KEY_SUFFIX = ".grpc"
"""Ends the keys of requests over gRPC. The body that a router makes of a message has other fields than the one over
HTTP, and routers refuse a key with another body. The seed keeps the tokens equal.
"""
_PASSED_ON = ("authorization", "x-session-id", "x-request-id", "traceparent")
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)
_PLAIN = ("n", "user", "suffix", "echo", "best_of", "resumable")
_CHAT = ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs")
_WITHOUT_MEANING = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
        "stream",
        "stream_options",
    }
)
"""Fields that change nothing of an answer, or that say what the kind of call says."""
_WITHOUT_MEANING_IN_TEXT = frozenset({"parallel_tool_calls", "reasoning_effort"})
"""The same where there is no conversation."""
_WITHOUT_MEANING_IN_MESSAGE = frozenset({"annotations", "parsed", "provider_specific_fields"})
"""What the official client's `parse` and LiteLLM add to the messages of answers, and where an answer quotes pages."""
_MODES = {
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


class Answer(Protocol):
    """Turns a call's messages into the content of an answer over HTTP."""

    is_stream: bool

    def take(self, message: Any) -> list[ServerSentEvent]:
        """The events of a message; none if the answer is given whole."""

    def end(self) -> list[ServerSentEvent] | bytes:
        """The last events, or the whole content."""


@dataclass(frozen=True)
class GrpcRequest:
    """A call."""

    method: str
    message: Any
    response: Any
    """The type of its messages."""
    answer: Answer


def grpc_request(request: Outgoing) -> GrpcRequest:
    """The call that does the same as a request over HTTP.

    Raises:
        InvalidRequestError: there is none, or a field of the body has no place in its message.
    """
    path = request.path.partition("?")[0]
    match request.method, path.removeprefix("/v1"):
        case "POST", "/chat/completions" | "/completions":
            body = _body(request)
            message = generate_message(body, is_chat=path.endswith("/chat/completions"))
            if _header(request, "x-lockstep-resumable") == "true":
                message.resumable = True
            return GrpcRequest("Generate", message, pb.GenerateEvent, _generated(request))
        case "GET", rest if rest.startswith("/streams/") and request.continues is not None:
            last = _header(request, "last-event-id")
            resume = pb.ResumeRequest(request_id=unquote(rest.removeprefix("/streams/")), last_event_id=last)
            return GrpcRequest("Resume", resume, pb.GenerateEvent, _generated(request.continues, last))
        case "DELETE", "/streams":
            cancel = pb.CancelRequest(idempotency_key=_header(request, KEY_HEADER) + _KEY_SUFFIX)
            return GrpcRequest("Cancel", cancel, pb.CancelResponse, _Only(lambda _: {"deleted": True}))
        case "DELETE", rest if rest.startswith("/streams/"):
            cancel = pb.CancelRequest(request_id=unquote(rest.removeprefix("/streams/")))
            return GrpcRequest("Cancel", cancel, pb.CancelResponse, _Only(lambda _: {"deleted": True}))
        case _:
            return _other(request, path.removeprefix("/v1"))


def metadata_of(request: Outgoing) -> tuple[tuple[str, str], ...]:
    """The metadata of a call."""
    passed_on = [(name.lower(), value) for name, value in request.headers.items() if name.lower() in _PASSED_ON]
    if key := _header(request, KEY_HEADER):
        passed_on.append((KEY_HEADER, key + _KEY_SUFFIX))
    return tuple(passed_on)


def generate_message(body: Body, *, is_chat: bool) -> pb.GenerateRequest:
    """A body of /v1/chat/completions or of /v1/completions as a message. Fields that are None count as left out.

    Raises:
        InvalidRequestError: a field is unknown, or its value has no place in the message.
    """
    left_out = _WITHOUT_MEANING if is_chat else _WITHOUT_MEANING | _WITHOUT_MEANING_IN_TEXT
    fields = {name: value for name, value in body.items() if value is not None and name not in left_out}
    message = pb.GenerateRequest()
    logprobs = fields.pop("logprobs", None)
    if is_chat:
        with _field("top_logprobs"):
            logprobs = fields.pop("top_logprobs", 0) if logprobs else None
        with _field("max_completion_tokens"):
            new = fields.pop("max_completion_tokens", None)
            if new is not None and fields.setdefault("max_tokens", new) != new:
                raise InvalidRequestError("max_tokens contradicts max_completion_tokens", field="max_tokens")
    if logprobs is not None:
        with _field("logprobs"):
            message.sampling.logprobs = logprobs
    for name, value in fields.items():
        with _field(name):
            _set(message, name, value, is_chat=is_chat)
    return message


def _set(message: pb.GenerateRequest, name: str, value: Any, *, is_chat: bool) -> None:
    if name in _SAMPLING:
        _assign(message.sampling, name, value)
    elif name in _PLAIN or name == "model":
        _assign(message, name, value)
    elif name in _CHAT and is_chat:
        _set_conversation(message.conversation, name, value)
    else:
        _set_other(message, name, value)


def _set_other(message: pb.GenerateRequest, name: str, value: Any) -> None:
    match name:
        case "top_k":
            message.sampling.top_k = max(0, value)
        case "seed":
            message.sampling.seed = value % 2**64
        case "logit_bias":
            message.sampling.logit_bias.update({int(token_id): bias for token_id, bias in value.items()})
        case "stop":
            message.stop.extend([value] if isinstance(value, str) else value)
        case "prompt":
            _set_input(message, value, ("prompt", "prompt_ids", "prompts", "prompt_id_lists"))
        case "response_format":
            _set_format(message.response_format, value)
        case "structured_outputs":
            _set_constraint(message.structured_outputs, value)
        case _:
            raise InvalidRequestError(f"{name} has no place in a request over gRPC", field=name)


def _assign(message: Any, name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def _set_input(message: Any, value: Any, names: tuple[str, str, str, str]) -> None:
    text, ids, texts, id_lists = names
    first = value[0] if value and not isinstance(value, str) else None
    if isinstance(value, str):
        setattr(message, text, value)
    elif isinstance(first, str):
        getattr(message, texts).texts.extend(value)
    elif first is None or isinstance(first, int):
        getattr(message, ids).SetInParent()
        getattr(message, ids).ids.extend(value)
    else:
        getattr(message, id_lists).lists.extend(pb.TokenIds(ids=each) for each in value)


def _set_conversation(conversation: pb.Conversation, name: str, value: Any) -> None:
    match name:
        case "messages":
            conversation.SetInParent()
            conversation.messages.extend(map(_message, value))
        case "tools":
            conversation.tools.extend(map(_tool, value))
        case "tool_choice" if isinstance(value, str):
            conversation.tool_choice.mode = _MODES[value]
        case "tool_choice":
            conversation.tool_choice.function = value["function"]["name"]
        case "chat_template_kwargs":
            for key, each in value.items():
                with _field(f"{name}.{key}"):
                    _set_value(conversation.chat_template_kwargs[key], each)
        case _:
            setattr(conversation, name, value)


def _message(given: Body) -> pb.ChatMessage:
    message = pb.ChatMessage(role=given["role"])
    for name, value in given.items():
        if value is None or value == [] or name == "role" or name in _WITHOUT_MEANING_IN_MESSAGE:
            continue
        match name:
            case "content" if not isinstance(value, str):
                message.content_parts.extend(_text(part, message.role) for part in value)
            case "content" | "name" | "tool_call_id" | "reasoning_content" | "refusal":
                setattr(message, name, value)
            case "tool_calls":
                message.tool_calls.extend(
                    pb.ToolCall(id=each["id"], name=each["function"]["name"], arguments=each["function"]["arguments"])
                    for each in value
                )
            case _:
                raise InvalidRequestError(f"messages: {name} has no place in a request over gRPC", field="messages")
    return message


def _text(part: Body, role: str) -> str:
    """The text of a part. What an assistant has refused is text, too, as it is over HTTP."""
    kind = part["type"]
    if kind != "text" and (kind, role) != ("refusal", "assistant"):
        raise InvalidRequestError("a part of a message's content is no text", field="messages")
    return str(part[kind])


def _tool(given: Body) -> pb.Tool:
    function = given["function"]
    tool = pb.Tool(name=function["name"], description=function.get("description"), strict=function.get("strict"))
    if function.get("parameters") is not None:
        tool.parameters = _json(function["parameters"])
    return tool


def _set_value(message: pb.TemplateValue, value: Any) -> None:
    kinds = {bool: "flag", int: "integer", float: "number", str: "text"}
    setattr(message, kinds[type(value)], value)


def _set_format(message: pb.ResponseFormat, given: Body) -> None:
    kind = given["type"]
    if kind != "json_schema":
        setattr(message, {"text": "text", "json_object": "json_object"}[kind], True)
        return
    schema = given["json_schema"]
    message.json_schema.name = schema["name"]
    message.json_schema.schema = _json(schema.get("schema") or {})
    for name in ("description", "strict"):
        if schema.get(name) is not None:
            setattr(message.json_schema, name, schema[name])


def _set_constraint(message: pb.StructuredOutputs, given: Body) -> None:
    ((name, value),) = ((name, value) for name, value in given.items() if value is not None)
    if name == "choice":
        message.choice.texts.extend(value)
    else:
        setattr(message, name, _json(value) if isinstance(value, dict) else value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@contextmanager
def _field(name: str) -> Iterator[None]:
    """What protobuf does not take as an error that names the field, and holds nothing of its value."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        raise InvalidRequestError(f"{name} has a value that has no place in a request over gRPC", field=name) from None


def _other(request: Outgoing, path: str) -> GrpcRequest:
    match request.method, path:
        case "POST", "/embeddings":
            body = _body(request)
            embed = _embed_message(body)
            is_base64 = body.get("encoding_format") == "base64"
            return GrpcRequest("Embed", embed, pb.EmbedEvent, Embeddings(embed.model, is_base64=is_base64))
        case "POST", "/tokenize":
            body = _body(request)
            tokenize = pb.TokenizeRequest(
                model=body.get("model"), prompt=body.get("prompt"), add_special_tokens=body.get("add_special_tokens")
            )
            if body.get("messages") is not None:
                with _field("messages"):
                    _set_conversation(tokenize.conversation, "messages", body["messages"])
            return GrpcRequest("Tokenize", tokenize, pb.TokenizeResponse, _Only(_tokens))
        case "POST", "/detokenize":
            body = _body(request)
            detokenize = pb.DetokenizeRequest(model=body.get("model"), tokens=body.get("tokens"))
            return GrpcRequest(
                "Detokenize", detokenize, pb.DetokenizeResponse, _Only(lambda got: {"prompt": got.prompt})
            )
        case "GET", "/models":
            return GrpcRequest("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse, _Only(model_list))
        case "GET", rest if rest.startswith("/models/"):
            listing = pb.ListModelsRequest(model=unquote(rest.removeprefix("/models/")))
            return GrpcRequest("ListModels", listing, pb.ListModelsResponse, _Only(single_model))
    raise InvalidRequestError(f"{request.method} {path} does not exist over gRPC")


def _embed_message(body: Body) -> pb.EmbedRequest:
    message = pb.EmbedRequest()
    for name in ("model", "dimensions", "user"):
        if body.get(name) is not None:
            with _field(name):
                setattr(message, name, body[name])
    with _field("input"):
        _set_input(message, body.get("input"), ("text", "text_ids", "texts", "text_id_lists"))
    return message


def _generated(request: Outgoing, position: str = "") -> Answer:
    """The answer to a request, or what comes of it after a position."""
    body, is_chat = _body(request), request.path.partition("?")[0].endswith("/chat/completions")
    if not body.get("stream"):
        return Whole(body, request.made_at, is_chat=is_chat)
    # Behind the request's id it has a part for each choice, `-` while there is nothing of it, and `u` after the usage.
    parts = position.rpartition(":")[2].split(",")
    opened = {index for index, part in enumerate(parts) if part not in ("", "-", "u")}
    return Streamed(body, request.made_at, is_chat=is_chat, opened=opened)


def _tokens(got: pb.TokenizeResponse) -> Body:
    return {"tokens": list(got.tokens), "count": len(got.tokens), "max_model_len": got.max_model_len}


def _body(request: Outgoing) -> Body:
    body: Body = json.loads(request.content)
    return body


def _header(request: Outgoing, name: str) -> str:
    return next((value for key, value in request.headers.items() if key.lower() == name), "")


class _Only:
    """The answer of a call with one message."""

    is_stream = False

    def __init__(self, body_of: Callable[[Any], Body]) -> None:
        self._body_of = body_of
        self._content = b""

    def take(self, message: Any) -> list[ServerSentEvent]:
        self._content = json.dumps(self._body_of(message), ensure_ascii=False).encode()
        return []

    def end(self) -> list[ServerSentEvent] | bytes:
        return self._content
