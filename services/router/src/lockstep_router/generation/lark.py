"""Pieces of grammars in llguidance's variant of Lark. What a regular expression takes has no added tokens in it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep_common.protocol import JSON_SCHEMA_OPTIONS

from lockstep_router.text.tokenizer import Tokenizer

_UNQUOTABLE = re.compile(r"(\\[^\n\r])|\\?([/\n\r])", re.DOTALL)
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def regex(pattern: str) -> str:
    """A regular expression as a literal."""
    return f"/{_UNQUOTABLE.sub(lambda found: found[1] or _ESCAPES[found[2]], pattern)}/"


def nested_schema(schema: Mapping[str, Any], options: Mapping[str, Any] = JSON_SCHEMA_OPTIONS) -> str:
    """JSON that conforms to a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def marker(text: str, tokenizer: Tokenizer) -> str:
    """A marker: a token of its own where the tokenizer has one."""
    token_id = tokenizer.added_id_of(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def rule_up_to(name: str, end: str, tokenizer: Tokenizer) -> str:
    """A rule for any text up to a marker, and the marker."""
    if tokenizer.added_id_of(end) is None:
        return f"{name}[lazy]: {regex(f'(?s:.*){re.escape(end)}')}"
    return f"{name}: /(?s:.*)/ {marker(end, tokenizer)}"


def terminal_without(name: str, text: str, tokenizer: Tokenizer) -> str:
    """A terminal for any text in which a marker, if there is one, does not occur."""
    if text and tokenizer.added_id_of(text) is None:
        return f"{name}: /(?s:.*)/ & ~{regex(f'(?s:.*){re.escape(text)}(?s:.*)')}"
    return f"{name}: /(?s:.*)/"
