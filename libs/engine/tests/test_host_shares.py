"""How tenants share the prefix cache's tier in host memory: nobody takes more than a share from others, and room that
nobody else needs is used.
"""

import random

import pytest
from lockstep_engine.blocks import BlockKey, HostSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.host_tier import HostTier
from lockstep_engine.prefix_log import PrefixLog
from lockstep_engine.shared_slots import SharedSlots
from scripted_ranks import Server, words


def key(tenant, number):
    return BlockKey(f"{tenant} {number}".encode(), b"parent", b"tokens")


class Tier:
    """A tier of eight slots, and what its tenants have there."""

    def __init__(self, *, share=0.5, slots=8, hot_slots=1):
        self.slots = SharedSlots()
        self.sizes, self.share = HostSizes(slots, 10, hot_slots, slots), share
        self.begin()

    def begin(self):
        """The tier is forgotten, its memory is not."""
        self.host = HostTier(self.sizes, (PrefixLog(), PrefixLog()), shared=self.slots, tenant_share=self.share)

    def spill(self, tenant, *numbers, cold=False):
        for number in numbers:
            self.host.evicted(number, key(tenant, number), cold=cold, is_wanted=True, tenant=tenant)
            self.copy()

    def copy(self):
        self.host.take()
        self.slots.executed()
        self.host.check()

    def has(self, tenant, *, cold=False):
        return [number for number in range(40) if self.host.has(key(tenant, number), cold=cold)]


def test_a_tenant_takes_the_room_that_nobody_needs():
    tier = Tier()
    tier.spill("modest", 0)
    tier.spill("greedy", *range(20))
    assert tier.has("greedy") == list(range(13, 20))
    assert tier.has("modest") == [0]


def test_a_tenant_within_its_share_takes_room_from_one_beyond_it():
    tier = Tier()
    tier.spill("modest", 0)
    tier.spill("greedy", *range(7))
    tier.spill("modest", 1, 2, 3)
    assert tier.has("modest") == [0, 1, 2, 3]
    assert tier.has("greedy") == [3, 4, 5, 6]
    tier.spill("modest", 4)  # beyond its share: at its own cost
    assert tier.has("modest") == [1, 2, 3, 4]
    assert tier.has("greedy") == [3, 4, 5, 6]


def test_the_tenant_furthest_beyond_its_share_gives_room_first():
    tier = Tier(share=0.25)
    tier.spill("some", 0, 1, 2)
    tier.spill("most", *range(5))
    tier.spill("modest", 0, 1)
    assert (tier.has("some"), tier.has("most"), tier.has("modest")) == ([0, 1, 2], [2, 3, 4], [0, 1])


def test_no_more_blocks_are_fetched_for_a_tenant_than_get_slots():
    chance = random.Random(5)
    bounded = 0
    for _ in range(300):
        tier = Tier(share=chance.choice([0.125, 0.25, 0.5, 1.0]), slots=16, hot_slots=chance.choice([1, 2]))
        for number in range(chance.randrange(24)):
            tier.spill(chance.choice("abc"), number, cold=chance.random() < 0.5)
        for tenant in chance.choices("ab", k=3):
            cold = chance.random() < 0.5
            most = tier.host.fillable(cold=cold, tenant=tenant)
            left = (8 - len(tier.slots.fillers)) // (1 if cold else tier.sizes.hot_slots)
            assert len(tier.host.reserve(16, cold=cold, tenant=tenant)) <= most <= left
            bounded += most < left
    assert bounded > 30
    tier = Tier(share=0.25)
    tier.spill("others", *range(8))
    assert tier.host.fillable(cold=True, tenant="a") == len(tier.host.reserve(8, cold=True, tenant="a")) == 2


def test_among_tenants_within_their_shares_the_oldest_block_is_evicted_first():
    tier = Tier(slots=4, share=0.75)
    tier.spill("a", 0, 1)
    tier.spill("b", 0, 1)
    tier.host.keep([key("a", 0)], cold=False)
    tier.spill("c", 0, 1)
    assert (tier.has("a"), tier.has("b"), tier.has("c")) == ([0], [1], [0, 1])


def test_with_the_whole_tier_as_everybodys_share_the_oldest_block_is_evicted_first():
    tier = Tier(share=1.0)
    tier.spill("modest", 0)
    tier.spill("greedy", *range(20))
    assert tier.has("modest") == []
    assert tier.has("greedy") == list(range(12, 20))


def test_blocks_that_come_from_other_machines_count():
    tier = Tier()
    tier.spill("modest", *range(4))
    tier.spill("greedy", *range(4))
    for number, slots in enumerate(tier.host.reserve(4, cold=False, tenant="greedy"), 10):
        assert tier.host.used_by("greedy") == 4
        tier.host.adopt(key("greedy", number), slots, cold=False)
        tier.host.check()
    assert tier.has("modest") == [0, 1, 2, 3]
    assert tier.has("greedy") == [10, 11, 12, 13]


def test_slots_that_are_being_filled_count_also_after_the_tier_was_forgotten():
    tier = Tier()
    first, second = tier.host.reserve(2, cold=False, tenant="greedy")
    tier.begin()
    assert tier.host.used_by("greedy") == 2
    tier.host.adopt(key("greedy", 0), first, cold=False)
    tier.host.give_back(second)
    tier.host.check()
    assert tier.host.used_by("greedy") == 1


def test_a_block_larger_than_a_share_finds_room_for_itself():
    tier = Tier(share=0.1, slots=6, hot_slots=3)
    tier.spill("a", 0)
    tier.spill("b", 0)
    tier.spill("a", 1)
    assert (tier.has("a"), tier.has("b")) == ([1], [0])


@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
def test_nobody_loses_a_block_to_a_tenant_beyond_its_share(share):
    rng = random.Random(f"{share} of the tier")
    tier = Tier(slots=30, share=share, hot_slots=3)
    most = max(3, int(30 * share))
    tenants = ("a", "b", "c", "d")
    reserved = []

    def held():
        return {each: [tier.has(each, cold=cold) for cold in (False, True)] for each in tenants}

    after = held()
    for _ in range(600):
        tenant, cold, number = rng.choice(tenants), rng.random() < 0.5, rng.randrange(40)
        chance = rng.random()
        used = {each: tier.host.used_by(each) for each in tenants}
        before = after
        if chance < 0.6:
            tier.spill(tenant, number, cold=cold)
        elif chance < 0.75:
            slots = tier.host.reserve(1, cold=cold, tenant=tenant)
            reserved += [(tenant, number, cold, each) for each in slots]
        elif chance < 0.9 and reserved:
            of, at, version, slots = reserved.pop(rng.randrange(len(reserved)))
            tier.host.adopt(key(of, at), slots, cold=version)
        elif reserved:
            tier.host.give_back(reserved.pop()[-1])
        else:
            tier.host.keep([key(tenant, number)], cold=cold)
        tier.host.check()
        after = held()
        for other in set(tenants) - {tenant}:
            lost = any(set(old) - set(new) for old, new in zip(before[other], after[other], strict=True))
            if lost:
                assert tier.host.used_by(tenant) <= most
                # Others within their shares lose blocks only once nobody is beyond (or with slots being filled alone).
                assert used[other] > most or reserved or all(tier.host.used_by(each) <= most for each in tenants)


@pytest.mark.parametrize(("share", "is_kept"), [(0.5, True), (1.0, False)])
def test_one_tenants_texts_do_not_push_out_anothers(share, is_kept):
    server = Server(
        host=HostSizes(40, 10, 1, 40), blocks=40, tenant_share=share, context_length=320, max_batch_tokens=64
    )
    text = words(15 * BLOCK_SIZE + 5, 0)

    def ask(prompt, tenant):
        number = server.submit(prompt, max_tokens=3, tenant=tenant)
        server.run()
        assert server.ids(number) == server.expected(number)
        server.assert_idle()
        return server.outputs[number][0].cached_tokens

    assert ask(text, "modest") == 0
    for seed in range(1, 9):
        ask(words(len(text), seed), "greedy")
    assert (ask(text, "modest") == 15 * BLOCK_SIZE) is is_kept
