"""Exact streams with compressed KV: what a query sees cold depends on positions alone, not on the steps in which tokens
are computed.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process_engine import InProcessEngine, InProcessModel
from lockstep_common.errors import LockstepError
from lockstep_engine import Engine, Request, SamplingParams
from lockstep_engine.config import BLOCK_SIZE, HotWindow

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[3] / "models/reference"
TEXT = "It was a dark night, and the wind rose. " * 5
NARROW = HotWindow(sink=1, size=1)
"""Most of what is read is cold."""
MODES = {
    "lazy": {"hot_window": NARROW},
    "immediate": {"hot_window": HotWindow(sink=0, size=0)},
    "per_layer": {"hot_window": NARROW, "compressed_layers": (1, 3)},
}
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=60, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "seeded": SEEDED}


@pytest.fixture(scope="module")
def model():
    return InProcessModel(MODEL)


@pytest.fixture(scope="module")
def prompt():
    from tokenizers import Tokenizer  # noqa: PLC0415

    return Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.fixture(scope="module")
def unbroken(model, prompt, mode):
    engine = InProcessEngine(model, **mode)
    return {name: engine.ids(prompt, params) for name, params in PARAMS.items()}


def words(count, seed):
    return random.Random(seed).choices(range(2, 4000), k=count)


def test_tokens_differ_from_those_without_compression(model, prompt, unbroken):
    """Otherwise the other tests would show nothing."""
    plain = InProcessEngine(model)
    assert any(plain.ids(prompt, params) != unbroken[name] for name, params in PARAMS.items())
    assert plain.scheduler.blocks.compressed == 0


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(k=st.integers(1, 59), budget=st.integers(8, 250), cached=st.booleans())
def test_a_stream_resumed_anywhere_in_any_chunks_equals_the_unbroken_one(
    model, prompt, mode, unbroken, name, k, budget, cached
):
    engine = InProcessEngine(model, max_batch_tokens=budget, **mode)
    if cached:  # another stream has left its blocks, and went on beyond the end of this one's
        engine.ids(prompt, replace(PARAMS[name], max_tokens=k + 20))
    assert engine.ids(prompt, PARAMS[name], unbroken[name][:k]) == unbroken[name][k:]


@pytest.mark.parametrize("hot", [8, 14])
def test_preempted_requests_emit_the_same_tokens(model, prompt, mode, unbroken, hot):
    crowd = [(words(100, each), (), replace(GREEDY, max_tokens=30)) for each in range(3)]
    engine = InProcessEngine(model, hot=hot, cold=20, **mode)
    ids = engine.run((prompt, (), GREEDY), *crowd, (prompt, (), SEEDED))
    assert (ids[0], ids[-1]) == (unbroken["greedy"], unbroken["seeded"])
    for (text, _, params), given_ids in zip(crowd, ids[1:-1], strict=True):
        assert InProcessEngine(model, **mode).ids(text, params) == given_ids


def test_a_second_turn_computes_only_new_tokens_and_emits_the_same(model, prompt, mode, unbroken):
    engine = InProcessEngine(model, **mode)
    turn = [*prompt, *engine.ids(prompt, GREEDY), 17, 18]
    before = engine.steps
    ids = engine.ids(turn, replace(GREEDY, max_tokens=2))
    assert engine.steps - before == 2
    assert InProcessEngine(model, **mode).ids(turn, replace(GREEDY, max_tokens=2)) == ids


def test_texts_that_diverge_after_a_common_prefix(model, mode):
    engine = InProcessEngine(model, **mode)
    shared = words(200, 1)
    params = replace(SEEDED, max_tokens=20)
    for each in range(3):
        turn = [*shared, *[20 + each] * 60]
        assert engine.ids(turn, params) == InProcessEngine(model, **mode).ids(turn, params)


def test_requests_with_a_common_prefix_that_run_together(model, mode):
    shared = words(120, 1)
    requests = [([*shared, *words(10 + 30 * each, each)], (), replace(SEEDED, max_tokens=20)) for each in range(4)]
    engine = InProcessEngine(model, max_batch_tokens=50, **mode)
    for request, ids in zip(requests, engine.run(*requests), strict=True):
        assert InProcessEngine(model, **mode).run(request) == [ids]


def test_a_block_is_compressed_once_whatever_happens_to_it(model):
    """Requests that share it, hits, a resumed stream: the text has 12 full blocks, and the last of them stays hot."""
    engine = InProcessEngine(model, hot_window=NARROW)
    prompt, params = words(160, 2), replace(SEEDED, max_tokens=41)
    ids = engine.run(*[(prompt, (), params)] * 3)
    assert ids[0] == ids[1] == ids[2]
    assert engine.ids(prompt, params, ids[0][:30]) == ids[0][30:]
    assert engine.ids(prompt, params) == ids[0]
    assert engine.scheduler.blocks.compressed == 200 // BLOCK_SIZE - NARROW.sink - NARROW.size


def test_a_text_within_the_hot_window_has_the_bits_of_no_compression(model, prompt):
    hot_window = HotWindow(sink=1, size=4)
    length, params = hot_window.blocks * BLOCK_SIZE, replace(SEEDED, max_tokens=57, logprobs=2)
    lazy, plain = InProcessEngine(model, hot_window=hot_window), InProcessEngine(model)
    for engine in (lazy, plain):
        engine.ids(prompt[: length - 56], params)
    assert lazy.scheduler.blocks.compressed == 1  # after the last step, for one that never comes
    assert lazy.logprobs == plain.logprobs
    for engine in (lazy, plain):
        engine.ids(prompt[: length - 56], replace(params, max_tokens=60))
    assert lazy.logprobs != plain.logprobs


@pytest.fixture(scope="module")
def ranks():
    with Engine(MODEL, tp=2, threads=1, max_batch_tokens=96, kv_hot_window=16) as engine:
        yield engine


class TestRanks:
    """The same on rank processes, once."""

    def test_the_canary_holds(self, ranks):
        status = ranks.core.status()
        assert status.deterministic
        assert status.free_blocks == status.total_blocks > status.cold_blocks > 0

    def test_streams_and_resumed_streams_are_those_of_one_rank(self, ranks, model, prompt):
        for params in PARAMS.values():
            whole = InProcessEngine(model, **MODES["lazy"]).ids(prompt, params)
            assert ranks.generate_ids([prompt], params)[0] == whole
            assert self.resume(ranks, prompt, params, whole[:41]) == whole[41:]
        assert ranks.core.status().compressed_blocks > 0

    def resume(self, ranks, prompt, params, emitted):
        request = Request("resumed", tuple(prompt), params, emitted_ids=tuple(emitted), tenant="finds nothing")
        return [id_ for output in ranks.run([request])[0] for id_ in output.ids]

    def test_a_layer_that_does_not_exist_is_refused(self):
        with pytest.raises(LockstepError, match="names layer 5; the model has 5"):
            Engine(MODEL, threads=1, kv_compression="per_layer", kv_compressed_layers=(5,))
