"""What the estimate for one more request is made of. The estimates of its parts are tested by themselves."""

import asyncio
from types import SimpleNamespace

from lockstep_engine.wait_estimates import WaitEstimates


def estimates_of(backlog=0):
    """With a pace of 0.5 s for each token of a prompt."""
    estimates = WaitEstimates(SimpleNamespace(running=[], free_seqs=1, backlog=backlog), step_tokens=4)
    estimates.pace.token_s = 0.5
    assert estimates.pace.step_s == 0
    return estimates


async def test_the_wait_for_a_turn_is_estimated_once_in_a_turn_of_the_loop():
    estimates = estimates_of()
    asked = []
    estimates.queue.waits = lambda **_: (asked.append(1) or 2.0, 0.0)
    assert [estimates.prompt_s(tokens) for tokens in (0, 2, 4)] == [2.0, 3.0, 4.0]
    assert len(asked) == 1
    await asyncio.sleep(0)
    estimates.prompt_s(1)
    assert len(asked) == 2


async def test_the_prompts_that_came_first_are_not_counted_twice():
    """The wait for a place has them, too."""
    estimates = estimates_of(backlog=3)
    wait_s = 2.0
    estimates.queue.waits = lambda **_: (wait_s, 0.0)
    assert estimates.prompt_s(2) == 3.0
    await asyncio.sleep(0)
    wait_s = 0.0
    assert estimates.prompt_s(2) == 2.5
