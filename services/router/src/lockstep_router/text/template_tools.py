"""Finds out how a chat template takes tools, by rendering a conversation that has a call and its result.

Templates differ, and nothing in a model's files says how: some want a call's arguments as an object, others as JSON
text; some fail on a message without content, others take such a message alone for one with calls; some fail on a
message with several calls, or write the first one alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

_FUNCTION, _KEY, _RESULT = "probe_function", "probe_key", "probe_result"
_VALUES = ("probe_value", "probe_other")
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
    takes_several: bool
    """A message may have several calls."""


def probe(render: Render) -> ToolSupport | None:
    """How a template takes tools; None if it does not show all of the tools, the calls and their results.

    Args:
        render: renders messages and tools with the template; None if it fails.
    """
    for takes_objects, takes_null_content in product((True, False), (False, True)):
        shows = partial(_shows, render, takes_objects=takes_objects, takes_null_content=takes_null_content)
        if shows(1):
            return ToolSupport(takes_objects, takes_null_content, takes_several=shows(2))
    return None


def _shows(render: Render, count: int, *, takes_objects: bool, takes_null_content: bool) -> bool:
    """Whether a template writes a message with so many calls in this form, and their results."""
    values, calls, results = _VALUES[:count], [], []
    for number, value in enumerate(values):
        arguments = {_KEY: value} if takes_objects else f'{{"{_KEY}": "{value}"}}'
        call_id = f"probe123{number}"  # nine characters, as Mistral's templates want them
        call = {"id": call_id, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
        calls.append(call)
        results.append({"role": "tool", "content": _RESULT, "name": _FUNCTION, "tool_call_id": call_id})
    message = {"role": "assistant", "content": None if takes_null_content else "", "tool_calls": calls}
    text = render([{"role": "user", "content": "A question."}, message, *results], [_TOOL])
    if text is None or text.count(_FUNCTION) <= count or text.count(_RESULT) < count:
        return False
    # An object that a template joins to text as Python writes it is no JSON.
    return all(value in text for value in values) and f"'{_KEY}'" not in text
