"""The filters and methods of chat templates that can make something large of something small.

Each counts its result in the rendering's budget before it makes it. Others are Jinja's own.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, NoReturn

from jinja2 import TemplateError, filters, pass_context, pass_environment
from jinja2.runtime import Context

from lockstep_router.text.template_budget import ITEM_CHARS, RenderLimitError, running
from lockstep_router.text.template_sizes import (
    MAX_WIDTH,
    braces_chars,
    json_chars,
    parts,
    percent_chars,
    replaced_chars,
    text_chars,
)

UNBOUNDED_FILTERS = ("pprint", "urlencode", "urlize", "wordwrap", "xmlattr")
"""Filters that templates do not have. They are for web pages and for people."""
UNBOUNDED_METHODS = frozenset({"encode", "maketrans", "to_bytes", "translate"})
_MAX_BITS = 1 << 16
_PERCENT_WIDTH = re.compile(r"%(?:%|(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?(?P<wide>\d{4})?(?P<given>\*)?)")
_BRACES_WIDTH = re.compile(r"\{[^{}]*:[^{}]*?(?:(?P<wide>\d{4})|(?P<given>\{))")
_BRACES_ATTRIBUTE = re.compile(r"\{[^{}:!]*\.")


def text_of(value: Any) -> str:
    """The value as a text."""
    if not isinstance(value, str):
        running.get().make(text_chars(value))
    return value if isinstance(value, str) else str(value)


def written(value: Any) -> Any:
    """What a template writes, which Jinja turns into a text."""
    return value if type(value) is str else text_of(value)


def joined(values: Iterable[Any]) -> str:
    """The texts of values, one after the other."""
    texts = list(map(text_of, values))
    running.get().make(sum(map(len, texts)))
    return "".join(texts)


def items_of(values: Any) -> Any:
    """Values of which a list will be made."""
    budget = running.get()
    if isinstance(values, Sized):
        budget.make(ITEM_CHARS * len(values))
        return values
    made = []
    for value in budget.rounds(values):
        budget.make(ITEM_CHARS)
        made.append(value)
    return made


# Operators.


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Count the result of an operator."""
    if operator == "+":
        if isinstance(left, Sized) and isinstance(right, Sized):
            running.get().make(_item_chars(left) * (len(left) + len(right)))
    elif operator == "*":
        _check_product(left, right)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
    elif isinstance(left, str):
        _check_percent(left, right if isinstance(right, tuple) else (right,))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sized) and isinstance(times, int):
            running.get().make(max(0, _item_chars(value) * len(value) * times))


def _item_chars(value: Any) -> int:
    return 1 if isinstance(value, str) else ITEM_CHARS


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise RenderLimitError(f"it makes a number of more than {_MAX_BITS} bits")


def _check_percent(form: str, values: tuple[Any, ...]) -> None:
    _check_widths(_PERCENT_WIDTH, form, values)
    running.get().make(percent_chars(form, values))


def _check_widths(widths: re.Pattern[str], form: str, values: Iterable[Any]) -> None:
    for match in widths.finditer(form):
        if match["wide"]:
            raise RenderLimitError(f"it pads a text to more than {MAX_WIDTH} characters")
        if match["given"]:
            _check_numbers(values)


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(each, int) and each > MAX_WIDTH for each in values):
        raise RenderLimitError(f"it pads a text to more than {MAX_WIDTH} characters")


# Filters.


def _of_text(function: Callable[..., Any], chars: int) -> Callable[..., Any]:
    """A filter that takes any value as a text, of each of whose characters it makes so many."""

    @functools.wraps(function)
    def of_text(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        text = text_of(value)
        if chars > 1:
            running.get().make(chars * len(text))
        return function(text, *args, **kwargs)

    return of_text


def _of_items(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes a list."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def of_items(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[at + 1 :], *kwargs.values()))
        return function(*args[:at], items_of(args[at]), *args[at + 1 :], **kwargs)

    return of_items


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = text_of(value), text_of(old), text_of(new)
    running.get().make(replaced_chars(text, old, new, -1 if count is None else count))
    return filters.do_replace(context.eval_ctx, text, old, new, count)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    values = list(items_of(value))
    running.get().make(sum(map(text_chars, values)) + text_chars(d) * len(values))
    return filters.sync_do_join(context.eval_ctx, values, d)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_numbers((width,))
    lines = parts(s) + 1
    running.get().make(len(s) + lines * (ITEM_CHARS + (len(width) if isinstance(width, str) else width)))
    return filters.do_indent(s, width, first, blank)


def _format(form: Any, *args: Any, **kwargs: Any) -> str:
    text = text_of(form)
    _check_percent(text, args or (kwargs,))
    return filters.do_format(text, *args, **kwargs)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    _check_numbers((precision,))
    return filters.do_round(value, precision, method)


@pass_environment
def _sum(environment: Any, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if isinstance(start, Sized):
        raise RenderLimitError("it adds up values that are no numbers")
    return filters.sync_do_sum(environment, values, attribute, start)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    _check_numbers((indent,))
    running.get().make(json_chars(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def bounded_filters(known: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters of chat templates, made of Jinja's own."""
    one = ("capitalize", "center", "lower", "safe", "string", "striptags", "trim", "upper")
    many = {"title": 8, "wordcount": 8, "e": 5, "escape": 5, "forceescape": 5}
    lists = ("batch", "dictsort", "groupby", "list", "reverse", "slice", "sort", "unique")
    return {
        **{name: each for name, each in known.items() if name not in UNBOUNDED_FILTERS},
        **{name: _of_text(known[name], chars) for name, chars in (dict.fromkeys(one, 1) | many).items()},
        **{name: _of_items(known[name]) for name in lists},
        "format": _format,
        "indent": _indent,
        "join": _join,
        "replace": _replace,
        "round": _round,
        "sum": _sum,
        "tojson": _to_json,
    }


# Functions and methods.


def raise_exception(message: Any) -> NoReturn:
    """End the rendering."""
    raise TemplateError(text_of(message))


def checked_arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The positional arguments for a function, after its result was counted."""
    name = getattr(function, "__name__", None)
    if (check := _METHODS.get(name)) is None:
        return args
    given = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # the sandbox wraps some methods
    own = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # Jinja adds a loop's variables
    return check(given, args, own) if isinstance(given, str) else args


def _pad(_: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    _check_numbers((*args, *kwargs.values()))
    return args


def _expand_tabs(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    _check_numbers((*args, *kwargs.values()))
    running.get().make(len(text) + MAX_WIDTH * text.count("\t"))
    return args


def _replace_method(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    old, new, *count = (*args, *kwargs.values())
    if isinstance(old, str) and isinstance(new, str):
        running.get().make(replaced_chars(text, old, new, *count))
    return args


def _join_method(text: str, args: tuple[Any, ...], _: Mapping[str, Any]) -> tuple[Any, ...]:
    (values,) = args
    values = list(items_of(values))
    running.get().make(sum(map(text_chars, values)) + len(text) * len(values))
    return (values,)


def _split_method(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    separator, most = (*args, None, -1)[:2] if len(args) != 1 else (args[0], -1)
    separator, most = kwargs.get("sep", separator), kwargs.get("maxsplit", most)
    running.get().make(len(text) + ITEM_CHARS * parts(text, separator if isinstance(separator, str) else None, most))
    return args


def _split_lines(text: str, args: tuple[Any, ...], _: Mapping[str, Any]) -> tuple[Any, ...]:
    running.get().make(len(text) + ITEM_CHARS * parts(text))
    return args


def _format_method(form: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    bare, values = form.replace("{{", "").replace("}}", ""), (*args, *kwargs.values())
    _check_widths(_BRACES_WIDTH, bare, values)
    if _BRACES_ATTRIBUTE.search(bare):
        raise RenderLimitError("it formats a part of a value")
    running.get().make(braces_chars(bare, values))
    return args


_METHODS: dict[Any, Callable[[str, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pad),
    **dict.fromkeys(("format", "format_map"), _format_method),
    **dict.fromkeys(("split", "rsplit"), _split_method),
    "expandtabs": _expand_tabs,
    "join": _join_method,
    "replace": _replace_method,
    "splitlines": _split_lines,
}
