"""What schemas of all families are made of: strings, bounds, lists, maps, unions, and the notes that authors leave."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = dict[str, Any]
Make = Callable[[random.Random], Schema]

_SUBJECTS = (
    "account",
    "branch",
    "build",
    "carrier",
    "cluster",
    "customer",
    "invoice",
    "job",
    "owner",
    "project",
    "region",
)
_SENTENCES = (
    "The {} that this belongs to.",
    "Name of the {}, as shown to people; it need not be unique.",
    "Which {} to use. One of the values below.",
    "Optional. Without it that of the {} is taken.",
    'Deprecated: set "{}" instead.',
    "Time in UTC (ISO 8601) at which the {} was last changed.\n\nNever later than the one of its parent.",
    "Identifies the {} \u2013 see the manual, \u00a7\u202f4.2.",
    "",
)
_NOTES: Sequence[Schema] = (
    {"x-order": 3},
    {"propertyOrder": 20},
    {"$comment": "kept for old clients"},
    {"readOnly": True},
    {"deprecated": True},
    {"example": "main"},
    {"contentMediaType": "text/plain"},
    {"x-enum-descriptions": {"main": "the first one"}},
)
_SLUGS = ("^[a-z][a-z0-9-]{1,30}$", "^[A-Za-z_][A-Za-z0-9_]*$", "^[^\\s/]+$", "^\\S+$", "^[a-z0-9]+(?:-[a-z0-9]+)*$")
_KEYS = ("^[a-z][a-z_]{0,12}$", "^x-[a-z-]+$", "^[A-Z_]{1,16}$", "^.*$", "^[0-9]{3}$")
_IDS = ("^[0-9a-f]{8}$", "^[A-Z]{2,4}-[0-9]{1,6}$", "^(ord|inv|cus)_[A-Za-z0-9]{10}$", "^\\d+$")
_UNKNOWN_FORMATS = ("uri-reference", "password", "byte", "regex", "color", "json-pointer")


# What says nothing about values.


def noted(draw: random.Random, name: str, schema: Schema) -> Schema:
    """The schema with some of what authors write beside it: titles, descriptions, defaults, examples, extensions."""
    made = dict(schema)
    if draw.random() < 0.6:
        made["description"] = draw.choice(_SENTENCES).format(draw.choice(_SUBJECTS))
    if draw.random() < 0.2:
        made["title"] = name.replace("_", " ").capitalize()
    if draw.random() < 0.15 and "$ref" not in made:
        made["default"] = _value_of(made)
    if draw.random() < 0.1:
        made[draw.choice(["examples", "examples", "enumNames"])] = [_value_of(made)]
    return made | draw.choice(_NOTES) if draw.random() < 0.1 else made


def _value_of(schema: Schema) -> Any:
    """A default, as good as authors' defaults are: it need not conform."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    kinds: Mapping[str, Any] = {
        "string": "main",
        "integer": schema.get("minimum", 1),
        "number": 0.5,
        "boolean": False,
        "array": [],
        "object": {},
    }
    return kinds.get(kind, None) if isinstance(kind, str) else None


# Values.


def label(draw: random.Random) -> Schema:
    """A text that people or programs read."""
    least = draw.randint(0, 2)
    return draw.choice(
        [
            {"type": "string"},
            {"type": "string", "maxLength": draw.choice([16, 32, 64, 255])},
            {"type": "string", "minLength": least, "maxLength": least + draw.choice([8, 20, 40])},
            {"type": "string", "pattern": draw.choice(_SLUGS)},
            {"type": "string", "pattern": draw.choice(_SLUGS), "maxLength": 24},
        ]
    )


def identifier(draw: random.Random) -> Schema:
    """A key of something."""
    return draw.choice(
        [
            {"type": "string", "format": "uuid"},
            {"type": "string", "pattern": draw.choice(_IDS)},
            {"type": "integer", "minimum": 1},
            {"type": "integer", "format": "int64", "minimum": 0, "maximum": 9_007_199_254_740_991},
        ]
    )


def moment(draw: random.Random) -> Schema:
    """A time."""
    return draw.choice(
        [
            {"type": "string", "format": "date-time"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "time"},
            {"type": "string", "format": "duration"},
            {"type": "integer", "minimum": 1_500_000_000, "exclusiveMaximum": 4_102_444_800},
            {"type": "string", "pattern": "^[0-9]{4}-(0[1-9]|1[0-2])$"},
        ]
    )


def address(draw: random.Random) -> Schema:
    """A place on a network; sometimes in a format that is not compiled."""
    if draw.random() < 0.06:
        return {"type": "string", "format": draw.choice(_UNKNOWN_FORMATS)}
    return draw.choice(
        [
            {"type": "string", "format": "uri"},
            {"type": "string", "format": "email"},
            {"type": "string", "format": "hostname"},
            {"type": "string", "format": draw.choice(["ipv4", "ipv6"])},
            {"type": "string", "pattern": "^(https?|git)://[a-z0-9.-]+(:[0-9]{2,5})?(/[^\\s]*)?$", "maxLength": 80},
        ]
    )


def count(draw: random.Random) -> Schema:
    """A whole number."""
    least = draw.choice([0, 1, -40, 1024])
    return draw.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": least, "maximum": least + draw.choice([1, 9, 100, 64_511])},
            {"type": "integer", "exclusiveMinimum": least, "maximum": least + 3600},
            {"type": "integer", "minimum": 0, "multipleOf": draw.choice([5, 8, 100])},
            {"type": "integer", "format": "int32", "maximum": 2**31 - 1},
        ]
    )


def amount(draw: random.Random) -> Schema:
    """A number with a fraction."""
    return draw.choice(
        [
            {"type": "number"},
            {"type": "number", "minimum": 0, "maximum": draw.choice([1, 100, 2.5])},
            {"type": "number", "minimum": -180.0, "maximum": 180.0},
            {"type": "number", "exclusiveMinimum": 0, "format": "double"},
            {"type": "number", "minimum": 0, "maximum": 999.99, "multipleOf": 0.01},
        ]
    )


def flag(draw: random.Random) -> Schema:
    """Yes or no."""
    return draw.choice([{"type": "boolean"}, {"type": "boolean", "default": draw.random() < 0.5}])


def one_of(draw: random.Random, *values: Any) -> Schema:
    """One of some values: with the type, without it, with null, or a constant."""
    kept = draw.sample(values, draw.randint(1, len(values)))
    kind = {str: "string", int: "integer", bool: "boolean"}.get(type(kept[0]), "string")
    is_mixed = len({type(value) for value in kept}) > 1
    match draw.randrange(5):
        case 0:
            return {"enum": kept}
        case 1:
            return {"enum": [*kept, None]} if is_mixed else {"type": [kind, "null"], "enum": [*kept, None]}
        case 2 if len(kept) == 1:
            return {"const": kept[0]}
    return {"enum": kept} if is_mixed else {"type": kind, "enum": kept}


# Containers.


def listed(draw: random.Random, items: Schema, most: int = 4) -> Schema:
    """A list. That its items differ, which many schemas say, is not compiled."""
    made: Schema = {"type": "array", "items": items}
    if draw.random() < 0.4:
        made["minItems"] = draw.randint(0, 1)
    if draw.random() < 0.7:
        made["maxItems"] = draw.randint(1, most)
    if draw.random() < 0.05:
        made["uniqueItems"] = True
    return made


def record(draw: random.Random, properties: Mapping[str, Any], needs: Sequence[str] = ()) -> Schema:
    """An object with most of these properties, and always with those that it `needs`."""
    names = [name for name in properties if name in needs or draw.random() < 0.8]
    made: Schema = {"type": "object", "properties": {name: noted(draw, name, properties[name]) for name in names}}
    if required := [name for name in names if name in needs or draw.random() < 0.4]:
        made["required"] = required
    if draw.random() < 0.6:
        made["additionalProperties"] = False
    elif draw.random() < 0.2:
        made["additionalProperties"] = draw.choice([True, {"type": "string", "maxLength": 12}])
    return made


def mapping(draw: random.Random, values: Schema) -> Schema:
    """An object whose names are free, or have a pattern."""
    if draw.random() < 0.5:
        made: Schema = {"type": "object", "additionalProperties": values}
    else:
        made = {"type": "object", "patternProperties": {draw.choice(_KEYS): values}, "additionalProperties": False}
    if draw.random() < 0.4:
        made["maxProperties"] = draw.randint(1, 4)
    return made


def nullable(draw: random.Random, schema: Schema) -> Schema:
    """The schema or null, in one of the ways in which drafts and OpenAPI write it."""
    match draw.randrange(4):
        case 0 if isinstance(schema.get("type"), str) and "enum" not in schema:
            return schema | {"type": [schema["type"], "null"]}
        case 1:
            return {"anyOf": [schema, {"type": "null"}]}
        case 2:
            return {"oneOf": [{"type": "null"}, schema]}
    return schema | {"nullable": True}


def either(draw: random.Random, *schemas: Schema) -> Schema:
    """One of several forms; `oneOf` is for those that no value has two of."""
    return {draw.choice(["anyOf", "oneOf"]): draw.sample(schemas, len(schemas))}


def any_of(draw: random.Random, *schemas: Schema) -> Schema:
    """One of several forms that may overlap; a few authors write `oneOf` for it, which is not compiled."""
    return {"oneOf" if draw.random() < 0.05 else "anyOf": list(schemas)}


def restricted(draw: random.Random, schema: Schema, share: float = 0.2) -> Schema:
    """Sometimes with a rule about an object as a whole that is not compiled."""
    names = list(schema["properties"])
    if draw.random() >= share or len(names) < 2:
        return schema
    first, second = draw.sample(names, 2)
    rules: Sequence[Schema] = (
        {"not": {"required": [first, second]}},
        {"dependencies": {first: [second]}},
        {"if": {"required": [first]}, "then": {"required": [second]}},
        {"propertyNames": {"pattern": "^[a-z_]+$"}},
        {"oneOf": [{"required": [first]}, {"required": [second]}]},
        {"minProperties": 1, "required": []},
        {"unevaluatedProperties": False},
        {"properties": schema["properties"] | {"secret": {"type": "string", "pattern": "^(?=.*[0-9]).{8,20}$"}}},
        {"properties": schema["properties"] | {"more": {"$ref": "https://schemas.example/common.json#/more"}}},
        {"properties": schema["properties"] | {"tags": {"type": "array", "contains": {"const": "main"}}}},
    )
    return schema | draw.choice(rules)


def headed(draw: random.Random, schema: Schema, title: str) -> Schema:
    """With what is at the top of a file: the draft, an address, a title. Drafts before 2019 are the most."""
    draft = draw.choice(["draft-07", "draft-07", "draft-06", ""])
    address_of = f"https://schemas.example/{title.lower().replace(' ', '-')}.json"
    heads: list[Schema] = [
        {},
        {"$schema": f"http://json-schema.org/{draft}/schema#"} if draft else {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": address_of},
        {"$schema": "https://json-schema.org/draft/2019-09/schema"},
    ]
    return draw.choice(heads) | {"title": title} | schema
