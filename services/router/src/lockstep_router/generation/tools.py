"""The functions that a model may call, and calls that it has made, in types that depend on no API."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool = False
    """The arguments must match the schema."""

    @property
    def body(self) -> dict[str, Any]:
        """The tool as chat templates expect it: the form of OpenAI's chat completions."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: each for key, each in fields.items() if each is not None}}

    @functools.cached_property
    def chars(self) -> int:
        """Characters of the tool in a prompt, about."""
        return len(to_json(self.body))


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how the model may use them."""

    tools: tuple[Tool, ...]
    is_required: bool = False
    """The answer must be a call."""
    named: str | None = None
    """The function that must be called; None: any."""
    is_parallel: bool = True
    """The answer may have several calls."""

    @property
    def is_free(self) -> bool:
        """Whether the model decides about calls and their arguments by itself."""
        return not self.is_required and not any(tool.strict for tool in self.tools)


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant's message has."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it; it may be invalid."""
