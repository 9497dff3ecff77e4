"""Tables of the fields of JSON objects, made of samples: which fields there are, and of what form, is read from the
samples; what they mean is given beside them. A field without a meaning, or a meaning without a field, is an error.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FORMS = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
_KINDS = ("object", "type")
"""The last parts of fields whose values are few: they are written as they are."""


@dataclass(frozen=True)
class Of:
    """The meaning of a field whose objects are those of another shape."""

    shape: str
    """Its name."""
    meaning: str


@dataclass(frozen=True)
class Data:
    """The meaning of a field with objects whose names are data, or described elsewhere."""

    meaning: str


@dataclass(frozen=True)
class As:
    """The meaning of a field whose form no sample shows."""

    form: str
    meaning: str


Meaning = str | Of | Data | As


@dataclass(frozen=True)
class Shape:
    """An object of answers: the heading of its section, what it is, and what its fields mean.

    A field is named by its path: `choices[].index` is one of each object in the array `choices`.
    """

    name: str
    about: str
    meanings: Mapping[str, Meaning]


@dataclass
class Field:
    """What the samples show of a field."""

    values: list[Any] = field(default_factory=list)
    is_optional: bool = False
    is_described: bool = False
    """Whether its values are described elsewhere."""

    def form(self, path: str, meaning: Meaning) -> str:
        """Its form in words."""
        words = dict.fromkeys(self._word(value, path, meaning) for value in self.values)
        if isinstance(meaning, As):
            words = {meaning.form: None}
        shown = [word for word in words if not any(other.startswith(f"{word} of ") for other in words)]
        text = " or ".join(sorted(shown, key=lambda word: word == "null"))
        return f"{text}; may be missing" if self.is_optional else text

    def _word(self, value: Any, path: str, meaning: Meaning) -> str:
        if value is None:
            return "null"
        if isinstance(meaning, Of):
            link = f"[{meaning.shape}](#{slug(meaning.shape)})"
            return f"array of {link}" if isinstance(value, list) else link
        if isinstance(value, str) and path.rsplit(".", maxsplit=1)[-1] in _KINDS and not self.is_described:
            return f"`{json.dumps(value)}`"
        inner = "array" if isinstance(value, list) else ""
        while isinstance(value, list) and value:
            value = value[0]
            inner = f"{inner} of {_FORMS[type(value)]}"
        return inner or _FORMS[type(value)]


def slug(name: str) -> str:
    """The anchor of a heading without punctuation."""
    return name.lower().replace(" ", "-")


def heading(shape: Shape) -> list[str]:
    """The heading of a shape's section, and what it is."""
    return [f"### {shape.name}", "", shape.about, ""]


def table(
    shape: Shape, samples: Sequence[Any], found: dict[str, list[Any]], *, has_types: bool = False
) -> Iterator[str]:
    """The table of a shape's fields.

    Args:
        shape: the shape.
        samples: its objects.
        found: gets the objects of other shapes, by the shape's name.
        has_types: the objects are of several types, which have different fields.

    Raises:
        ValueError: there is no sample, or fields and meanings do not fit together.
    """
    yield from ("| field | form | meaning |", "| --- | --- | --- |")
    for path, each in fields(shape, samples).items():
        meaning = shape.meanings[path]
        if isinstance(meaning, Of):
            found.setdefault(meaning.shape, []).extend(_objects(each.values))
        if has_types and "." not in path:
            each.is_optional, each.is_described = False, True
        each.is_described |= path.startswith("error.")
        text = meaning if isinstance(meaning, str) else meaning.meaning
        yield f"| `{path}` | {each.form(path, meaning)} | {text} |"
    yield ""


def fields(shape: Shape, samples: Sequence[Any]) -> dict[str, Field]:
    """The fields of a shape by their paths.

    Raises:
        ValueError: there is no sample, or fields and meanings do not fit together.
    """
    if not samples:
        raise ValueError(f"{shape.name}: there is no sample")
    found = dict(_walk("", list(samples), shape.meanings))
    if unknown := found.keys() ^ shape.meanings.keys():
        raise ValueError(f"{shape.name}: only in the samples, or only in the meanings: {', '.join(sorted(unknown))}")
    return found


def _walk(path: str, objects: list[Any], meanings: Mapping[str, Meaning]) -> Iterator[tuple[str, Field]]:
    for name in dict.fromkeys(name for each in objects for name in each):
        values = [each[name] for each in objects if name in each]
        inner = f"{path}.{name}" if path else name
        yield inner, Field(values, is_optional=len(values) < len(objects))
        if isinstance(meanings.get(inner), Of | Data):
            continue
        yield from _walk(inner, [value for value in values if isinstance(value, dict)], meanings)
        items = [item for value in values if isinstance(value, list) for item in value if isinstance(item, dict)]
        yield from _walk(f"{inner}[]", items, meanings)


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, dict))
