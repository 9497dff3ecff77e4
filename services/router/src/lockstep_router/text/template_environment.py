"""The Jinja environment of chat templates: a sandbox whose renderings have bounds on work and memory.

Work is counted in the bodies of loops and macros, and values by the operators, filters and methods that make them, all
in the rendering's `RenderBudget`. Jinja's sandbox bounds `range`.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from lockstep_router.text.template_budget import STEPS_BETWEEN_LOOKS, RenderBudget, RenderLimitError, running
from lockstep_router.text.template_functions import (
    UNBOUNDED_METHODS,
    bounded_filters,
    check_operator,
    checked_arguments,
    items_of,
    joined,
    raise_exception,
    written,
)
from lockstep_router.text.template_sizes import MAX_WIDTH

_ROUNDS, _CALL, _JOINED, _ITEMS = "count rounds", "count a call", "join texts", "count items"
"""Filters that no template can name."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. It defines the names that templates on the Hugging Face hub expect."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, change: Callable[[str], str] = str) -> None:
        """Make an environment.

        Args:
            change: of each text that a template has, between its blocks and in its expressions.
        """
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], finalize=written
        )
        self._change = change
        self.concat = joined  # type: ignore[method-assign]
        self.filters = bounded_filters(self.filters) | {
            _ROUNDS: _count_rounds,
            _CALL: _count_call,
            _JOINED: joined,
            _ITEMS: items_of,
        }
        self.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
        del self.globals["lipsum"]  # makes text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _ROUNDS)
            if loop.recursive:  # what a loop calls itself with is counted here only
                loop.body.insert(0, _counted_call(loop.lineno))
        macros: Iterable[Any] = tree.find_all((nodes.Macro, nodes.CallBlock))
        for macro in macros:
            macro.body.insert(0, _counted_call(macro.lineno))
        for data in tree.find_all(nodes.TemplateData):
            data.data = self._change(data.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = self._change(constant.value)
        calls: Iterable[Any] = tree.find_all((nodes.Call, nodes.Filter, nodes.Test))
        for call in calls:
            if call.dyn_args is not None:
                call.dyn_args = _filtered(call.dyn_args, _ITEMS)
        _JoinedTexts().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator that can make something large of something small."""
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a call in a template."""
        return super().call(context, function, *checked_arguments(function, args, kwargs), **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether templates may use an attribute."""
        return attr not in UNBOUNDED_METHODS and super().is_safe_attribute(obj, attr, value)


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which tells transformers what an assistant said. It stands for its
    content.
    """

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """The content. As in transformers, what it sets is not seen outside."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _JoinedTexts(NodeTransformer):
    """Puts the counted filter in place of the operator `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja finds it by this name
        """The filter."""
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load"), _JOINED).set_lineno(node.lineno)


class _Rounds:
    """The values of a loop of a known length."""

    def __init__(self, values: Any, budget: RenderBudget) -> None:
        self._values = values
        self._budget = budget

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return self._budget.rounds(self._values)


def _count_rounds(values: Any) -> Any:
    budget = running.get()
    try:
        length = len(values)
    except TypeError:
        return budget.rounds(values)
    if length > STEPS_BETWEEN_LOOKS:
        return _Rounds(values, budget)
    budget.take(length)
    return values


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _counted_call(line: int) -> nodes.Stmt:
    """What begins a macro: it counts a step."""
    statement = nodes.ExprStmt(_filtered(nodes.Const(1), _CALL))
    statement.set_lineno(line)
    return statement


def _count_call(steps: int) -> None:
    running.get().take(steps)


class _Namespace(Namespace):
    """Jinja's namespace. Jinja's own writes all its values, which cannot be measured."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _strftime_now(form: str) -> str:
    if len(form) > MAX_WIDTH:
        raise RenderLimitError(f"it formats a time with more than {MAX_WIDTH} characters")
    return datetime.datetime.now().strftime(form)
