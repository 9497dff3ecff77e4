"""The log of the prefix cache: whoever follows its changes knows what the cache holds."""

import random

import pytest
from lockstep_common.prefix_keys import compressed_key, key_of, prefix_keys
from lockstep_engine.blocks import PoolSizes, extend_keys
from lockstep_engine.config import HotWindow
from lockstep_engine.prefix_log import PrefixChanges, PrefixLog
from scripted_ranks import Server, words

EVERYTHING = 1 << 30


class Follower:
    """Knows what the changes tell."""

    def __init__(self, server):
        self.scheduler = server.scheduler
        self.scheduler.note_prefixes(wanted=True)
        self.held = set()

    def follow(self):
        changes = self.scheduler.take_prefix_changes()
        if not changes.is_complete:
            self.held = set(self.scheduler.newest_prefixes(EVERYTHING))
        assert not set(changes.added) & set(changes.removed)
        self.held |= set(changes.added)
        self.held -= set(changes.removed)
        return changes


def held_by(server):
    pool = server.pool
    hot, cold = (
        {*each._by_digest, *(digest for is_cold, digest in pool.host._held if is_cold == (each is pool.cold))}
        for each in (pool.hot, pool.cold)
    )
    return {key_of(digest) for digest in hot} | {compressed_key(key_of(digest)) for digest in cold}


@pytest.mark.parametrize("hot_window", [None, HotWindow(sink=1, size=2), HotWindow(sink=0, size=0)], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_changes_add_up_to_what_the_cache_holds(hot_window, depth):
    """Few blocks, so that requests of two tenants evict each other's and are preempted."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    cold = 24 if hot_window else 0
    server = Server(hot_window=hot_window, blocks=24, cold_blocks=cold, context_length=256, depth=depth)
    follower = Follower(server)
    added = removed = 0
    for _ in range(150):
        if rng.random() < 0.3 and len(server.scheduler.sequences.waiting) < 5:
            text = words(rng.randrange(1, 150), seed=rng.randrange(4))
            server.submit(text, max_tokens=rng.randrange(1, 40), tenant=rng.choice("ab"))
        for _ in range(rng.randrange(6)):
            server.step()
        if rng.random() < 0.7:
            changes = follower.follow()
            added, removed = added + len(changes.added), removed + len(changes.removed)
            assert follower.held == held_by(server)
            assert set(server.scheduler.newest_prefixes(EVERYTHING)) == follower.held
    assert min(added, removed) > 20


def test_a_report_names_the_blocks_that_a_router_computes_from_the_prompt():
    server = Server()
    follower = Follower(server)
    prompt = words(100, seed=1)
    server.submit(prompt, tenant="search", max_tokens=1)
    server.run()
    changes = follower.follow()
    assert list(changes.added) == prefix_keys("search", prompt, 256), "in order: parents first"
    assert changes.removed == ()
    assert follower.follow() == PrefixChanges()


def test_the_newest_blocks_are_those_of_the_last_texts_from_their_beginnings():
    server = Server(blocks=64)
    texts = [words(81, seed=seed) for seed in range(3)]
    for text in texts:
        server.submit(text, max_tokens=1)
        server.run()
    running = server.submit(words(40, seed=9), max_tokens=50)
    server.step()
    keys = []
    extend_keys(keys, server.requests[running].prompt_ids, "")
    for text in (texts[2], texts[1]):
        chain = []
        extend_keys(chain, text, "")
        keys += chain
    expected = [key_of(key.digest) for key in keys]
    assert server.scheduler.newest_prefixes(12) == expected
    assert server.scheduler.newest_prefixes(4) == expected[:4]
    assert len(server.scheduler.newest_prefixes(EVERYTHING)) == 17


@pytest.mark.parametrize("begin_again", ["shed", "reset"])
def test_a_cache_that_begins_again_makes_the_changes_incomplete(begin_again):
    server = Server()
    follower = Follower(server)
    server.submit(words(100, seed=1), max_tokens=1)
    server.run()
    follower.follow()
    assert follower.held
    if begin_again == "shed":
        server.scheduler.shed(0)
    else:
        server.scheduler.clear()
        server.scheduler.reset(PoolSizes(32))
    assert not follower.follow().is_complete
    assert follower.held == set()


def number(digest):
    return int(digest)


def take(log, holds):
    return log.take(lambda digest: number(digest) in holds, number)


def test_nothing_is_noted_while_nobody_asks():
    log = PrefixLog()
    log.note(b"1")
    log.turn(on=True)
    log.note(b"2")
    assert take(log, {1, 2, 3}) == PrefixChanges((2,))
    log.turn(on=False)
    log.note(b"3")
    assert take(log, {1, 2, 3}) == PrefixChanges()


def test_too_many_changes_count_as_lost():
    log = PrefixLog(limit=3)
    log.turn(on=True)
    for each in range(4):
        log.note(b"%d" % each)
    assert take(log, {1}) == PrefixChanges(is_complete=False)
    log.note(b"5")
    assert take(log, {1}) == PrefixChanges((), (5,))


def test_a_block_that_came_and_went_again_is_named_once():
    log = PrefixLog()
    log.turn(on=True)
    for digest in (b"1", b"2", b"1"):
        log.note(digest)
    assert take(log, {1}) == PrefixChanges((1,), (2,))
