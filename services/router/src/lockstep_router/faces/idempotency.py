"""Idempotency keys of clients, whichever face they come by: whose they are, and for which request."""

import hashlib
import re

import msgspec
from lockstep_common.errors import invalid
from pydantic import BaseModel

from lockstep_router.faces import identity
from lockstep_router.faces.identity import Origin, owner_of
from lockstep_router.resumption import IdempotencyKey

MAX_KEY_CHARS = 255

_KEY = re.compile(f"[!-~]{{1,{MAX_KEY_CHARS}}}")


def scope_of(key: str, field: str, origin: Origin) -> str:
    """A key, and whose it is.

    Args:
        key: as the client gave it.
        field: the name of the header or field that it came in.
        origin: its sender.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field.
    """
    if not _KEY.fullmatch(key):
        raise invalid(field, f"must be 1 to {MAX_KEY_CHARS} visible ASCII characters")
    # Clients without an API key have no tenant to share keys in, so their address separates them.
    return f"{owner_of(origin) or identity.anonymous_tenant(origin.address)}/{key}"


def idempotency_key(key: str, field: str, origin: Origin, body: BaseModel, kind: str) -> IdempotencyKey:
    """The key of a request with this body; `kind` differs between endpoints.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field.
    """
    return IdempotencyKey(scope_of(key, field, origin), fingerprint_of(body, kind), field)


def fingerprint_of(body: BaseModel, kind: str) -> bytes:
    """What equal bodies have in common, also at routers of other versions, which may have more fields or another order
    of them: a field that has its default counts as not given. What is inside a field keeps its order: that of a
    schema's properties is the order in which they are generated.
    """
    given = sorted(body.model_dump(exclude_defaults=True).items())
    fingerprint = hashlib.blake2b(msgspec.json.encode(given), digest_size=32, person=b"body")
    fingerprint.update(kind.encode())
    return fingerprint.digest()
