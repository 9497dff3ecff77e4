"""What one rendering of a chat template may take: time of its thread, and characters that it makes.

A template comes with its model. A mistake in it must cost the chat with this model alone, not the router that serves
others too. Work is counted where a template repeats it, and values before they are made.
"""

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

MAX_CHARS = 32 << 20
"""Largest value that a template makes of others, in characters."""
MADE_CHARS = 4 * MAX_CHARS
"""What all values together may have that a rendering makes, besides those for messages."""
MADE_CHARS_PER_MESSAGE = 512 << 10
ITEM_CHARS = 16
"""What an item of a list counts for: it takes as much memory, or more."""
CPU_S = 1.0
"""What a rendering may take of its thread's time, besides that for messages. A busy machine does not count."""
CPU_S_PER_MESSAGE = 0.02
_SLOW_S = 0.05
"""An ordinary template takes 0.01 to 0.1 ms for a message."""
_SLOW_S_PER_MESSAGE = 0.005
STEPS_BETWEEN_LOOKS = 64


class RenderLimitError(Exception):
    """A rendering takes too long, or one of its values becomes too large."""


class RenderBudget:
    """The work of one rendering, which one thread does. Its time is looked at after each few steps.

    Args:
        messages: how many the conversation has.
    """

    __slots__ = ("_began_s", "_made_chars", "_messages", "is_slow", "left")

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self._began_s = 0.0
        self._made_chars = 0
        self.left = STEPS_BETWEEN_LOOKS
        """Steps until the next look."""
        self.is_slow = False
        """Whether it has taken far longer than such renderings do."""

    def look(self) -> None:
        """Compare the time that was taken with the limit."""
        self.left, now_s = STEPS_BETWEEN_LOOKS, time.thread_time()
        self._began_s = self._began_s or now_s  # most renderings end before the first look and need no clock
        taken_s, limit_s = now_s - self._began_s, CPU_S + CPU_S_PER_MESSAGE * self._messages
        if taken_s > _SLOW_S + _SLOW_S_PER_MESSAGE * self._messages:
            self.is_slow = True
        if taken_s > limit_s:
            raise RenderLimitError(f"it takes more than {limit_s:.3g} s")

    def take(self, steps: int) -> None:
        """Count steps."""
        self.left -= steps
        if self.left <= 0:
            self.look()

    def make(self, chars: int) -> None:
        """Count a value that is about to be made, by at least its characters.

        Raises:
            RenderLimitError: it is too large, or all together are.
        """
        self._made_chars += chars
        if chars > MAX_CHARS:
            raise RenderLimitError(f"it makes a value of more than {MAX_CHARS} characters")
        limit = MADE_CHARS + MADE_CHARS_PER_MESSAGE * self._messages
        if self._made_chars > limit:
            raise RenderLimitError(f"it makes values of more than {limit} characters")

    def rounds(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop, each of which is a step."""
        for value in values:
            self.take(1)
            yield value


running: ContextVar[RenderBudget] = ContextVar("running")
"""The budget of the rendering that this thread does. There is none while a template is compiled."""
