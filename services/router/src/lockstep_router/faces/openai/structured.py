"""The grammar that a request's answers conform to, from `response_format` or `structured_outputs`.

It never compiles a grammar: workers do, and their errors name the field that is noted here.
"""

import json
from typing import Any

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import LockstepError, invalid
from lockstep_common.protocol import MAX_GRAMMAR_BYTES

from lockstep_router.faces.openai.plain import PlainChat, PlainCompletion
from lockstep_router.faces.openai.schemas import ResponseFormat, SamplingFields, StructuredOutputs


def grammar(body: SamplingFields | PlainChat | PlainCompletion) -> inference_pb2.Grammar | None:
    """The grammar of a body; None: its answers are free text.

    Raises:
        LockstepError: INVALID_REQUEST, fields contradict each other or a text is too large.
    """
    formatted = None if body.response_format is None else _of_format(body.response_format)
    structured = None if body.structured_outputs is None else _of_structured(body.structured_outputs)
    if formatted is not None and structured is not None:
        raise invalid("structured_outputs", "cannot be combined with response_format")
    return formatted or structured


def _of_format(given: ResponseFormat) -> inference_pb2.Grammar | None:
    if (given.type == "json_schema") != (given.json_schema is not None):
        problem = "is missing" if given.json_schema is None else 'needs the type "json_schema"'
        raise invalid("response_format.json_schema", problem)
    if given.json_schema is not None:
        return _schema(given.json_schema.schema_ or {}, "response_format")
    if given.type == "json_object":
        return inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_JSON_OBJECT, field="response_format")
    return None


def grammar_of_text(kind: str, schema: dict[str, Any] | None, field: str) -> inference_pb2.Grammar | None:
    """The grammar of a form of text in the Responses API; None: any text.

    Raises:
        LockstepError: INVALID_REQUEST, the schema is missing, superfluous or too large.
    """
    if (kind == "json_schema") != (schema is not None):
        raise invalid(f"{field}.schema", "is missing" if schema is None else 'needs the type "json_schema"')
    if schema is not None:
        return _schema(schema, field)
    return inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_JSON_OBJECT, field=field) if kind != "text" else None


def _of_structured(given: StructuredOutputs) -> inference_pb2.Grammar:
    wanted = given.model_dump(exclude_none=True, by_alias=True)
    if len(wanted) != 1:
        raise invalid("structured_outputs", "must have exactly one of json, regex, choice, grammar and json_object")
    ((name, value),) = wanted.items()
    field = f"structured_outputs.{name}"
    match name:
        case "json":
            return _schema(value, field)
        case "regex":
            return _grammar(inference_pb2.GRAMMAR_KIND_REGEX, value, field)
        case "choice":
            # JSON's escapes of strings are Lark's. One terminal is compiled in less time than one rule for each choice.
            choices = " | ".join(map(json.dumps, value)) if _fits(value) else None
            text = None if choices is None else f"start: CHOICE\nCHOICE: {choices}"
            return _grammar(inference_pb2.GRAMMAR_KIND_LARK, text, field)
        case "grammar":
            return _grammar(inference_pb2.GRAMMAR_KIND_LARK, value, field)
        case _:
            return inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_JSON_OBJECT, field=field)


def _schema(schema: str | dict[str, Any], field: str) -> inference_pb2.Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False) if _fits(schema) else None
    return _grammar(inference_pb2.GRAMMAR_KIND_JSON_SCHEMA, text, field)


def _grammar(kind: inference_pb2.GrammarKind, text: str | None, field: str) -> inference_pb2.Grammar:
    """The grammar with this text; None: the text would be too large."""
    if text is None or len(text) > MAX_GRAMMAR_BYTES or len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise _too_large(field)
    if not text:
        raise invalid(field, "must not be empty")
    return inference_pb2.Grammar(kind=kind, text=text, field=field)


def _fits(value: Any) -> bool:
    """Whether a parsed JSON value may fit a grammar's text. Checked before it becomes text, which takes time."""
    left, waiting = MAX_GRAMMAR_BYTES, [value]
    while waiting and left >= 0:
        each = waiting.pop()
        if isinstance(each, str):
            left -= len(each)
        elif isinstance(each, dict):
            left -= 2 * len(each)
            if left >= 0:
                waiting += each.keys()
                waiting += each.values()
        elif isinstance(each, list):
            left -= len(each)
            if left >= 0:
                waiting += each
        else:
            left -= 1
    return left >= 0


def _too_large(field: str) -> LockstepError:
    return invalid(field, f"is larger than {MAX_GRAMMAR_BYTES} bytes")
