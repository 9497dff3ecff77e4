"""The cost gate: its rule, what it chooses, and that it finds the faster way where estimates err by a tenth.

Nothing is computed or fetched here; `tools/bench/gate.py` does that.
"""

import math
from random import Random

import pytest
from lockstep_worker.kv_store.gate import ADVANTAGE, LinkEstimate, break_even_blocks, choose
from lockstep_worker.kv_store.link import Link

MIB = 1 << 20
CASES = 200
SEED = 20_240_601
NOISE = 0.25
"""Ways whose times differ by less than this part of the computing are alike: the gate's own margin, and the jitter."""


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def linear(wait_s, block_s):
    return lambda count: wait_s + count * block_s


def test_a_fetch_has_to_be_clearly_faster_than_computing():
    link = LinkEstimate(latency_s=0.0, bytes_per_s=1e9)  # 10 ms a block of 10 MB
    assert choose(10, 10_000_000, link, linear(0.0, 0.01 / ADVANTAGE * 1.01)).blocks == 10
    assert choose(10, 10_000_000, link, linear(0.0, 0.01 / ADVANTAGE * 0.99)).blocks == 0


def test_latency_makes_short_prefixes_be_computed():
    link = LinkEstimate(latency_s=0.1, bytes_per_s=1e9)
    assert choose(5, MIB, link, linear(0.0, 0.01)).blocks == 0
    assert choose(50, MIB, link, linear(0.0, 0.01)).blocks == 50


def test_a_short_prefix_passes_while_the_request_waits_where_the_whole_does_not():
    """Twice as slow as computing, the fetch costs nothing as long as it ends before the request's turn."""
    link = LinkEstimate(latency_s=0.0, bytes_per_s=1e9)
    choice = choose(1000, 10_000_000, link, linear(1.0, 0.005))
    assert 0 < choice.blocks < 1000
    assert choice.fetch_s == pytest.approx(1.0, rel=0.1)
    assert choose(1000, 10_000_000, link, linear(0.0, 0.005)).blocks == 0


def test_other_fetches_are_waited_for():
    alone = LinkEstimate(0.001, 1e9)
    behind = LinkEstimate(0.001, 1e9, waiting_bytes=1_000_000_000)
    assert choose(10, 10_000_000, alone, linear(0.0, 0.05)).blocks == 10
    assert choose(10, 10_000_000, behind, linear(0.0, 0.05)).blocks == 0


def test_the_gate_asks_for_few_estimates():
    asked = []

    def recompute_s(count):
        asked.append(count)
        return count * 1.0

    assert choose(4096, 1, LinkEstimate(0.001, 1e9), recompute_s).blocks == 4096
    assert len(asked) < 40


def test_estimates_that_cannot_be_computed_with_refuse():
    link = LinkEstimate(0.001, 1e9)
    for odd in (math.nan, 0.0, -1.0):
        assert choose(10, MIB, link, lambda _, odd=odd: odd).blocks == 0


def test_break_even_is_where_the_gate_begins_to_let_pass():
    link = LinkEstimate(0.05, 2e9)
    blocks = break_even_blocks(MIB, 0.001, link)
    assert blocks is not None
    assert choose(blocks, MIB, link, linear(0.0, 0.001)).blocks == blocks
    assert choose(blocks - 1, MIB, link, linear(0.0, 0.001)).blocks == 0
    assert break_even_blocks(MIB, 0.0005, link) is None


def test_the_link_measures_what_all_transfers_get_together():
    clock = Clock()
    link = Link(clock)
    assert link.estimate() is None
    link.note_call(0.01)
    assert link.estimate() is None
    with link.transfer(10 * MIB) as one, link.transfer(10 * MIB) as other:
        for _ in range(10):
            clock.now += 0.01
            link.received(one, MIB)
            link.received(other, MIB)
        assert link._transfers == [one, other]
    estimate = link.estimate()
    assert estimate.bytes_per_s == pytest.approx(20 * MIB / 0.09)
    assert estimate.waiting_bytes == 0


def test_what_a_transfer_has_yet_to_get_is_waited_for():
    clock = Clock()
    link = Link(clock)
    link.note_call(0.0)
    with link.transfer(MIB) as first:
        clock.now += 0.01
        link.received(first, MIB)
    with link.transfer(10 * MIB) as second:
        link.received(second, 3 * MIB)
        assert link.estimate().waiting_bytes == 7 * MIB
    assert link.estimate().waiting_bytes == 0


def test_a_transfer_that_gets_next_to_nothing_says_nothing_of_the_bandwidth():
    clock = Clock()
    link = Link(clock)
    link.note_call(0.01)
    with link.transfer(MIB) as transfer:
        clock.now += 1.0
        link.received(transfer, 100)
    assert link.estimate() is None


def transfer(link, count, took_s):
    with link.transfer(count) as transfer:
        link.clock.now += took_s
        link.received(transfer, count)


@pytest.mark.parametrize("quiet_s", [0.0, 60.0])
def test_one_stalled_transfer_is_forgotten_within_a_minute_of_probes(quiet_s):
    link = Link(Clock())
    link.note_call(0.0)
    for _ in range(10):
        transfer(link, 10 * MIB, 0.01)
    link.clock.now += quiet_s
    transfer(link, MIB, 5.0)
    assert link.estimate().bytes_per_s < 100 * MIB
    for _ in range(2):
        link.clock.now += 30
        transfer(link, 2 * MIB, 0.002)
    assert link.estimate().bytes_per_s == pytest.approx(1000 * MIB, rel=0.1)


def test_a_small_transfer_says_little_even_of_a_way_that_was_quiet():
    """The time of a small one is mostly latency, of which only an average is known."""
    link = Link(Clock())
    link.note_call(0.01)
    transfer(link, 2 * MIB, 0.012)
    link.clock.now += 10
    transfer(link, MIB // 16, 0.01)
    assert link.estimate().bytes_per_s == pytest.approx(1000 * MIB, rel=0.3)


class Case:
    """A model, a network, and a request. What the gate learns of them has come over that network."""

    def __init__(self, seed):
        self.random = Random(seed)
        uniform = self.random.uniform
        self.bytes_per_s = 10 ** uniform(7, 10.5)
        self.delay_s = 10 ** uniform(-4, -1.3)
        self.jitter = uniform(0.0, 0.3)
        self.block_bytes = 16 * self.random.choice([12, 64, 128, 320, 512]) * 1024
        self.tokens_per_s = 10 ** uniform(2, 5.2)
        self.context = self.random.choice([8192, 32_768, 131_072])
        self.wait_s = self.random.choice([0.0, 0.0, 10 ** uniform(-2, 0.5)])
        self.blocks = int(2 ** uniform(2, 11))
        self.pace_error = self.around(0.1)
        self.clock = Clock()
        self.link = Link(self.clock)
        for _ in range(self.random.randint(3, 12)):
            self.transfer(int(2 ** uniform(20, 26)))
        self.waiting = self.random.choice([0, 0, int(2 ** uniform(20, 28))])

    def around(self, sigma):
        return self.random.lognormvariate(0.0, sigma)

    def fetch_s(self, count):
        """What a transfer takes this time."""
        return self.delay_s * self.around(self.jitter) + count / (self.bytes_per_s * self.around(self.jitter))

    def transfer(self, count):
        self.link.note_call(self.delay_s * self.around(self.jitter))
        with self.link.transfer(count) as transfer:
            self.clock.now += self.fetch_s(count)
            self.link.received(transfer, count)

    def recompute_s(self, blocks):
        tokens = 16 * blocks
        return self.wait_s + tokens / self.tokens_per_s * (1 + tokens / self.context)

    def estimated_s(self, blocks):
        """The engine's estimate errs, too."""
        return self.recompute_s(blocks) * self.pace_error

    def choose(self):
        with self.link.transfer(self.waiting):
            return choose(self.blocks, self.block_bytes, self.link.estimate(), self.estimated_s)

    def gain(self, blocks):
        """The part of the computing that is saved by fetching so many blocks; negative: that it takes longer."""
        fetched_s = max(self.fetch_s(self.waiting + blocks * self.block_bytes), self.wait_s)
        all_s = self.recompute_s(self.blocks)
        return (self.recompute_s(blocks) - fetched_s) / all_s


def test_the_choice_is_the_faster_way_in_simulated_networks():
    seed = SEED
    wrong, fetched, computed = [], 0, 0
    for number in range(CASES):
        case = Case(f"{seed}/{number}")
        choice = case.choose()
        gain = case.gain(choice.blocks or case.blocks)
        if abs(gain) <= NOISE:
            continue
        fetched += choice.blocks > 0
        computed += choice.blocks == 0
        if (gain > 0) != (choice.blocks > 0):
            wrong.append((number, choice, round(gain, 2)))
    differ = fetched + computed
    print(f"seed {seed}: {CASES} cases, {differ} differ; {fetched} fetched, {computed} computed, {len(wrong)} wrong")
    assert min(fetched, computed) > CASES / 10, f"seed {seed}"
    assert len(wrong) <= 0.05 * differ, f"seed {seed}: {wrong}"
