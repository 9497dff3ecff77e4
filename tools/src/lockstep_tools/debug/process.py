"""A service as its management port shows it, wherever it runs: what is asked of it is bounded in size and time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

PART_BYTES = 8 << 20
PART_S = 10.0
_FORBIDDEN = 403
_ANSWERS = (200, 404, 503)
"""503 is the answer of a service that is not ready, and says why; 404 that of one that has no such page."""


class PartError(Exception):
    """A part cannot be collected; the message says why."""


class RefusedError(PartError):
    """The service answers, and refuses it."""


@dataclass(frozen=True)
class Process:
    """One process of the system."""

    name: str
    """For people and for the bundle's folder: `worker-w0`."""
    url: str
    """Of its management port."""
    pid: int | None = None
    """On this machine; None: it runs elsewhere."""


@contextmanager
def named_errors() -> Iterator[None]:
    """Turn errors of HTTP into a `PartError`."""
    try:
        yield
    except httpx.HTTPError as error:
        raise PartError(str(error) or type(error).__name__) from None


def fetch(client: httpx.Client, url: str) -> bytes:
    """The body of a page.

    Raises:
        PartError: there is none, it is too large, or it takes too long.
    """
    ends_at = time.monotonic() + PART_S
    body = bytearray()
    with named_errors(), client.stream("GET", url) as answer:
        if answer.status_code == _FORBIDDEN:
            raise RefusedError(f"refuses operators: HTTP {_FORBIDDEN}; run it on that host or with --client-cert")
        if answer.status_code not in _ANSWERS:
            raise PartError(f"HTTP status {answer.status_code}")
        for chunk in answer.iter_bytes():
            body += chunk
            if len(body) > PART_BYTES:
                raise PartError(f"more than {PART_BYTES >> 20} MiB")
            if time.monotonic() > ends_at:
                raise PartError(f"not complete after {PART_S:g} s")
    return bytes(body)
