"""Whether an answer conforms to a schema, and which keyword of it the message of a refusal names."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from schema_corpus.parts import Schema

REFUSED: Mapping[str, str] = {
    "uniqueItems": '"uniqueItems"',
    "not": '"not"',
    "if": '"if"',
    "dependencies": '"dependencies"',
    "propertyNames": '"propertyNames"',
    "contains": '"contains"',
    "unevaluatedProperties": '"unevaluatedProperties"',
    "minProperties": "minProperties|min/maxProperties",
    "maxProperties": "maxProperties",
    "oneOf": "oneOf constraints",
    "format": "Unknown format: ",
    "pattern": "look-around",
    "$ref": "Resource '|circular references",
}
"""The keywords for which a schema may be refused, and how messages name them, as regular expressions."""
_ALSO_DATES: Mapping[str, str] = {
    r"(:\d\d):60": r"\1:59",
    r"^0000-": "2000-",
    r"^\d{4}-02-29": "2000-02-29",
}
"""Any second 60 is taken for a leap second: RFC 3339's syntax has it, and a grammar cannot know when there was one. The
RFC has the year 0, Python has not. Of 29 February llguidance does not ask whether its year is a leap year.
"""


def refused_keywords(schema: Schema, message: str) -> set[str]:
    """The keywords of the schema that a message names."""
    return {keyword for keyword in set(_keys(schema)) & REFUSED.keys() if re.search(REFUSED[keyword], message)}


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _keys(each)
    elif isinstance(value, list):
        for each in value:
            yield from _keys(each)


def problem_of(schema: Schema, answer: str) -> str:
    """Why an answer is not one of the schema's draft; empty: it is one.

    Numbers are decimal ones: 0.07 is no multiple of 0.01 in binary.
    """
    import jsonschema  # noqa: PLC0415 - takes a second, and each process of pytest-xdist imports this file

    decimal = json.loads(json.dumps(schema), parse_float=Decimal)
    draft = jsonschema.validators.validator_for(decimal, default=jsonschema.Draft202012Validator)
    try:
        draft(decimal, format_checker=format_checker()).validate(json.loads(answer, parse_float=Decimal))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{answer!r} for {json.dumps(schema)}: {error}"
    return ""


def format_checker() -> Any:
    """The draft's formats, but more times and dates than the package knows (`_ALSO_DATES`)."""
    import jsonschema  # noqa: PLC0415 - see above

    made = jsonschema.FormatChecker(())
    made.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    for name in {"date", "date-time", "time"} & made.checkers.keys():
        holds, raises = made.checkers[name]
        made.checkers[name] = partial(_holds, holds), raises
    return made


def _holds(check: Callable[[object], bool], value: object) -> bool:
    return check(_known_date(value) if isinstance(value, str) else value)


def _known_date(value: str) -> str:
    for pattern, replacement in _ALSO_DATES.items():
        value = re.sub(pattern, replacement, value)
    return value
