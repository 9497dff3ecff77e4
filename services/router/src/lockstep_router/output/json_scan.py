"""Finds the end of a JSON value that arrives in pieces. It looks at strings and brackets only and builds no objects."""

import re

_STRUCTURE = re.compile(r'["{}\[\]]|[^\s,:0-9A-Za-z.+\-]')
"""Outside of strings: what opens or closes something, or cannot be JSON."""
_IN_STRING = re.compile(r'["\\]')
_NOT_LITERAL = re.compile(r"[^0-9A-Za-z.+\-]")
SPACES = " \t\r\n"


class JsonScan:
    """Takes the text of one value from its first character on."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_invalid = False
        """There was a character that cannot stand there."""
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_literal = False
        self._has_begun = False

    def feed(self, text: str) -> int:
        """Take the next piece; returns how many of its characters belong to the value."""
        at = 0
        if not self._has_begun and text:
            self._has_begun = True
            at = self._begin(text[0])
        while at < len(text) and not self.is_complete and not self.is_invalid:
            if self._is_string:
                at = self._scan_string(text, at)
            elif self._is_literal:
                match = _NOT_LITERAL.search(text, at)
                self.is_complete = match is not None
                at = len(text) if match is None else match.start()
            else:
                at = self._scan_structure(text, at)
        return at

    def _begin(self, char: str) -> int:
        if char in "{[":
            self._depth = 1
        elif char == '"':
            self._is_string = True
        elif _NOT_LITERAL.match(char):
            self.is_invalid = True
            return 0
        else:
            self._is_literal = True
        return 1

    def _scan_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        match = _IN_STRING.search(text, at)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._is_escaped = True
        else:
            self._is_string = False
            self.is_complete = not self._depth
        return match.end()

    def _scan_structure(self, text: str, at: int) -> int:
        match = _STRUCTURE.search(text, at)
        if match is None:
            return len(text)
        if match[0] == '"':
            self._is_string = True
        elif match[0] in "{[":
            self._depth += 1
        elif match[0] in "}]":
            self._depth -= 1
            self.is_complete = not self._depth
        else:
            self.is_invalid = True
            return match.start()
        return match.end()
