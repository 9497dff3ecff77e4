"""Messages of chat answers with reasoning and tool calls besides their text: complete, or the new part for a chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_router.output import CallArguments, CallName, Content, Part, Reasoning

Body = dict[str, Any]


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def body(self) -> Body:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class GrowingMessage:
    """What one choice's message has besides its text."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    def add(self, part: Part) -> None:
        """Append a part."""
        match part:
            case Reasoning():
                self._reasoning.append(part.text)
            case CallName():
                self._calls.append(_Call(part.id, part.name))
            case CallArguments():
                self._calls[part.index].arguments.append(part.text)

    def body(self, content: str) -> Body:
        """The message with this text."""
        message: Body = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [call.body for call in self._calls]
        return message


def delta_body(parts: Sequence[Part]) -> Body:
    """The `delta` of a chunk with these parts."""
    body: Body = {}
    for part in parts:
        match part:
            case Content():
                body["content"] = body.get("content", "") + part.text
            case Reasoning():
                body["reasoning_content"] = body.get("reasoning_content", "") + part.text
            case CallName() | CallArguments():
                _add_call(body.setdefault("tool_calls", []), part)
    return body


def _add_call(calls: list[Body], part: CallName | CallArguments) -> None:
    if isinstance(part, CallName):
        function = {"name": part.name, "arguments": ""}
        calls.append({"index": part.index, "id": part.id, "type": "function", "function": function})
    elif calls and calls[-1]["index"] == part.index:
        calls[-1]["function"]["arguments"] += part.text
    else:
        calls.append({"index": part.index, "function": {"arguments": part.text}})
