"""Finds tool calls that are JSON objects: between markers, in a list, or as the whole answer."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep_router.output.call_object import CallObject
from lockstep_router.output.json_scan import SPACES, JsonScan
from lockstep_router.output.markers import find_first, held_back
from lockstep_router.output.parts import CallArguments, CallName, Part, content

MAX_HELD_CHARS = 16 << 10
"""A text that may be a call, but has no name after this many characters, is content. Reading it again takes
milliseconds at most.
"""


@dataclass(frozen=True)
class Calls:
    """What the parser of one answer needs to know."""

    is_known: Callable[[str], bool]
    """Whether there is a function with this name: a call of any other is content."""
    new_id: Callable[[int], str]
    """The id of the call with this number: always the same for a stream."""
    most: int | None = None
    """The answer ends after so many calls; None: no limit."""


@dataclass(frozen=True)
class JsonSyntax:
    """Where calls stand in the text."""

    opening: str = ""
    """Precedes a call or a list of calls."""
    closing: str = ""
    """Follows a call or a list of calls; empty: nothing does."""
    is_bare: bool = False
    """A call or a list of calls may also be the beginning of the answer, without a marker."""
    separators: str = ""
    """Each of these characters may stand between two calls that are in no list."""
    has_names_outside: bool = False
    """`name{…}` or `name[ARGS]{…}` may stand in place of an object with a name and arguments."""
    inner: tuple[str, ...] = ()
    """Further markers, between a name and its arguments."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers; models have special tokens for some of them."""
        return frozenset(filter(None, (self.opening, self.closing, *self.inner)))


class JsonCalls:
    """Splits text into content and calls.

    A call is given as soon as its name is known, so what comes before its name decides whether it is one: otherwise the
    text stays content, with its marker. After the name, arguments are given as they are written, and text that belongs
    to no argument is left out up to the closing marker: without one it is content. The closing marker of a call is
    never content, whatever precedes it. Spaces around calls are left out.
    """

    def __init__(self, syntax: JsonSyntax, calls: Calls) -> None:
        self._syntax = syntax
        self._calls = calls
        self._markers = tuple(filter(None, (syntax.opening,)))
        self._buffer = ""
        self._prefix = ""
        """Spaces and the marker before the text that may be a call."""
        self._held = ""
        """The text since then: content if it is no call."""
        self._object = CallObject(calls.is_known)
        self._scan = JsonScan()
        self._is_in_list = False
        self._is_inside = False
        """Behind the marker that a call had, and before the closing one."""
        self._is_after_call = False
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._begin if syntax.is_bare else self._text
        self.count = 0
        """Calls so far."""
        self.has_ended = False
        """The answer has as many calls as it may have."""

    @property
    def may_end(self) -> bool:
        """Whether there is a limit for the number of calls."""
        return self._calls.most is not None

    def feed(self, text: str) -> list[Part]:
        """Take the next piece; returns the parts that are final now."""
        self._buffer += text
        while not self.has_ended and self._state():
            pass
        return self._take_parts()

    def finish(self) -> list[Part]:
        """The parts of the text that still waits, at the end."""
        if not self.has_ended and self._is_undecided and not self._is_cut_off:
            waiting = self._prefix + self._held + self._buffer
            if self._state == self._skip or (self._state == self._text and self._is_inside):
                # The beginning of the closing marker is no content.
                waiting = waiting[: len(waiting) - held_back(waiting, self._ends)]
            self._parts += content(waiting.lstrip(SPACES) if self._is_after_call else waiting)
        self._buffer = self._held = self._prefix = ""
        return self._take_parts()

    @property
    def _is_undecided(self) -> bool:
        """Whether the text that waits is content if nothing follows."""
        if self._state == self._call:
            return self._object.name is None
        return self._state in (self._begin, self._text, self._enter, self._name, self._skip)

    @property
    def _is_cut_off(self) -> bool:
        """Whether the text that waits is what precedes the name of a further call: its beginning, its marker or a
        separator. It is no content, and no call yet.
        """
        if self.count == 0:
            return False
        if self._state == self._text:
            return self._is_after_call
        if self._state == self._skip:
            return False
        # A name has no spaces: text with them, behind a marker, is meant for somebody.
        return self._state != self._name or not any(space in self._buffer.strip(SPACES) for space in SPACES)

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # States. Each one uses what it can of the buffer, and says whether there may be more to do.

    def _begin(self) -> bool:
        """The answer's beginning, where a call may stand without a marker."""
        text = self._buffer.lstrip(SPACES)
        if not text:
            return False
        if text[0] in "{[":
            self._start_holding(len(self._buffer) - len(text))
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        """Content, up to a marker."""
        if self._is_after_call:
            self._buffer = self._buffer.lstrip(SPACES)
        markers = self._ends if self._is_inside else self._markers
        found = find_first(self._buffer, markers)
        end = len(self._buffer) - held_back(self._buffer, markers) if found is None else found[0]
        text = self._buffer[:end].rstrip(SPACES)
        self._give(text)
        self._buffer = self._buffer[len(text) :]
        if found is None:
            return False
        marker_end = found[0] - len(text) + len(found[1])
        self._is_inside = False
        if found[1] == self._syntax.closing:
            self._buffer = self._buffer[marker_end:]
        else:
            self._start_holding(marker_end)
        return True

    def _enter(self) -> bool:
        """Before a call."""
        text = self._buffer.lstrip(SPACES)
        self._hold(len(self._buffer) - len(text))
        if not text:
            return self._check_held()
        if text[0] == "[" and not self._is_in_list:
            self._is_in_list = True
            self._hold(1)
        elif text[0] == "{":
            self._object = CallObject(self._calls.is_known)
            self._state = self._call
        elif self._syntax.has_names_outside and not self._is_in_list:
            self._state = self._name
        else:
            self._fall_back()
        return True

    def _call(self) -> bool:
        """In an object with a name and arguments."""
        call = self._object
        if call.name is None:
            taken = call.feed(self._buffer[: max(0, MAX_HELD_CHARS - len(self._held))])
            if call.name is None:
                self._hold(taken)
                if not call.is_invalid:
                    return self._check_held()
                self._fall_back()
                return True
            self._open(call.name)
        else:
            taken = call.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        self._give_arguments(call.take_arguments())
        return self._go_on(is_complete=call.is_complete, is_invalid=call.is_invalid) or bool(self._buffer)

    def _name(self) -> bool:
        """A name that stands before its arguments."""
        at = self._buffer.find("{")
        if at < 0:
            return self._check_held(len(self._buffer))
        name = self._buffer[:at].partition("[")[0].strip(SPACES)
        if len(self._held) + at >= MAX_HELD_CHARS or not self._calls.is_known(name):
            self._fall_back()
            return True
        self._buffer = self._buffer[at:]
        self._open(name)
        self._scan = JsonScan()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        """In arguments that stand behind their name."""
        taken = self._scan.feed(self._buffer)
        self._give_arguments(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        return self._go_on(is_complete=self._scan.is_complete, is_invalid=self._scan.is_invalid)

    def _after(self) -> bool:
        """Behind a complete call."""
        self._buffer = self._buffer.lstrip(SPACES)
        if not self._buffer:
            return False
        char, syntax = self._buffer[0], self._syntax
        if self._is_in_list and char == "]":
            self._is_in_list = False
            self._buffer = self._buffer[1:]
        elif char in syntax.separators or (self._is_in_list and char == ","):
            self._prefix, self._held = char, ""
            self._buffer = self._buffer[1:]
            self._state = self._enter
        elif char == "{" and (syntax.closing or (syntax.is_bare and not self._is_in_list)):
            self._prefix = self._held = ""
            self._state = self._enter
        else:
            self._state = self._skip if syntax.closing else self._text
        return True

    def _skip(self) -> bool:
        """What follows a call up to its closing marker; the next call may begin without one. It waits, as it is content
        if there is no marker, or none for too long.
        """
        found = find_first(self._buffer, self._ends)
        length = len(self._buffer) - held_back(self._buffer, self._ends) if found is None else found[0]
        if length > MAX_HELD_CHARS:
            self._state = self._text
        elif found is None:
            return False
        else:
            at, marker = found
            self._buffer = self._buffer[at + len(marker) if marker == self._syntax.closing else at :]
            self._is_inside = False
            self._state = self._text
        self._is_in_list = False
        return True

    @property
    def _ends(self) -> tuple[str, ...]:
        """The markers that end what follows a call."""
        return (self._syntax.closing, *self._markers)

    # What states have in common.

    def _give(self, text: str) -> None:
        if text:
            self._parts += content(text)
            self._is_after_call = False

    def _give_arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self.count - 1, text))

    def _start_holding(self, chars: int) -> None:
        """Hold what may be a call; `chars` of the buffer precede it."""
        self._prefix, self._held = self._buffer[:chars], ""
        self._buffer = self._buffer[chars:]
        self._is_in_list = False
        self._state = self._enter

    def _hold(self, chars: int) -> None:
        self._held += self._buffer[:chars]
        self._buffer = self._buffer[chars:]

    def _check_held(self, more: int = 0) -> bool:
        """Give up on a call that has no name for too long; True if that is so."""
        is_too_long = len(self._held) + more >= MAX_HELD_CHARS
        if is_too_long:
            self._fall_back()
        return is_too_long

    def _fall_back(self) -> None:
        """What was held is no call. There may be a marker of one in it."""
        self._give(self._prefix.lstrip(SPACES) if self._is_after_call else self._prefix)
        self._buffer = self._held + self._buffer
        self._prefix = self._held = ""
        self._is_in_list = False
        self._state = self._text

    def _open(self, name: str) -> None:
        self._prefix = self._held = ""
        self._is_inside = bool(self._syntax.closing)
        self._is_after_call = True
        self._parts.append(CallName(self.count, self._calls.new_id(self.count), name))
        self.count += 1

    def _go_on(self, *, is_complete: bool, is_invalid: bool) -> bool:
        """The next state after a part of a call; returns whether there is one."""
        if is_complete or is_invalid:  # a call that the model has broken off is a call, too
            self.has_ended = self.count == self._calls.most
        if is_complete:
            self._state = self._after
        elif is_invalid:
            self._is_in_list = False
            self._state = self._skip if self._syntax.closing else self._text
        return is_complete or is_invalid
