"""Pieces of grammars in llguidance's variant of Lark.

llguidance follows all terminals that may come next at once, and takes the longest one that it can: when a terminal has
come to nothing it tries none of the shorter ones. So where a terminal for any text stands beside others, it must end
where they begin.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_common.protocol import JSON_SCHEMA_OPTIONS

from lockstep_router.text.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"
SPACES = "/[ \\n]{0,4}/"
"""What models write between reasoning and answer, or before a call."""
_UNQUOTABLE = re.compile(r"(\\[^\n\r])|\\?([/\n\r])", re.DOTALL)
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def regex(pattern: str) -> str:
    """A regular expression as a literal."""
    return f"/{_UNQUOTABLE.sub(lambda found: found[1] or _ESCAPES[found[2]], pattern)}/"


def nested_schema(schema: Mapping[str, Any], options: Mapping[str, Any] = JSON_SCHEMA_OPTIONS) -> str:
    """JSON that conforms to a schema."""
    given = {**schema, "x-guidance": options}
    return f"%json {json.dumps(given, ensure_ascii=False, separators=(',', ':'))}"


def marker(text: str, tokenizer: Tokenizer) -> str:
    """A marker: a token of its own where the tokenizer has one."""
    token_id = tokenizer.added_id_of(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def without(text: str) -> str:
    """What a terminal has behind it, so that a marker does not occur in it, in whichever tokens."""
    return f" & ~{regex(f'(?s:.*){re.escape(text)}(?s:.*)')}"


def rules_up_to(name: str, end: str, tokenizer: Tokenizer) -> Iterator[str]:
    """A rule for any text up to a marker, and the marker."""
    if tokenizer.added_id_of(end) is None:
        yield f"{name}[lazy]: {regex(f'(?s:.*){re.escape(end)}')}"
    else:
        yield f"{name}: {name.upper()} {marker(end, tokenizer)}"
        yield f"{name.upper()}: {ANY_TEXT}{without(end)}"
