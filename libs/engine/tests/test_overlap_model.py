"""Overlap on a model, in this process and on rank processes: the tokens of a step are the input of the next one before
the driver has read them.
"""

import asyncio
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from fast_cases import further
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_engine import InProcessEngine, InProcessModel
from lockstep_engine import AsyncEngine, Engine, EngineConfig, Request, SamplingParams
from lockstep_engine.config import HotWindow

MODEL = Path(__file__).parents[3] / "models/reference"
NARROW = HotWindow(sink=1, size=1)
IMMEDIATE = HotWindow(sink=0, size=0)


@pytest.fixture(scope="module")
def model():
    return InProcessModel(MODEL)


GREEDY = SamplingParams(max_tokens=40, temperature=0)
SEEDED = SamplingParams(
    max_tokens=40, temperature=0.9, top_p=0.95, top_k=200, seed=7, repetition_penalty=1.1, logprobs=2
)


class TestModel:
    @pytest.mark.parametrize("hot_window", [None, NARROW, IMMEDIATE], ids=str)
    def test_tokens_and_logprobs_have_the_same_bits(self, model, hot_window):
        texts = [random.Random(each).choices(range(2, 4000), k=20 + 30 * each) for each in range(3)]
        requests = [(text, (), params) for text in texts for params in (GREEDY, SEEDED)]
        runs = []
        for depth in (1, 2):
            engine = InProcessEngine(model, depth=depth, hot_window=hot_window, max_batch_tokens=64)
            runs.append((engine.run(*requests), sorted(engine.logprobs, key=repr)))
        assert runs[0] == runs[1]

    @settings(max_examples=4, deadline=None, derandomize=True)
    @given(k=st.integers(1, 39), budget=st.integers(8, 100))
    def test_streams_resumed_anywhere_beside_others_in_few_blocks(self, model, k, budget):
        text = random.Random(3).choices(range(2, 4000), k=50)
        whole = InProcessEngine(model, hot_window=NARROW).ids(text, SEEDED)
        crowd = [(random.Random(each).choices(range(2, 4000), k=60), (), GREEDY) for each in range(3)]
        engine = InProcessEngine(model, depth=2, hot=9, cold=16, hot_window=NARROW, max_batch_tokens=budget)
        assert engine.run(*crowd, (text, whole[:k], SEEDED))[-1] == whole[k:]


@pytest.mark.slow
class TestRanks:
    """On rank processes."""

    @pytest.mark.parametrize("tp", [further(1), 2])
    def test_streams_are_those_without_overlap(self, tp):
        choose = random.Random(5)
        prompts = [choose.choices(range(2, 4000), k=choose.randrange(1, 150)) for _ in range(8)]
        params = [replace(SEEDED if each % 2 else GREEDY, max_tokens=choose.randrange(1, 60)) for each in range(8)]
        outputs = {}
        for overlap in (False, True):
            with Engine(MODEL, tp=tp, threads=1, max_batch_tokens=96, kv_hot_window=16, overlap=overlap) as engine:
                each_outputs = engine.outputs(prompts, params)
                outputs[overlap] = [[(o.ids, o.logprobs, o.finish) for o in one] for one in each_outputs]
                status = engine.core.status()
                assert status.free_blocks == status.total_blocks
        assert outputs[True] == outputs[False]

    @pytest.mark.parametrize("end", [signal.SIGKILL, further(signal.SIGSTOP)])
    async def test_a_rank_that_ends_with_two_steps_in_flight(self, end):
        """Streams continue from the tokens that they have emitted, and equal unbroken ones."""
        outputs = asyncio.Queue()
        engine = AsyncEngine(
            EngineConfig(model=str(MODEL), tp=2, threads=1, overlap=True, decode_deadline_s=3.0),
            on_outputs=lambda _step, new: [outputs.put_nowait(each) for each in new],
            on_change=lambda: None,
        )
        params = SamplingParams(max_tokens=200, temperature=0.8, seed=3, ignore_eos=True)
        ids = []

        async def take(count):
            error = None
            async with asyncio.timeout(60):
                while len(ids) < count and error is None:
                    output = await outputs.get()
                    error = output.error
                    assert error or output.position == len(ids)
                    ids.extend(output.ids)
            return error

        await engine.start()
        try:
            engine.submit(Request("unbroken", (5, 6, 7), params))
            assert await take(200) is None
            unbroken, ids = ids, []
            engine.submit(Request("broken", (5, 6, 7), params))
            assert await take(20) is None
            os.kill(engine.status().ranks[1].pid, end)
            error = await take(200)
            assert error.meaning.retryable
            assert "rank 1 " in error.message
            async with asyncio.timeout(60):
                while engine.status().state != "ready":
                    await asyncio.sleep(0.05)
            status = engine.status()
            assert status.epoch == 2
            assert status.free_blocks == status.total_blocks
            engine.submit(Request("goes on", (5, 6, 7), params, emitted_ids=tuple(ids)))
            assert await take(200) is None
            assert ids == unbroken
        finally:
            await engine.close()
