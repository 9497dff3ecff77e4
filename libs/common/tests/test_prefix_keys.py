"""The keys of prefixes: routers and workers of any version and machine have to compute the same."""

import hashlib
import struct

from lockstep_common.prefix_keys import BLOCK_TOKENS, block_digest, key_of, keys_of, prefix_keys, root_digest

TEXT = list(range(1000, 1000 + 3 * BLOCK_TOKENS + 1))


def test_keys_are_those_that_the_protocol_describes():
    digest = hashlib.blake2b(b"search", digest_size=16, person=b"lockstep-prefix").digest()
    expected = []
    for block in range(3):
        tokens = struct.pack("<16i", *TEXT[block * 16 : block * 16 + 16])
        digest = hashlib.blake2b(digest + tokens, digest_size=16).digest()
        expected.append(struct.unpack("<Q", digest[:8])[0])
    assert prefix_keys("search", TEXT, 256) == expected


def test_keys_never_change():
    """A router and a worker of different versions run side by side during a rollout."""
    assert prefix_keys("search", TEXT, 256) == [0x5731B8FC16144826, 0x07F249802A73CAAF, 0x1B2E8834F8884FD4]
    assert prefix_keys("", TEXT, 1) == [0x63817FCFBE94C819]


def test_blocks_are_whole_and_leave_out_the_last_token():
    counts = {length: len(prefix_keys("", [7] * length, 256)) for length in (0, 1, 16, 17, 33, 10**5)}
    assert counts == {0: 0, 1: 0, 16: 0, 17: 1, 33: 2, 10**5: 256}


def test_a_key_depends_on_all_tokens_before_it_and_on_the_tenant():
    keys = prefix_keys("a", TEXT, 256)
    for other in (prefix_keys("b", TEXT, 256), prefix_keys("a", [1, *TEXT[1:]], 256)):
        assert not set(keys) & set(other)
    assert prefix_keys("a", [*TEXT[:20], 1, *TEXT[21:]], 256)[0] == keys[0]


def test_tenants_of_any_text_have_roots_of_their_own():
    tenants = ["", "a", "ab", "b" * 128, "\0", "é", "\ud800"]
    assert len({root_digest(tenant) for tenant in tenants}) == len(tenants)


def test_a_digest_and_its_key_are_one():
    digest = block_digest(root_digest(""), struct.pack("<16i", *TEXT[:16]))
    assert [key_of(digest)] == prefix_keys("", TEXT[:17], 256)
    digests = [root_digest(str(number)) for number in range(9)]
    assert keys_of(digests) == [key_of(each) for each in digests]
