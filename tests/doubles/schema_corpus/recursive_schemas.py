"""Schemas that name their parts and use them again, also within themselves."""

import random
from collections.abc import Sequence

from schema_corpus.parts import (
    Make,
    Schema,
    address,
    amount,
    any_of,
    count,
    flag,
    headed,
    identifier,
    label,
    listed,
    mapping,
    nullable,
    one_of,
    record,
    restricted,
)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _with(schema: Schema, **definitions: Schema) -> Schema:
    return schema | {"$defs": definitions}


def menu(draw: random.Random) -> Schema:
    parts = {
        "label": label(draw),
        "target": address(draw),
        "hidden": flag(draw),
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    }
    return restricted(draw, record(draw, parts, ["label"]))


def arithmetic(draw: random.Random) -> Schema:
    operand = {"anyOf": [{"type": "number"}, _ref("name"), _ref("operation")]}
    operation = record(
        draw,
        {"op": one_of(draw, "+", "-", "*", "/"), "left": operand, "right": operand},
        ["op", "left", "right"],
    )
    name = {"type": "string", "pattern": "^[a-z]{1,8}$"}
    title = {"title": "Expression"} if draw.random() < 0.3 else {}
    return _with(title | _ref("operation"), operation=operation, name=name)


def query_filter(draw: random.Random) -> Schema:
    comparison = record(
        draw,
        {
            "field": label(draw),
            "cmp": one_of(draw, "eq", "ne", "lt", "gt"),
            "value": {"type": ["string", "number", "boolean", "null"]},
        },
        ["field", "cmp", "value"],
    )
    both = {"type": "object", "properties": {"and": listed(draw, _ref("filter"), 2)}, "required": ["and"]}
    neither = {"type": "object", "properties": {"nor": listed(draw, _ref("filter"), 2)}, "required": ["nor"]}
    closed = {"additionalProperties": False}
    choices = {"anyOf": [_ref("comparison"), both | closed, neither | closed]}
    return _with(headed(draw, {"$ref": "#/$defs/filter"}, "Filter"), filter=choices, comparison=comparison)


def form(draw: random.Random) -> Schema:
    text = {"kind": {"const": "text"}, "name": label(draw), "max_length": count(draw)}
    choice = {"kind": {"const": "choice"}, "name": label(draw), "options": listed(draw, label(draw))}
    group = {"kind": {"const": "group"}, "fields": listed(draw, _ref("field"), 2)}
    field = {draw.choice(["oneOf", "anyOf"]): [_ref("text"), _ref("choice"), _ref("group")]}
    parts = {"id": identifier(draw), "fields": listed(draw, _ref("field"), 3), "locale": one_of(draw, "en", "de", "fr")}
    return _with(
        headed(draw, restricted(draw, record(draw, parts, ["fields"])), "Form"),
        text=record(draw, text, ["kind", "name"]),
        choice=record(draw, choice, ["kind", "name"]),
        group=record(draw, group, ["kind", "fields"]),
        field=field,
    )


def workflow(draw: random.Random) -> Schema:
    retry = record(draw, {"attempts": count(draw), "backoff_s": amount(draw)}, ["attempts"])
    task = {
        "uses": {"type": "string", "pattern": "^[a-z-]+/[a-z-]+@v[0-9]+$"},
        "with": mapping(draw, {"type": ["string", "integer", "boolean"]}),
        "retry": _ref("retry"),
        "on_error": nullable(draw, _ref("task")),
        "parallel": listed(draw, _ref("task"), 2),
    }
    parts = {"name": label(draw), "start": _ref("task"), "retry": _ref("retry"), "tasks": mapping(draw, _ref("task"))}
    made = restricted(draw, record(draw, parts, ["start"]))
    return _with(headed(draw, made, "Workflow"), task=record(draw, task, ["uses"]), retry=retry)


def geometry(draw: random.Random) -> Schema:
    longitude, latitude = ({"type": "number", "minimum": -limit, "maximum": limit} for limit in (180, 90))
    position = {"type": "array", "prefixItems": [longitude, latitude], "items": False, "minItems": 2}
    point = {"type": {"const": "Point"}, "coordinates": _ref("position")}
    line = {"type": {"const": "LineString"}, "coordinates": listed(draw, _ref("position"), 3)}
    several = {"type": {"const": "GeometryCollection"}, "geometries": listed(draw, _ref("geometry"), 2)}
    either = {draw.choice(["anyOf", "anyOf", "oneOf"]): [_ref("point"), _ref("line"), _ref("several")]}
    parts = {
        "type": {"const": "Feature"},
        "geometry": _ref("geometry"),
        "properties": nullable(draw, {"type": "object"}),
    }
    return _with(
        record(draw, parts, ["type", "geometry"]),
        position=position,
        point=record(draw, point, ["type", "coordinates"]),
        line=record(draw, line, ["type", "coordinates"]),
        several=record(draw, several, ["type", "geometries"]),
        geometry=either,
    )


def organisation(draw: random.Random) -> Schema:
    base = {"type": "object", "properties": {"id": identifier(draw), "name": label(draw)}, "required": ["id"]}
    extra = {"type": "object", "properties": {"reports": {"type": "array", "items": _ref("person"), "maxItems": 2}}}
    person = {"allOf": [_ref("base"), extra]}
    parts = {"head": _ref("person"), "address": _ref("address"), "billing": _ref("address"), "size": count(draw)}
    place = record(draw, {"street": label(draw), "postcode": {"type": "string", "pattern": "^[0-9]{5}$"}}, ["postcode"])
    made = restricted(draw, record(draw, parts, ["head"]))
    return _with(headed(draw, made, "Organisation"), base=base, person=person, address=place)


def anything(draw: random.Random) -> Schema:
    value = {
        "anyOf": [
            {"type": ["string", "number", "boolean", "null"]},
            {"type": "array", "items": _ref("value"), "maxItems": 2},
            {"type": "object", "additionalProperties": _ref("value"), "maxProperties": 2},
        ]
    }
    parts = {"key": label(draw), "value": _ref("value"), "previous": any_of(draw, _ref("value"), {"type": "null"})}
    return _with(record(draw, parts, ["key", "value"]), value=value)


RECURSIVE: Sequence[Make] = (
    menu,
    arithmetic,
    query_filter,
    form,
    workflow,
    geometry,
    organisation,
    anything,
)
