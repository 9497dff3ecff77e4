"""How fast prompts are computed, from the steps that do it."""

import pytest
from lockstep_engine.prompt_pace import PromptPace

STEP_TOKENS = 512


class Ranks:
    """Ranks on a scripted clock: a step takes `step_s`, and `token_s` more for each token of a prompt."""

    def __init__(self, step_s, token_s):
        self.step_s, self.token_s = step_s, token_s
        self.pace = PromptPace()
        self.now = 0.0
        self.steps = 0

    def step(self, prompt_tokens=0, late_s=0.0):
        self.steps += 1
        self.pace.planned(self.steps, prompt_tokens, self.now)
        self.now += self.step_s + prompt_tokens * self.token_s
        self.pace.done(self.steps, self.now)
        self.now += late_s

    def prompt(self, tokens, decoded=0, decoding=0):
        """Compute a prompt, whose request then decodes, while `decoding` tokens of each step are of others."""
        for begin in range(0, tokens, STEP_TOKENS - decoding):
            self.step(min(tokens - begin, STEP_TOKENS - decoding))
        for _ in range(decoded):
            self.step(late_s=0.001)

    def error(self, tokens):
        """How many times too long the estimate is for a prompt that is computed alone."""
        return self.pace.prompt_s(tokens, STEP_TOKENS) / (tokens * (self.token_s + self.step_s / STEP_TOKENS))


def is_close(error):
    return 1 / 1.5 < error < 1.5


def test_the_self_test_counts_until_a_step_was_measured():
    pace = PromptPace()
    pace.begin(0.1, 0.01)
    assert (pace.token_s, pace.step_s) == pytest.approx((0.01, 0.1))
    assert pace.prompt_s(100, 50) == pytest.approx(100 * 0.01 + 2 * 0.1)
    pace.begin(0.2, 0.02)
    assert (pace.token_s, pace.step_s) == pytest.approx((0.02, 0.2))
    pace.planned(1, 500, 1.0)
    pace.done(1, 1.0 + 0.2 + 500 * 0.04)
    assert pace.token_s == pytest.approx(0.04, rel=0.1)
    known = pace.token_s
    pace.begin(0.1, 0.01)
    assert pace.token_s == known


@pytest.mark.parametrize("self_test", [(0.0, 0.0), (0.002, 0.00003), (0.05, 0.005)], ids=["none", "short", "long"])
@pytest.mark.parametrize("tokens", [100, 500, 1500])
def test_the_estimate_is_that_of_the_steps_after_a_few_prompts(self_test, tokens):
    ranks = Ranks(0.005, 0.0002)
    ranks.pace.begin(*self_test)
    for _ in range(4):
        ranks.prompt(tokens, decoded=16)
    assert is_close(ranks.error(1532))


def test_the_ends_of_prompts_after_cached_prefixes_do_not_count_as_slow_prompts():
    """A step with 12 tokens takes almost as long as one with none."""
    ranks = Ranks(0.012, 0.0002)
    ranks.pace.begin(0.002, 0.0001)
    ranks.prompt(1500, decoded=16)
    for _ in range(300):
        ranks.prompt(12, decoded=3)
    assert is_close(ranks.error(1532))


def test_steps_that_also_decode_count_by_what_their_prompts_add():
    ranks = Ranks(0.040, 0.0002)  # 64 requests decode
    ranks.pace.begin(0.002, 0.0001)
    ranks.prompt(0, decoded=32)
    for _ in range(4):
        ranks.prompt(700, decoded=2, decoding=64)
    assert is_close(ranks.error(1532))
    ranks.step_s = 0.005  # they have ended
    for _ in range(4):
        ranks.prompt(700, decoded=16)
    assert is_close(ranks.error(1532))


@pytest.mark.parametrize("factor", [10, 0.1], ids=["busy", "calm"])
def test_the_estimate_follows_a_machine_that_is_busy_or_calm_again(factor):
    ranks = Ranks(0.005, 0.0002)
    ranks.pace.begin(0.005, 0.0002)
    for _ in range(10):
        ranks.prompt(1500, decoded=16)
    ranks.step_s, ranks.token_s = ranks.step_s * factor, ranks.token_s * factor
    for _ in range(3):
        ranks.prompt(1500, decoded=16)
    assert is_close(ranks.error(1532))


def test_prompts_are_measured_though_nothing_ever_decodes():
    """Embeddings, or one token for each prompt. The fixed part of a step is from busier times."""
    ranks = Ranks(0.005, 0.0002)
    ranks.pace.begin(0.2, 0.0)
    for _ in range(8):
        ranks.prompt(500)
    assert is_close(ranks.error(1532))


def test_a_step_that_waits_for_the_one_before_is_measured_from_its_end():
    pace = PromptPace()
    pace.planned(1, 100, 2.0)
    pace.planned(2, 100, 2.1)
    pace.done(1, 4.0)
    assert pace.token_s == pytest.approx(0.02)
    pace.done(2, 6.0)
    assert pace.token_s == pytest.approx(0.02)


def test_a_step_that_was_not_noted_changes_nothing():
    pace = PromptPace()
    pace.begin(0.1, 0.01)
    pace.done(1, 5.0)
    assert (pace.token_s, pace.step_s) == pytest.approx((0.01, 0.1))
