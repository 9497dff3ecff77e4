"""The identity of a request's sender: request ids, sessions, tenants. Keys are hashed before they are stored, and never
logged.
"""

import functools
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep_common.errors import invalid
from lockstep_common.trace_context import parse_traceparent, parse_tracestate

from lockstep_router.generation.request import Caller
from lockstep_router.randomness import new_id
from lockstep_router.traces import RequestTrace

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_MAX_SESSION_CHARS = 256
_TIMEOUT_HEADER = "X-Request-Timeout"
_TIMEOUT_NAME = _TIMEOUT_HEADER.lower()
MAX_TIMEOUT_S = 86_400.0
_REMEMBERED_ADDRESSES = 1024
_PLACEHOLDER = re.compile("(?i)empty|none|null|dummy|fake|unused|not-needed|no-key|sk-no-key-required|token-abc123")
"""What the documentation of OpenAI-compatible servers gives for a key, because clients insist on one. Everybody sends
these: as a tenant they would share one prefix cache, and one worker.
"""


@dataclass(slots=True)
class Origin:
    """The sender of a request: its headers and its address. Nobody changes one."""

    headers: Mapping[str, str]
    """Names are looked up in lower case."""
    address: str = ""
    """Separates clients without a key; empty: it is not known."""
    tenant: str = ""
    """The tenant that the client's key belongs to, if the router has keys."""
    trace: RequestTrace | None = None
    """The request's trace; None: it has none."""
    request_id: str = ""
    """For log lines."""
    shares_cache: bool = False
    """Whether clients without a key share prefixes with all others, whatever their address."""


def caller(origin: Origin, user: str | None) -> Caller:
    """The caller, from the request's headers, the client's address and the body's `user`."""
    headers = origin.headers
    name = origin.tenant or (tenant(headers) if "authorization" in headers else "")
    traceparent = tracestate = ""
    if origin.trace is None:  # else the worker gets the context of a span of the trace
        traceparent = parse_traceparent(headers.get("traceparent", ""))
        tracestate = parse_tracestate(headers.get("tracestate", "")) if traceparent else ""
    return Caller(
        _session(origin, user, name),
        name or ("" if origin.shares_cache else anonymous_tenant(origin.address)),
        traceparent,
        timeout_s(headers) if _TIMEOUT_NAME in headers else None,
        tracestate,
        origin.trace,
        origin.request_id,
    )


@functools.lru_cache(_REMEMBERED_ADDRESSES)
def anonymous_tenant(address: str) -> str:
    """A tenant name for all clients without a key at one address; empty without an address.

    Tenants never share KV blocks. If all clients without a key were one tenant, each could learn from `cached_tokens`,
    or from the time to the first token, which prompts the others had sent.
    """
    if not address:
        return ""
    return hashlib.blake2b(address.encode(), digest_size=16, person=b"address").hexdigest()


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """The client's own deadline in the header X-Request-Timeout, in seconds; None without one.

    Raises:
        LockstepError: INVALID_REQUEST, the header is not a number of seconds.
    """
    given = headers.get(_TIMEOUT_NAME)
    if given is None:
        return None
    value = float(given) if _SECONDS.fullmatch(given) else math.nan
    if not 0 < value <= MAX_TIMEOUT_S:
        raise invalid(_TIMEOUT_HEADER, f"must be a number of seconds above 0 and at most {MAX_TIMEOUT_S:.0f}")
    return value


def request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-ID if it is 1 to 64 harmless characters, else a new one."""
    given = headers.get("x-request-id", "")
    return given if given and _SANE_ID.fullmatch(given) else new_id(12)


def _session(origin: Origin, user: str | None, name: str) -> str:
    """The identity that picks the worker: X-Session-ID, then `user`, then the tenant or the API key, then a new random
    one.
    """
    given = origin.headers.get("x-session-id", "")
    if given:
        return f"session:{given[:_MAX_SESSION_CHARS]}"
    if user:
        return f"user:{user[:_MAX_SESSION_CHARS]}"
    if origin.tenant:
        return f"tenant:{origin.tenant}"
    return f"key:{name}" if name else f"request:{new_id(8)}"


def owner_of(origin: Origin) -> str:
    """Names who may resume a stream: the tenant; empty for clients without an API key, whom the unguessable id tells
    apart, so that they may come back from another address.
    """
    return origin.tenant or tenant(origin.headers)


def tenant(headers: Mapping[str, str]) -> str:
    """A hash of the API key, which names the tenant; empty without a key and for a common placeholder."""
    given = headers.get("authorization")
    if not given:
        return ""
    scheme, _, key = given.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or _PLACEHOLDER.fullmatch(key):
        return ""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16, person=b"tenant").hexdigest()
