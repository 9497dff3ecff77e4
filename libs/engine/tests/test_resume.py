"""Isolation and resumption on real rank processes: a stream is the same on any worker and in any batch."""

import asyncio
import random
from pathlib import Path

import pytest
from fast_cases import fast_if, further
from lockstep_engine import AsyncEngine, Engine, EngineConfig, Output, Request, SamplingParams

MODEL = Path(__file__).parents[3] / "models/reference"
TEXT = "It was a dark night, and the wind"
GREEDY = SamplingParams(max_tokens=96, temperature=0)
SEEDED = SamplingParams(max_tokens=96, temperature=0.9, top_p=0.95, top_k=200, seed=7, repetition_penalty=1.1)
WAIT_S = 120
"""Longer than anything takes on a slow machine under load."""
PARAMS = {"greedy": GREEDY, "seeded": SEEDED}


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, tp=2, threads=1, max_batch_tokens=96) as engine:
        assert engine.core.status().deterministic
        yield engine


@pytest.fixture(scope="module")
def unbroken(engine):
    return {name: engine.generate_ids([TEXT], params)[0] for name, params in PARAMS.items()}


def test_importing_the_engine_does_not_import_torch():
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    code = "import sys, lockstep_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [fast_if(False, "greedy"), "seeded"])
def test_a_stream_resumed_at_any_position_equals_the_unbroken_one(engine, unbroken, name):
    """Alone at some positions, and at all of them together."""
    whole, params = unbroken[name], PARAMS[name]
    for k in (1, 40, 81, 95):
        assert resume(engine, whole[:k], params) == whole[k:]
    assert resume_all(engine, [whole[:k] for k in range(1, 96)], params) == [whole[k:] for k in range(1, 96)]


def resume(engine: Engine, emitted: list[int], params: SamplingParams) -> list[int]:
    return resume_all(engine, [emitted], params)[0]


def resume_all(engine: Engine, emitted: list[list[int]], params: SamplingParams) -> list[list[int]]:
    prompt = tuple(engine.encode(TEXT))
    outputs: list[list[Output]] = engine.run(
        [Request(f"resumed-{random.random()}", prompt, params, emitted_ids=tuple(each)) for each in emitted]
    )
    for given, of_one in zip(emitted, outputs, strict=True):
        assert [output.position for output in of_one] == list(range(len(given), params.max_tokens))
    return [[id_ for output in of_one for id_ in output.ids] for of_one in outputs]


def test_a_requests_tokens_do_not_depend_on_other_requests(engine, unbroken):
    rng = random.Random(5)
    crowd = [
        (
            [rng.randrange(2, 4096) for _ in range(rng.randrange(1, 300))],
            SamplingParams(max_tokens=rng.randrange(1, 90), seed=n),
        )
        for n in range(20)
    ]
    prompts = [TEXT, *(prompt for prompt, _ in crowd), TEXT]
    params = [GREEDY, *(each for _, each in crowd), SEEDED]
    ids = engine.generate_ids(prompts, params)
    assert ids[0] == unbroken["greedy"]
    assert ids[-1] == unbroken["seeded"]


@pytest.mark.slow
def test_preempted_requests_emit_the_same_tokens(unbroken):
    with Engine(MODEL, threads=1, kv_memory_bytes=30 * 16 * 5 * 2 * 256 * 4, kv_compression="none") as small:
        assert small.core.status().total_blocks == 30
        assert small.generate_ids([TEXT] * 8, GREEDY) == [unbroken["greedy"]] * 8
        assert small.core.status().free_blocks == 30


@pytest.mark.parametrize(("tp", "collectives"), [further(1, "auto"), (4, "auto"), (2, "torch"), further(4, "torch")])
@pytest.mark.slow
def test_greedy_tokens_are_the_same_on_any_number_of_ranks(unbroken, tp, collectives):
    with Engine(MODEL, tp=tp, threads=1, collectives=collectives) as other:
        assert other.core.status().deterministic
        assert other.generate_ids([TEXT], GREEDY)[0] == unbroken["greedy"]
        assert resume(other, unbroken["greedy"][:41], GREEDY) == unbroken["greedy"][41:]


def test_streamed_text_is_generated_text(engine):
    params = SamplingParams(max_tokens=60, seed=3)
    pieces = list(engine.stream(TEXT, params))
    assert len(pieces) > 10
    assert "".join(pieces) == engine.generate([TEXT], params)[0]


def test_a_second_turn_computes_only_new_tokens(engine):
    first = engine.encode(TEXT * 12)
    answer = engine.generate_ids([first], SamplingParams(max_tokens=20, seed=1))[0]
    second = engine.outputs([[*first, *answer, 17, 18]], SamplingParams(max_tokens=2, seed=1))[0]
    assert second[0].cached_tokens == (len(first) + 19) // 16 * 16


@pytest.mark.slow
async def test_a_killed_rank_fails_its_streams_and_the_group_restarts():
    import os  # noqa: PLC0415
    import signal  # noqa: PLC0415

    outputs: asyncio.Queue[Output] = asyncio.Queue()
    ready = asyncio.Event()

    def changed() -> None:
        (ready.set if engine.status().state == "ready" else ready.clear)()

    engine = AsyncEngine(
        EngineConfig(model=str(MODEL), tp=2, threads=1),
        on_outputs=lambda _step, new: [outputs.put_nowait(each) for each in new],
        on_change=changed,
    )
    await engine.start()
    try:
        for victim in (0, 1):
            epoch = engine.status().epoch
            engine.submit(Request(f"victim-{victim}", (5, 6, 7), SamplingParams(max_tokens=1000, temperature=0)))
            for _ in range(5):
                assert (await asyncio.wait_for(outputs.get(), WAIT_S)).error is None
            os.kill(engine.status().ranks[victim].pid, signal.SIGKILL)
            while (last := await asyncio.wait_for(outputs.get(), WAIT_S)).error is None:
                pass
            assert last.error.meaning.retryable
            await asyncio.wait_for(ready.wait(), WAIT_S)
            status = engine.status()
            assert status.epoch > epoch
            assert status.free_blocks == status.total_blocks
        engine.submit(Request("after", (5, 6, 7), SamplingParams(max_tokens=3, temperature=0)))
        while (last := await asyncio.wait_for(outputs.get(), WAIT_S)).finish is None:
            pass
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("computes_a_prompt", [False, True])
async def test_a_stopped_rank_is_found_named_and_replaced(computes_a_prompt):
    """Also during a prompt: a few tokens get no more of its long deadline than they can need."""
    import os  # noqa: PLC0415
    import signal  # noqa: PLC0415

    outputs: asyncio.Queue[Output] = asyncio.Queue()
    reasons: list[str] = []
    engine = AsyncEngine(
        EngineConfig(model=str(MODEL), tp=2, threads=1, decode_deadline_s=3.0, prefill_deadline_s=4 * WAIT_S),
        on_outputs=lambda _step, new: [outputs.put_nowait(each) for each in new],
        on_change=lambda: reasons.append(engine.status().reason),
    )
    await engine.start()
    try:
        if not computes_a_prompt:
            engine.submit(Request("victim", (5, 6, 7), SamplingParams(max_tokens=1000, temperature=0)))
            await asyncio.wait_for(outputs.get(), WAIT_S)
        os.kill(engine.status().ranks[1].pid, signal.SIGSTOP)
        if computes_a_prompt:
            engine.submit(Request("victim", (5, 6, 7), SamplingParams(max_tokens=1000, temperature=0)))
        while (await asyncio.wait_for(outputs.get(), WAIT_S)).error is None:
            pass
        assert any(reason.startswith("rank 1 ") for reason in reasons)
        async with asyncio.timeout(WAIT_S):
            while engine.status().state != "ready":
                await asyncio.sleep(0.05)
    finally:
        await engine.close()
