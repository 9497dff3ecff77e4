"""How many characters a value of a chat template will have, computed before it is made.

A list may have the same text many times and takes little memory; what is written of it does not. All sizes are upper
bounds, and nothing here makes a value.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from typing import Any

MAX_WIDTH = 1000
"""Most characters to which a text is padded."""
_SCALAR_CHARS = 32
_OBJECT_CHARS = 1000
_SHOWS = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*[ra]|![ra]")
_NAMED_PERCENT, _NAMED_BRACES = "%(", re.compile(r"\{[^{}:!]")
_SPACES = tuple(char for char in map(chr, range(0x3001)) if char.isspace())


def text_chars(value: Any) -> int:
    """What `str(value)` has."""
    return len(value) if isinstance(value, str) else shown_chars(value)


def shown_chars(value: Any) -> int:
    """What `repr(value)` has."""
    return _Written(_shown).chars(value)


def json_chars(value: Any, *, ensure_ascii: bool, indent: int | str | None, separators: Iterable[str] | None) -> int:
    """What a value has as JSON."""
    indent_chars = len(indent) if isinstance(indent, str) else max(0, indent or 0)
    written = _Written(_ascii_json if ensure_ascii else _json, sum(map(len, separators or ())), indent_chars)
    return written.chars(value)


class _Written:
    """The sizes of the parts of one value.

    Args:
        text_chars: what a text has, with its quotes and escapes.
        separator_chars: what separates two items, if not a comma and a space.
        indent_chars: what each level adds to each item.
    """

    def __init__(self, text_chars: Callable[[str], int], separator_chars: int = 0, indent_chars: int = 0) -> None:
        self._text_chars = text_chars
        self._item_chars = 4 + separator_chars
        self._indent_chars = indent_chars
        self._known: dict[tuple[int, int], int] = {}

    def chars(self, value: Any, depth: int = 1) -> int:
        """What the value has, at this depth of another one."""
        if isinstance(value, str):
            return self._text_chars(value)
        if isinstance(value, int):
            return _SCALAR_CHARS + value.bit_length() // 3
        if value is None or isinstance(value, float):
            return _SCALAR_CHARS
        if not isinstance(value, Mapping | Sequence | Set | ValuesView):
            return _OBJECT_CHARS
        # Lists in lists can have the same one more often than there is time to count.
        if (known := self._known.get((id(value), depth))) is None:
            known = self._known[id(value), depth] = self._of_items(value, depth)
        return known

    def _of_items(self, value: Any, depth: int) -> int:
        if isinstance(value, range):
            return _OBJECT_CHARS + len(value) * (_SCALAR_CHARS + self._item_chars)
        items = [*value, *value.values()] if isinstance(value, Mapping) else list(value)
        for_each = self._item_chars + depth * self._indent_chars
        return _SCALAR_CHARS + for_each * (len(items) + 1) + sum(self.chars(each, depth + 1) for each in items)


# To look at each character would take longer than to write the text: these are its longest escapes.


def _shown(text: str) -> int:
    return 2 + len(text) * (4 if text.isascii() else 10)


def _json(text: str) -> int:
    return 2 + len(text) * 6


def _ascii_json(text: str) -> int:
    return 2 + len(text) * (6 if text.isascii() else 12)


def replaced_chars(text: str, old: str, new: str, count: int = -1) -> int:
    """What a text has after `count` replacements, or after all."""
    times = text.count(old)
    return len(text) + len(new) * (min(times, count) if count >= 0 else times)


def parts(text: str, separator: str | None = None, most: int = -1) -> int:
    """How many texts a text is split into; without a separator at spaces or at ends of lines."""
    times = text.count(separator) if separator else sum(map(text.count, _SPACES))
    return 1 + (min(times, most) if most >= 0 else times)


def percent_chars(form: str, values: Sequence[Any]) -> int:
    """What `form % values` has, if no width is above `MAX_WIDTH`."""
    return _formatted_chars(form, form.count("%"), values, form.count(_NAMED_PERCENT))


def braces_chars(form: str, values: Sequence[Any]) -> int:
    """What `form.format(*values)` has, if no width is above `MAX_WIDTH`."""
    return _formatted_chars(form, form.count("{"), values, len(_NAMED_BRACES.findall(form)))


def _formatted_chars(form: str, fields: int, values: Sequence[Any], named: int) -> int:
    measure = shown_chars if _SHOWS.search(form) else text_chars
    sizes = [measure(part) for value in values for part in _parts_of(value)]
    return len(form) + fields * MAX_WIDTH + sum(sizes) + named * max(sizes, default=0)


def _parts_of(value: Any) -> list[Any]:
    """A mapping whose values a form takes by their names counts as these."""
    return [value, *value.values()] if isinstance(value, Mapping) else [value]
