"""What the prefix cache has for a request that cannot start is looked up once, and again only when it has changed."""

import random

import pytest
from lockstep_engine.blocks import HostSizes
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.matches import Match, Matches
from lockstep_engine.step_chooser import StepChooser
from scripted_ranks import Server, words

LAZY = HotWindow(sink=1, size=2)


@pytest.fixture
def look_ups(monkeypatch):
    """How many there have been, as the only element of a list."""
    counts = [0]

    def counting(chooser, sequence, look_up=StepChooser.find_match):
        before = chooser.blocks.matches.get(sequence.request.id, len(sequence.tokens))
        counts[0] += before is None
        return look_up(chooser, sequence)

    monkeypatch.setattr(StepChooser, "find_match", counting)
    return counts


def test_a_blocked_prompt_is_looked_up_once_while_others_fill_blocks(look_ups):
    server = Server(blocks=60, max_seqs=8, context_length=1024)
    running = [server.submit(words(20, seed=seed), max_tokens=200) for seed in range(3)]
    server.step()
    blocked = server.submit(words(900, seed=9))
    look_ups[0] = 0
    filled = server.pool.free
    for _ in range(8 * BLOCK_SIZE):
        server.step()
    assert filled - server.pool.free >= 3 * 8
    assert not server.computed(blocked)
    assert look_ups == [1]
    server.run()
    for number in (*running, blocked):
        assert server.ids(number) == server.expected(number)
    assert look_ups[0] <= 1 + len(running)


def test_one_request_of_a_tenant_at_its_limit_is_looked_up_in_a_step(look_ups):
    """However many of its requests wait for its share, and begin with the same cached text."""
    server = Server(blocks=60, tenant_share=0.5, max_seqs=8, context_length=1024)
    document = words(25 * BLOCK_SIZE, seed=1)
    running = server.submit(document, tenant="greedy", max_tokens=60)
    while not server.ids(running):
        server.step()
    waiting = [server.submit([*document, *words(70, seed=each)], tenant="greedy", max_tokens=4) for each in range(30)]
    for _ in range(40):
        before = look_ups[0]
        server.step()
        assert look_ups[0] <= before + 1
    assert not any(map(server.computed, waiting))
    server.run()
    assert all(server.ids(number) == server.expected(number) for number in (running, *waiting))


def test_a_blocked_prompt_is_looked_up_again_when_its_prefix_is_there(look_ups):
    server = Server(blocks=22, max_seqs=2)
    prefix = words(6 * BLOCK_SIZE, seed=1)
    first = server.submit([*prefix, 1], max_tokens=40)
    server.step()
    second = server.submit([*prefix, *words(14 * BLOCK_SIZE, seed=2)], max_tokens=4)
    server.run()
    assert server.computed(second)[0][0] == 6 * BLOCK_SIZE
    assert server.ids(first) == server.expected(first)
    assert server.ids(second) == server.expected(second)


@pytest.mark.parametrize("host", [None, HostSizes(slots=12, slot_bytes=1, hot_slots=2, step_slots=4)], ids=["", "host"])
@pytest.mark.parametrize("hot_window", [None, LAZY], ids=["hot", "cold"])
def test_what_is_remembered_is_what_would_be_found(host, hot_window, monkeypatch):
    """Random requests with common prefixes of three tenants, in small pools."""
    reused = []

    def compare(chooser, sequence, match=StepChooser.find_match):
        found = match(chooser, sequence)
        reused.append(chooser.blocks.matches.get(sequence.request.id, len(sequence.tokens)) is not None)
        assert found == chooser.blocks.look_up(sequence, chooser.cacheable_keys(sequence))
        return found

    monkeypatch.setattr(StepChooser, "find_match", compare)
    dice = random.Random(7)
    cold, slots = (0, 2) if hot_window is None else (20, 2)
    if host is not None and hot_window is None:
        host = HostSizes(slots=12, slot_bytes=1, hot_slots=1, step_slots=4)
        slots = 1
    assert host is None or host.hot_slots == slots
    server = Server(
        blocks=24, cold_blocks=cold, host=host, hot_window=hot_window, tenant_share=0.7, context_length=256, depth=2
    )
    prefixes = [words(length, seed=length) for length in (40, 100, 130)]
    for _ in range(400):
        if len(server.scheduler.sequences.waiting) < 5:
            prompt = [*dice.choice(prefixes), *words(dice.randint(1, 60), seed=dice.randint(0, 9))]
            server.submit(
                prompt, max_tokens=dice.randint(1, 40), tenant=dice.choice("abc"), priority=dice.choice([-1, 0, 0, 1])
            )
        if dice.random() < 0.05:
            server.cancel(dice.randrange(len(server.requests)))
        server.step()
    server.run()
    assert reused.count(True) > 50
    assert reused.count(False) > 50
    server.assert_idle()


def test_there_is_a_bound_on_what_is_remembered():
    matches = Matches()
    found = Match([], 1, None, None)
    for number in range(100):
        matches.remember(str(number), found)
    assert sum(matches.get(str(number), 1) is not None for number in range(100)) == 8
    matches.forget("0")
    matches.remember("100", found)
    assert matches.get("100", 1) is found
    assert matches.get("100", 2) is None
