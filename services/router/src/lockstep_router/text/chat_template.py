"""Turns a conversation into the text that a model was trained on, with the Jinja template that comes with the model.

Templates are untrusted data: they run in Jinja's sandbox, which cannot reach or change Python objects.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lockstep_common.errors import invalid


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
        except TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as a prompt that ends where the assistant is to speak.

        Raises:
            LockstepError: INVALID_REQUEST, the template does not accept these messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            )
        # A template can fail in any way that Python code can.
        except Exception as error:
            raise invalid("messages", f"are not accepted by the model's chat template: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)
