"""The formats of tool calls and reasoning by name, and which one a model uses."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep_router.output.generic_json import GENERIC_JSON
from lockstep_router.output.hermes import HERMES
from lockstep_router.output.json_calls import JsonSyntax
from lockstep_router.output.llama3 import LLAMA3
from lockstep_router.output.mistral import MISTRAL
from lockstep_router.output.reasoning import REASONING_FORMATS

GENERIC = "json"
"""The format that a model can be asked for in plain text."""
OFF = "off"
"""In place of a format: none is looked for."""

TOOL_FORMATS: Mapping[str, JsonSyntax] = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    GENERIC: GENERIC_JSON,
}

_OTHER_FORMATS = re.compile(
    r"<function=|<arg_key>|<\|channel\|>|tool\u2581calls\u2581begin|<\|tool_calls_section_begin\|>"
)
"""What templates with other formats have, though some also have a marker of the formats above."""
_JSON_CALL = re.compile(r"""["']name["'\\]*: .{0,80}["'](parameters|arguments)["'\\]*:""", re.DOTALL)


@dataclass(frozen=True)
class OutputFormat:
    """The formats of one model; None where it has none that is known."""

    tools: str | None
    reasoning: str | None


class ModelFormats:
    """The formats of models: what the settings say or, without that, what their chat templates show.

    Args:
        tools: names of formats of tool calls, or `off`, by model.
        reasoning: names of formats of reasoning, or `off`, by model.
    """

    def __init__(self, tools: Mapping[str, str], reasoning: Mapping[str, str]) -> None:
        self._tools = tools
        self._reasoning = reasoning

    def of(self, model: str, template: str) -> OutputFormat:
        """The formats of a model with this chat template."""
        tools = self._tools.get(model) or detect_tools(template)
        reasoning = self._reasoning.get(model) or detect_reasoning(template)
        return OutputFormat(None if tools == OFF else tools, None if reasoning == OFF else reasoning)

    def is_generic(self, model: str) -> bool:
        """Whether a model whose template has no place for tools gets them in plain text."""
        return self._tools.get(model) == GENERIC


@functools.lru_cache(maxsize=256)
def detect_tools(template: str) -> str | None:
    """The name of the format of tool calls in a chat template."""
    if _OTHER_FORMATS.search(template):
        return None
    for name in ("mistral", "hermes"):
        if TOOL_FORMATS[name].opening in template:
            return name
    if LLAMA3.opening in template or ("<|start_header_id|>" in template and _JSON_CALL.search(template)):
        return "llama3"
    return GENERIC if _JSON_CALL.search(template) else None


@functools.lru_cache(maxsize=256)
def detect_reasoning(template: str) -> str | None:
    """The name of the format of reasoning in a chat template."""
    return next((name for name, syntax in REASONING_FORMATS.items() if syntax.closing in template), None)
