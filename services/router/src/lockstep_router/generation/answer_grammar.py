"""The grammar of an answer: reasoning first, if the model marks any, then calls of tools, text of a form, or either.

It never compiles a grammar: workers do.
"""

import json
import re
from collections.abc import Iterable
from itertools import chain

from lockstep_api.v1 import inference_pb2
from lockstep_common.protocol import MAX_GRAMMAR_BYTES

from lockstep_router.generation.lark import SPACES, marker, nested_schema, regex, rules_up_to
from lockstep_router.generation.parsing import Parsing
from lockstep_router.generation.tool_grammar import FIELD, rules_of_calls, rules_of_text_and_calls, too_large
from lockstep_router.generation.tools import ToolUse
from lockstep_router.output.reasoning import REASONING_FORMATS
from lockstep_router.text.tokenizer import Tokenizer

_LARK = re.compile(r"^\s*(start\s*:|%llguidance\b)", re.MULTILINE)
"""Lark has one of these, and GBNF has not; llguidance tells them apart in the same way."""
_REASONING = f"thought {SPACES}"


def answer_grammar(
    form: inference_pb2.Grammar | None, use: ToolUse | None, parsing: Parsing, tokenizer: Tokenizer
) -> inference_pb2.Grammar | None:
    """The grammar of the answers to a conversation: `form` itself, if they are nothing else; None: any answer.

    Args:
        form: of the text of an answer without calls, a JSON object if there are tools. None: any text.
        use: the tools; None: an answer has no calls.

    Raises:
        LockstepError: INVALID_REQUEST, schemas are too large, or those of tools describe no objects.
    """
    if use is None:
        nested = None if form is None or parsing.reasoning is None else _nested(form)
        if form is None or nested is None:
            return form
        return _grammar(form.field, "form", [f"form: {nested}"], parsing, tokenizer)
    assert parsing.tool_format is not None
    if form is not None and not use.is_required:
        nested = _nested(form)
        assert nested is not None
        calls = rules_of_calls(use, parsing.tool_format, tokenizer, is_beside_json=True)
        return _grammar(form.field, "(calls | form)", chain([f"form: {nested}"], calls), parsing, tokenizer)
    if use.is_free:
        return None
    if use.is_required:
        return _grammar(FIELD, "calls", rules_of_calls(use, parsing.tool_format, tokenizer), parsing, tokenizer)
    return _grammar(FIELD, "text_and_calls", rules_of_text_and_calls(use, parsing, tokenizer), parsing, tokenizer)


def _grammar(
    field: str, answer: str, rules: Iterable[str], parsing: Parsing, tokenizer: Tokenizer
) -> inference_pb2.Grammar:
    if parsing.reasoning is not None:
        syntax = REASONING_FORMATS[parsing.reasoning]
        opening = marker(syntax.opening, tokenizer)
        # A model may repeat the marker with which the prompt ends.
        answer = f"{opening}? {_REASONING} {answer}" if parsing.is_open else f"({opening} {_REASONING})? {answer}"
        rules = chain(rules, rules_up_to("thought", syntax.closing, tokenizer))
    lines, size = [f"start: {answer}"], 0
    for rule in rules:
        lines.append(rule)
        size += len(rule.encode()) + 1
        if size > MAX_GRAMMAR_BYTES - len(lines[0]):
            raise too_large(field)
    return inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_LARK, text="\n".join(lines), field=field)


def _nested(form: inference_pb2.Grammar) -> str | None:
    """A form inside a grammar; None: it cannot be inside one."""
    match form.kind:
        case inference_pb2.GRAMMAR_KIND_JSON_OBJECT:
            return nested_schema({"type": "object"})
        case inference_pb2.GRAMMAR_KIND_JSON_SCHEMA:
            return _nested_text(form.text)
        case inference_pb2.GRAMMAR_KIND_REGEX:
            return regex(form.text)
        case _:
            return f"%lark {{\n{form.text}\n}}" if _LARK.search(form.text) else None


def _nested_text(text: str) -> str | None:
    """A schema inside a grammar; None: it is no object, or no text at all, and workers say what is wrong with it."""
    try:
        schema = json.loads(text)
        nested = nested_schema(schema) if isinstance(schema, dict) else ""
        nested.encode()  # half of a pair of surrogates is in no text
    except (ValueError, RecursionError):
        return None
    return nested or None
