"""What every backend does with blocks."""

import pytest
from backends import LIMITS, TTL_S, eventually
from lockstep_state.backend import Block, Limits
from lockstep_state.memory import MemoryBackend


def block(kept, name="b", value=b"value", ttl_s=TTL_S):
    return Block(kept.tenant, kept.key(name), value, ttl_s)


async def test_block_is_read_as_it_was_stored(kept):
    values = {"a": b"", "b": b"x" * 5000, "c": bytes(range(256))}
    assert await kept.backend.put([block(kept, name, value) for name, value in values.items()]) == [True] * 3
    keys = [kept.key(name) for name in (*values, "none")]
    assert await kept.backend.get(keys) == [*values.values(), None]
    sizes = await kept.backend.sizes(keys)
    assert sizes[1] >= 5000
    assert sizes[3] == 0


async def test_block_is_replaced_and_discarded(kept):
    await kept.backend.put([block(kept, value=b"one")])
    await kept.backend.put([block(kept, value=b"two")])
    assert await kept.backend.get([kept.key("b")]) == [b"two"]
    await kept.backend.discard(kept.tenant, [kept.key("b"), kept.key("none")])
    assert await kept.backend.get([kept.key("b")]) == [None]


async def test_block_expires(kept):
    await kept.backend.put([block(kept, ttl_s=0.3)])

    async def is_gone():
        return await kept.backend.get([kept.key("b")]) == [None]

    await eventually(is_gone)
    assert await kept.backend.sizes([kept.key("b")]) == [0]


async def test_tenant_has_so_many_bytes(kept):
    value = bytes(LIMITS.tenant_block_bytes // 4 - 1000)
    stored = [(await kept.backend.put([block(kept, str(n), value)]))[0] for n in range(6)]
    assert stored == [True] * 4 + [False] * 2
    assert await kept.backend.get([kept.key("5")]) == [None]
    assert await kept.backend.put([block(kept, "0", value)]) == [True], "a repeat needs no room"
    assert await kept.backend.put([Block("another tenant", kept.key("other"), value, TTL_S)]) == [True]
    await kept.backend.discard(kept.tenant, [kept.key("1")])
    assert await kept.backend.put([block(kept, "5", value)]) == [True]
    await kept.backend.discard("another tenant", [kept.key("other")])


@pytest.mark.parametrize("kind", ["memory"])
async def test_memory_evicts_the_least_recently_used(kept, kind):
    backend = MemoryBackend(100_000, Limits(1 << 20, 1 << 30, 10, 1 << 30))
    for number in range(3):
        await backend.put([block(kept, str(number), bytes(30_000))])
    await backend.get([kept.key("0")])
    assert await backend.put([block(kept, "3", bytes(30_000))]) == [True]
    assert await backend.put([block(kept, "huge", bytes(200_000))]) == [False]
    sizes = await backend.sizes([kept.key(str(number)) for number in range(4)])
    assert sizes == [30_000, 0, 30_000, 30_000]
    assert backend.used_bytes <= 100_000
