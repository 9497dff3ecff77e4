"""Rules of a grammar for tool calls, in the format that the model's parser reads."""

import json
import re
from collections.abc import Iterator
from typing import Any

from lockstep_common.errors import LockstepError, invalid
from lockstep_common.protocol import MAX_GRAMMAR_BYTES
from pydantic_core import to_json

from lockstep_router.generation.lark import ANY_TEXT, SPACES, marker, nested_schema, regex, rules_up_to, without
from lockstep_router.generation.parsing import Parsing
from lockstep_router.generation.tools import Tool, ToolUse
from lockstep_router.output.formats import TOOL_FORMATS
from lockstep_router.output.json_calls import JsonSyntax
from lockstep_router.output.reasoning import REASONING_FORMATS
from lockstep_router.text.tokenizer import Tokenizer

FIELD = "tools"
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The arguments' spaces, as templates write them."""
_NO_BARE_CALL = r"/(\[?[^ \n\r\t\[{](?s:.*)|\[)?/"
"""Any text, but one that begins as a call or a list of them without a marker."""
_ARGS = "[ARGS]"
"""Mistral's marker between a name and its arguments."""


def rules_of_calls(
    use: ToolUse, tool_format: str, tokenizer: Tokenizer, *, is_beside_json: bool = False
) -> Iterator[str]:
    """The rule `calls`, which is one call or several, and those that it needs. Arguments conform to their schema if a
    call is required or the tool is strict.

    Args:
        is_beside_json: the answer may also be JSON of another form. Calls without a marker then have its terminals.

    Raises:
        LockstepError: INVALID_REQUEST, the tools' schemas are too large or describe no objects.
    """
    syntax = TOOL_FORMATS[tool_format]
    one = "block" if syntax.is_bare else f"{marker(syntax.opening, tokenizer)} block"
    several = ' ("\\n" {})*' if syntax.closing else " ({})*" if _has_names_outside(syntax, tokenizer) else ""
    yield f"calls: {one}{several.format(one) if use.is_parallel else ''}"
    yield from _rules_of_block(use, tool_format, tokenizer, is_beside_json=is_beside_json)


def rules_of_text_and_calls(use: ToolUse, parsing: Parsing, tokenizer: Tokenizer) -> Iterator[str]:
    """The rule `text_and_calls`, and those that it needs: any text, in which whatever begins as a call is one, as in
    `rules_of_calls`.

    Raises:
        LockstepError: as `rules_of_calls`.
    """
    assert parsing.tool_format is not None
    syntax = TOOL_FORMATS[parsing.tool_format]
    if not syntax.is_bare:
        yield f"text_and_calls: {'(marked block)* TEXT' if use.is_parallel else 'TEXT | marked block'}"
        yield from rules_up_to("marked", syntax.opening, tokenizer)
        yield f"TEXT: {ANY_TEXT}{without(syntax.opening)}"
        yield from _rules_of_block(use, parsing.tool_format, tokenizer)
        return
    has_marker = tokenizer.added_id_of(syntax.opening) is not None
    marked = f" | TEXT {marker(syntax.opening, tokenizer)} block" if has_marker else ""
    yield f"text_and_calls: {SPACES} (calls | TEXT{marked})"
    excluded = without(syntax.opening) if syntax.opening else ""
    if parsing.reasoning is not None:
        excluded += f" & ~{regex(re.escape(REASONING_FORMATS[parsing.reasoning].opening) + '(?s:.*)')}"
    yield f"TEXT: {_NO_BARE_CALL}{excluded}"
    yield from rules_of_calls(use, parsing.tool_format, tokenizer)


def too_large(field: str) -> LockstepError:
    """The error for a grammar that workers would not take."""
    return invalid(field, f"would become a grammar of more than {MAX_GRAMMAR_BYTES} bytes")


def _rules_of_block(
    use: ToolUse, tool_format: str, tokenizer: Tokenizer, *, is_beside_json: bool = False
) -> Iterator[str]:
    """The rule `block`, which is what follows a marker of calls, and those that it needs."""
    syntax = TOOL_FORMATS[tool_format]
    tools = {index: tool for index, tool in enumerate(use.tools) if use.named in (None, tool.name)}
    has_names_outside = _has_names_outside(syntax, tokenizer)
    yield f"block: {_block(syntax, tokenizer, is_parallel=use.is_parallel)}{' | named' if has_names_outside else ''}"
    yield f"call: {' | '.join(f'call_{index}' for index in tools)}"
    if has_names_outside:
        yield f"named: {' | '.join(f'named_{index}' for index in tools)}"
    key = "parameters" if tool_format == "llama3" else "arguments"
    for index, tool in tools.items():
        schema = _schema(index, tool) if use.is_required or tool.strict else {"type": "object"}
        if is_beside_json and syntax.is_bare:
            yield f"call_{index}: {nested_schema(_call_schema(index, tool.name, key, schema))}"
            continue
        head = f'{{"name": "{tool.name}", "{key}": '
        yield f'call_{index}: {json.dumps(head)} arguments_{index} "}}"'
        yield f"arguments_{index}: {nested_schema(schema, _SPACING)}"
        if has_names_outside:
            yield f"named_{index}: {json.dumps(tool.name)} {marker(_ARGS, tokenizer)} arguments_{index}"


def _has_names_outside(syntax: JsonSyntax, tokenizer: Tokenizer) -> bool:
    """Whether a call may have its name before its arguments."""
    return syntax.has_names_outside and tokenizer.added_id_of(_ARGS) is not None


def _block(syntax: JsonSyntax, tokenizer: Tokenizer, *, is_parallel: bool) -> str:
    """A call, or calls that need no further marker."""
    if syntax.closing:
        return f'"\\n" call "\\n" {marker(syntax.closing, tokenizer)}'
    if syntax.separators and syntax.opening:
        return "call (/; ?|\\n/ call)*" if is_parallel else "call"
    return '"[" call (", " call)* "]"' if is_parallel else '"[" call "]"'


def _schema(index: int, tool: Tool) -> dict[str, Any]:
    schema = {"type": "object"} | dict(tool.parameters or {})
    if schema["type"] != "object":
        raise invalid(f"{FIELD}[{index}]", "has parameters that are no object")
    if len(to_json(schema)) > MAX_GRAMMAR_BYTES:
        raise too_large(FIELD)
    return schema


def _call_schema(index: int, name: str, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as one object. The arguments' schema has an id, so that its references are still to its own parts."""
    properties = {"name": {"const": name}, key: {"$id": f"urn:lockstep:tool:{index}"} | arguments}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
