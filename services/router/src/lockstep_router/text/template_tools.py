"""Finds out how a chat template takes tools, by rendering a conversation that has a call and its result.

Templates differ, and nothing in a model's files says how: some want a call's arguments as an object, others as JSON
text; some fail on a message without content, others take such a message alone for one with calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

_FUNCTION, _KEY, _VALUE, _RESULT = "probe_function", "probe_key", "probe_value", "probe_result"
_TOOL = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "A function.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A value."}}},
    },
}

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str | None]


@dataclass(frozen=True)
class ToolSupport:
    """How a chat template takes tools."""

    takes_objects: bool
    """A call's arguments are an object, not JSON text."""
    takes_null_content: bool
    """The content of a message with calls alone is null, not an empty text."""


def probe(render: Render) -> ToolSupport | None:
    """How a template takes tools; None if it does not show all of the tools, the calls and their results.

    Args:
        render: renders messages and tools with the template; None if it fails.
    """
    for takes_objects, takes_null_content in product((True, False), (False, True)):
        text = render(_conversation(takes_objects=takes_objects, takes_null_content=takes_null_content), [_TOOL])
        if text is None or text.count(_FUNCTION) < 2 or _RESULT not in text:
            continue
        # An object that a template joins to text as Python writes it is no JSON.
        if _VALUE in text and f"'{_KEY}'" not in text:
            return ToolSupport(takes_objects, takes_null_content)
    return None


def _conversation(*, takes_objects: bool, takes_null_content: bool) -> list[dict[str, Any]]:
    arguments = {_KEY: _VALUE} if takes_objects else f'{{"{_KEY}": "{_VALUE}"}}'
    call = {"id": "probe1234", "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
    return [
        {"role": "user", "content": "A question."},
        {"role": "assistant", "content": None if takes_null_content else "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "name": _FUNCTION, "tool_call_id": "probe1234"},
    ]
