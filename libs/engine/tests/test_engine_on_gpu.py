"""A whole engine with its processes on a GPU: what neither the interpreter nor a stand-in can show."""

import asyncio
import gzip
import json
import logging
import os
import random
import signal
from pathlib import Path

import pytest
from lockstep_engine import Engine, Request, SamplingParams
from lockstep_engine.engine_status import EngineState
from triton_device import DEVICE, NEEDS_GPU

pytestmark = [*NEEDS_GPU, pytest.mark.slow]

MODEL = Path(__file__).parents[3] / "models/reference"
TOKENS = 64
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=TOKENS, temperature=0.9, top_p=0.95, top_k=200, seed=7, repetition_penalty=1.1, ignore_eos=True
)
WAIT_S = 300


def start(**settings):
    """An engine on the GPU, with settings for which prompts are cut and blocks go cold within the tests' lengths."""
    return Engine(
        MODEL, **({"device": DEVICE.type, "max_seqs": 24, "max_batch_tokens": 96, "kv_memory_bytes": 2**28} | settings)
    )


def prompts(count, seed=3):
    draw = random.Random(seed)
    return [[draw.randrange(2, 4096) for _ in range(draw.choice((1, 5, 16, 40, 97, 300)))] for _ in range(count)]


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def exact(request):
    with start(deterministic=True, dtype=request.param) as engine:
        assert engine.core.status().deterministic
        yield engine


class TestExact:
    """The mode in which a token's bits depend on nothing but its sequence."""

    def test_has_a_fingerprint_that_another_start_has_too(self, exact):
        mine = exact.core.status()
        with start(deterministic=True, dtype=mine.dtype, max_seqs=5, max_batch_tokens=64) as other:
            assert mine.fingerprint == other.core.status().fingerprint != ""

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    def test_tokens_are_the_same_alone_and_beside_others(self, exact, params):
        every = prompts(20)
        alone = [exact.generate_ids([prompt], params)[0] for prompt in every[:6]]
        assert exact.generate_ids(every, params)[:6] == alone

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    def test_a_stream_resumed_at_any_position_goes_on_as_it_would_have(self, exact, params):
        prompt = tuple(prompts(1, seed=9)[0])
        whole = exact.generate_ids([prompt], params)[0]
        requests = [Request(f"from {at}", prompt, params, tuple(whole[:at])) for at in range(1, TOKENS)]
        for at, outputs in enumerate(exact.run(requests), start=1):
            assert [each for output in outputs for each in output.ids] == whole[at:]

    def test_float32_chooses_the_cpus_tokens(self, exact):
        if exact.core.status().dtype != "float32":
            pytest.skip("rounded otherwise than on the CPU")
        every = prompts(8)
        with Engine(MODEL, device="cpu") as cpu:
            expected = cpu.generate_ids(every, GREEDY)
        assert exact.generate_ids(every, GREEDY) == expected


class TestServing:
    """By the kernels as a GPU uses them without the exact mode."""

    def test_no_kernel_is_built_while_it_serves(self, caplog):
        caplog.set_level(logging.INFO, "lockstep")
        options = {"logprobs": 5, "min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {7: 2.0}}
        params = [
            GREEDY,
            SEEDED,
            SamplingParams(max_tokens=20, temperature=0.7, seed=1, **options),
            SamplingParams(max_tokens=20, temperature=1.0, seed=2, top_k=3),
        ]
        with start() as engine:
            every = prompts(48)
            lengths = [len(each) for each in engine.generate_ids(every, [params[i % 4] for i in range(len(every))])]
            engine.score(every[0], vocabulary=True)
            status = engine.core.status()
        assert lengths == [params[i % 4].max_tokens for i in range(len(every))]
        assert status.compressed_blocks > 0
        assert status.ranks[0].device_bytes > 0
        assert status.ranks[0].forward_s > 0
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert not told

    def test_ranks_come_back_after_one_is_killed_and_a_stream_goes_on(self):
        with start(deterministic=True) as engine:
            prompt = tuple(prompts(1)[0])
            whole = engine.generate_ids([prompt], GREEDY)[0]
            epoch = engine.core.status().epoch
            os.kill(engine.core.status().ranks[0].pid, signal.SIGKILL)

            async def back():
                async with asyncio.timeout(WAIT_S):
                    while engine.core.status().epoch == epoch or engine.core.status().state is not EngineState.READY:
                        await asyncio.sleep(0.05)

            engine._await(back())
            (outputs,) = engine.run([Request("again", prompt, GREEDY, tuple(whole[:30]))])
            assert [each for output in outputs for each in output.ids] == whole[30:]

    @pytest.mark.parametrize("compression", ["lazy", "none"])
    def test_blocks_that_come_back_from_host_memory_are_those_that_went(self, compression):
        settings = {"deterministic": True, "dtype": "float16", "kv_compression": compression}
        pool = {"kv_memory_bytes": 2**22, "host_cache_bytes": 2**25, "max_context": 700}
        long = [[(7 * row + 3 * at) % 4000 + 2 for at in range(500)] for row in range(6)]
        with start(**settings) as roomy:
            expected = roomy.generate_ids(long, GREEDY)
        with start(**settings, **pool) as small:
            for _ in range(2):
                assert [small.generate_ids([each], GREEDY)[0] for each in long] == expected
            usage = small.core.status().host
        assert usage.copied_in > 0

    def test_a_profile_names_the_kernels_of_the_device(self):
        with start() as engine:

            async def profiled():
                profile = asyncio.ensure_future(engine.core.profile(8))
                requests = [Request(f"p{each}", tuple(prompts(1)[0]), GREEDY) for each in range(2)]
                await engine._collect(requests)
                return await profile

            (profile,) = engine._await(profiled())
        head, _, trace = gzip.decompress(profile).partition(b"\n")
        events = json.loads(trace)["traceEvents"]
        launches = {
            each["args"]["correlation"] for each in events if each.get("cat") in ("cuda_runtime", "cuda_driver")
        }
        kernels = [each for each in events if each.get("cat") == "kernel" and each["name"] == "_attend"]
        assert len(kernels) >= len(json.loads(head)["steps"]) > 0
        assert {each["args"]["correlation"] for each in kernels} <= launches, "`lockstep profile` finds steps by these"
