"""A position in an answer: what a client has of each choice. It is the end of an event's id.

As text it has one part for each choice, comma-separated: `-`, nothing; `12`, the events of twelve tokens, and what
precedes the first one; `12f`, the same and the finish. A last part `u` means that it has the usage too. Where a token
may give several events, as in the Responses API, `s30` at the end is the number of the last event that the client has:
it has all of what the tokens before gave, and of what follows the events up to this one.
"""

import re
from dataclasses import dataclass, replace
from typing import Self

from lockstep_common.errors import LockstepError, invalid

from lockstep_router.generation.choices import Delta

_NOTHING = -1
_CHOICE = re.compile(r"-|([0-9]{1,10})(f?)")
_NUMBER = re.compile(r"(.*)s([0-9]{1,10})", re.DOTALL)
_USAGE = "u"
_MAX_CHARS = 64 << 10


@dataclass(frozen=True)
class Position:
    """What a client has of an answer."""

    tokens: tuple[int, ...]
    """For each choice the tokens whose events it has; -1: nothing, not even what precedes the first token."""
    finished: tuple[bool, ...]
    """For each choice whether it has the finish."""
    has_usage: bool = False
    number: int | None = None
    """Of the last event that it has, where events are numbered; None: it has those of its tokens."""

    @classmethod
    def start(cls, choices: int) -> Self:
        """The position of a client that has nothing."""
        return cls((_NOTHING,) * choices, (False,) * choices)

    @classmethod
    def parse(cls, text: str, choices: int, field: str) -> Self:
        """The position that a client names.

        Raises:
            LockstepError: INVALID_REQUEST, naming the field; it is no position in an answer with so many choices.
        """
        numbered = _NUMBER.fullmatch(text)
        number = None if numbered is None else int(numbered[2])
        parts = (text if numbered is None else numbered[1]).split(",", choices + 1)
        has_usage = len(parts) == choices + 1 and parts[-1] == _USAGE
        parts = parts[:-1] if has_usage else parts
        found = [_CHOICE.fullmatch(part) for part in parts]
        if len(parts) != choices or not all(found):
            raise no_position(field)
        tokens = tuple(_NOTHING if each is None or each[1] is None else int(each[1]) for each in found)
        position = cls(tokens, tuple(each is not None and bool(each[2]) for each in found), has_usage, number)
        if has_usage and not all(position.finished):
            raise no_position(field)
        return position

    def __str__(self) -> str:
        parts = [
            "-" if tokens == _NOTHING else f"{tokens}f" if finished else str(tokens)
            for tokens, finished in zip(self.tokens, self.finished, strict=True)
        ]
        text = ",".join([*parts, _USAGE] if self.has_usage else parts)
        return text if self.number is None else f"{text}s{self.number}"

    @property
    def unopened(self) -> list[int]:
        """The choices of which the client has nothing."""
        return [index for index, tokens in enumerate(self.tokens) if tokens == _NOTHING]

    def opened(self, index: int) -> "Position":
        """The position after what precedes a choice's first token."""
        return self._with(index, 0, is_finished=False)

    def after(self, delta: Delta) -> "Position":
        """The position after a delta."""
        return self._with(delta.index, delta.tokens, is_finished=delta.finish_reason is not None)

    def with_usage(self) -> "Position":
        """The position after the usage."""
        return replace(self, has_usage=True, number=None)

    def numbered(self, number: int) -> "Position":
        """The position after an event with this number, which is not the last one of its token."""
        return replace(self, number=number)

    def _with(self, index: int, tokens: int, *, is_finished: bool) -> "Position":
        return Position(
            (*self.tokens[:index], tokens, *self.tokens[index + 1 :]),
            (*self.finished[:index], is_finished, *self.finished[index + 1 :]),
            self.has_usage,
        )


def no_position(field: str) -> LockstepError:
    """The error for what is no position in the answer, or one that it has not reached."""
    return invalid(field, "is no event of this stream")


@dataclass(frozen=True)
class After:
    """The event that a client names as the last one it has."""

    request_id: str
    position: str
    field: str
    """The name of the header or field that it came in, for errors."""

    @classmethod
    def parse(cls, event_id: str, field: str) -> Self:
        """Take an event's id apart.

        Raises:
            LockstepError: INVALID_REQUEST, naming the field: it is no event's id.
        """
        request_id, separator, position = event_id.rpartition(":")
        if not separator or len(event_id) > _MAX_CHARS:
            raise no_position(field)
        return cls(request_id, position, field)


def event_id(request_id: str, position: Position) -> str:
    """The id of the event after which a client has reached a position."""
    return f"{request_id}:{position}"
