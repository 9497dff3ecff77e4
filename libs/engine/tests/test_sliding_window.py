"""Models with a window in every layer: a sequence holds the blocks of its window, and has the bits that all give it."""

import random
from dataclasses import replace

import pytest
import torch
from checkpoints import VOCABULARY, make
from fast_cases import fast_if
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process_engine import InProcessEngine, InProcessModel
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import Engine, SamplingParams
from lockstep_engine.blocks import HostSizes
from lockstep_engine.config import BLOCK_SIZE, HotWindow, SlidingWindow
from scripted_ranks import Server, expected_ids, words
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

WINDOWS = [SlidingWindow(tokens) for tokens in (1, 2, 16, 17, 37, 64)]
NARROW = HotWindow(sink=1, size=1)
IMMEDIATE = HotWindow(sink=0, size=0)
WIDE = SlidingWindow(64)
FORMS = [
    *((None, window) for window in WINDOWS),
    *((hot, window) for hot in (NARROW, IMMEDIATE, HotWindow(sink=2, size=2)) for window in WINDOWS[-2:]),
    (IMMEDIATE, SlidingWindow(2)),
]
"""In each a query sees blocks in both versions, or there is one."""
ids_of = str


def serve(hot_window=None, window=WIDE, **settings):
    cold = 0 if hot_window is None else 64
    return Server(
        **{"hot_window": hot_window, "window": window, "blocks": 64, "cold_blocks": cold, "context_length": 640}
        | settings
    )


def in_use(server):
    return sum(pool.total - pool.free for pool in (server.pool.hot, server.pool.cold))


class TestBlocksInUse:
    """`ScriptedRanks` checks every plan: each query finds the blocks of its window, in their version."""

    @pytest.mark.parametrize(("hot_window", "window"), FORMS, ids=ids_of)
    def test_a_long_stream_holds_its_window_and_the_block_that_it_fills(self, hot_window, window):
        server = serve(hot_window, window, max_batch_tokens=40)
        number = server.submit(words(200, seed=1), max_tokens=400)
        computed = 0
        while server.step():
            computed = sum(server.computed(number)[-1])
            if server.scheduler.sequences.running:
                first = -(-computed // BLOCK_SIZE) - in_use(server)
                entered = computed // BLOCK_SIZE * BLOCK_SIZE
                assert window.first_seen(entered) <= first <= window.first_seen(computed)
                assert in_use(server) <= window.blocks_before + 1
        assert computed == 599
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_while_a_step_is_planned_the_tokens_of_the_step_are_held_too(self):
        server = serve(max_batch_tokens=40)
        server.submit(words(600, seed=1), max_tokens=1)
        while (plan := server.scheduler.schedule()) is not None:
            held = (plan.tables >= 0).sum()
            assert held <= WIDE.blocks_before + 1 + -(-40 // BLOCK_SIZE)
            server.finish(server.ranks.execute(plan))

    @pytest.mark.parametrize(("hot_window", "window"), FORMS, ids=ids_of)
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_request_that_just_fits_runs_to_its_end(self, hot_window, window, depth):
        for tokens in (90, 95, 96, 97, 120, 300):
            needs = serve(hot_window, window).scheduler.blocks.needs(tokens)
            server = serve(hot_window, window, blocks=needs.hot, cold_blocks=needs.cold, depth=depth)
            number = server.submit(words(60, seed=1), max_tokens=tokens - 60)
            server.run()
            assert server.ids(number) == server.expected(number)
            assert server.restarts() == 0
            server.assert_idle()

    @pytest.mark.parametrize("blocks", [5, 6, 8, 9])
    def test_a_prompt_is_cut_into_chunks_for_which_there_are_blocks(self, blocks):
        server = serve(blocks=blocks, max_batch_tokens=600)
        number = server.submit(words(500, seed=1), max_tokens=5)
        server.run()
        assert server.computed(number)[0] == (0, blocks * BLOCK_SIZE)
        assert server.ids(number) == server.expected(number)
        assert server.restarts() == 0
        server.assert_idle()

    @pytest.mark.parametrize(("hot_window", "window"), FORMS[3:], ids=ids_of)
    @pytest.mark.parametrize("budget", [1, 7, 16, 33, 200])
    def test_chunks_of_any_size(self, hot_window, window, budget):
        server = serve(hot_window, window, max_batch_tokens=budget, max_seqs=1)
        number = server.submit(words(150, seed=1), max_tokens=30)
        server.run()
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_as_many_streams_run_as_there_is_room_for_windows(self):
        blocks, preempted = 4 * (WIDE.blocks_before + 1), {}
        for window in (WIDE, None):
            server = serve(window=window, blocks=blocks)
            numbers = [server.submit(words(20, seed=each), max_tokens=250) for each in range(4)]
            server.run()
            assert all(server.ids(number) == server.expected(number) for number in numbers)
            preempted[window] = server.restarts()
            server.assert_idle()
        assert preempted[WIDE] == 0 < preempted[None]

    def test_a_request_that_can_never_fit_is_refused_with_the_blocks_of_a_window(self):
        server = serve(blocks=4)
        with pytest.raises(LockstepError, match="need 5 blocks of KV cache, this engine has 4 blocks") as caught:
            server.submit(words(200, seed=1), max_tokens=200)
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED

    def test_an_embedding_of_a_long_text_holds_no_more(self):
        server = serve(NARROW, max_batch_tokens=40, blocks=8, cold_blocks=5)
        number = server.embed(words(500, seed=1))
        server.run()
        assert server.embedding(number)
        server.assert_idle()


class TestPrefixCache:
    @pytest.mark.parametrize("hot_window", [None, NARROW], ids=ids_of)
    def test_a_second_turn_starts_after_a_window_whose_beginning_was_evicted(self, hot_window):
        server = serve(hot_window, blocks=16, cold_blocks=0 if hot_window is None else 12)
        prompt = words(200, seed=1)
        first = server.submit(prompt, max_tokens=100)
        server.run()
        turn = [*prompt, *server.ids(first), *words(5, seed=2)]
        second = server.submit(turn, max_tokens=40)
        server.run()
        assert server.outputs[second][0].cached_tokens == 299 // BLOCK_SIZE * BLOCK_SIZE
        assert server.ids(second) == server.expected(second)
        assert server.restarts() == 0
        server.assert_idle()

    @pytest.mark.parametrize("hot_window", [None, NARROW], ids=ids_of)
    @pytest.mark.parametrize("kept", range(12))
    def test_a_text_starts_where_its_window_is_whole(self, hot_window, kept):
        """The prompt is the beginning of an earlier text, of which the last blocks are cached."""
        server = serve(hot_window, blocks=12, cold_blocks=0 if hot_window is None else 8, max_batch_tokens=32)
        text = words(20 * BLOCK_SIZE, seed=1)
        server.submit(text, max_tokens=2)
        server.run()
        number = server.submit([*text[: (8 + kept) * BLOCK_SIZE], 1], max_tokens=60)
        server.run()
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_a_text_whose_window_has_a_gap_starts_before_it_or_is_computed(self):
        server = serve(blocks=40)
        text = words(20 * BLOCK_SIZE, seed=1)
        server.submit(text, max_tokens=2)
        server.run()
        number = server.submit([*text, 1], max_tokens=8)
        keys = server.scheduler.prefix_keys(str(number))
        usable = [server.pool.match(keys[:count]).usable for count in range(21)]
        assert usable == [*range(21)]
        for gap in (3, 11, 17):
            server.pool.hot.forget(server.pool.hot.find(keys[gap]))
        usable = [server.pool.match(keys[:count]).usable for count in range(21)]
        assert usable == [0, 1, 2, 3, *[3] * 4, 8, 9, 10, 11, *[11] * 4, 16, 17, 17, 17, 17]
        assert server.pool.match(keys).known == 17
        server.run()
        assert server.outputs[number][0].cached_tokens == 17 * BLOCK_SIZE
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_texts_with_a_common_beginning_share_one_prefill(self):
        server = serve(max_seqs=8, max_batch_tokens=64, blocks=60)
        shared = words(10 * BLOCK_SIZE + 3, seed=1)
        numbers = [server.submit([*shared, each], max_tokens=20) for each in range(6)]
        server.run()
        assert [server.outputs[number][0].cached_tokens for number in numbers] == [0, *[160] * 5]
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        server.assert_idle()

    @pytest.mark.parametrize("hot_window", [None, IMMEDIATE], ids=ids_of)
    def test_where_texts_have_diverged_the_window_is_kept(self, hot_window):
        """The first continues, and drops the blocks before the fork. The second starts after them and keeps them for
        the third, while others are evicted.
        """
        server = serve(hot_window, blocks=14, cold_blocks=0 if hot_window is None else 14, max_batch_tokens=32)
        shared = words(10 * BLOCK_SIZE, seed=1)
        cached = []
        for tail in range(4):
            number = server.submit([*shared, *words(100, seed=50 + tail)], max_tokens=4)
            server.run()
            assert server.ids(number) == server.expected(number)
            cached.append(server.outputs[number][0].cached_tokens)
        assert cached[0] == 0
        assert cached[2:] == [160, 160]

    def test_what_was_dropped_is_evicted_first(self):
        server = serve(blocks=24)
        text = words(20 * BLOCK_SIZE, seed=1)
        first = server.submit(text, max_tokens=2)
        server.run()
        server.submit(words(15 * BLOCK_SIZE, seed=2), max_tokens=2)
        server.run()
        again = server.submit([*text, *server.ids(first)], max_tokens=2)
        server.run()
        assert server.outputs[again][0].cached_tokens == 20 * BLOCK_SIZE

    @pytest.mark.parametrize("hot_window", [None, NARROW], ids=ids_of)
    def test_a_text_that_goes_on_beyond_a_shared_window_waits_for_room_for_one_of_its_own(self, hot_window):
        """The first holds the shared window until it ends. The second would drop these blocks and free none."""
        server = serve(hot_window, blocks=7, cold_blocks=5, max_seqs=2, max_batch_tokens=32, prefix_cache=True)
        shared = words(6 * BLOCK_SIZE, seed=1)
        first = server.submit(shared, max_tokens=15)
        server.step()
        server.step()
        server.step()
        second = server.submit([*shared, *words(200, seed=2)], max_tokens=3)
        server.run()
        assert server.restarts() == 0
        assert all(server.ids(number) == server.expected(number) for number in (first, second))
        server.assert_idle()

    def test_a_preempted_stream_goes_on_after_its_window(self):
        server = serve(blocks=11, max_batch_tokens=64)
        numbers = [server.submit(words(20, seed=each), max_tokens=300, arrived_at=each) for each in range(3)]
        server.run()
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        assert server.restarts() > 0
        server.assert_idle()

    @pytest.mark.parametrize("hot_window", [None, NARROW], ids=ids_of)
    def test_host_memory_gives_the_window_back(self, hot_window):
        host = HostSizes(slots=200, slot_bytes=10, hot_slots=1 if hot_window is None else 2, step_slots=4)
        server = serve(hot_window, blocks=12, cold_blocks=0 if hot_window is None else 8, host=host)
        prompt = words(200, seed=1)
        first = server.submit(prompt, max_tokens=100)
        server.run()
        for each in range(4):
            server.submit(words(12 * BLOCK_SIZE, seed=10 + each), max_tokens=2)
            server.run()
        turn = [*prompt, *server.ids(first), *words(5, seed=2)]
        second = server.submit(turn, max_tokens=40)
        server.run()
        assert server.outputs[second][0].cached_tokens == 299 // BLOCK_SIZE * BLOCK_SIZE
        assert server.ids(second) == server.expected(second)
        assert 0 < server.pool.host.usage.copied_in <= WIDE.blocks_before
        server.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_host", [False, True], ids=["pools", "host"])
@pytest.mark.parametrize(
    ("hot_window", "window"), [fast_if(n in (4, 6), *each) for n, each in enumerate(FORMS)], ids=ids_of
)
def test_soak_with_random_cancels(hot_window, window, has_host, depth):
    """Requests with too few blocks: every stream is the same as alone, and no block is lost."""
    choose, needs = random.Random(3), serve(hot_window, window).scheduler.blocks.needs(300)
    host = HostSizes(slots=60, slot_bytes=10, hot_slots=1 if hot_window is None else 2, step_slots=6)
    server = serve(
        hot_window,
        window,
        blocks=3 * needs.hot,
        cold_blocks=3 * needs.cold,
        host=host if has_host else None,
        depth=depth,
        max_seqs=6,
        max_batch_tokens=40,
        context_length=300,
    )
    shared = [words(length, length) for length in (0, 16, 90, 170)]
    live, cancelled = set(), set()
    while len(server.outputs) < 150:
        while len(server.scheduler.sequences.waiting) < choose.randint(0, 8):
            prompt = [*choose.choice(shared), *words(choose.randint(1, 60), choose.random())]
            total, seed = choose.randint(1, 60), choose.randrange(2**64)
            resumed = choose.randrange(total) if choose.random() < 0.3 else 0
            emitted = expected_ids(prompt, resumed, seed=seed, window=window)
            priority, tenant = choose.choice([0, 0, 1, -1]), choose.choice(["", "other"])
            number = server.submit(
                prompt, emitted=emitted, priority=priority, tenant=tenant, max_tokens=total, seed=seed
            )
            live.add(number)
        for number in sorted(live):
            if choose.random() < 0.003 and server.cancel(number):
                cancelled.add(number)
        server.step()
        live -= {number for number in live if server.finish_reason(number) is not None} | cancelled
    server.run()
    server.assert_idle()
    for number in range(len(server.outputs)):
        ids, expected = server.ids(number), server.expected(number)
        assert ids == (expected[: len(ids)] if number in cancelled else expected), f"request {number}"


# A model: the bits are those of an engine that keeps all blocks.

SEEDED = SamplingParams(max_tokens=300, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True, logprobs=3)
GREEDY = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, logprobs=3)
OF_MODEL = SlidingWindow(37)
PROMPT = random.Random(5).choices(range(2, VOCABULARY), k=150)
MODES = {
    "none": {},
    "lazy": {"hot_window": NARROW},
    "immediate": {"hot_window": IMMEDIATE},
    "per_layer": {"hot_window": NARROW, "compressed_layers": (1,)},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make("mistral", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return InProcessModel(checkpoint[0])


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.fixture(scope="module")
def unbroken(model, mode):
    """By an engine that keeps all blocks: ids and log probabilities."""
    engine = InProcessEngine(model, **mode)
    return {params.temperature: (engine.ids(PROMPT, params), engine.logprobs) for params in (GREEDY, SEEDED)}


def window_engine(model, **options):
    return InProcessEngine(model, window=OF_MODEL, **options)


def test_logits_equal_transformers_past_many_windows(checkpoint, model):
    """Log probabilities of 300 tokens in windows of 37, by an engine with the blocks of one window and a chunk."""
    engine = window_engine(model, hot=OF_MODEL.blocks_before + 1 + 2, max_batch_tokens=32, prefix_cache=False)
    ids = engine.ids(PROMPT, GREEDY)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint[0], dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(ids) == len(engine.logprobs) == 300
    for position, (token, scores) in enumerate(zip(ids, engine.logprobs, strict=True)):
        assert scores.chosen.logprob == pytest.approx(expected[position, token].item(), abs=2e-4)
        best = expected[position].max().item()
        assert expected[position, token].item() == pytest.approx(best, abs=2e-4)


@pytest.mark.bits
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_bits_are_those_of_an_engine_that_keeps_all_blocks(model, mode, unbroken, params):
    engine = window_engine(model, **mode)
    assert engine.ids(PROMPT, params) == unbroken[params.temperature][0]
    assert engine.logprobs == unbroken[params.temperature][1]


@pytest.mark.bits
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(k=st.integers(1, 299), budget=st.integers(8, 250), cached=st.booleans())
def test_a_stream_resumed_anywhere_in_any_chunks_equals_the_unbroken_one(model, mode, unbroken, k, budget, cached):
    engine, (ids, scores) = window_engine(model, max_batch_tokens=budget, **mode), unbroken[SEEDED.temperature]
    if cached:  # another stream has left its blocks, and went on beyond the end of this one's
        engine.ids(PROMPT, replace(SEEDED, max_tokens=min(300, k + 20)))
    assert engine.ids(PROMPT, SEEDED, ids[:k]) == ids[k:]
    assert engine.logprobs == scores[k:]


@pytest.mark.bits
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_streams_have_the_same_bits(model, mode, unbroken, depth):
    engine = window_engine(model, hot=10, cold=6, depth=depth, max_batch_tokens=64, **mode)
    others = [(random.Random(each).choices(range(2, VOCABULARY), k=10), (), SEEDED) for each in range(3)]
    *_, ids = engine.run(*others, (PROMPT, (), SEEDED))
    assert ids == unbroken[SEEDED.temperature][0]
    assert engine.scheduler.sequences.preemptions > 0


@pytest.mark.parametrize("tp", [1, fast_if(False, 2)])
def test_rank_processes_serve_texts_longer_than_their_cache(checkpoint, model, tp):
    """450 tokens, in blocks for 128: a window of 37 and chunks of 32."""
    path, params = checkpoint[0], [replace(SEEDED, seed=each, logprobs=None) for each in range(4)]
    Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0")).save(str(path / "tokenizer.json"))
    block_bytes = 2 * 3 * 2 // tp * BLOCK_SIZE * 16 * 4
    settings = {"tp": tp, "threads": 1, "kv_compression": "none", "max_batch_tokens": 32, "max_seqs": 4}
    with Engine(path, kv_memory_bytes=8 * block_bytes, **settings) as engine:
        ids = engine.generate_ids([PROMPT] * 4, params)
        status = engine.core.status()
        assert status.deterministic
        assert (status.total_blocks, status.free_blocks) == (8, 8)
    if tp == 1:
        assert ids == InProcessEngine(model).run(*((PROMPT, (), each) for each in params))
    else:
        with Engine(path, **settings) as engine:
            assert engine.generate_ids([PROMPT] * 4, params) == ids


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("name", ["none", "lazy"])
def test_without_the_compiled_kernels(checkpoint, name):
    model, params = InProcessModel(checkpoint[0]), replace(SEEDED, max_tokens=60)
    kept = InProcessEngine(model, **MODES[name])
    expected = kept.ids(PROMPT, params)
    engine = window_engine(model, **MODES[name])
    assert engine.ids(PROMPT, params) == expected
    assert engine.logprobs == kept.logprobs
