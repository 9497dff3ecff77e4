"""What a newsroom keeps: traits that all objects share, bodies of mixed elements, and titles for all of it."""

import random
from collections.abc import Sequence

from schema_corpus.parts import Make, Schema, address, any_of, flag, label, listed, nullable, one_of, record, restricted

_DRAFT = "http://json-schema.org/draft-04/schema#"


def _trait(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _definitions(draw: random.Random) -> Schema:
    dates = {
        "published": {"type": "string", "format": "date-time"},
        "updated": {"type": "string", "format": "date-time"},
    }
    image = {
        "type": {"type": "string", "enum": ["image"]},
        "url": {"type": "string", "format": "uri"},
        "width": {"type": "integer", "minimum": 0},
        "caption": {"type": "string", "maxLength": 80},
        "licensable": flag(draw),
    }
    text = {"type": {"type": "string", "enum": ["text"]}, "content": {"type": "string"}}
    return {
        "identity": {"title": "Globally unique id", "type": "string", "pattern": "^([A-Z0-9]{26}|[a-z0-9-]{4,40})$"},
        "locale": {"title": "Locale", "type": "string", "pattern": "^[a-z]{2}(-[A-Z]{2})?$"},
        "dates": record(draw, dates),
        "image": record(draw, image, ["type", "url"]),
        "text": record(draw, text, ["type", "content"]),
        "author": record(draw, {"name": label(draw), "byline": label(draw), "contact": address(draw)}, ["name"]),
        "references": _identities(draw),
        "unused_trait": {"type": "array", "uniqueItems": True},
    }


def _identities(draw: random.Random) -> Schema:
    return {"type": "object", "additionalProperties": _trait("identity")}


def _document(draw: random.Random, title: str, properties: Schema, needs: Sequence[str]) -> Schema:
    made = restricted(draw, record(draw, properties, needs), 0.08)
    top = {"$schema": _DRAFT, "id": f"https://schemas.example/0.8/{title}.json", "title": title}
    return top | made | {"definitions": _definitions(draw)}


def story(draw: random.Random) -> Schema:
    elements = any_of(draw, _trait("text"), _trait("image"))
    parts = {
        "_id": _trait("identity"),
        "type": {"type": "string", "enum": ["story"]},
        "language": _trait("locale"),
        "headlines": record(draw, {"basic": label(draw), "mobile": label(draw), "print": label(draw)}, ["basic"]),
        "content_elements": {"type": "array", "items": elements, "maxItems": 3},
        "credits": record(draw, {"by": {"type": "array", "items": _trait("author"), "maxItems": 2}}),
        "dates": _trait("dates"),
        "canonical_url": {"type": "string", "format": "uri"},
    }
    return _document(draw, "story", parts, ["_id", "type"])


def video(draw: random.Random) -> Schema:
    stream = {
        "height": {"type": "integer", "minimum": 144, "maximum": 4320},
        "bitrate": {"type": "number", "minimum": 0},
        "stream_type": one_of(draw, "mp4", "hls", "webm"),
        "url": {"type": "string", "format": "uri"},
    }
    parts = {
        "_id": _trait("identity"),
        "duration": {"type": "integer", "minimum": 0},
        "streams": listed(draw, record(draw, stream, ["url"]), 2),
        "live": flag(draw),
        "promo_image": nullable(draw, _trait("image")),
        "subtitles": {
            "type": "object",
            "patternProperties": {"^[a-z]{2}$": {"type": "string"}},
            "additionalProperties": False,
        },
    }
    return _document(draw, "video", parts, ["_id", "streams"])


def gallery(draw: random.Random) -> Schema:
    parts = {
        "_id": _trait("identity"),
        "images": {"type": "array", "items": _trait("image"), "minItems": 1, "maxItems": 2},
        "related": _trait("references"),
        "taxonomy": record(draw, {"tags": listed(draw, label(draw)), "sections": listed(draw, _trait("identity"), 2)}),
        "distributor": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}], "title": "Distributor"},
    }
    return _document(draw, "gallery", parts, ["_id", "images"])


def redirect(draw: random.Random) -> Schema:
    parts = {
        "_id": _trait("identity"),
        "from": {"type": "string", "pattern": "^/[a-z0-9/-]*$"},
        "to": {"type": "string", "format": "uri"},
        "code": one_of(draw, 301, 302, 410),
        "dates": _trait("dates"),
    }
    return _document(draw, "redirect", parts, ["_id", "from", "to"])


ARTICLES: Sequence[Make] = (story, video, gallery, redirect)
