"""Keys of the store: SHA-256 over a tenant, a kind and a name.

A name is looked up with the tenant of the call and with nothing else, so another tenant's entry is as absent as one
that never was: the same key is computed and the same operation done, in the same time. Names are not in the store.
"""

import hashlib
from enum import StrEnum

_BYTES = 20


class Kind(StrEnum):
    """What a key is for."""

    TENANT = "tenant"
    STREAM = "stream"
    CLAIM = "claim"
    SESSION = "session"
    LEASE = "lease"
    BLOCK = "block"


def key_of(kind: Kind, tenant: str, *parts: bytes) -> str:
    """The key of one thing of a tenant. Lengths are hashed too, so that no two lists of parts are equal."""
    named = (kind.encode(), tenant.encode(), *parts)
    hashed = b"".join([len(part).to_bytes(4, "big") + part for part in named])
    return hashlib.sha256(hashed).hexdigest()[: 2 * _BYTES]
