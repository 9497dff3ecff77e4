"""From a request's bytes to a typed request, or to an error that names the field at fault."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lockstep_common.errors import ErrorCode, LockstepError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

Model = TypeVar("Model", bound=BaseModel)

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)
"""Fields of OpenAI's API that change nothing about the text that is asked for."""

_MAX_QUOTED_CHARS = 64


def _is_absent(value: Any) -> bool:
    return value in (None, [], {})


def _is_no_tool(value: Any) -> bool:
    return value in (None, "none", "auto")


def _is_text(value: Any) -> bool:
    return value is None or value == ["text"]


def _is_text_format(value: Any) -> bool:
    return value is None or value == {"type": "text"}


UNSUPPORTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_is_absent, "tools are not supported"),
    "tool_choice": (_is_no_tool, "tools are not supported"),
    "functions": (_is_absent, "functions are not supported"),
    "function_call": (_is_no_tool, "functions are not supported"),
    "response_format": (_is_text_format, "only the format text is supported"),
    "modalities": (_is_text, "only text is supported"),
    "audio": (_is_absent, "only text is supported"),
    "suffix": (_is_absent, "text after the completion is not supported"),
    "web_search_options": (_is_absent, "web search is not supported"),
    "moderation": (_is_absent, "moderation is not supported"),
}
"""Fields of OpenAI's API that would change the answer: accepted only with the value that asks for nothing."""

UNSUPPORTED_IN_MESSAGE = ("tool_calls", "function_call", "audio", "refusal", "annotations")
"""Fields that an answer carries and clients send back: accepted when they are empty."""


def parse(model: type[Model], body: bytes) -> Model:
    """The typed request.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field if the JSON itself is well formed.
    """
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise LockstepError(ErrorCode.INVALID_REQUEST, f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise LockstepError(ErrorCode.INVALID_REQUEST, "the body must be a JSON object")
    known = model.model_fields
    fields = {key: value for key, value in data.items() if key in known or not _is_harmless(key, value)}
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [_plain_message(index, message) for index, message in enumerate(messages)]
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


def _is_harmless(key: str, value: Any) -> bool:
    """Whether a field that the model does not know can be left out."""
    if key in UNSUPPORTED:
        asks_nothing, sentence = UNSUPPORTED[key]
        if not asks_nothing(value):
            raise LockstepError(ErrorCode.INVALID_REQUEST, f"{key}: {sentence}", field=key)
        return True
    return key in IGNORED


def _plain_message(index: int, message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    for key in UNSUPPORTED_IN_MESSAGE:
        if not _is_absent(message.get(key)):
            field = f"messages[{index}].{key}"
            raise LockstepError(ErrorCode.INVALID_REQUEST, f"{field} is not supported", field=field)
    return {key: value for key, value in message.items() if key not in UNSUPPORTED_IN_MESSAGE}


def _invalid(error: ValidationError) -> LockstepError:
    """The first complaint as an error for the client. It quotes names, never contents."""
    entry = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = field_name(entry["loc"])
    match entry["type"]:
        case "missing":
            sentence = f"{name} is required"
        case "extra_forbidden":
            sentence = f"{name} is not a known field"
        case _:
            sentence = f"{name}: {entry['msg']}"
    return LockstepError(ErrorCode.INVALID_REQUEST, sentence, field=name)


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
