"""How fast prompts are computed, from the steps that do it."""

import pytest
from lockstep_engine.prompt_pace import PromptPace


def test_the_self_test_counts_until_a_step_was_measured():
    pace = PromptPace()
    pace.begin(0.01)
    assert pace.token_s == 0.01
    pace.planned(1, 0, 1.0)  # a step without prompts
    pace.done(1, 1.5)
    assert pace.token_s == 0.01
    pace.planned(2, 100, 2.0)
    pace.planned(3, 100, 2.1)  # waits for the one before
    pace.done(2, 4.0)
    assert pace.token_s == pytest.approx(0.02)
    pace.done(3, 5.0)
    assert pace.token_s == pytest.approx(0.02 + 0.2 * (0.01 - 0.02))
    pace.begin(7.0)
    assert pace.token_s == pytest.approx(0.018)


def test_a_step_that_could_not_be_noted_changes_nothing():
    pace = PromptPace()
    pace.begin(0.01)
    pace.done(1, 5.0)
    assert pace.token_s == 0.01
    pace.planned(2, 100, 6.0)
    pace.done(2, 7.0)
    assert pace.token_s == pytest.approx(0.01)
