"""Models with layers that have a window and others: a sequence keeps the blocks of that window, and copies or
compressed blocks of the other layers, and has the bits that all blocks of all layers give it.
"""

import random
from dataclasses import replace

import pytest
import torch
from checkpoints import VOCABULARY, make
from fast_cases import fast_if
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process_engine import InProcessEngine, InProcessModel
from in_process_rank import InProcessRank
from lockstep_engine import Engine, SamplingParams
from lockstep_engine.attention_triton import TritonAttention
from lockstep_engine.blocks import HostSizes, PoolSizes
from lockstep_engine.config import BLOCK_SIZE, EngineConfig, HotWindow, SlidingWindow, WindowedLayers
from lockstep_engine.kernels import cpu
from remote_double import MemoryStore
from remote_worker import FULL, Worker, first_turn, second_turn
from scripted_ranks import Server, expected_ids, words
from test_host_memory import Ranks, check
from texts import LAYER, Texts, assert_same_bits, by_kernel, by_torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from triton_device import GPU

OF_MODEL = SlidingWindow(37)
RULE = HotWindow(sink=0, size=OF_MODEL.blocks_before)
RULES = [HotWindow(sink=0, size=size) for size in (0, 1, 3)]
"""Of windows of 1, 2 to 17 and 34 to 49 tokens."""
ids_of = str


def serve(hot_window=RULE, **settings):
    return Server(
        **{"hot_window": hot_window, "copies": True, "blocks": 64, "cold_blocks": 64, "context_length": 640} | settings
    )


def in_use(server):
    return [pool.total - pool.free for pool in (server.pool.hot, server.pool.cold)]


class TestBlocksInUse:
    """`ScriptedRanks` checks every plan: each query finds the blocks of its window hot, and others as copies."""

    @pytest.mark.parametrize("hot_window", RULES, ids=ids_of)
    def test_a_long_stream_holds_the_hot_blocks_of_its_window_and_copies_of_the_others(self, hot_window):
        server = serve(hot_window, max_batch_tokens=40)
        number = server.submit(words(200, seed=1), max_tokens=400)
        computed = 0
        while server.step():
            computed = sum(server.computed(number)[-1])
            if server.scheduler.sequences.running:
                copied = hot_window.first_hot(computed // BLOCK_SIZE)
                assert in_use(server) == [-(-computed // BLOCK_SIZE) - copied, copied]
        assert computed == 599
        assert server.ids(number) == server.expected(number)
        assert server.pool.compressed == 0
        server.assert_idle()

    @pytest.mark.parametrize("hot_window", RULES, ids=ids_of)
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_request_that_just_fits_runs_to_its_end(self, hot_window, depth):
        for tokens in (90, 96, 97, 300):
            needs = serve(hot_window).scheduler.blocks.needs(tokens)
            server = serve(hot_window, blocks=needs.hot, cold_blocks=needs.cold, depth=depth)
            number = server.submit(words(60, seed=1), max_tokens=tokens - 60)
            server.run()
            assert server.ids(number) == server.expected(number)
            assert server.restarts() == 0
            server.assert_idle()

    @pytest.mark.parametrize("blocks", [5, 6, 9])
    def test_a_prompt_is_cut_into_chunks_for_which_there_are_hot_blocks(self, blocks):
        server = serve(blocks=blocks, max_batch_tokens=600)
        number = server.submit(words(500, seed=1), max_tokens=5)
        server.run()
        assert server.computed(number)[0] == (0, blocks * BLOCK_SIZE)
        assert server.ids(number) == server.expected(number)
        assert server.restarts() == 0
        server.assert_idle()

    def test_an_embedding_of_a_long_text_holds_no_more(self):
        server = serve(max_batch_tokens=40, blocks=8, cold_blocks=28)
        number = server.embed(words(500, seed=1))
        server.run()
        assert server.embedding(number)
        server.assert_idle()


class TestPrefixCache:
    def test_a_second_turn_starts_after_copies_and_the_hot_blocks_of_its_window(self):
        server = serve(blocks=12, cold_blocks=24)
        prompt = words(200, seed=1)
        first = server.submit(prompt, max_tokens=100)
        server.run()
        turn = [*prompt, *server.ids(first), *words(5, seed=2)]
        second = server.submit(turn, max_tokens=40)
        server.run()
        assert server.outputs[second][0].cached_tokens == 299 // BLOCK_SIZE * BLOCK_SIZE
        assert server.ids(second) == server.expected(second)
        server.assert_idle()

    def test_host_memory_gives_both_versions_back(self):
        server = serve(blocks=12, cold_blocks=24, host=HostSizes(slots=400, slot_bytes=10, hot_slots=3, step_slots=6))
        prompt = words(200, seed=1)
        first = server.submit(prompt, max_tokens=100)
        server.run()
        for each in range(4):
            server.submit(words(18 * BLOCK_SIZE, seed=10 + each), max_tokens=2)
            server.run()
        turn = [*prompt, *server.ids(first), *words(5, seed=2)]
        second = server.submit(turn, max_tokens=40)
        server.run()
        assert server.outputs[second][0].cached_tokens == 299 // BLOCK_SIZE * BLOCK_SIZE
        assert server.ids(second) == server.expected(second)
        assert server.pool.host.usage.copied_in > RULE.size
        server.assert_idle()


@pytest.mark.parametrize("depth", [fast_if(False, 1), 2])
@pytest.mark.parametrize("has_host", [False, True], ids=["pools", "host"])
@pytest.mark.parametrize("hot_window", [RULE, fast_if(False, RULES[0])], ids=ids_of)
def test_soak_with_random_cancels(hot_window, has_host, depth):
    """Requests with too few blocks: every stream is the same as alone, and no block is lost."""
    choose, needs = random.Random(3), serve(hot_window).scheduler.blocks.needs(300)
    host = HostSizes(slots=60, slot_bytes=10, hot_slots=3, step_slots=6)
    server = serve(
        hot_window,
        blocks=3 * needs.hot,
        cold_blocks=2 * needs.cold,
        host=host if has_host else None,
        depth=depth,
        max_seqs=6,
        max_batch_tokens=40,
        context_length=300,
    )
    shared = [words(length, length) for length in (0, 16, 90, 170)]
    live, cancelled = set(), set()
    while len(server.outputs) < 120:
        while len(server.scheduler.sequences.waiting) < choose.randint(0, 8):
            prompt = [*choose.choice(shared), *words(choose.randint(1, 60), choose.random())]
            total, seed = choose.randint(1, 60), choose.randrange(2**64)
            resumed = choose.randrange(total) if choose.random() < 0.3 else 0
            emitted = expected_ids(prompt, resumed, seed=seed)
            tenant = choose.choice(["", "other"])
            live.add(server.submit(prompt, emitted=emitted, tenant=tenant, max_tokens=total, seed=seed))
        for number in sorted(live):
            if choose.random() < 0.003 and server.cancel(number):
                cancelled.add(number)
        server.step()
        live -= {number for number in live if server.finish_reason(number) is not None} | cancelled
    server.run()
    server.assert_idle()
    assert server.restarts() > 0 or hot_window != RULE
    for number in range(len(server.outputs)):
        ids, expected = server.ids(number), server.expected(number)
        assert ids == (expected[: len(ids)] if number in cancelled else expected), f"request {number}"


# Attention: the bits are those of a cache with one pool, or with cold blocks in all layers.

LAZY = HotWindow(1, RULE.size)


def by_triton(cache, layout):
    return TritonAttention(cache, layout)


def by_exact(cache, layout):
    return TritonAttention(cache, layout, exact=True)


@pytest.mark.skipif(GPU, reason="texts lie on the CPU")
@pytest.mark.parametrize("kind", [by_kernel, by_torch, by_triton, fast_if(False, by_exact)])
def test_attention_of_layers_with_and_without_cold_blocks(kind):
    """What lies before a window, and hot blocks of which there are cold ones, are NaN."""
    if kind is by_kernel and not cpu.build:
        pytest.skip("needs the compiled kernels")
    texts = Texts([20, 90], kv_heads=1, seed=5)
    steps = texts.in_random_chunks(5)
    kept = texts.attend(kind, steps)
    assert_same_bits(texts.attend(kind, steps, hot_layers=(0,), copies=RULE), kept)
    kept = texts.attend(kind, steps, hot_window=LAZY)
    assert_same_bits(texts.attend(kind, steps, hot_layers=(0,), hot_window=LAZY), kept)
    kept = texts.attend(kind, steps, window=OF_MODEL.tokens)
    for cold in ({"copies": RULE}, {"hot_window": LAZY}):
        assert_same_bits(texts.attend(kind, steps, hot_layers=(LAYER,), window=OF_MODEL.tokens, **cold), kept)


# Models: the bits are those of an engine that keeps all blocks.

SEEDED = SamplingParams(max_tokens=150, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True, logprobs=3)
PROMPT = random.Random(5).choices(range(2, VOCABULARY), k=150)
MODES = {
    "none": ({}, {"hot_window": RULE, "copies": True}),
    "lazy": ({"hot_window": LAZY}, {"hot_window": LAZY}),
}
"""Of an engine that keeps all blocks, and of one that does not."""
MODELS = {"gemma3_text": (0,), "gpt_oss": (0,), "qwen2-window": (1,)}
"""Which of their two layers has the window. The last one is computed by the fused kernel for plain layers."""


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    made = InProcessModel(make(request.param, tmp_path_factory.mktemp("model"))[0])
    made.hot_layers = MODELS[request.param]
    return made


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def unbroken(model, mode):
    """By an engine that keeps all blocks: ids and log probabilities."""
    engine = InProcessEngine(model, **MODES[mode][0])
    return engine.ids(PROMPT, SEEDED), engine.logprobs


def window_engine(model, mode, **options):
    return InProcessEngine(model, **MODES[mode][1], hot_layers=model.hot_layers, **options)


@pytest.mark.bits
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(k=st.integers(0, 149), budget=st.integers(8, 250), cached=st.booleans())
def test_a_stream_resumed_anywhere_in_any_chunks_equals_that_of_an_engine_that_keeps_all_blocks(
    model, mode, unbroken, k, budget, cached
):
    engine, (ids, scores) = window_engine(model, mode, max_batch_tokens=budget), unbroken
    if cached:  # another stream has left its blocks, and went on beyond the end of this one's
        engine.ids(PROMPT, replace(SEEDED, max_tokens=min(150, k + 20)))
    assert engine.ids(PROMPT, SEEDED, ids[:k]) == ids[k:]
    assert engine.logprobs == scores[k:]


@pytest.mark.bits
@pytest.mark.parametrize("depth", [fast_if(False, 1), 2])
def test_preempted_streams_have_the_same_bits(model, mode, unbroken, depth):
    engine = window_engine(model, mode, hot=14, cold=24, depth=depth, max_batch_tokens=64)
    params = replace(SEEDED, max_tokens=100)
    others = [(random.Random(each).choices(range(2, VOCABULARY), k=10), (), params) for each in range(3)]
    *_, ids = engine.run(*others, (PROMPT, (), SEEDED))
    assert ids == unbroken[0]
    assert engine.scheduler.sequences.preemptions > 0


@pytest.mark.usefixtures("without_kernels")
def test_without_the_compiled_kernels(tmp_path):
    model, params = InProcessModel(make("gpt_oss", tmp_path)[0]), replace(SEEDED, max_tokens=30)
    model.hot_layers = MODELS["gpt_oss"]
    for mode in MODES:
        kept, engine = InProcessEngine(model, **MODES[mode][0]), window_engine(model, mode)
        expected = kept.ids(PROMPT, params)
        assert engine.ids(PROMPT, params) == expected
        assert engine.logprobs == kept.logprobs


@pytest.mark.bits
@pytest.mark.parametrize(
    ("mode", "tp", "dtype"), [("none", 1, "bfloat16"), ("none", 2, "float32"), ("lazy", 2, "float32")]
)
async def test_a_session_goes_on_from_host_memory_and_from_a_store_with_the_bits_of_computed_blocks(
    tmp_path, mode, tp, dtype
):
    path, dtype, mode, store = make("gemma3_text", tmp_path)[0], getattr(torch, dtype), MODES[mode][1], MemoryStore()
    mode = {**mode, "hot_layers": MODELS["gemma3_text"]}
    check(path, tp, dtype, texts=5, **mode)
    ids = await first_turn(path, store, tp=tp, dtype=dtype, **mode)
    other = Worker(path, store, tp, dtype, **mode)
    *found, cached = await other.ask("second", second_turn(ids))
    assert cached == FULL
    assert other.tier.usage.fetched >= FULL // BLOCK_SIZE
    forms = other.tier._epoch.view.forms
    assert [each.shape[1] for each in forms] == [2, 1]
    assert (forms[0].dtype == forms[1].dtype) == mode.get("copies", False)
    await other.close()
    *computed, cached = Ranks(path, tp, dtype, **mode).run(second_turn(ids))
    assert cached == 0
    assert found == computed


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_has_pools_for_windows_and_the_fingerprint_of_its_numerics(tmp_path, mode):
    """Copies change no bits. What is compressed does, and a shorter context keeps all blocks of all layers."""
    path, params = make("gpt_oss", tmp_path)[0], replace(SEEDED, logprobs=None)
    settings = {"threads": 1, "kv_compression": mode, "max_batch_tokens": 64, "max_seqs": 4, "kv_hot_window": 16}
    rule = EngineConfig(model="", **settings).hot_window_with(WindowedLayers(OF_MODEL, (0,), 2))
    assert rule == MODES[mode][1]["hot_window"]
    fingerprints = set()
    for context in (512, 383):
        with InProcessRank(path, max_context=context, **settings) as rank:
            fingerprints.add(rank.ready.fingerprint)
            assert rank.ready.deterministic
            if context == 512:
                running = 4 * rule.blocks + 4
                assert rank.loaded.blocks == PoolSizes(running + -(-running // 4), 4 * (32 - rule.blocks))
                expected = InProcessEngine(InProcessModel(path), **MODES[mode][0])
                assert rank.run((PROMPT, params))[0] == expected.ids(PROMPT, params)
    assert len(fingerprints) == (1 if mode == "none" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_serve_a_text_longer_than_their_hot_blocks(tmp_path, mode):
    path = make("gemma3_text", tmp_path)[0]
    Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0")).save(str(path / "tokenizer.json"))
    params = [replace(SEEDED, seed=each, logprobs=None) for each in range(4)]
    settings = {
        "tp": 2,
        "threads": 1,
        "kv_compression": mode,
        "max_batch_tokens": 32,
        "max_seqs": 4,
        "kv_hot_window": 16,
    }
    with Engine(path, max_context=383, **settings | {"kv_hot_window": 48}) as engine:
        kept = engine.generate_ids([PROMPT] * 4, params)
    with Engine(path, host_cache_bytes=2**20, **settings) as engine:
        assert engine.generate_ids([PROMPT] * 4, params) == kept
        status = engine.core.status()
        assert status.total_blocks - status.cold_blocks < 2 * len(PROMPT) // BLOCK_SIZE * 4
        assert status.free_blocks == status.total_blocks
        assert (status.compressed_blocks > 0) == (mode == "lazy")
