"""Answers of the management port."""

import json
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The answer to a management request."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    """Further ones."""

    @property
    def tag(self) -> str:
        """Its ETag; empty: it has none."""
        return next((value for name, value in self.headers if name == "ETag"), "")

    def unless_known(self, if_none_match: str) -> "Answer":
        """This answer, or 304 without a body for a client that has the same one already."""
        known = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
        return replace(self, status=304, body=b"") if self.tag and self.tag in known else self


def as_json(status: int, value: Any) -> Answer:
    """An answer that is JSON."""
    return Answer(status, "application/json", json.dumps(value, separators=(",", ":")).encode())


def needs_certificate() -> Answer:
    """The answer to strangers."""
    return as_json(403, {"error": "a client certificate is needed"})


def not_found() -> Answer:
    """The answer for other paths."""
    return as_json(404, {"error": "not found"})
