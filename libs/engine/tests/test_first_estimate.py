"""A queue right after the start: its wait is estimated before any rank has ended a step."""

import asyncio
import time
from pathlib import Path

import pytest
from handmade import write_model
from lockstep_engine import AsyncEngine, EngineConfig, Request, SamplingParams

TESTS = Path(__file__).parent
STEP_S, TOKEN_S = 0.5, 0.25
PROMPT = (3, 4, 5, 6)
EACH_S = len(PROMPT) * TOKEN_S + 10 * (STEP_S + TOKEN_S)
"""What a request of ten tokens needs at the pace of the self-test."""


@pytest.fixture
async def engine(tmp_path):
    """An engine whose ranks have measured a pace and never end a step."""
    script = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import scripted_ranks_zygote; "
    script += f"scripted_ranks_zygote.main(step_s={STEP_S}, token_s={TOKEN_S}, holds=True)"
    config = EngineConfig(model=str(write_model(tmp_path)), max_seqs=1, prefill_deadline_s=600.0)
    engine = AsyncEngine(config, on_outputs=lambda *_: None, on_change=lambda: None, zygote=script)
    async with asyncio.timeout(120):
        await engine.start()
    yield engine
    await engine.close()


async def test_a_long_queue_is_known_before_the_first_token(engine):
    assert engine.status().queue_wait_s == 0.0
    began = time.monotonic()
    for number in range(1, 41):
        engine.submit(Request(f"r{number}", PROMPT, SamplingParams(max_tokens=10, ignore_eos=True)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        status = engine.status()
        ran_s = time.monotonic() - began
        assert number * EACH_S - ran_s <= status.queue_wait_s <= number * EACH_S + 1e-6
        assert status.queue_wait_per_request_s == pytest.approx(EACH_S)
    assert status.steps == 0
    engine.cancel("r1")
    for number in range(2, 41):
        engine.cancel(f"r{number}")
    assert engine.status().queue_wait_s == 0.0
