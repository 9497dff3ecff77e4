"""Splits one answer's text into its parts: reasoning first, then content and tool calls."""

from lockstep_router.output.json_calls import JsonCalls
from lockstep_router.output.parts import Part, Reasoning, content
from lockstep_router.output.reasoning import ReasoningSplit


class OutputParser:
    """Takes an answer's text in pieces. Its parts depend on the whole text alone.

    Args:
        reasoning: finds reasoning; None: the model marks none.
        calls: finds tool calls in what follows; None: there are no tools.
    """

    def __init__(self, reasoning: ReasoningSplit | None, calls: JsonCalls | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text has begun to be reasoning that has not ended."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether there was a tool call."""
        return self._calls is not None and self._calls.count > 0

    @property
    def may_end(self) -> bool:
        """Whether the answer may end after a number of tool calls."""
        return self._calls is not None and self._calls.may_end

    @property
    def has_ended(self) -> bool:
        """Whether the answer has as many tool calls as it may have: what follows is no part of it."""
        return self._calls is not None and self._calls.has_ended

    def feed(self, text: str) -> list[Part]:
        """Take the next piece; returns the parts that are final now."""
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._split(reasoning, answer)

    def finish(self) -> list[Part]:
        """The parts of the text that still waits, at the end."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        parts = self._split(reasoning, answer)
        return parts if self._calls is None else parts + self._calls.finish()

    def _split(self, reasoning: str, answer: str) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if not answer:
            return parts
        return parts + (content(answer) if self._calls is None else self._calls.feed(answer))
