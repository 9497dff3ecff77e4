"""The Jinja environment of chat templates: a sandbox whose renderings have bounds on work and memory.

A template comes with its model. A mistake in it must cost the chat with this model alone, not the router that serves
others too. Work is counted where a template repeats it: in the bodies of loops and macros. Memory is bounded where a
short template makes a long value: repetition, padding, and values that grow from round to round. Jinja's sandbox
bounds `range`.
"""

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 32 << 20
"""Largest text, and most items of a list, that a template makes of shorter ones."""
CPU_S = 1.0
"""What a rendering may take of its thread's time, beside that for messages. A busy machine does not count."""
CPU_S_PER_MESSAGE = 0.02
BUDGET = "budget of this rendering"
"""Under this name, which no template can have, each rendering is given its `RenderBudget`."""
_SLOW_S = 0.05
"""An ordinary template takes 0.01 to 0.1 ms for a message."""
_SLOW_S_PER_MESSAGE = 0.005
_STEPS_BETWEEN_LOOKS = 64
_GROWING = frozenset({str, list, tuple})
_MAX_WIDTH = 1000
_MAX_BITS = 1 << 16
_PERCENT_WIDTH = re.compile(r"%(?:%|(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?(?P<wide>\d{4})?(?P<given>\*)?)")
_BRACES_WIDTH = re.compile(r"\{[^{}]*:[^{}]*?(?:(?P<wide>\d{4})|(?P<given>\{))")
_ROUNDS, _CALL = "count rounds", "count a call"  # filters that no template can name
_PADDING_FILTERS = ("center", "indent", "batch", "slice")


class RenderLimitError(Exception):
    """A rendering takes too long, or one of its values becomes too large."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. It defines the names that templates on the Hugging Face hub expect."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        self.concat = _join  # type: ignore[method-assign]
        self.filters |= {name: _narrow(self.filters[name]) for name in _PADDING_FILTERS}
        self.filters |= {_ROUNDS: _count_rounds, _CALL: _count_call, "tojson": _to_json, "format": _format}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
        del self.globals["lipsum"]  # makes text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _ROUNDS, [], [], None, None)
            if loop.recursive:  # what a loop calls itself with is counted here only
                loop.body.insert(0, _counted_call([], loop.lineno))
        macros: Iterable[Any] = tree.find_all((nodes.Macro, nodes.CallBlock))
        for macro in macros:
            macro.body.insert(0, _counted_call(macro.args, macro.lineno))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator that can make something large of something small."""
        if operator == "%":
            if isinstance(left, str):
                _check_format(_PERCENT_WIDTH, left, right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            _check_product(left, right)
        else:
            _check_power(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a call in a template."""
        check = _CHECKED_CALLS.get(getattr(function, "__name__", None))
        if check is not None:
            check(function, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which tells transformers what an assistant said. It stands for its
    content.
    """

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """The content. As in transformers, what it sets is not seen outside."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class RenderBudget:
    """The work of one rendering, which one thread does. Its time is looked at after each few steps.

    Args:
        messages: how many the conversation has.
    """

    __slots__ = ("_began_s", "_messages", "is_slow", "left")

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self._began_s = 0.0
        self.left = _STEPS_BETWEEN_LOOKS
        """Steps until the next look."""
        self.is_slow = False
        """Whether it has taken far longer than such renderings do."""

    def look(self) -> None:
        """Compare the time that was taken with the limit."""
        self.left, now_s = _STEPS_BETWEEN_LOOKS, time.thread_time()
        self._began_s = self._began_s or now_s  # most renderings end before the first look and need no clock
        taken_s, limit_s = now_s - self._began_s, CPU_S + CPU_S_PER_MESSAGE * self._messages
        if taken_s > _SLOW_S + _SLOW_S_PER_MESSAGE * self._messages:
            self.is_slow = True
        if taken_s > limit_s:
            raise RenderLimitError(f"it takes more than {limit_s:.3g} s")

    def rounds(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop, each of which is a step."""
        for value in values:
            self.left -= 1
            if self.left <= 0:
                self.look()
            yield value


class _Rounds:
    """The values of a loop of a known length."""

    def __init__(self, values: Any, budget: RenderBudget) -> None:
        self._values = values
        self._budget = budget

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return self._budget.rounds(self._values)


@pass_context
def _count_rounds(context: Context, values: Any) -> Any:
    budget: RenderBudget = context.parent[BUDGET]
    try:
        length = len(values)
    except TypeError:
        return budget.rounds(values)
    if length > _STEPS_BETWEEN_LOOKS:
        return _Rounds(values, budget)
    budget.left -= length
    if budget.left <= 0:
        budget.look()
    return values


def _counted_call(arguments: Iterable[nodes.Name], line: int) -> nodes.Stmt:
    """What begins a macro: it counts a step and checks the arguments, with which values can grow from call to call."""
    names = nodes.Tuple([nodes.Name(each.name, "load") for each in arguments], "load")
    statement = nodes.ExprStmt(nodes.Filter(names, _CALL, [], [], None, None))
    statement.set_lineno(line)
    return statement


@pass_context
def _count_call(context: Context, arguments: tuple[Any, ...]) -> None:
    budget: RenderBudget = context.parent[BUDGET]
    budget.left -= 1
    if budget.left <= 0:
        budget.look()
    for value in arguments:
        if type(value) in _GROWING:
            _check_count(len(value))


class _Namespace(Namespace):
    """Jinja's namespace: values that outlive a round of a loop."""

    def __setitem__(self, name: str, value: Any) -> None:
        if type(value) in _GROWING:
            _check_count(len(value))
        Namespace.__setitem__(self, name, value)


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses large widths."""

    @functools.wraps(function)
    def narrow(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        return function(value, *args, **kwargs)

    return narrow


def _format(form: str, *args: Any, **kwargs: Any) -> str:
    _check_format(_PERCENT_WIDTH, str(form), (*args, *kwargs.values()))
    return do_format(form, *args, **kwargs)


def _join(pieces: Iterable[str]) -> str:
    texts = list(pieces)
    _check_count(sum(map(len, texts)))
    return "".join(texts)


def _check_count(count: int) -> None:
    if count > MAX_CHARS:
        raise RenderLimitError(f"it makes a value of more than {MAX_CHARS} characters")


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(each, int) and each > _MAX_WIDTH for each in values):
        raise RenderLimitError(f"it pads a text to more than {_MAX_WIDTH} characters")


def _check_format(widths: re.Pattern[str], form: str, values: Iterable[Any]) -> None:
    for match in widths.finditer(form):
        if match["wide"]:
            raise RenderLimitError(f"it pads a text to more than {_MAX_WIDTH} characters")
        if match["given"]:
            _check_numbers(values)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for value, times in ((left, right), (right, left)):
        if type(value) in _GROWING and isinstance(times, int):
            _check_count(len(value) * times)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise RenderLimitError(f"it makes a number of more than {_MAX_BITS} bits")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    _check_numbers((indent,))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_padding_call(_: Any, arguments: Iterable[Any]) -> None:
    _check_numbers(arguments)


def _check_format_call(method: Any, arguments: Iterable[Any]) -> None:
    form = getattr(getattr(method, "__wrapped__", method), "__self__", None)  # the sandbox wraps these methods
    if isinstance(form, str):
        _check_format(_BRACES_WIDTH, form.replace("{{", "").replace("}}", ""), arguments)


_CHECKED_CALLS: dict[str | None, Callable[[Any, Iterable[Any]], None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _check_padding_call),
    **dict.fromkeys(("format", "format_map"), _check_format_call),
}
