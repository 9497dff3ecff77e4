"""The grammar of answers that must be tool calls, in the format that the model's parser reads.

Reasoning may come first. It never compiles the grammar: workers do.
"""

import json
from collections.abc import Mapping
from typing import Any

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import invalid
from lockstep_common.protocol import MAX_GRAMMAR_BYTES
from pydantic_core import to_json

from lockstep_router.generation.parsing import Parsing
from lockstep_router.generation.tools import Tool, ToolUse
from lockstep_router.output.formats import TOOL_FORMATS
from lockstep_router.output.reasoning import REASONING_FORMATS
from lockstep_router.text.tokenizer import Tokenizer

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The arguments' spaces, as templates write them."""
_FIELD = "tools"


def forced_calls(use: ToolUse, parsing: Parsing, tokenizer: Tokenizer) -> inference_pb2.Grammar:
    """The grammar of answers that are one or more calls.

    Raises:
        LockstepError: INVALID_REQUEST, the tools' schemas are too large or describe no objects.
    """
    assert parsing.tool_format is not None
    tools = {index: tool for index, tool in enumerate(use.tools) if use.named in (None, tool.name)}
    if sum(tool.chars for tool in tools.values()) > MAX_GRAMMAR_BYTES:
        raise _too_large()
    lines = [
        f"start: {_reasoning(parsing, tokenizer)}{_calls(parsing.tool_format, tokenizer, is_parallel=use.is_parallel)}",
        "thought: /(?s:.*)/",
        f"call: {' | '.join(f'call_{index}' for index in tools)}",
    ]
    key = "parameters" if parsing.tool_format == "llama3" else "arguments"
    for index, tool in tools.items():
        head = f'{{"name": "{tool.name}", "{key}": '
        lines.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {to_json(_schema(index, tool)).decode()}")
    text = "\n".join(lines)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise _too_large()
    return inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_LARK, text=text, field=_FIELD)


def _reasoning(parsing: Parsing, tokenizer: Tokenizer) -> str:
    if parsing.reasoning is None:
        return ""
    syntax = REASONING_FORMATS[parsing.reasoning]
    rest = f"thought {_marker(syntax.closing, tokenizer)} /[ \\n]{{0,4}}/"
    return f"{rest} " if parsing.is_open else f"({_marker(syntax.opening, tokenizer)} {rest})? "


def _calls(name: str, tokenizer: Tokenizer, *, is_parallel: bool) -> str:
    syntax = TOOL_FORMATS[name]
    opening, closing = (_marker(text, tokenizer) if text else "" for text in (syntax.opening, syntax.closing))
    if closing:
        one = f'{opening} "\\n" call "\\n" {closing}'
        return f'{one} ("\\n" {one})*' if is_parallel else one
    if syntax.separators and syntax.opening:
        return 'call ("; " call)*' if is_parallel else "call"
    several = 'call (", " call)*' if is_parallel else "call"
    return f'{opening} "[" {several} "]"'


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """A marker: a token of its own where the tokenizer has one."""
    token_id = tokenizer.added_id_of(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _schema(index: int, tool: Tool) -> Mapping[str, Any]:
    schema = {"type": "object"} | dict(tool.parameters or {})
    if schema["type"] != "object":
        raise invalid(f"{_FIELD}[{index}]", "has parameters that are no object")
    return schema | {"x-guidance": _SPACING}


def _too_large() -> Exception:
    return invalid(
        _FIELD, f"make a grammar of more than {MAX_GRAMMAR_BYTES} bytes, so tool_choice may only be none or auto"
    )
