"""Answers of the management port."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The answer to a management request."""

    status: int
    content_type: str
    body: bytes


def as_json(status: int, value: Any) -> Answer:
    """An answer that is JSON."""
    return Answer(status, "application/json", json.dumps(value, separators=(",", ":")).encode())


def needs_certificate() -> Answer:
    """The answer to strangers."""
    return as_json(403, {"error": "a client certificate is needed"})


def not_found() -> Answer:
    """The answer for other paths."""
    return as_json(404, {"error": "not found"})
