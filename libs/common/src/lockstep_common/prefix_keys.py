"""The names of cached prompt prefixes: how a block of tokens, with all tokens before it, becomes a digest and a key.

An engine files the blocks of its prefix cache under these digests, and workers report their first 64 bits. A router
computes the same keys from a prompt and its tenant, and so knows which worker has which part of it.

A digest is one of BLAKE2b over the digest before it and the block's tokens. The chain begins with a digest of the
tenant, which is therefore the salt of all of its keys: equal prompts of two tenants have no key in common.
"""

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 16
"""Tokens in a block of KV cache, and in a block of a prefix."""

_KEY_BYTES = 8
_INVERTED = (1 << 8 * _KEY_BYTES) - 1


def root_digest(tenant: str) -> bytes:
    """The digest before a tenant's first blocks."""
    data = tenant.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, person=b"lockstep-prefix").digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a block.

    Args:
        parent: digest of the block before it, or the tenant's root.
        tokens: its token ids as int32, least significant byte first.
    """
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


def key_of(digest: bytes) -> int:
    """The 64 bits of a digest by which a block is reported."""
    return int.from_bytes(digest[:_KEY_BYTES], "little")


def keys_of(digests: Sequence[bytes]) -> list[int]:
    """The keys of many digests: as `key_of` gives them, several times as fast."""
    words = array("Q", b"".join(digests))
    if _IS_BIG_ENDIAN:
        words.byteswap()
    return words[::2].tolist()


def compressed_key(key: int) -> int:
    """The key by which a block's compressed version is reported: a cache may have both versions, or one."""
    return key ^ _INVERTED


def prefix_keys(tenant: str, token_ids: Sequence[int], max_blocks: int) -> list[int]:
    """The keys of a prompt's first whole blocks, at most `max_blocks`.

    The last token is left out: it is always computed, since the next token follows from it.
    """
    blocks = min(max_blocks, (len(token_ids) - 1) // BLOCK_TOKENS)
    data = _int32(token_ids[: max(0, blocks) * BLOCK_TOKENS])
    digest, size = root_digest(tenant), 4 * BLOCK_TOKENS
    keys = []
    for begin in range(0, len(data), size):
        digest = block_digest(digest, data[begin : begin + size])
        keys.append(key_of(digest))
    return keys


def _int32(ids: Sequence[int]) -> bytes:
    words = array("i", ids)
    assert words.itemsize == 4
    if _IS_BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


_IS_BIG_ENDIAN = array("i", [1]).tobytes()[-1] == 1
