"""The order in which an engine tells what happens to a request."""

import asyncio
import time
from pathlib import Path

import uvloop
from handmade import write_model
from lockstep_engine import AsyncEngine, EngineConfig, Request, SamplingParams
from lockstep_engine.request import Phase

TESTS = Path(__file__).parent
RANKS = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import scripted_ranks_zygote; "
RANKS += "scripted_ranks_zygote.main(step_s=0.001, token_s=0.001)"


def test_a_request_runs_before_its_first_output_even_if_the_step_ends_first(tmp_path):
    """With uvloop, as in a worker, what has arrived is read before what was left for the loop's next turn."""
    told = []

    async def serve():
        engine = AsyncEngine(
            EngineConfig(model=str(write_model(tmp_path)), max_seqs=1),
            on_outputs=lambda _, outputs: told.extend(each.ids for each in outputs),
            on_change=lambda: None,
            on_phases=lambda changes: told.extend(each.phase for each in changes),
            zygote=RANKS,
        )
        async with asyncio.timeout(120):
            await engine.start()
            try:
                engine.submit(
                    Request("r", (3, 4, 5), SamplingParams(max_tokens=1, ignore_eos=True, logit_bias={1: 0.0}))
                )
                time.sleep(0.5)  # the step is over
                while len(told) < 2:
                    await asyncio.sleep(0.01)
            finally:
                await engine.close()

    uvloop.run(serve())
    assert told[0] is Phase.RUNNING
    assert len(told[1]) == 1
