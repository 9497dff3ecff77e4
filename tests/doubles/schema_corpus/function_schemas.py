"""Parameters of functions that models call: flat or nearly so, with a description for each."""

import random
from collections.abc import Sequence

from schema_corpus.parts import (
    Make,
    Schema,
    address,
    amount,
    count,
    flag,
    identifier,
    label,
    listed,
    moment,
    one_of,
    record,
    restricted,
)


def reserve_table(draw: random.Random) -> Schema:
    parts = {
        "restaurant": label(draw),
        "party_size": count(draw),
        "date": {"type": "string", "format": "date"},
        "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        "seating": one_of(draw, "inside", "terrace", "bar"),
        "wishes": listed(draw, label(draw)),
    }
    return record(draw, parts, ["restaurant", "party_size"])


def estimate_shipping(draw: random.Random) -> Schema:
    size = {"length_cm": amount(draw), "width_cm": amount(draw), "height_cm": amount(draw)}
    parts = {
        "origin": {"type": "string", "minLength": 2, "maxLength": 2, "pattern": "^[A-Z]{2}$"},
        "destination": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": 70},
        "dimensions": record(draw, size),
        "insured": flag(draw),
        "service": one_of(draw, "economy", "standard", "express", "same day"),
    }
    return record(draw, parts, ["origin", "destination", "weight"])


def find_route(draw: random.Random) -> Schema:
    place = record(draw, {"latitude": amount(draw), "longitude": amount(draw), "name": label(draw)}, ["latitude"])
    parts = {
        "from": place,
        "to": place,
        "via": listed(draw, place, 2),
        "mode": one_of(draw, "walk", "bicycle", "train", "car"),
        "avoid": listed(draw, one_of(draw, "tolls", "ferries", "motorways")),
        "depart_at": moment(draw),
    }
    return restricted(draw, record(draw, parts, ["from", "to"]))


def schedule_meeting(draw: random.Random) -> Schema:
    parts = {
        "title": label(draw),
        "attendees": listed(draw, {"type": "string", "format": "email"}),
        "starts_at": {"type": "string", "format": "date-time"},
        "duration_minutes": {"type": "integer", "minimum": 5, "maximum": 480, "multipleOf": 5},
        "repeats": one_of(draw, "never", "daily", "weekly", "monthly"),
        "room": label(draw),
    }
    return record(draw, parts, ["title", "attendees"])


def convert_units(draw: random.Random) -> Schema:
    units = one_of(draw, "mm", "cm", "m", "km", "in", "ft", "\u00b5m")
    return record(draw, {"value": amount(draw), "from_unit": units, "to_unit": units, "digits": count(draw)}, ["value"])


def create_ticket(draw: random.Random) -> Schema:
    parts = {
        "summary": {"type": "string", "minLength": 5, "maxLength": 120},
        "body": {"type": "string"},
        "severity": one_of(draw, 1, 2, 3, 4),
        "component": one_of(draw, "billing", "login", "search", "other / unknown"),
        "reporter": address(draw),
        "labels": listed(draw, {"type": "string", "pattern": "^[a-z]+(:[a-z]+)?$"}),
        "due": moment(draw),
    }
    return restricted(draw, record(draw, parts, ["summary", "severity"]))


def query_inventory(draw: random.Random) -> Schema:
    parts = {
        "sku": identifier(draw),
        "warehouse": one_of(draw, "north", "south", "overseas"),
        "in_stock": flag(draw),
        "price": record(draw, {"min": amount(draw), "max": amount(draw), "currency": one_of(draw, "EUR", "USD")}),
        "sort": one_of(draw, "price", "-price", "name"),
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    }
    return restricted(draw, record(draw, parts, ["sku"]))


def set_thermostat(draw: random.Random) -> Schema:
    parts = {
        "room": one_of(draw, "kitchen", "bedroom", "office"),
        "celsius": {"type": "number", "minimum": 5, "maximum": 30, "multipleOf": 0.5},
        "mode": one_of(draw, "heat", "cool", "off"),
        "until": moment(draw),
    }
    return record(draw, parts, ["celsius"])


def split_bill(draw: random.Random) -> Schema:
    share = record(draw, {"name": label(draw), "share": amount(draw)}, ["name"])
    parts = {"total": amount(draw), "tip_percent": count(draw), "people": listed(draw, share), "currency": label(draw)}
    return record(draw, parts, ["total", "people"])


def no_arguments(draw: random.Random) -> Schema:
    made: Schema = draw.choice(
        [
            {"type": "object", "properties": {}},
            {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
            {"type": "object", "properties": {"confirm": {"type": "boolean", "const": True}}, "required": ["confirm"]},
        ]
    )
    return made | {"description": f"Takes nothing but {draw.randint(1, 1000)} ms."}


def draft_message(draw: random.Random) -> Schema:
    parts = {
        "recipient": address(draw),
        "subject": label(draw),
        "tone": one_of(draw, "formal", "friendly", "terse"),
        "language": {"type": "string", "pattern": "^[a-z]{2}(-[A-Z]{2})?$"},
        "attachments": listed(draw, record(draw, {"name": label(draw), "url": address(draw)}, ["url"]), 2),
    }
    return restricted(draw, record(draw, parts, ["recipient", "subject"]))


FUNCTIONS: Sequence[Make] = (
    reserve_table,
    estimate_shipping,
    find_route,
    schedule_meeting,
    convert_units,
    create_ticket,
    query_inventory,
    set_thermostat,
    split_bill,
    no_arguments,
    draft_message,
)
