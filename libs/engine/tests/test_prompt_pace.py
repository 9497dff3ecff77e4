"""How fast prompts are computed, from the steps that do it."""

import pytest
from lockstep_engine.prompt_pace import PromptPace


def test_the_self_test_counts_until_a_step_was_measured():
    pace = PromptPace()
    pace.begin(0.01)
    assert pace.token_s == 0.01
    pace.planned(0, 1.0)  # a step without prompts
    pace.done(1.5)
    assert pace.token_s == 0.01
    pace.planned(100, 2.0)
    pace.planned(100, 2.1)  # waits for the one before
    pace.done(4.0)
    assert pace.token_s == pytest.approx(0.02)
    pace.done(5.0)
    assert pace.token_s == pytest.approx(0.02 + 0.2 * (0.01 - 0.02))
    pace.begin(7.0)
    assert pace.token_s == pytest.approx(0.018)
