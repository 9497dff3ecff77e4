"""JSON schemas of many kinds, from a seed, and a model that knows nothing: it draws from what a grammar allows."""

import random

import numpy as np

_PATTERNS = [
    "^[a-z]{2,6}$",
    "^[A-Z][a-z]+$",
    "^\\d{3}-\\d{4}$",
    "^(red|green|blue)$",
    "^[^0-9]{1,4}$",
    "a.b",
    "^$|^x+$",
]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration"]
_UNKNOWN = [{"not": {"type": "null"}}, {"uniqueItems": True}, {"if": {}, "then": {}}, {"format": "zip-code"}]
"""Parts that llguidance does not compile, or only where they say nothing."""
_CLOSERS = 0.5
"""How often the model prefers to end a string, a number, an array, an object or its answer, if it may."""


def schema(rng, depth=3):
    """A schema of at most `depth` nested levels; with `$defs` sometimes, and sometimes with a part that is refused."""
    root = _object(rng, depth) if rng.random() < 0.7 else _any(rng, depth)
    if rng.random() < 0.25:
        root = {
            "type": "object",
            "properties": {
                "first": {"$ref": "#/$defs/part"},
                "rest": {"type": "array", "items": {"$ref": "#/$defs/part"}},
            },
            "required": ["first"],
            "$defs": {"part": _any(rng, depth - 1)},
        }
        if rng.random() < 0.5:
            root["$defs"]["part"] = {
                "anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#/$defs/part"}}}]
            }
    if rng.random() < 0.06:
        root = {**root, **rng.choice(_UNKNOWN)}
    return root


def _any(rng, depth):
    kinds = [_string, _number, _integer, _enum, _constant, _simple]
    if depth > 0:
        kinds += [_object, _object, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _object(rng, depth):
    names = rng.sample(
        ["name", "age", "e-mail", "ümlaut", "a b", "tags", "id", "x", "note", "$type"], rng.randint(1, 5)
    )
    made = {"type": "object", "properties": {name: _any(rng, depth - 1) for name in names}}
    required = [name for name in names if rng.random() < 0.6]
    if required or rng.random() < 0.3:
        made["required"] = required
    choice = rng.random()
    if choice < 0.5:
        made["additionalProperties"] = False
    elif choice < 0.65:
        made["additionalProperties"] = _string(rng, 0)
    if rng.random() < 0.1:
        made["patternProperties"] = {"^q_": _integer(rng, 0)}
    return made


def _array(rng, depth):
    made = {"type": "array", "items": _any(rng, depth - 1)}
    if rng.random() < 0.5:
        made["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.7:
        made["maxItems"] = made.get("minItems", 0) + rng.randint(0, 3)
    if rng.random() < 0.2:
        made["prefixItems"] = [_any(rng, 0) for _ in range(rng.randint(1, 2))]
        made.pop("maxItems", None)
    return made


def _union(rng, depth):
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng, _depth):
    made = {"type": "string"}
    match rng.randrange(5):
        case 0:
            made["pattern"] = rng.choice(_PATTERNS)
        case 1:
            made["format"] = rng.choice(_FORMATS)
        case 2:
            made["minLength"] = rng.randint(0, 3)
            made["maxLength"] = made["minLength"] + rng.randint(0, 6)
        case 3:
            made["maxLength"] = rng.randint(0, 12)
    return made


def _integer(rng, _depth):
    made = {"type": "integer"}
    if rng.random() < 0.7:
        made[rng.choice(["minimum", "exclusiveMinimum"])] = rng.randint(-1000, 100)
    if rng.random() < 0.7:
        made[rng.choice(["maximum", "exclusiveMaximum"])] = rng.randint(102, 100_000)
    elif rng.random() < 0.3:
        made["multipleOf"] = rng.choice([2, 5, 10, 7])
    return made


def _number(rng, _depth):
    made = {"type": "number"}
    if rng.random() < 0.6:
        made["minimum"] = round(rng.uniform(-50, 1), 3)
    if rng.random() < 0.6:
        made["maximum"] = round(rng.uniform(2, 500), 2)
    return made


def _enum(rng, _depth):
    return {
        "enum": rng.sample(["a", "b c", '\u00e9"\\', 1, 2.5, None, True, "long value, with commas", [1], {"k": 0}], 3)
    }


def _constant(rng, _depth):
    return {"const": rng.choice(["fixed", 0, False, None, "\n"])}


def _simple(rng, _depth):
    return rng.choice(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "boolean"]}]
    )


def draw(rng, allowed, closers):
    """A token [id] of a mask [vocabulary], uniformly, or one of `closers` with some preference."""
    ending = [token for token in closers if allowed[token]]
    if ending and rng.random() < _CLOSERS:
        return rng.choice(ending)
    ids = np.flatnonzero(allowed)
    return int(ids[rng.randrange(len(ids))])


def seed_of(text):
    """A generator for one schema."""
    return random.Random(text)
