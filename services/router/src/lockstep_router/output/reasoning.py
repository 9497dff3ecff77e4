"""Separates what a model writes for itself before its answer from the answer."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep_router.output.json_scan import SPACES
from lockstep_router.output.markers import held_back


@dataclass(frozen=True)
class ReasoningSyntax:
    """The markers around reasoning, at the beginning of an answer."""

    opening: str
    closing: str


REASONING_FORMATS = {
    "think": ReasoningSyntax("<think>", "</think>"),
    "magistral": ReasoningSyntax("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningSyntax("<seed:think>", "</seed:think>"),
}
"""The formats by name: that of DeepSeek R1, Qwen 3, GLM and most others, that of Magistral, that of Seed-OSS."""


class ReasoningSplit:
    """Splits text into reasoning and answer. Spaces around the reasoning are left out.

    Args:
        syntax: the markers.
        is_open: the prompt ends with the opening marker, so the text begins inside. The model may repeat the marker.
    """

    def __init__(self, syntax: ReasoningSyntax, *, is_open: bool) -> None:
        self._syntax = syntax
        self._buffer = ""
        self._is_trimming = False
        """Spaces at the beginning of what follows are left out."""
        self._state: Callable[[], tuple[str, str]] = self._begin
        self.is_reasoning = is_open

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece; returns the reasoning and the answer's text that are final now."""
        self._buffer += text
        reasoning = answer = ""
        while True:
            state = self._state
            more_reasoning, more_answer = state()
            reasoning += more_reasoning
            answer += more_answer
            if self._state == state:
                return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """The same of the text that still waits, at the end."""
        text, self._buffer = self._buffer, ""
        if self.is_reasoning:
            return text.strip(SPACES) if self._is_trimming else text.rstrip(SPACES), ""
        return "", text if self._state == self._begin else text.lstrip(SPACES)

    def _begin(self) -> tuple[str, str]:
        """The text's beginning, where the opening marker may stand."""
        text = self._buffer.lstrip(SPACES)
        opening = self._syntax.opening
        if text.startswith(opening):
            self._buffer = text[len(opening) :]
            self.is_reasoning = True
        elif opening.startswith(text):  # also if there is none yet
            return "", ""
        self._is_trimming = self.is_reasoning
        self._state = self._reasoning if self.is_reasoning else self._answer
        return "", ""

    def _reasoning(self) -> tuple[str, str]:
        if self._is_trimming:
            self._buffer = self._buffer.lstrip(SPACES)
        text, marker, rest = self._buffer.partition(self._syntax.closing)
        if marker:
            self._buffer = rest
            self._is_trimming = True
            self.is_reasoning = False
            self._state = self._answer
            return text.rstrip(SPACES), ""
        text = self._buffer[: len(self._buffer) - held_back(self._buffer, (self._syntax.closing,))].rstrip(SPACES)
        self._buffer = self._buffer[len(text) :]
        self._is_trimming = self._is_trimming and not text
        return text, ""

    def _answer(self) -> tuple[str, str]:
        text = self._buffer.lstrip(SPACES) if self._is_trimming else self._buffer
        self._buffer = ""
        self._is_trimming = self._is_trimming and not text
        return "", text
