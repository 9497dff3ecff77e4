"""The prefix cache's tier in host memory, as the driver keeps it: plans order every copy, in time and within bounds."""

import random
from dataclasses import replace

import pytest
from lockstep_common.errors import ErrorCode
from lockstep_engine.blocks import BlockKey, HostSizes, PoolSizes, extend_keys
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.host_tier import HostTier
from lockstep_engine.prefix_log import PrefixLog
from scripted_ranks import Server, words
from test_prefix_log import EVERYTHING, Follower, held_by

LAZY = HotWindow(sink=1, size=2)
IMMEDIATE = HotWindow(sink=0, size=0)
HOST = HostSizes(slots=200, slot_bytes=10, hot_slots=3, step_slots=60)
KEY = BlockKey(b"digest", b"parent", b"tokens")
LONG = 15 * BLOCK_SIZE + 5


def serve(hot_window=LAZY, host=HOST, blocks=24, **settings):
    """The pools hold little more than one long text."""
    if hot_window is None:
        host = HostSizes(host.slots, host.slot_bytes, 1, host.step_slots)
    defaults = {"cold_blocks": 16 if hot_window else 0, "context_length": 320, "max_batch_tokens": 64}
    return Server(hot_window=hot_window, host=host, blocks=blocks, **{**defaults, **settings})


def slow():
    """A server whose steps copy little, and whose tier has several long texts."""
    server = serve(host=HostSizes(slots=300, slot_bytes=10, hot_slots=3, step_slots=4), max_batch_tokens=16)
    for seed in range(5):
        ask(server, seed)
    assert server.pool.host.usage.dropped == 0
    return server


def ask(server, seed, count=LONG, **settings):
    """A request that runs alone to its end; how many tokens of its prompt were cached."""
    number = server.submit(words(count, seed), max_tokens=3, **settings)
    server.run()
    assert server.ids(number) == server.expected(number)
    server.assert_idle()
    return server.outputs[number][0].cached_tokens


@pytest.mark.parametrize("hot_window", [None, LAZY, IMMEDIATE], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_that_the_pools_have_evicted_comes_back(hot_window, depth):
    server = serve(hot_window, depth=depth)
    for seed in range(5):
        assert ask(server, seed) == 0
    assert ask(server, 0) == LONG // BLOCK_SIZE * BLOCK_SIZE
    usage = server.pool.host.usage
    assert usage.hits == 1
    assert (usage.copied_in, usage.copied_out) == (server.ranks.host.copied["in"], server.ranks.host.copied["out"])
    assert usage.copied_in >= 10  # the others were still in the pools
    assert usage.dropped == 0


def test_without_the_tier_it_does_not():
    server = serve(host=HostSizes())
    for seed in range(5):
        ask(server, seed)
    assert ask(server, 0) <= BLOCK_SIZE
    assert server.ranks.host.copied == {"in": 0, "out": 0}


def test_other_tenants_do_not_hit():
    server = serve()
    for seed in range(5):
        ask(server, seed, tenant="a")
    assert ask(server, 0, tenant="b") == 0


def test_the_oldest_text_is_evicted_first():
    server = serve(host=HostSizes(slots=60, slot_bytes=10, hot_slots=3, step_slots=60))
    for seed in range(7):
        ask(server, seed)
    usage = server.pool.host.usage
    assert usage.used_bytes <= 600
    assert ask(server, 4) > LONG - 2 * BLOCK_SIZE
    assert ask(server, 0) <= BLOCK_SIZE


def test_a_prompt_is_loaded_over_several_steps_while_others_run():
    server = slow()
    server.ranks.host.most["in"] = 0
    other = server.submit(words(20, 99), max_tokens=40)
    server.step()
    number = server.submit(words(LONG, 1), max_tokens=3)
    steps = 0
    while not server.computed(number):
        assert server.step()
        steps += 1
    assert server.computed(number)[0][0] > LONG - 2 * BLOCK_SIZE
    assert steps > 2
    assert server.ranks.host.most["in"] <= 4
    server.run()
    for each in (other, number):
        assert server.ids(each) == server.expected(each)
    server.assert_idle()


def test_a_prompt_that_nobody_else_delays_is_loaded_at_once():
    server = slow()
    number = server.submit(words(LONG, 1), max_tokens=3)
    server.step()
    assert server.computed(number)[0][0] > LONG - 2 * BLOCK_SIZE
    assert server.ranks.host.most["in"] > 4


def test_a_running_sequence_reads_a_cold_block_that_another_one_is_loading():
    """The first block that leaves its hot window is one that the last request needs cold, and that host memory has."""
    server = serve(host=HostSizes(600, 10, 3, 3), blocks=26, cold_blocks=24, context_length=400)
    text = words(12 * BLOCK_SIZE, 7)
    longer = [*text, *words(64, 8)]
    others = [words(count, seed) for seed, count in enumerate((289, 191, 303, 276), 20)]
    for prompt in ([*text, *words(5, 9)], longer, *others):
        server.submit(prompt, max_tokens=2)
        server.run()
    numbers = [server.submit(words(20, 99), max_tokens=60)]
    server.step()
    numbers.append(server.submit([*text, *words(34, 30)], max_tokens=60))
    server.step()
    numbers.append(server.submit([*longer, *words(9, 31)], max_tokens=5))
    server.run()
    assert [server.ids(each) for each in numbers] == [server.expected(each) for each in numbers]
    server.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_whose_loads_are_done_waits_for_the_room_of_one_that_is_loading(depth):
    server = serve(None, HostSizes(300, 10, 1, 2), blocks=25, depth=depth, context_length=512)
    length = 11 * BLOCK_SIZE + 5
    for seed, count in ((1, length), (2, length), (3, 20 * BLOCK_SIZE), (4, 22 * BLOCK_SIZE)):
        ask(server, seed, count)
    numbers = [server.submit(words(20, 99), max_tokens=3)]
    server.step()
    numbers.append(server.submit([*words(length, 1), *words(60, 50)], max_tokens=3))
    server.step()
    numbers.append(server.submit([*words(length, 2), *words(4, 51)], max_tokens=3, priority=1))
    server.run()
    assert [server.ids(each) for each in numbers] == [server.expected(each) for each in numbers]
    server.assert_idle()


@pytest.mark.parametrize(("hot_window", "cold_blocks"), [(None, 0), (HotWindow(sink=1, size=4), 40)], ids=str)
def test_all_that_a_step_evicts_is_kept_however_little_it_may_load(hot_window, cold_blocks):
    """Steps allocate four blocks of each pool and more, a prompt that comes back all of its own."""
    host = HostSizes(slots=4000, slot_bytes=10, hot_slots=2, step_slots=2)
    server = serve(hot_window, host, cold_blocks=cold_blocks, blocks=40 - cold_blocks // 3, context_length=600)
    for seed in range(6):
        ask(server, seed, 485)
    assert [ask(server, seed, 485) for seed in (1, 2, 3)] == [480, 480, 480]
    assert server.pool.host.usage.dropped == 0


@pytest.mark.parametrize("hot_window", [None, LAZY], ids=str)
@pytest.mark.parametrize("slots", [60, 400])
def test_blocks_that_move_between_the_tiers_are_not_announced_again(hot_window, slots):
    server = serve(hot_window, HostSizes(slots, 10, 3, 60))
    follower = Follower(server)
    for seed in (0, 1, 2, 3, 2, 0, 4, 2):
        before = set(follower.held)
        ask(server, seed)
        changes = follower.follow()
        assert not set(changes.added) & before
        assert follower.held == held_by(server)
    assert server.pool.host.usage.copied_in > 10


def test_a_hit_counts_once_for_a_request_that_is_preempted_and_loaded_again():
    server = serve(None)
    for seed in range(5):
        ask(server, seed)
    number = server.submit(words(LONG, 0), max_tokens=30)
    server.step()
    first = server.pool.host.usage
    assert first.hits == 1
    server.submit(words(100, 9), max_tokens=100, priority=1)
    server.run()
    assert server.restarts() == 1
    assert server.ids(number) == server.expected(number)
    usage = server.pool.host.usage
    assert usage.copied_in > first.copied_in
    assert usage.hits == 1


def test_a_request_that_ends_while_it_is_loaded_leaves_what_others_can_use():
    server = slow()
    server.submit(words(20, 99), max_tokens=40)
    server.step()
    number = server.submit(words(LONG, 1), max_tokens=3)
    server.step()
    before = server.ranks.host.copied["in"]
    assert before > 0
    assert server.computed(number) == []
    server.cancel(number)
    server.pool.check()
    again = server.submit(words(LONG, 1), max_tokens=3)
    server.run()
    assert server.ids(again) == server.expected(again)
    assert server.outputs[again][0].cached_tokens > LONG - 2 * BLOCK_SIZE
    assert server.ranks.host.copied["in"] < 2 * LONG // BLOCK_SIZE, "what was loaded is not loaded again"
    server.assert_idle()


def test_a_request_for_whose_settings_there_is_no_memory_while_it_is_loaded_ends_with_an_error():
    """The plan with its settings computes nothing of it; later ones must not sample without them."""
    server = slow()
    other = server.submit(words(20, 99), max_tokens=40)
    server.step()
    number = server.submit(words(LONG, 1), max_tokens=3, presence_penalty=0.5)
    plan = server.scheduler.schedule()
    (added,) = plan.added
    assert added.sampling_row not in plan.sampling_rows
    result = server.ranks.execute(plan)
    result.unserved = [added.sampling_row]
    server.finish(result)
    (output,) = server.outputs[number]
    assert (output.position, output.ids, output.error.code) == (0, (), ErrorCode.OVERLOADED)
    assert server.scheduler.sequences.ended[-1] == str(number)
    server.run()
    assert server.outputs[number] == [output]
    assert server.ids(other) == server.expected(other)
    server.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_for_whose_settings_there_is_no_memory_while_it_is_computed_ends_with_an_error(depth):
    server = serve(None)
    other = server.submit(words(20, 99), max_tokens=10)
    number = server.submit(words(20, 1), max_tokens=10)
    plans = [server.scheduler.schedule() for _ in range(depth)]
    results = [server.ranks.execute(plan) for plan in plans]
    results[0].unserved = [plans[0].added[1].sampling_row]
    for result in results:
        server.finish(result)
    (output,) = server.outputs[number]
    assert (output.position, output.ids, output.error.code) == (0, (), ErrorCode.OVERLOADED)
    server.run()
    assert server.ids(other) == server.expected(other)
    server.assert_idle()


def test_a_new_request_with_the_id_of_one_that_was_cancelled_goes_on_if_there_was_no_memory_for_that():
    server = serve(None)
    number = server.submit(words(20, 1), max_tokens=10)
    plan = server.scheduler.schedule()
    server.cancel(number)
    assert server.scheduler.submit(server.requests[number]) is None
    result = server.ranks.execute(plan)
    result.unserved = [plan.added[0].sampling_row]
    server.finish(result)
    server.run()
    assert server.ids(number) == server.expected(number)
    server.assert_idle()


@pytest.fixture
def tier():
    """A tier with one block, which a plan has copied from block 3 to slot 0."""
    tier = HostTier(HostSizes(slots=2, slot_bytes=10, hot_slots=1, step_slots=2), (PrefixLog(), PrefixLog()))
    tier.evicted(3, KEY, cold=False, is_wanted=True)
    spills, loads = tier.take()
    assert (spills.tolist(), loads) == ([[3, 0]], None)
    return tier


def test_a_block_that_is_evicted_before_it_was_loaded_is_not_loaded_any_more(tier):
    tier.pin([KEY], cold=False)
    tier.load(5, KEY, cold=False)
    tier.check()
    tier.evicted(5, KEY, cold=False, is_wanted=True)
    assert tier.take() == (None, None)
    tier.check()
    assert tier.has(KEY, cold=False)
    tier.pin([KEY], cold=False)
    tier.load(6, KEY, cold=False)
    assert tier.take()[1].tolist() == [[6, 0]]


def test_a_block_that_is_loaded_keeps_its_slots(tier):
    tier.pin([KEY], cold=False)
    tier.load(5, KEY, cold=False)
    for number in range(3):
        tier.evicted(7, BlockKey(b"other%d" % number, b"", b""), cold=False, is_wanted=True)
        tier.check()
    spills, loads = tier.take()
    assert (spills.tolist(), loads.tolist()) == ([[7, 1]], [[5, 0]])
    assert tier.usage.dropped == 2


def test_equal_digests_of_different_tokens_are_a_miss(tier):
    assert not tier.has(replace(KEY, tokens=b"others"), cold=False)
    assert not tier.has(KEY, cold=True)
    assert tier.has(KEY, cold=False)


def test_new_ranks_begin_with_an_empty_tier():
    server = serve()
    for seed in range(5):
        ask(server, seed)
    server.scheduler.clear()
    server.scheduler.reset(PoolSizes(24, 16, HOST))
    assert server.pool.host.usage.blocks == 0
    keys = []
    extend_keys(keys, words(LONG, 0), "")
    assert server.pool.match(keys).known == 0


@pytest.mark.parametrize("hot_window", [None, LAZY, HotWindow(sink=2, size=1), IMMEDIATE], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slots", [12, 60, 400])
def test_whatever_happens_every_stream_reads_its_own_text(hot_window, depth, slots):
    """Requests come, are cancelled, preempt each other and are forgotten in a failed plan. `ScriptedRanks` checks that
    a slot is read only after it was written and with the text that was, and the log is followed."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    budget = rng.choice([3, 8, 40])
    host = HostSizes(slots=slots, slot_bytes=1, hot_slots=3, step_slots=budget)
    server = serve(hot_window, host, depth=depth, blocks=rng.choice([20, 28]), context_length=256)
    follower = Follower(server)
    live, whole = [], []
    for _ in range(80):
        if rng.random() < 0.4 and len(server.scheduler.sequences.waiting) < 4:
            text = [*words(rng.choice([0, 64, 100]), rng.randrange(2)), *words(rng.randrange(1, 90), rng.randrange(6))]
            options = {"tenant": rng.choice("ab"), "priority": rng.choice([0, 0, 1])}
            live.append(server.submit(text, max_tokens=rng.randrange(1, 30), **options))
        if live and rng.random() < 0.1:
            server.cancel(live.pop(rng.randrange(len(live))))
        for _ in range(rng.randrange(6)):
            server.step()
        if rng.random() < 0.02:
            in_flight = len(server._results)
            (ended,) = server.scheduler.shed(in_flight) or (None,)
            live = [each for each in live if ended is None or str(each) != ended.request_id]
        server.pool.check()
        follower.follow()
        assert follower.held == held_by(server)
        assert set(server.scheduler.newest_prefixes(EVERYTHING)) == follower.held
        whole += [each for each in live if server.finish_reason(each) is not None]
        live = [each for each in live if server.finish_reason(each) is None]
    server.run()
    for number in (*whole, *live):
        assert server.ids(number) == server.expected(number)
    if slots == 400:  # more than all blocks of the pools take, so that they are never all pinned
        assert server.pool.host.usage.dropped == 0
    server.assert_idle()
