"""Turns a conversation into the text that a model was trained on, with the Jinja template that comes with the model.

Templates are untrusted data: they run in Jinja's sandbox, which cannot reach or change Python objects.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2 import meta as jinja_meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lockstep_common.errors import LockstepError, invalid

from lockstep_router.text.template_tools import ToolSupport, probe


class ChatTemplate:
    """A compiled chat template. It defines the names that templates on the Hugging Face hub expect."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template.

        Raises:
            ValueError: it is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            names = jinja_meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._own_names = {"messages": None, "add_generation_prompt": True, "tools": None, "documents": None}
        self.fields = frozenset(names) - {*environment.globals, *self._own_names, *special_tokens}
        """The names of further values that it uses, such as `enable_thinking`."""

    @functools.cached_property
    def tool_support(self) -> ToolSupport | None:
        """How it takes tools and their calls; None if it has no place for them."""

        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
            try:
                return self.render(messages, tools)
            except LockstepError:
                return None

        return probe(render)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as a prompt that ends where the assistant is to speak.

        Args:
            messages: the conversation.
            tools: the functions that the model may call.
            fields: further values, by names that are among `fields`.

        Raises:
            LockstepError: INVALID_REQUEST, the template does not accept these messages.
        """
        values = {**(fields or {}), **self._own_names, **self._special_tokens, "messages": messages, "tools": tools}
        try:
            return self._template.render(values)
        # A template can fail in any way that Python code can.
        except Exception as error:
            raise invalid("messages", f"are not accepted by the model's chat template: {error}") from error


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
