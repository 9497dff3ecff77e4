"""Turns a conversation into what the model's chat template takes: messages, tools and further values."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import invalid
from pydantic_core import from_json, to_json

from lockstep_router.generation.request import Conversation, Turn
from lockstep_router.generation.tools import ToolCall, ToolUse
from lockstep_router.output import ModelFormats
from lockstep_router.text.chat_template import ChatTemplate
from lockstep_router.text.template_tools import ToolSupport

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_THINKING_FIELDS = ("enable_thinking", "thinking")
"""The names by which templates let reasoning be turned off."""

Message = dict[str, Any]


@dataclass(frozen=True)
class TemplateInput:
    """The arguments of `Tokenizer.render`."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    fields: Mapping[str, Any]


def template_input(
    source: Conversation, template: ChatTemplate, card: worker_pb2.ModelCard, formats: ModelFormats
) -> TemplateInput:
    """What the template takes for this conversation.

    Raises:
        LockstepError: INVALID_REQUEST, the model cannot be given tools, or it does not know a value.
    """
    fields = _fields(source, template, card)
    if source.tools is None and not any(turn.calls for turn in source.turns):
        return TemplateInput([_message(turn) for turn in source.turns], None, fields)
    name = formats.of(card.name, template.source).tools
    support = template.tool_support
    if source.tools is not None and (name is None or (support is None and not formats.is_generic(card.name))):
        raise invalid("tools", _refusal(card.name, is_shown=support is not None))
    if support is None:
        return TemplateInput(_generic_messages(source.turns, source.tools), None, fields)
    renamed = _mistral_id if name == "mistral" else str
    turns = source.turns if support.takes_several else _one_by_one(source.turns)
    messages = [_tool_message(turn, support, renamed) for turn in turns]
    return TemplateInput(messages, None if source.tools is None else [tool.body for tool in source.tools.tools], fields)


def _refusal(model: str, *, is_shown: bool) -> str:
    what = "writes calls in a format that this router does not know" if is_shown else "has no place for tools"
    return f"are not supported: the chat template of {model!r} {what} (see the router's setting model_tool_formats)"


def _fields(source: Conversation, template: ChatTemplate, card: worker_pb2.ModelCard) -> Mapping[str, Any]:
    for name in source.template_fields:
        if name not in template.fields:
            raise invalid(f"chat_template_kwargs.{name}", f"is not used by the chat template of {card.name!r}")
    fields: dict[str, Any] = {}
    if source.reasoning_effort is not None:
        if "reasoning_effort" in template.fields:
            fields["reasoning_effort"] = source.reasoning_effort
        elif source.reasoning_effort == "none":
            fields |= {name: False for name in _THINKING_FIELDS if name in template.fields}
    return fields | dict(source.template_fields)


def _message(turn: Turn) -> Message:
    # Templates know "system"; "developer" is OpenAI's newer name for it.
    message: Message = {"role": "system" if turn.role == "developer" else turn.role, "content": turn.content}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    return message


# With a template that has a place for tools.


def _one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """A message for each call, with its result behind it, for a template that takes one call a message: clients send
    back what an answer had, and that may be several.
    """
    split: list[Turn] = []
    left = list(reversed(turns))
    while left:
        turn = left.pop()
        if len(turn.calls) < 2:
            split.append(turn)
            continue
        results: dict[str | None, list[Turn]] = {}
        while left and left[-1].role == "tool":
            result = left.pop()
            results.setdefault(result.tool_call_id, []).append(result)
        for call in turn.calls:
            split += [replace(turn, calls=(call,)), *results.pop(call.id, ())]
            turn = replace(turn, content="", reasoning="")
        for others in results.values():
            split += others
    return split


def _tool_message(turn: Turn, support: ToolSupport, renamed: Any) -> Message:
    message = _message(turn)
    if turn.tool_call_id is not None:
        message["tool_call_id"] = renamed(turn.tool_call_id)
    if turn.calls:
        if not turn.content:
            message["content"] = None if support.takes_null_content else ""
        message["tool_calls"] = [_call(call, support, renamed) for call in turn.calls]
    return message


def _call(call: ToolCall, support: ToolSupport, renamed: Any) -> Message:
    arguments: Any = call.arguments or "{}"
    if support.takes_objects:
        arguments = arguments_of(call)
    return {"id": renamed(call.id), "type": "function", "function": {"name": call.name, "arguments": arguments}}


def arguments_of(call: ToolCall) -> Any:
    """The arguments as an object; as text if the model wrote something else."""
    try:
        value = from_json(call.arguments or "{}")
    except ValueError:
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _mistral_id(given: str) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return given if _MISTRAL_ID.fullmatch(given) else hashlib.blake2b(given.encode(), digest_size=8).hexdigest()[:9]


# With a template that knows no tools: everything is written in messages.


_INSTRUCTION = """\
You can call these functions:
{tools}

To call functions, answer with nothing but a JSON list of calls, each with the function's name and its arguments:
[{{"name": "…", "arguments": {{…}}}}]
Otherwise answer in plain text."""


def _generic_messages(turns: Iterable[Turn], use: ToolUse | None) -> list[Message]:
    messages = [_generic_message(turn) for turn in turns]
    if use is None:
        return messages
    tools = "\n".join(to_json(tool.body["function"]).decode() for tool in use.tools)
    instruction = _INSTRUCTION.format(tools=tools)
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{instruction}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instruction}, *messages]


def _generic_message(turn: Turn) -> Message:
    if turn.calls:
        calls = [{"name": call.name, "arguments": arguments_of(call)} for call in turn.calls]
        written = to_json(calls).decode()
        return {"role": "assistant", "content": f"{turn.content}\n{written}" if turn.content else written}
    if turn.role == "tool":
        return {"role": "user", "content": f"Result of {turn.name or 'the call'}: {turn.content}"}
    return _message(turn)
