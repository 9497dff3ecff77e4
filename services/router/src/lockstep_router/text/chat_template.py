"""Turns a conversation into the text that a model was trained on, with the Jinja template that comes with the model.

Templates are untrusted data: they run in Jinja's sandbox, which cannot reach or change Python objects, and within
limits of time and memory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2 import meta as jinja_meta
from lockstep_common.errors import LockstepError, invalid

from lockstep_router.text.template_budget import RenderBudget, running
from lockstep_router.text.template_environment import ChatEnvironment
from lockstep_router.text.template_roles import find_role_tokens
from lockstep_router.text.template_tools import ToolSupport, probe


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template.

        Raises:
            ValueError: it cannot be compiled.
        """
        environment = ChatEnvironment()
        try:
            self._template = environment.from_string(source)
            names = jinja_meta.find_undeclared_variables(environment.parse(source))
        # Jinja compiles to Python, which may refuse the result in any way.
        except Exception as error:
            raise ValueError(f"chat template: {_first_line(error)}") from error
        self.source = source
        self._environment, self._globals = environment, dict(environment.globals)
        self._marked = self._template
        self._own: dict[str, Any] = {"add_generation_prompt": True, "documents": None, **special_tokens}
        self._own_marked = self._own
        self.fields = frozenset(names) - {"messages", "tools", *self._globals, *self._own}
        """The names of further values that it uses, such as `enable_thinking`."""

        self.is_slow = False
        """Whether a rendering took so long that none may be done on the event loop."""
        self.tool_support: ToolSupport | None = probe(self._try)
        """How it takes tools and their calls; None if it has no place for them."""

    def role_tokens(self, tokens: Collection[str]) -> frozenset[str]:
        """Which of some tokens it writes to mark turns."""
        return find_role_tokens(self._try, tokens)

    def mark(self, change: Callable[[str], str]) -> None:
        """Change what the template itself writes, in renderings that ask for that.

        Args:
            change: of each text that the template has, and of each special token that it is given.
        """
        self._marked = ChatEnvironment(change).from_string(self.source)
        self._own_marked = {
            name: change(value) if isinstance(value, str) else value for name, value in self._own.items()
        }

    def _try(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        try:
            return self.render(messages, tools)
        except LockstepError:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        marked: bool = False,
    ) -> str:
        """The conversation as a prompt that ends where the assistant begins to speak.

        Args:
            messages: the conversation.
            tools: the functions that the model may call.
            fields: further values, by names that are among `fields`.
            marked: with the changes that `mark` has made.

        Raises:
            LockstepError: INVALID_REQUEST, the template does not accept these messages.
        """
        budget = RenderBudget(len(messages))
        template, own = (self._marked, self._own_marked) if marked else (self._template, self._own)
        values = {**self._globals, **(fields or {}), **own, "messages": messages, "tools": tools}
        # What else Jinja's own method does takes longer than the rendering of a short conversation.
        context = self._environment.context_class(template.environment, values, None, template.blocks)
        token = running.set(budget)
        try:
            return self._environment.concat(template.root_render_func(context))
        # A template can fail in any way that Python code can.
        except Exception as error:
            raise invalid("messages", f"are not accepted by the model's chat template: {error}") from error
        finally:
            running.reset(token)
            if budget.is_slow:
                self.is_slow = True


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{text} (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else text
