"""Rules of a grammar for tool calls, in the format that the model's parser reads."""

import json
from collections.abc import Iterator
from typing import Any

from lockstep_common.errors import invalid
from lockstep_common.protocol import MAX_GRAMMAR_BYTES

from lockstep_router.generation.lark import marker, nested_schema, rule_up_to, terminal_without
from lockstep_router.generation.tools import Tool, ToolUse
from lockstep_router.output.formats import TOOL_FORMATS
from lockstep_router.output.json_calls import JsonSyntax
from lockstep_router.text.tokenizer import Tokenizer

FIELD = "tools"
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The arguments' spaces, as templates write them."""
_BARE_CALL = r'/[ \n\r\t\[]*\{[ \n\r\t]*"((name|arguments|parameters)"|type"[ \n\r\t]*:[ \n\r\t]*"function")(?s:.*)/'
"""The beginning of an answer that is a call without a marker, as models write it."""


def rules_of_calls(
    use: ToolUse, tool_format: str, tokenizer: Tokenizer, *, is_beside_json: bool = False
) -> Iterator[str]:
    """The rule `calls`, which is one call or several, and those that it needs. Arguments conform to their schema if a
    call is required or the tool is strict.

    Args:
        is_beside_json: the answer may also be JSON of another form. Without a marker before them, calls then have the
            same terminals: the longest that begins is taken, and no other is tried when it comes to nothing.

    Raises:
        LockstepError: INVALID_REQUEST, the tools' schemas are too large or describe no objects.
    """
    tools = {index: tool for index, tool in enumerate(use.tools) if use.named in (None, tool.name)}
    if sum(tool.chars for tool in tools.values()) > MAX_GRAMMAR_BYTES:
        raise too_large(FIELD)
    syntax = TOOL_FORMATS[tool_format]
    one = "block" if syntax.is_bare else f"{marker(syntax.opening, tokenizer)} block"
    yield f'calls: {one} ("\\n" {one})*' if syntax.closing and use.is_parallel else f"calls: {one}"
    yield f"block: {_block(syntax, tokenizer, is_parallel=use.is_parallel)}"
    yield f"call: {' | '.join(f'call_{index}' for index in tools)}"
    key = "parameters" if tool_format == "llama3" else "arguments"
    for index, tool in tools.items():
        schema = _schema(index, tool) if use.is_required or tool.strict else {"type": "object"}
        if is_beside_json and syntax.is_bare:
            yield f"call_{index}: {nested_schema(_call_schema(index, tool.name, key, schema))}"
        else:
            head = f'{{"name": "{tool.name}", "{key}": '
            yield f'call_{index}: {json.dumps(head)} arguments_{index} "}}"'
            yield f"arguments_{index}: {nested_schema(schema, _SPACING)}"


def rules_of_text_and_calls(use: ToolUse, tool_format: str, tokenizer: Tokenizer) -> Iterator[str]:
    """The rule `text_and_calls`, and those that it needs beside `rules_of_calls`: any text, in which whatever begins
    as a call is one.
    """
    syntax = TOOL_FORMATS[tool_format]
    text = terminal_without("TEXT", syntax.opening, tokenizer)
    if syntax.is_bare:
        has_marker = tokenizer.added_id_of(syntax.opening) is not None
        marked = f" | TEXT {marker(syntax.opening, tokenizer)} block" if has_marker else ""
        yield f"text_and_calls: calls | TEXT{marked}"
        yield f"{text} & ~{_BARE_CALL}"
    else:
        yield f"text_and_calls: {'(marked block)* TEXT' if use.is_parallel else 'TEXT | marked block'}"
        yield rule_up_to("marked", syntax.opening, tokenizer)
        yield text


def too_large(field: str) -> Exception:
    """The error for a grammar that workers would not take."""
    hint = ", so tool_choice may only be none, or auto without strict" if field == FIELD else ""
    return invalid(field, f"makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes{hint}")


def _block(syntax: JsonSyntax, tokenizer: Tokenizer, *, is_parallel: bool) -> str:
    """A call, or calls that need no further marker."""
    if syntax.closing:
        return f'"\\n" call "\\n" {marker(syntax.closing, tokenizer)}'
    if syntax.separators and syntax.opening:
        return 'call ("; " call)*' if is_parallel else "call"
    return '"[" call (", " call)* "]"' if is_parallel else '"[" call "]"'


def _schema(index: int, tool: Tool) -> dict[str, Any]:
    schema = {"type": "object"} | dict(tool.parameters or {})
    if schema["type"] != "object":
        raise invalid(f"{FIELD}[{index}]", "has parameters that are no object")
    return schema


def _call_schema(index: int, name: str, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as one object. The arguments' schema has an id, so that its references are still to its own parts."""
    properties = {"name": {"const": name}, key: {"$id": f"urn:lockstep:tool:{index}"} | arguments}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
