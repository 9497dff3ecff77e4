"""How values are kept at rest: with a checksum, or encrypted. A value that is not as it was written counts as absent.

Each value is bound to its place, the key that it belongs to, so that a value that was copied elsewhere is no value.
"""

import functools
import hashlib
import hmac
import os
from collections.abc import Sequence

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lockstep_state import metrics

_PLAIN = b"LS\x01"
_SEALED = b"LS\x02"
_MAGIC_BYTES = 3
_CHECKSUM_BYTES = 8
_KEY_ID_BYTES = 4
_NONCE_BYTES = 12
_CACHED_KEYS = 4096

KEY_BYTES = 32
"""Of AES-256."""


class Values:
    """Writes and reads values.

    Args:
        keys: secrets of 32 bytes. The first one encrypts, all decrypt, so that a key can be
            replaced. None: no encryption.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {hashlib.sha256(key).digest()[:_KEY_ID_BYTES]: key for key in keys}
        self._first = next(iter(self._keys), b"")
        self._cipher = functools.lru_cache(_CACHED_KEYS)(self._make_cipher)

    def write(self, place: str, plain: bytes) -> bytes:
        """What is stored for a value."""
        if not self._keys:
            return _PLAIN + _checksum(place, plain) + plain
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join((_SEALED, self._first, nonce, self._cipher(self._first, place).encrypt(nonce, plain, None)))

    def read(self, place: str, stored: bytes) -> bytes | None:
        """The value; None if it is damaged, of another place, or not encrypted with a known key if there are any."""
        plain = self._open(place, stored)
        if plain is None:
            metrics.DAMAGED.inc()
        return plain

    def fingerprints(self, place: str, plain: bytes) -> str:
        """32 characters with each key, separated by spaces: equal for equal values of one place. Without the secret
        they reveal nothing else. The first is stored. Any of them may have been stored, before keys were replaced.
        """
        message = place.encode() + b"\0" + plain
        digests = (hmac.new(secret, message, hashlib.sha256).hexdigest() for secret in self._keys.values() or (b"",))
        return " ".join(digest[:32] for digest in digests)

    def _open(self, place: str, stored: bytes) -> bytes | None:
        magic, rest = stored[:_MAGIC_BYTES], memoryview(stored)[_MAGIC_BYTES:]  # a block is large: no more copies
        if magic == _PLAIN and not self._keys:
            plain = rest[_CHECKSUM_BYTES:]
            return bytes(plain) if rest[:_CHECKSUM_BYTES] == _checksum(place, plain) else None
        key_id, rest = bytes(rest[:_KEY_ID_BYTES]), rest[_KEY_ID_BYTES:]
        if magic != _SEALED or key_id not in self._keys:
            return None
        try:
            return self._cipher(key_id, place).decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], None)
        except (InvalidTag, ValueError):
            return None

    def _make_cipher(self, key_id: bytes, place: str) -> AESGCM:
        """Of a key of its own for each place: random nonces of one key must not be used billions of times."""
        return AESGCM(hmac.new(self._keys[key_id], place.encode(), hashlib.sha256).digest())


def _checksum(place: str, plain: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_64(place.encode())
    digest.update(plain)
    return digest.digest()
