"""The grammar of an answer: reasoning first, if the model marks any, then calls of tools, text of a form, or either.

It never compiles a grammar: workers do.
"""

import json
import re
from collections.abc import Iterable
from itertools import chain

from lockstep_api.v1 import inference_pb2
from lockstep_common.protocol import MAX_GRAMMAR_BYTES

from lockstep_router.generation.lark import marker, nested_schema, regex, rule_up_to
from lockstep_router.generation.parsing import Parsing
from lockstep_router.generation.tool_grammar import FIELD, rules_of_calls, rules_of_text_and_calls, too_large
from lockstep_router.generation.tools import ToolUse
from lockstep_router.output.reasoning import REASONING_FORMATS
from lockstep_router.text.tokenizer import Tokenizer

_LARK = re.compile(r"^\s*(start\s*:|%llguidance\b)", re.MULTILINE)
"""Lark has one of these, and GBNF has not; llguidance tells them apart in the same way."""


def answer_grammar(
    form: inference_pb2.Grammar | None, use: ToolUse | None, parsing: Parsing, tokenizer: Tokenizer
) -> inference_pb2.Grammar | None:
    """The grammar of the answers to a conversation. None: `form` is the grammar, since the model marks no reasoning or
    the form has no place in another grammar; without a form the model is free.

    Args:
        form: of the text of an answer without calls, as JSON if there are tools. None: any text.
        use: the tools; None: an answer has no calls.

    Raises:
        LockstepError: INVALID_REQUEST, schemas are too large, or those of tools describe no objects.
    """
    nested = None if form is None else _nested(form)
    if use is None:
        if form is None or nested is None or parsing.reasoning is None:
            return None
        return _grammar(form.field, "form", [f"form: {nested}"], parsing, tokenizer)
    assert parsing.tool_format is not None
    rules = rules_of_calls(use, parsing.tool_format, tokenizer, is_beside_json=form is not None and not use.is_required)
    if use.is_required:
        return _grammar(FIELD, "calls", rules, parsing, tokenizer)
    if form is not None:
        return _grammar(form.field, "(calls | form)", [f"form: {nested}", *rules], parsing, tokenizer)
    if use.is_free:
        return None
    rules = chain(rules_of_text_and_calls(use, parsing.tool_format, tokenizer), rules)
    return _grammar(FIELD, "text_and_calls", rules, parsing, tokenizer)


def _grammar(
    field: str, answer: str, rules: Iterable[str], parsing: Parsing, tokenizer: Tokenizer
) -> inference_pb2.Grammar:
    lines = [f"start: {answer}", *rules]
    if parsing.reasoning is not None:
        syntax = REASONING_FORMATS[parsing.reasoning]
        reasoning = "thought /[ \\n]{0,4}/"
        opened = f"({marker(syntax.opening, tokenizer)} {reasoning})?"
        lines[0] = f"start: {reasoning if parsing.is_open else opened} {answer}"
        lines.append(rule_up_to("thought", syntax.closing, tokenizer))
    text = "\n".join(lines)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise too_large(field)
    return inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_LARK, text=text, field=field)


def _nested(form: inference_pb2.Grammar) -> str | None:
    """A form inside a grammar; None: it cannot be inside one."""
    match form.kind:
        case inference_pb2.GRAMMAR_KIND_JSON_OBJECT:
            return nested_schema({"type": "object"})
        case inference_pb2.GRAMMAR_KIND_JSON_SCHEMA:
            try:
                schema = json.loads(form.text)
            except ValueError:
                return None  # workers say what is wrong with it
            return nested_schema(schema) if isinstance(schema, dict) else None
        case inference_pb2.GRAMMAR_KIND_REGEX:
            return regex(form.text)
        case _:
            return f"%lark {{\n{form.text}\n}}" if _LARK.search(form.text) else None
