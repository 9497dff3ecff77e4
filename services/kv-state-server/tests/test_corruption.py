"""Blocks whose stored values were changed in any way are misses, and are forgotten."""

import itertools
import random
import secrets
from collections import Counter

import pytest
import redis
import xxhash
from backends import SECRET
from lockstep_api.v1 import state_pb2
from lockstep_state.block_values import pack, unpack
from lockstep_state.keys import Kind, key_of
from lockstep_state.values import Values
from state_serving import served
from test_kv_service import STORED, get, header, key, put

BLOCKS = 64
HEADS = ((0, 4), (4, 4), (0, 8))


def seeded():
    seed = secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def flip(value, rng, _):
    made = bytearray(value)
    for bit in rng.sample(range(8 * len(made)), rng.choice([1, 1, 2, 9])):  # the same bit twice would change nothing
        made[bit // 8] ^= 1 << bit % 8
    return bytes(made)


def flip_at_the_start(value, rng, _):
    """Where the headers are."""
    at = rng.randrange(100)
    return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :]


def cut(value, rng, _):
    return value[: rng.randrange(len(value))]


def lengthen(value, rng, _):
    return value + rng.randbytes(rng.randrange(1, 50))


def blank(value, rng, _):
    at, size = rng.randrange(len(value)), rng.randrange(1, 64)
    made = value[:at] + bytes(len(value[at : at + size])) + value[at + size :]
    return made if made != value else b""


def shift(value, rng, _):
    at = rng.randrange(len(value))
    return value[:at] + rng.randbytes(1) + value[at:]


def of_another_block(value, rng, others):
    """Of another rank, head range, model, dtype or tenant: all of them are other keys."""
    return rng.choice([other for other in others if other != value])


CHANGES = (flip, flip_at_the_start, cut, lengthen, blank, shift, of_another_block)


@pytest.mark.parametrize("count", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("store_kind", ["redis"])
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_changed_values_are_misses(tmp_path, store, store_kind, is_encrypted, count):
    rng, done, prefix = seeded(), Counter(), f"corrupt-{secrets.token_hex(4)}:"
    options = {}
    if is_encrypted:
        (tmp_path / "keys").write_text(f"{SECRET.hex()}\n")
        options["encryption_key_file"] = str(tmp_path / "keys")
    async with served(tmp_path, store=store, store_prefix=prefix, **options) as client:
        with redis.Redis.from_url(store) as server:
            mine = client.tenant
            originals = await fill(client, server, prefix)
            client.tenant = f"{mine}-other"
            others = [*originals.values(), *(await fill(client, server, prefix)).values()]
            client.tenant = mine
            keys = [key(number, *HEADS[number % len(HEADS)]) for number in range(BLOCKS)]
            while done.total() < count:
                changed = {}
                for name, value in originals.items():
                    change = rng.choice(CHANGES)
                    changed[name] = change(value, rng, others)
                    assert changed[name] != value
                    done[change.__name__] += 1
                server.mset(changed)
                assert await get(client, *keys) == {}, "a changed value was given out"
                assert not server.exists(*originals), "it is still there"
                server.mset(originals)
                assert len(await get(client, *keys)) == BLOCKS
    print(done)


async def fill(client, server, prefix):
    """Store blocks; the raw values of those that are new, by key."""
    before = set(server.scan_iter(f"{prefix}block:*"))
    for number in range(BLOCKS):
        content = random.Random(f"{client.tenant}{number}").randbytes(300)
        head = header(number, content, key=key(number, *HEADS[number % len(HEADS)]))
        assert await put(client, (head, content)) == [STORED]
    return {name: server.get(name) for name in sorted(set(server.scan_iter(f"{prefix}block:*")) - before)}


def test_what_is_well_formed_and_of_another_kind_is_a_miss():
    """Even with right checksums: another schema, block, range of heads, length or content than asked for."""
    content = random.Random(1).randbytes(1000)
    good = header("a", content, key=key("a", 0, 4))
    others = {
        "schema": header("a", content, key=good.key, schema=2),
        "rank": header("a", content, key=key("a", 4, 4)),
        "heads": header("a", content, key=key("a", 0, 8)),
        "model": header("a", content, key=key("b", 0, 4)),
        "length": header("a", content, key=good.key, length=999),
        "checksum": header("a", content, key=good.key, checksum=1),
        "no key": header("a", content, key=state_pb2.BlockKey()),
    }
    values, place = Values([SECRET]), "block:x"
    assert unpack(values.read(place, values.write(place, pack(good, content))), good.key, 1)[0] == good
    for name, other in others.items():
        assert unpack(values.read(place, values.write(place, pack(other, content))), good.key, 1) is None, name
    assert values.read("block:y", values.write(place, pack(good, content))) is None, "the value of another place"
    assert Values([bytes(32)]).read(place, values.write(place, b"value")) is None, "another secret"
    assert Values().read(place, values.write(place, b"value")) is None, "encrypted"
    assert values.read(place, Values().write(place, b"value")) is None, "not encrypted"


def test_state_servers_read_each_others_values_in_each_step_of_a_replaced_key():
    """As docs/deployment.md tells it; in a rollout those of two steps run beside each other."""
    old, new = bytes([1] * 32), bytes([2] * 32)
    steps = [Values(keys) for keys in ([old], [old, new], [new, old])]
    for before, after in itertools.pairwise(steps):
        assert before.read("place", after.write("place", b"value")) == b"value"
        assert after.read("place", before.write("place", b"value")) == b"value"
    assert Values([new]).read("place", steps[-1].write("place", b"value")) == b"value"
    assert steps[0].read("place", steps[-1].write("place", b"value")) is None, "why it is not one step"


def test_ten_thousand_changes_of_a_packed_block():
    """Without the value's own checksum, too: it is what memory keeps."""
    rng, content = seeded(), random.Random(2).randbytes(600)
    head = header("a", content)
    value = pack(head, content)
    other = pack(header("b", content, key=key("b")), content)
    for _ in range(10_000):
        change = rng.choice(CHANGES)
        changed = change(value, rng, [other])
        assert unpack(changed, head.key, 1) is None, (change.__name__, changed)
    assert unpack(value, head.key, 1) == (head, content)
    assert xxhash.xxh3_64_intdigest(content) == head.checksum


def test_keys_of_different_things_differ():
    """Nothing of one tenant, kind or name can be written as something of another."""
    parts = ("", "a", "b", "ab", "a\0b", "stream", "block", "\0\0\0\1a")
    keys = [
        key_of(kind, tenant, first.encode(), second.encode())
        for kind in Kind
        for tenant in parts
        for first in parts
        for second in parts
    ]
    keys += [key_of(kind, tenant, first.encode()) for kind in Kind for tenant in parts for first in parts]
    assert len(set(keys)) == len(keys)
