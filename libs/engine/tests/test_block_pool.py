"""The block pool against a model of it: references, the order of eviction, and hits by tenant."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lockstep_common.prefix_keys import root_digest
from lockstep_engine.blocks import BlockPool, extend_keys
from lockstep_engine.config import BLOCK_SIZE


def keys_of(tokens, tenant=""):
    keys = []
    extend_keys(keys, tokens, tenant)
    return keys


def text(*contents):
    """A text of full blocks, one for each number."""
    return [number for number in contents for _ in range(BLOCK_SIZE)]


def fill(pool, keys):
    """Allocate blocks for a text, register their contents and release them."""
    blocks = [pool.allocate() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.remember(block, key)
    return blocks


@dataclass
class Holding:
    """A sequence that uses blocks: `blocks[i]` must hold block i of the text, after the blocks before it."""

    tenant: str
    text: tuple[int, ...]
    blocks: list[int] = field(default_factory=list)
    filled: int = 0

    def contents(self, index):
        return self.tenant, self.text[: index + 1]

    @property
    def keys(self):
        return keys_of(text(*self.text), self.tenant)


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


class PoolMachine(RuleBasedStateMachine):
    """Sequences of two tenants start and end in few blocks. The model knows contents by tenant and text, without
    digests.
    """

    TOTAL = 7

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.TOTAL)
        self.holdings = []
        self.users = [0] * self.TOTAL
        self.found_at = {}  # contents -> the one block that is found for them
        self.idle = []  # unused blocks with contents, the next to be forgotten first
        self.empty = set(range(self.TOTAL))

    def held(self):
        return bool(self.holdings)

    def contents_of(self, block):
        return next((contents for contents, at in self.found_at.items() if at == block), None)

    def expected_match(self, tenant, chain):
        found = []
        for end in range(1, len(chain) + 1):
            block = self.found_at.get((tenant, chain[:end]))
            if block is None:
                break
            found.append(block)
        return found

    @rule(tenant=st.sampled_from(["a", "b"]), chain=TEXTS)
    def begin(self, tenant, chain):
        holding = Holding(tenant, chain)
        hits = self.pool.match(holding.keys)
        assert hits == self.expected_match(tenant, chain)
        for block in hits:
            self.pool.share(block)
            if self.users[block] == 0:
                self.idle.remove(block)
            self.users[block] += 1
        holding.blocks, holding.filled = list(hits), len(hits)
        self.holdings.append(holding)

    @precondition(held)
    @rule(data=st.data())
    def grow(self, data):
        holding = data.draw(st.sampled_from(self.holdings))
        if self.pool.free == 0 or len(holding.blocks) == len(holding.text) + 1:  # the last block never gets full
            return
        block = self.pool.allocate()
        if self.empty:
            self.empty.remove(block)
        else:
            assert block == self.idle.pop(0), "the least recently used block is the one that is forgotten"
            del self.found_at[self.contents_of(block)]
        assert self.users[block] == 0
        self.users[block] = 1
        holding.blocks.append(block)

    @precondition(held)
    @rule(data=st.data())
    def compute(self, data):
        holding = data.draw(st.sampled_from(self.holdings))
        index = holding.filled
        if index >= min(len(holding.blocks), len(holding.text)):
            return
        self.pool.remember(holding.blocks[index], holding.keys[index])
        self.found_at.setdefault(holding.contents(index), holding.blocks[index])
        holding.filled += 1

    @precondition(held)
    @rule(data=st.data())
    def end(self, data):
        holding = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        self.pool.release(holding.blocks)
        for block in reversed(holding.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                if self.contents_of(block) is None:
                    self.empty.add(block)
                else:
                    self.idle.append(block)

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check()
        assert self.pool.free == len(self.empty) + len(self.idle)
        assert [self.pool.is_idle(block) for block in range(self.TOTAL)] == [count == 0 for count in self.users]
        for tenant, chain in {*self.found_at, ("a", (0, 1, 1)), ("b", (1, 0))}:
            assert self.pool.match(keys_of(text(*chain), tenant)) == self.expected_match(tenant, chain)

    def teardown(self):
        for holding in self.holdings:
            self.pool.release(holding.blocks)
        self.pool.check()
        assert self.pool.free == self.TOTAL


TestPoolAgreesWithItsModel = PoolMachine.TestCase
TestPoolAgreesWithItsModel.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_contents_of_released_blocks_are_found_until_the_blocks_are_taken():
    pool, keys = BlockPool(4), keys_of(text(1, 2))
    blocks = fill(pool, keys)
    pool.release(blocks)
    assert pool.match(keys) == blocks
    assert pool.free == 4
    for _ in range(4):
        pool.allocate()
    assert pool.match(keys) == []
    assert pool.free == 0


def test_empty_blocks_are_allocated_before_cached_ones():
    pool, keys = BlockPool(5), keys_of(text(1, 2))
    pool.release(fill(pool, keys))
    for _ in range(3):
        pool.allocate()
    assert len(pool.match(keys)) == 2


def test_the_end_of_a_text_is_evicted_before_its_beginning():
    pool, keys = BlockPool(3), keys_of(text(1, 2, 3))
    blocks = fill(pool, keys)
    pool.release(blocks)
    for left in (2, 1, 0):
        pool.allocate()
        assert pool.match(keys) == blocks[:left]


def test_the_least_recently_used_text_is_evicted_first():
    pool = BlockPool(2)
    first, second = keys_of(text(1)), keys_of(text(2))
    pool.release(fill(pool, first))
    pool.release(fill(pool, second))
    pool.share(*pool.match(first))
    pool.release(pool.match(first))
    pool.allocate()
    assert pool.match(second) == []
    assert len(pool.match(first)) == 1


def test_a_shared_block_is_free_only_after_its_last_release():
    pool, keys = BlockPool(2), keys_of(text(1))
    (block,) = fill(pool, keys)
    pool.share(block)
    assert pool.free == 1
    pool.release([block])
    assert pool.free == 1
    assert not pool.is_idle(block)
    pool.release([block])
    assert pool.free == 2
    assert pool.is_idle(block)


def test_of_two_blocks_with_the_same_contents_the_first_is_found():
    pool, keys = BlockPool(3), keys_of(text(1))
    first, second = fill(pool, keys), fill(pool, keys)
    assert pool.match(keys) == first
    pool.release(second)
    pool.check()
    pool.release(first)
    assert pool.match(keys) == first


def test_a_chain_is_matched_up_to_its_first_gap():
    pool, keys = BlockPool(4), keys_of(text(1, 2, 3))
    blocks = [pool.allocate() for _ in keys]
    pool.remember(blocks[0], keys[0])
    pool.remember(blocks[2], keys[2])
    assert pool.match(keys) == blocks[:1]


def test_tenants_never_hit_each_others_blocks():
    pool = BlockPool(8)
    tenants = ("", "a", "b", "a\0", "ab")
    mine = fill(pool, keys_of(text(1, 2), "a"))
    for tenant in tenants:
        assert pool.match(keys_of(text(1, 2), tenant)) == (mine if tenant == "a" else [])
    assert len({root_digest(tenant) for tenant in tenants}) == len(tenants)


def test_equal_blocks_after_different_prefixes_have_different_keys():
    pool = BlockPool(4)
    fill(pool, keys_of(text(1, 9)))
    assert pool.match(keys_of(text(2, 9))) == []
    assert keys_of(text(1, 9))[1].digest != keys_of(text(2, 9))[1].digest


@pytest.mark.parametrize("field_name", ["tokens", "parent"])
def test_a_collision_of_digests_is_a_miss(field_name):
    pool, (key,) = BlockPool(3), keys_of(text(7))
    (block,) = fill(pool, [key])
    other = replace(key, **{field_name: bytes(len(getattr(key, field_name)))})
    assert other.digest == key.digest
    assert pool.match([other]) == []

    collided = pool.allocate()
    pool.remember(collided, other)  # the one that came first stays
    pool.check()
    assert pool.match([key]) == [block]
    assert pool.match([other]) == []
    pool.release([collided, block])
    pool.check()
    assert pool.free == 3


def test_keys_do_not_depend_on_how_a_text_was_appended():
    tokens = list(range(1000, 1000 + 5 * BLOCK_SIZE + 3))
    keys = []
    for end in range(len(tokens) + 1):
        extend_keys(keys, tokens[:end], "t")
        assert len(keys) == end // BLOCK_SIZE
    assert keys == keys_of(tokens, "t")
    assert len({key.digest for key in keys}) == 5
