"""Events that applications send for analysis: closed, flat, of draft 4, with a limit for each text and many nulls."""

import random
from collections.abc import Sequence

from schema_corpus.parts import Make, Schema, listed, noted, one_of, restricted


def _event(draw: random.Random, name: str, properties: Schema, required: Sequence[str] = ()) -> Schema:
    """An event of some of these properties; each may be null unless it is required."""
    made: Schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "description": f"Schema of the event {name}",
        "self": {"vendor": "com.example", "name": name, "format": "jsonschema", "version": f"1-0-{draw.randrange(5)}"},
        "type": "object",
    }
    if draw.random() < 0.3:
        made |= {"id": f"http://schemas.example/{name}#"}
    kept = {key: value for key, value in properties.items() if key in required or draw.random() < 0.85}
    made["properties"] = {
        key: noted(draw, key, value if key in required or draw.random() < 0.5 else _or_null(value))
        for key, value in kept.items()
    }
    if required:
        made["required"] = list(required)
    made["additionalProperties"] = False
    return restricted(draw, made, 0.08)


def _or_null(schema: Schema) -> Schema:
    kind = schema.get("type")
    if not isinstance(kind, str) or "enum" in schema:
        return schema
    return schema | {"type": [kind, "null"]}


def _text(draw: random.Random) -> Schema:
    return {"type": "string", "maxLength": draw.choice([8, 36, 128, 255, 1024])}


def _whole(draw: random.Random) -> Schema:
    made: Schema = {"type": "integer", "minimum": 0, "maximum": draw.choice([100, 32_767, 2_147_483_647])}
    return made | {"exclusiveMinimum": True} if draw.random() < 0.3 else made


def page_view(draw: random.Random) -> Schema:
    parts = {
        "url": {"type": "string", "format": "uri", "maxLength": 200},
        "referrer": _text(draw),
        "title": _text(draw),
        "load_ms": _whole(draw),
        "viewport": {"type": "string", "pattern": "^[0-9]{2,4}x[0-9]{2,4}$"},
    }
    return _event(draw, "page_view", parts, ["url"])


def add_to_cart(draw: random.Random) -> Schema:
    parts = {
        "sku": {"type": "string", "minLength": 1, "maxLength": 32},
        "quantity": _whole(draw),
        "unit_price": {"type": "number", "minimum": 0, "maximum": 1_000_000, "multipleOf": 0.01},
        "currency": {"type": "string", "minLength": 3, "maxLength": 3},
        "category": one_of(draw, "books", "toys", "garden", "food & drink"),
    }
    return _event(draw, "add_to_cart", parts, ["sku", "quantity"])


def transaction(draw: random.Random) -> Schema:
    item = {
        "type": "object",
        "properties": {"sku": _text(draw), "price": {"type": "number"}, "gift": {"type": "boolean"}},
        "required": ["sku"],
        "additionalProperties": False,
    }
    parts = {
        "order_id": {"type": "string", "format": "uuid"},
        "total": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        "items": listed(draw, item),
        "coupon": _text(draw),
        "paid_at": {"type": "string", "format": "date-time"},
    }
    return _event(draw, "transaction", parts, ["order_id", "total"])


def session_context(draw: random.Random) -> Schema:
    parts = {
        "session_id": {"type": "string", "format": "uuid"},
        "session_index": _whole(draw),
        "storage": one_of(draw, "COOKIE", "LOCAL_STORAGE", "NONE"),
        "first_event_id": _text(draw),
        "ip": {"type": "string", "format": "ipv4"},
    }
    return _event(draw, "session_context", parts, ["session_id"])


def media_progress(draw: random.Random) -> Schema:
    parts = {
        "media_id": _text(draw),
        "percent": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 25},
        "position_s": {"type": "number", "minimum": 0},
        "muted": {"type": "boolean"},
        "quality": one_of(draw, "auto", "480p", "1080p"),
        "rates": listed(draw, {"type": "number", "minimum": 0.25, "maximum": 4}),
    }
    return _event(draw, "media_progress", parts, ["media_id"])


def device(draw: random.Random) -> Schema:
    parts = {
        "os": one_of(draw, "android", "ios", "linux", "other"),
        "os_version": {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+){0,2}$", "maxLength": 16},
        "screen": {"type": "array", "items": _whole(draw), "minItems": 2, "maxItems": 2},
        "battery": {"type": "number", "minimum": 0, "maximum": 1},
        "locale": {"type": "string", "pattern": "^[a-z]{2}_[A-Z]{2}$"},
        "rooted": {"enum": [True, False, None]},
    }
    return _event(draw, "device", parts)


def form_sent(draw: random.Random) -> Schema:
    element = {
        "type": "object",
        "properties": {"name": _text(draw), "node": {"enum": ["INPUT", "SELECT", "TEXTAREA"]}, "value": _text(draw)},
        "required": ["name", "node"],
        "additionalProperties": draw.random() < 0.5,
    }
    parts = {"form_id": _text(draw), "classes": listed(draw, _text(draw)), "elements": listed(draw, element)}
    return _event(draw, "form_sent", parts, ["form_id"])


EVENTS: Sequence[Make] = (page_view, add_to_cart, transaction, session_context, media_progress, device, form_sent)
