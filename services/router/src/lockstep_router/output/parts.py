"""The parts of a model's output, in the order in which they stand in its text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the text that the model writes for itself before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallName:
    """The beginning of a tool call."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. All pieces together are JSON, if the model wrote valid JSON."""

    index: int
    text: str


Part = Content | Reasoning | CallName | CallArguments


def content(text: str) -> list[Part]:
    """The text as a part; none if it is empty."""
    return [Content(text)] if text else []
