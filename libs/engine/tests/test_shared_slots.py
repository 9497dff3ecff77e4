"""Slots that the driver reads and writes itself: never while a plan in flight copies from or to them."""

import random

import pytest
from lockstep_engine.blocks import BlockKey, HostSizes, extend_keys
from lockstep_engine.config import HotWindow
from lockstep_engine.host_tier import HostTier
from lockstep_engine.prefix_log import PrefixLog
from lockstep_engine.shared_slots import SharedSlots
from scripted_ranks import Server, words

LAZY = HotWindow(sink=1, size=2)


def key(number):
    return BlockKey(b"digest %d" % number, b"parent", b"tokens")


def tier(slots=4, hot_slots=1, shared=None):
    shared = shared or SharedSlots()
    return HostTier(HostSizes(slots, 10, hot_slots, 2), (PrefixLog(), PrefixLog()), shared=shared), shared


def test_a_block_is_read_once_the_plan_that_copies_it_has_been_executed():
    host, shared = tier()
    assert host.stage(3, key(0), cold=False)
    assert host.has_spills
    assert host.slots_of(key(0), cold=False) == ()
    spills, _ = host.take()
    assert host.slots_of(key(0), cold=False) == ()
    shared.executed()
    assert host.slots_of(key(0), cold=False) == (spills[0][1],)
    assert host.slots_of(key(1), cold=False) is None
    assert host.slots_of(BlockKey(key(0).digest, b"parent", b"others"), cold=False) is None


def test_slots_that_a_plan_in_flight_copies_are_not_filled():
    host, shared = tier()
    for number in range(4):
        host.stage(number, key(number), cold=False)
    host.take()
    assert host.reserve(2, cold=False) == []
    host.check()
    shared.executed()
    found = host.reserve(9, cold=False)
    assert len(found) == 2  # no more than half of the tier
    assert shared.filling == {slot for slots in found for slot in slots}
    host.check()
    assert host.reserve(1, cold=False) == []


def test_slots_that_are_filled_get_no_other_use():
    host, shared = tier()
    (first,), (second,) = host.reserve(2, cold=False)
    for number in range(4):
        host.stage(number, key(number), cold=False)
    spills, _ = host.take()
    assert {first, second}.isdisjoint(spills[:, 1].tolist())
    shared.executed()
    host.check()
    host.adopt(key(9), (first,), cold=False)
    host.give_back((second,))
    assert shared.filling == set()
    host.check()
    assert host.slots_of(key(9), cold=False) == (first,)


def test_what_is_filled_outlives_a_tier_that_is_forgotten():
    host, shared = tier()
    (slots,) = host.reserve(1, cold=False)
    host.take()
    shared.forget(0)
    again, _ = tier(shared=shared)
    again.check()
    again.adopt(key(1), slots, cold=False)
    again.check()
    assert again.has(key(1), cold=False)


def test_a_tier_that_is_forgotten_may_still_be_copied_to():
    host, shared = tier()
    host.stage(1, key(1), cold=False)
    spills, _ = host.take()
    shared.forget(1)
    again, _ = tier(shared=shared)
    found = [slot for slots in again.reserve(9, cold=False) for slot in slots]
    assert len(found) == 2
    assert spills[0][1] not in found
    again.check()


def test_a_block_that_came_by_itself_meanwhile_is_not_there_twice():
    host, shared = tier()
    (slots,) = host.reserve(1, cold=False)
    host.stage(5, key(1), cold=False)
    host.take()
    shared.executed()
    host.adopt(key(1), slots, cold=False)
    assert host.slots_of(key(1), cold=False) not in (slots, None)
    host.check()


def test_what_was_only_read_is_evicted_first():
    host = HostTier(HostSizes(2, 10, 1, 2), (PrefixLog(), PrefixLog()), lambda *_: True, SharedSlots())
    host.evicted(1, key(1), cold=False, is_wanted=True)
    host.stage(2, key(2), cold=False)
    host.take()
    host.demote(key(2), cold=False)
    host.stage(3, key(3), cold=False)
    assert host.has(key(1), cold=False)
    assert not host.has(key(2), cold=False)


class LateServer(Server):
    """Its ranks execute a plan when its result is due: what the driver does itself happens before."""

    def __init__(self, **settings):
        super().__init__(shares_slots=True, **settings)
        self.fetches = []

    def plan(self):
        while len(self._results) < self._depth and (plan := self.scheduler.schedule()) is not None:
            self._results.append(plan)
            self.pool.check()

    def finish(self, result):
        super().finish(self.ranks.execute(result))

    @property
    def slots(self):
        return self.ranks.host._slots

    def begin_fetch(self, text, *, cold):
        keys = []
        extend_keys(keys, text, "")
        missing = [each for each in keys if not self.pool.has(each, cold=cold)]
        reserved = self.pool.host.reserve(len(missing), cold=cold)
        for slots in reserved:
            for slot in slots:
                self.slots[slot] = "what nobody may read"
        self.fetches.append((missing, reserved, cold))

    def end_fetch(self, rng):
        missing, reserved, cold = self.fetches.pop(rng.randrange(len(self.fetches)))
        count = rng.randrange(len(reserved) + 1)
        for each, slots in zip(missing[:count], reserved, strict=False):
            for part, slot in enumerate(slots):
                self.slots[slot] = (cold, part, _text(each))
            self.pool.host.adopt(each, slots, cold=cold)
        for slots in reserved[count:]:
            self.pool.host.give_back(slots)

    def stage(self, text, *, cold):
        keys = []
        extend_keys(keys, text, "")
        for each in keys:
            self.pool.stage(each, cold=cold)

    def read(self, text, *, cold):
        """Check the contents of all blocks of a text that may be read; how many."""
        keys = []
        extend_keys(keys, text, "")
        count = 0
        for each in keys:
            slots = self.pool.host.slots_of(each, cold=cold) or ()
            for part, slot in enumerate(slots):
                assert self.slots[slot] == (cold, part, _text(each))
            count += bool(slots)
        return count


def _text(each):
    return tuple(int.from_bytes(each.tokens[at : at + 4], "little") for at in range(0, len(each.tokens), 4))


@pytest.mark.parametrize("hot_window", [None, LAZY], ids=str)
@pytest.mark.parametrize("slots", [20, 200])
def test_whatever_happens_driver_and_ranks_read_what_was_written(hot_window, slots):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    hot_slots = 3 if hot_window else 1
    server = LateServer(
        host=HostSizes(slots, 1, hot_slots, 8), hot_window=hot_window, depth=2, blocks=24,
        cold_blocks=16 if hot_window else 0, context_length=256,
    )  # fmt: skip
    texts = [words(rng.choice([70, 130, 200]), number) for number in range(6)]
    live, read = [], 0
    for _ in range(250):
        text, cold = rng.choice(texts), hot_window is not None and rng.random() < 0.5
        chance = rng.random()
        if chance < 0.2 and len(server.scheduler.sequences.waiting) < 4:
            live.append(server.submit([*text, *words(rng.randrange(1, 9), 9)], max_tokens=rng.randrange(1, 9)))
        elif chance < 0.35:
            server.begin_fetch(text, cold=cold)
        elif chance < 0.5 and server.fetches:
            server.end_fetch(rng)
        elif chance < 0.6:
            server.stage(text, cold=cold)
        elif chance < 0.62:
            ended = {each.request_id for each in server.scheduler.shed(len(server._results))}
            live = [each for each in live if str(each) not in ended]
        elif chance < 0.7:
            server.plan()
        else:
            server.step()
        server.pool.check()
        read += server.read(text, cold=cold)
    while server.fetches:
        server.end_fetch(rng)
    server.run()
    for number in live:
        assert server.ids(number) == server.expected(number)
    assert read
    assert not server.scheduler.slots.filling
    server.assert_idle()
