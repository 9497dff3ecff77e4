"""Turns a request's bytes into a typed request, or into an error that names the invalid field."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.protocol import MAX_LOGIT_BIAS
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from lockstep_router.faces.openai.json_structure import check_structure
from lockstep_router.faces.openai.schemas import MAX_MESSAGES
from lockstep_router.faces.openai.tool_schemas import MAX_CALLS, MAX_TEMPLATE_FIELDS, MAX_TOOLS

Model = TypeVar("Model", bound=BaseModel)

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)
"""Fields of OpenAI's API that do not change the requested text."""

_NOT_SUPPORTED = "is not supported"
_MAX_QUOTED_CHARS = 64
_MAX_OBJECT_FIELDS = 32
"""Largest number of fields in a message, a content part or an object of options."""


_GUIDED = ("json", "regex", "choice", "grammar")
"""vLLM's older names of the fields in `structured_outputs`."""


def _is_absent(value: Any) -> bool:
    return value in (None, [], {})


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _is_none_or_0(value: Any) -> bool:
    return value is None or (value == 0 and not isinstance(value, bool))


def _is_no_tool(value: Any) -> bool:
    return value in (None, "none", "auto")


def _is_text(value: Any) -> bool:
    return value is None or value == ["text"]


def _includes_nothing(value: Any) -> bool:
    # Asked for with `store: false` by clients that would send it back: reasoning is not encrypted here.
    return value is None or (isinstance(value, list) and all(each == "reasoning.encrypted_content" for each in value))


def _is_untruncated(value: Any) -> bool:
    return value in (None, "disabled")


_NOT_KEPT = "is not supported: this router keeps no responses; send all items in input"

UNSUPPORTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_is_absent, _NOT_SUPPORTED),
    "tool_choice": (_is_no_tool, "is not supported, because tools are not"),
    "functions": (_is_absent, _NOT_SUPPORTED),
    "function_call": (_is_no_tool, "is not supported, because functions are not"),
    **{f"guided_{name}": (_is_absent, f"is not supported; use structured_outputs.{name}") for name in _GUIDED},
    "modalities": (_is_text, "may only be text"),
    "audio": (_is_absent, _NOT_SUPPORTED),
    "suffix": (_is_absent, _NOT_SUPPORTED),
    "web_search_options": (_is_absent, _NOT_SUPPORTED),
    "moderation": (_is_absent, _NOT_SUPPORTED),
    "background": (_is_off, _NOT_SUPPORTED),
    "context_management": (_is_absent, _NOT_SUPPORTED),
    "conversation": (_is_absent, _NOT_KEPT),
    "include": (_includes_nothing, "may only be reasoning.encrypted_content, of which there is none"),
    "max_tool_calls": (_is_absent, _NOT_SUPPORTED),
    "previous_response_id": (_is_absent, _NOT_KEPT),
    "prompt": (_is_absent, _NOT_SUPPORTED),
    "top_logprobs": (_is_none_or_0, _NOT_SUPPORTED),
    "truncation": (_is_untruncated, "may only be disabled"),
}
"""Fields of OpenAI's API that would change the answer: accepted only with the value that asks for nothing. For other
values the error is the field's name and the sentence here.
"""

UNSUPPORTED_IN_MESSAGE = ("function_call", "audio")
"""Fields of answers that clients send back in messages: accepted if they are empty."""

_IGNORED_IN_MESSAGE = ("provider_specific_fields", "parsed", "annotations")
"""What LiteLLM and the official client's `parse` add to answers, and send back, and where an answer's text quotes pages
of the web, which changes nothing of the text.
"""

_REFUSAL = "refusal"
"""A field, and a type of parts, of an assistant's messages: what the model said in place of an answer."""

_IGNORED_IN_FUNCTION = "parsed_arguments"
"""What `parse` adds to the functions of calls, and to the items of the Responses API that are calls."""

_IGNORED_IN_PART = "parsed"
"""What `parse` adds to the parts of such items' contents."""


def parse(model: type[Model], body: bytes | bytearray, *, max_values: int = 150_000) -> Model:
    """The typed request.

    Validation stops at the first mistake: collecting all of them, as pydantic does, takes microseconds and hundreds of
    bytes for each.

    Args:
        model: the type of the body.
        body: the bytes that the client sent.
        max_values: largest number of list elements and object fields together.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field if the JSON itself is well formed.
    """
    return validate(model, parse_object(body, max_values))


def parse_object(body: bytes | bytearray, max_values: int) -> dict[str, Any]:
    """The JSON object in a body, within limits for its elements.

    Raises:
        LockstepError: INVALID_REQUEST, it is no JSON object, or has too many elements.
    """
    check_structure(body, max_values)
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise LockstepError(ErrorCode.INVALID_REQUEST, f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise LockstepError(ErrorCode.INVALID_REQUEST, "the body must be a JSON object")
    return data


def validate(model: type[Model], data: dict[str, Any]) -> Model:
    """The typed request from a body's fields; every face uses it, so that all have the same rules.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field.
    """
    fields = _known_fields(model, data)
    _check_sizes(fields)
    if isinstance(tools := fields.get("tools"), list):
        for index, tool in enumerate(tools):
            _check_object(f"tools[{index}]", tool)
        if "input" in model.model_fields:  # of the Responses API, whose answers repeat the tools with all their fields
            fields["tools"] = [_without_empty(tool) for tool in tools]
    if isinstance(items := fields.get("input"), list):
        fields["input"] = [_plain_item(index, item) for index, item in enumerate(items)]
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [_plain_message(index, message) for index, message in enumerate(messages)]
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


def _known_fields(model: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    fields = {}
    for key, value in data.items():
        if key in model.model_fields:
            fields[key] = value
        elif not _is_harmless(key, value):
            raise invalid(field_name((key,)), "is not a known field")
    return fields


def _check_sizes(fields: dict[str, Any]) -> None:
    """Raise INVALID_REQUEST for fields with too many entries: pydantic would check each entry before it counts them."""
    for key, limit in (
        ("messages", MAX_MESSAGES),
        ("input", MAX_MESSAGES),
        ("logit_bias", MAX_LOGIT_BIAS),
        ("tools", MAX_TOOLS),
        ("chat_template_kwargs", MAX_TEMPLATE_FIELDS),
        ("stream_options", _MAX_OBJECT_FIELDS),
        ("response_format", _MAX_OBJECT_FIELDS),
        ("structured_outputs", _MAX_OBJECT_FIELDS),
    ):
        value = fields.get(key)
        if isinstance(value, list | dict) and len(value) > limit:
            raise invalid(key, f"has more than {limit} entries")


def _is_harmless(key: str, value: Any) -> bool:
    """Whether a field that the model does not know can be left out."""
    if key in UNSUPPORTED:
        asks_nothing, sentence = UNSUPPORTED[key]
        if not asks_nothing(value):
            raise invalid(key, sentence)
        return True
    return key in IGNORED


def _plain_message(index: int, message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    _check_object(f"messages[{index}]", message)
    if isinstance(content := message.get("content"), list):
        for part_index, part in enumerate(content):
            _check_object(f"messages[{index}].content[{part_index}]", part)
    message = _with_refusal_as_text(f"messages[{index}]", message)
    if isinstance(calls := message.get("tool_calls"), list):
        message = message | {"tool_calls": _plain_calls(f"messages[{index}].tool_calls", calls)}
    for key in UNSUPPORTED_IN_MESSAGE:
        if not _is_absent(message.get(key)):
            field = f"messages[{index}].{key}"
            raise invalid(field, _NOT_SUPPORTED)
    left_out = (*UNSUPPORTED_IN_MESSAGE, *_IGNORED_IN_MESSAGE)
    return {key: value for key, value in message.items() if key not in left_out}


def _with_refusal_as_text(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """A chat message whose refusal is a line of its text, as the model has written it."""
    plain = {key: value for key, value in message.items() if key != _REFUSAL}
    refusal, content = message.get(_REFUSAL), message.get("content")
    if message.get("role") != "assistant":
        if not _is_absent(refusal):
            raise invalid(f"{name}.{_REFUSAL}", "is only allowed in messages of the assistant")
        return plain
    if isinstance(content, list):
        plain["content"] = content = [_plain_part(part, "text") for part in content]
    if _is_absent(refusal) or refusal == "":
        return plain
    if not isinstance(refusal, str):
        raise invalid(f"{name}.{_REFUSAL}", "must be a string")
    if isinstance(content, list):
        plain["content"] = [*content, {"type": "text", "text": refusal}]
    elif content is None or isinstance(content, str):
        plain["content"] = f"{content}\n{refusal}" if content else refusal
    return plain


def _plain_part(part: Any, text_type: str) -> Any:
    """A part of an assistant's message; a refusal becomes a text."""
    if isinstance(part, dict) and part.get("type") == _REFUSAL and part.keys() == {"type", _REFUSAL}:
        return {"type": text_type, "text": part[_REFUSAL]}
    return part


def _plain_calls(name: str, calls: list[Any]) -> list[Any]:
    if len(calls) > MAX_CALLS:
        raise invalid(name, f"has more than {MAX_CALLS} entries")
    plain = []
    for index, call in enumerate(calls):
        _check_object(f"{name}[{index}]", call)
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            function = {key: value for key, value in function.items() if key != _IGNORED_IN_FUNCTION}
            plain.append(call | {"function": function})
        else:
            plain.append(call)
    return plain


def _plain_item(index: int, item: Any) -> Any:
    """An item without empty fields: those of answers that clients send back have many."""
    if not isinstance(item, dict):
        return item
    _check_object(f"input[{index}]", item)
    for key in ("content", "output"):
        if isinstance(parts := item.get(key), list):
            for part_index, part in enumerate(parts):
                _check_object(f"input[{index}].{key}[{part_index}]", part)
            parts = [_without_empty(part, _IGNORED_IN_PART) for part in parts]
            if item.get("role") == "assistant":
                parts = [_plain_part(part, "output_text") for part in parts]
            item = item | {key: parts}
    return _without_empty(item, _IGNORED_IN_FUNCTION)


def _without_empty(value: Any, ignored: str = "") -> Any:
    """An object without fields that are null, and without one that is ignored."""
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if each is not None and key != ignored}


def _check_object(name: str, value: Any) -> None:
    if isinstance(value, dict):
        if len(value) > _MAX_OBJECT_FIELDS:
            raise invalid(name, f"has more than {_MAX_OBJECT_FIELDS} fields")
        _check_object(f"{name}.function", value.get("function"))


def _invalid(error: ValidationError) -> LockstepError:
    """Pydantic's first error as an error for the client. It quotes names, never contents."""
    entry = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = field_name(entry["loc"])
    match entry["type"]:
        case "missing":
            return invalid(name, "is required")
        case "extra_forbidden":
            return invalid(name, "is not a known field")
        case _:
            return invalid(name, f"is invalid: {entry['msg']}")


def field_name(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from pydantic's path to the field."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not (part.startswith("<") and part.endswith(">")) and part != "[key]":
            short = part if len(part) <= _MAX_QUOTED_CHARS else part[:_MAX_QUOTED_CHARS] + "…"
            name += f".{short}" if name else short
    return name
