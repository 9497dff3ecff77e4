"""Bodies of HTTP APIs as OpenAPI documents have them: `nullable`, `readOnly`, discriminators, pages, patches."""

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
    identifier,
    label,
    listed,
    mapping,
    moment,
    nullable,
    one_of,
    record,
    restricted,
)


def customer(draw: random.Random) -> Schema:
    parts = {
        "id": identifier(draw) | {"readOnly": True},
        "email": {"type": "string", "format": "email"},
        "name": nullable(draw, label(draw)),
        "birthday": nullable(draw, {"type": "string", "format": "date"}),
        "tags": listed(draw, label(draw)),
        "balance": amount(draw),
        "metadata": mapping(draw, {"type": "string", "maxLength": 40}),
        "homepage": address(draw),
    }
    return restricted(draw, record(draw, parts, ["id", "email"]))


def payment(draw: random.Random) -> Schema:
    card = {
        "type": {"type": "string", "enum": ["card"]},
        "number": {"type": "string", "pattern": "^[0-9]{12,19}$", "writeOnly": True},
        "expires": {"type": "string", "pattern": "^(0[1-9]|1[0-2])/[0-9]{2}$"},
    }
    transfer = {
        "type": {"type": "string", "enum": ["transfer"]},
        "iban": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$"},
    }
    methods = [record(draw, card, ["type", "number"]), record(draw, transfer, ["type", "iban"])]
    method = {"oneOf": methods, "discriminator": {"propertyName": "type"}}
    parts = {
        "amount": count(draw),
        "currency": one_of(draw, "eur", "usd", "jpy"),
        "method": method,
        "capture": flag(draw),
    }
    return record(draw, parts, ["amount", "method"])


def page(draw: random.Random) -> Schema:
    item = record(
        draw, {"id": identifier(draw), "created": moment(draw), "state": one_of(draw, "open", "shut")}, ["id"]
    )
    parts = {
        "items": listed(draw, item),
        "next": nullable(draw, {"type": "string", "format": "uri"}),
        "total": {"type": "integer", "minimum": 0, "format": "int64"},
    }
    return restricted(draw, record(draw, parts, ["items"]))


def problem(draw: random.Random) -> Schema:
    parts = {
        "type": {"type": "string", "format": "uri", "default": "about:blank"},
        "title": label(draw),
        "status": {"type": "integer", "minimum": 100, "exclusiveMaximum": 600},
        "detail": {"type": "string"},
        "errors": listed(
            draw, record(draw, {"loc": listed(draw, {"type": ["string", "integer"]}), "msg": label(draw)})
        ),
    }
    return record(draw, parts, ["status"])


def patch(draw: random.Random) -> Schema:
    path = {"type": "string", "pattern": "^(/[^/~]*)*$"}
    add = {"op": {"enum": ["add", "replace", "test"]}, "path": path, "value": {}}
    remove = {"op": {"const": "remove"}, "path": path}
    changes = any_of(draw, record(draw, add, ["op", "path", "value"]), record(draw, remove, ["op", "path"]))
    return {"type": "array", "items": changes, "minItems": 1, "maxItems": 3}


def webhook(draw: random.Random) -> Schema:
    kinds = [
        {"event": {"const": name}, "data": record(draw, {"id": identifier(draw), "at": moment(draw)}, ["id"])}
        for name in ("order.created", "order.paid", "order.sent")
    ]
    bodies = [
        {"type": "object", "properties": each, "required": ["event", "data"], "additionalProperties": False}
        for each in kinds[: draw.randint(2, 3)]
    ]
    return any_of(draw, *bodies)


def search_results(draw: random.Random) -> Schema:
    hit = {
        "id": identifier(draw),
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "highlights": mapping(draw, listed(draw, {"type": "string", "maxLength": 60})),
        "source": address(draw),
    }
    facet = record(draw, {"value": any_of(draw, label(draw), count(draw)), "count": count(draw)}, ["value"])
    parts = {
        "took_ms": {"type": "integer", "minimum": 0},
        "hits": listed(draw, record(draw, hit, ["id", "score"])),
        "facets": mapping(draw, listed(draw, facet, 2)),
        "suggestion": nullable(draw, label(draw)),
    }
    return restricted(draw, record(draw, parts, ["hits"]))


BODIES: Sequence[Make] = (customer, payment, page, problem, patch, webhook, search_results)
