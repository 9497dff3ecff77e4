"""Reads a tool call that is written as one JSON object, `{"name": …, "arguments": {…}}`, while it arrives."""

import json
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from lockstep_router.output.json_scan import SPACES, JsonScan

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half of a pair, as in the JSON string `"\\ud83d"`: no text in UTF-8 can have it."""


class _Expected(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallObject:
    """Takes the object's text in pieces and gives its name and its arguments as soon as they are known.

    The fields may come in any order, and further ones are skipped. Arguments are given as they are written; if they are
    a string of JSON, as some models write them, what the string says is given when it is complete.

    Args:
        is_known: whether there is a function with this name. Other objects are no calls.
    """

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        self._is_known = is_known
        self._expected = _Expected.OBJECT
        self._scan: JsonScan | None = None
        self._read: list[str] = []
        """The text of the key or value that is being read, if it has to be complete to be used."""
        self._key = ""
        self._is_raw = False
        """The value that is being read is given as it is written."""
        self._has_arguments = False
        self._arguments: list[str] = []
        self.name: str | None = None
        self.is_complete = False
        self.is_invalid = False

    def feed(self, text: str) -> int:
        """Take the next piece; returns how many of its characters belong to the object."""
        at = 0
        while at < len(text) and not self.is_complete and not self.is_invalid:
            if self._scan is not None:
                at += self._continue(self._scan, text[at:])
            elif text[at] in SPACES:
                at += 1
            else:
                at += self._step(text[at])
        return at

    def take_arguments(self) -> str:
        """The arguments' text since the last call; empty before the name is known."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _step(self, char: str) -> int:
        """Take one character between keys and values."""
        match self._expected, char:
            case _Expected.OBJECT, "{":
                self._expected = _Expected.KEY
            case (_Expected.KEY, '"') | (_Expected.VALUE, _):
                self._begin(char)
                return 0
            case _Expected.COLON, ":":
                self._expected = _Expected.VALUE
            case _Expected.COMMA, ",":
                self._expected = _Expected.KEY
            case _Expected.COMMA, "}":
                self._end()
            case _:
                self.is_invalid = True
                return 0
        return 1

    def _begin(self, char: str) -> None:
        self._scan, self._read = JsonScan(), []
        is_value = self._expected is _Expected.VALUE
        is_arguments = is_value and self._key in ARGUMENT_KEYS
        self._is_raw = is_arguments and char == "{" and not self._has_arguments
        if is_value and self._key == "name":
            self.is_invalid = char != '"'
        elif is_arguments and not self._is_raw:
            self.is_invalid = char not in '"n'

    def _continue(self, scan: JsonScan, text: str) -> int:
        taken = scan.feed(text)
        if self._is_raw:
            self._has_arguments = True
            self._arguments.append(text[:taken])
        elif self._expected is _Expected.KEY or self._key == "name" or self._key in ARGUMENT_KEYS:
            self._read.append(text[:taken])
        if scan.is_invalid:
            self.is_invalid = True
        elif scan.is_complete:
            self._scan = None
            self._take("".join(self._read))
        return taken

    def _take(self, text: str) -> None:
        """Use a complete key or value."""
        if self._expected is _Expected.KEY:
            key = _parsed(text)
            self._key = key if isinstance(key, str) else ""
            self._expected = _Expected.COLON
            return
        self._expected = _Expected.COMMA
        if self._key == "name" and self.name is None:
            name = _parsed(text)
            if isinstance(name, str) and self._is_known(name):
                self.name = name
            else:
                self.is_invalid = True
        elif self._key in ARGUMENT_KEYS and not self._is_raw and not self._has_arguments:
            self._take_arguments(_parsed(text))

    def _take_arguments(self, value: Any) -> None:
        if isinstance(value, str):
            self._has_arguments = True
            self._arguments.append(_LONE_SURROGATE.sub("\ufffd", value))
        elif value is not None:
            self.is_invalid = True

    def _end(self) -> None:
        if self.name is None:
            self.is_invalid = True
            return
        if not self._has_arguments:
            self._arguments.append("{}")
        self.is_complete = True


def _parsed(text: str) -> Any:
    """The value of a JSON text; a number for one that is not valid."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return 0
