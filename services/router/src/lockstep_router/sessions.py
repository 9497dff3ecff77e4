"""Who asks: request ids, sessions, tenants. Keys are hashed before they are kept and never logged."""

import hashlib
import re
import secrets
from collections.abc import Mapping

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_SESSION_CHARS = 256


def request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-ID if it is 1 to 64 harmless characters, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else secrets.token_hex(12)


def session(headers: Mapping[str, str], user: str | None) -> str:
    """The identity that picks the worker: X-Session-ID, then `user`, then the API key, then a new random one."""
    given = headers.get("x-session-id", "")
    if given:
        return f"session:{given[:_MAX_SESSION_CHARS]}"
    if user:
        return f"user:{user[:_MAX_SESSION_CHARS]}"
    name = tenant(headers)
    return f"key:{name}" if name else f"request:{secrets.token_hex(8)}"


def tenant(headers: Mapping[str, str]) -> str:
    """A name for the API key that does not tell the key; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return ""
    return hashlib.blake2b(key.strip().encode("utf-8", "surrogateescape"), digest_size=16, person=b"tenant").hexdigest()


def traceparent(headers: Mapping[str, str]) -> str:
    """The W3C trace context of the request; empty if it has none that is well formed."""
    given = headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""
