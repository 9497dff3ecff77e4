"""The two pools: blocks are compressed once, when they leave the hot window, and none is lost."""

import random

import pytest
from fast_cases import fast_if
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.sizes import hot_pool_blocks
from scripted_ranks import Server, expected_ids, words
from specs import rank_spec

LAZY = HotWindow(sink=1, size=4)
NARROW = HotWindow(sink=1, size=1)
IMMEDIATE = HotWindow(sink=0, size=0)
HOT_WINDOWS = [LAZY, NARROW, IMMEDIATE, HotWindow(sink=2, size=3)]


def serve(hot_window=NARROW, **settings):
    return Server(**{"hot_window": hot_window, "blocks": 64, "cold_blocks": 64, "context_length": 512, **settings})


def run(server):
    """Run to the end. For each step, by the position of its first token: the numbers of moves within it and after
    it."""
    steps = {}
    while (plan := server.scheduler.schedule()) is not None:
        steps[int(plan.starts[0])] = (len(plan.moves), len(plan.late_moves))
        server.finish(server.ranks.execute(plan))
    return steps


def in_use(server):
    return tuple(pool.total - pool.free for pool in (server.pool.hot, server.pool.cold))


class TestCachedTexts:
    """A conversation's next turn, while other streams fill the batch."""

    SEQS, BATCH_TOKENS = 8, 128

    def second_turn(self, hot):
        """How many tokens of the first turn the second one need not compute."""
        server = serve(LAZY, blocks=hot, cold_blocks=400, max_seqs=self.SEQS, max_batch_tokens=self.BATCH_TOKENS)
        first = server.submit(words(200, seed=1), max_tokens=24)
        server.run()
        others = [server.submit(words(150, seed=10 + each), max_tokens=200) for each in range(self.SEQS - 1)]
        brief = server.submit(words(150, seed=9), max_tokens=60)
        while server.finish_reason(brief) is None:
            server.step()
        assert len(server.scheduler.sequences.running) == self.SEQS - 1
        turn = [*words(200, seed=1), *server.ids(first), *words(20, seed=2)]
        second = server.submit(turn, max_tokens=4)
        server.run()
        for number in (first, *others, brief, second):
            assert server.ids(number) == server.expected(number)
        server.assert_idle()
        return server.outputs[second][0].cached_tokens

    def test_their_hot_windows_have_a_share_of_the_hot_pool(self):
        spec = rank_spec(max_seqs=self.SEQS, max_batch_tokens=self.BATCH_TOKENS)
        assert spec.config.hot_window == LAZY
        assert self.second_turn(hot_pool_blocks(spec.config, LAZY)) >= 200

    def test_without_it_a_full_batch_leaves_the_sink_at_most(self):
        assert self.second_turn(self.SEQS * LAZY.blocks + self.BATCH_TOKENS // BLOCK_SIZE) <= BLOCK_SIZE


class TestTransition:
    """`ScriptedRanks` checks every plan: each query finds each block in its version."""

    def test_a_decoding_sequence_compresses_a_block_after_the_step_that_fills_one(self):
        server = serve(LAZY)
        number = server.submit(words(90, seed=1), max_tokens=60)
        moves = {start: each for start, each in run(server).items() if each != (0, 0)}
        assert moves == {95: (0, 1), 111: (0, 1), 127: (0, 1), 143: (0, 1)}
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_a_prompt_compresses_blocks_in_the_step_whose_queries_need_them_cold(self):
        server = serve(LAZY, max_batch_tokens=128)
        server.submit(words(16 * BLOCK_SIZE, seed=1), max_tokens=1)
        assert run(server) == {0: (2, 1), 128: (8 - 1, 1)}
        assert len(set(server.ranks.compressed)) == len(server.ranks.compressed) == 11

    @pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
    def test_a_sequence_holds_what_its_next_query_sees_and_nothing_else(self, hot_window):
        server = serve(hot_window, max_batch_tokens=40)
        server.submit(words(200, seed=1), max_tokens=100)
        computed = 0
        while server.step():
            computed = sum(server.computed(0)[-1])
            if server.scheduler.sequences.running:
                hot, cold = in_use(server)
                assert hot + cold == -(-computed // BLOCK_SIZE)
                assert cold == max(0, hot_window.first_hot(computed // BLOCK_SIZE) - hot_window.sink)
                assert hot <= hot_window.blocks
        assert computed == 299
        server.assert_idle()

    def test_a_text_that_stays_in_the_window_has_no_cold_block(self):
        server = serve(LAZY)
        server.submit(words(50, seed=1), max_tokens=LAZY.blocks * BLOCK_SIZE - 50)
        assert set(run(server).values()) == {(0, 0)}

    @pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
    @pytest.mark.parametrize("budget", [1, 7, 16, 33, 200])
    def test_chunks_of_any_size(self, hot_window, budget):
        server = serve(hot_window, max_batch_tokens=budget, max_seqs=1)
        number = server.submit(words(150, seed=1), max_tokens=30)
        server.run()
        assert server.ids(number) == server.expected(number)
        assert len(server.ranks.compressed) == len(set(server.ranks.compressed))
        server.assert_idle()

    def test_few_hot_blocks_make_small_chunks_and_preempt_nobody(self):
        server = serve(LAZY, blocks=9, max_batch_tokens=200)
        number = server.submit(words(200, seed=1), max_tokens=5)
        server.run()
        chunks = [count for _, count in server.computed(number)]
        assert chunks == [9 * BLOCK_SIZE, 4 * BLOCK_SIZE - 8, 1, 1, 1, 1]
        assert server.restarts() == 0
        server.assert_idle()

    def test_a_cancelled_sequence_leaves_a_valid_shared_block(self):
        """Two sequences compress the same block in one step; the first of them is cancelled before the step is done."""
        server = serve(max_batch_tokens=200)
        prompt = words(3 * BLOCK_SIZE - 2, seed=1)
        first = server.submit(prompt, max_tokens=40, seed=1)
        server.step()
        second = server.submit(prompt, max_tokens=40, seed=1)  # the same text, so the same tokens
        while not len((plan := server.scheduler.schedule()).late_moves):
            server.finish(server.ranks.execute(plan))
        result = server.ranks.execute(plan)
        server.cancel(first)
        server.finish(result)
        server.run()
        assert server.ids(second) == server.expected(second)
        server.assert_idle()


class TestPrefixCache:
    def test_a_second_turn_starts_after_the_blocks_of_the_first(self):
        server = serve(LAZY)
        prompt = words(200, seed=1)
        first = server.submit(prompt, max_tokens=100)
        server.run()
        server.submit([*prompt, *server.ids(first), *words(5, seed=2)], max_tokens=2)
        server.run()
        assert server.outputs[1][0].cached_tokens == 299 // BLOCK_SIZE * BLOCK_SIZE
        assert len(server.ranks.compressed) == len(set(server.ranks.compressed)) == 305 // BLOCK_SIZE - 5
        server.assert_idle()

    def test_a_request_that_diverges_where_others_did_finds_the_prefix(self):
        """The first continues, and other texts take the hot blocks at the fork. The second computes these again and
        caches them. The third starts after them.
        """
        server = serve(NARROW, blocks=8, cold_blocks=100, max_batch_tokens=32)
        shared = words(10 * BLOCK_SIZE, seed=1)
        cached = []
        for tail in range(4):
            number = server.submit([*shared, *words(60, seed=50 + tail)], max_tokens=4)
            server.run()
            assert server.ids(number) == server.expected(number)
            cached.append(server.outputs[number][0].cached_tokens)
            server.submit(words(3 * BLOCK_SIZE, seed=100 + tail), max_tokens=4)
            server.run()
        assert cached == [0, BLOCK_SIZE, 160, 160]
        assert len(server.ranks.compressed) == len(set(server.ranks.compressed))

    def test_blocks_that_are_computed_again_are_not_compressed_again(self):
        server = serve(NARROW, blocks=6, cold_blocks=100, max_batch_tokens=32)
        prompt = words(12 * BLOCK_SIZE, seed=1)
        server.submit(prompt, max_tokens=4)
        server.run()
        server.submit(words(5 * BLOCK_SIZE, seed=2), max_tokens=4, tenant="takes the hot blocks")
        server.run()
        again = server.submit(prompt, max_tokens=4)
        server.run()
        assert server.outputs[again][0].cached_tokens == BLOCK_SIZE
        assert len(server.ranks.compressed) == len(set(server.ranks.compressed))

    def test_requests_with_a_common_prefix_share_one_prefill_and_its_cold_blocks(self):
        server = serve(NARROW, max_seqs=8, max_batch_tokens=64)
        shared = words(10 * BLOCK_SIZE + 3, seed=1)
        numbers = [server.submit([*shared, each], max_tokens=20) for each in range(6)]
        server.run()
        assert [server.outputs[number][0].cached_tokens for number in numbers] == [0, *[160] * 5]
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        assert len(server.ranks.compressed) == len(set(server.ranks.compressed))
        server.assert_idle()

    def test_without_prefix_cache_every_sequence_compresses_its_own_blocks(self):
        server = serve(NARROW, prefix_cache=False)
        prompt = words(100, seed=1)
        for _ in range(2):
            server.submit(prompt, max_tokens=2)
        server.run()
        texts = server.ranks.compressed
        assert len(texts) == 2 * len(set(texts)) > 0
        server.assert_idle()


class TestRefusal:
    def test_a_request_that_can_never_fit_is_refused_with_the_blocks_of_both_pools(self):
        server = serve(LAZY, blocks=8, cold_blocks=10)
        with pytest.raises(
            LockstepError, match=r"need 6 hot and 11 cold blocks of KV cache, this engine has 8 hot and 10 c"
        ):
            server.submit(words(200, seed=1), max_tokens=58)
        server.submit(words(200, seed=1), max_tokens=56)
        server.run()
        assert len(server.ids(0)) == 56
        server.assert_idle()

    def test_too_few_hot_blocks(self):
        server = serve(LAZY, blocks=4, cold_blocks=100)
        with pytest.raises(LockstepError, match=r"need 5 blocks of KV cache, this engine has 4 hot and 100 cold"):
            server.submit(words(60, seed=1), max_tokens=5)
        number = server.submit(words(60, seed=1), max_tokens=4)
        server.run()
        assert server.ids(number) == server.expected(number)

    @pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
    def test_a_request_that_just_fits_runs_to_its_end(self, hot_window):
        for tokens in range(90, 130):
            needs = serve(hot_window).scheduler.blocks.needs(tokens)
            server = serve(hot_window, blocks=needs.hot, cold_blocks=needs.cold)
            number = server.submit(words(60, seed=1), max_tokens=tokens - 60)
            server.run()
            assert server.ids(number) == server.expected(number)
            assert server.restarts() == 0
            server.assert_idle()


class TestTenants:
    def test_a_request_above_its_tenants_share_is_refused_with_the_numbers(self):
        server = Server(blocks=20, tenant_share=0.5)
        with pytest.raises(LockstepError, match="need 11 blocks of KV cache, one tenant may have 10 blocks") as caught:
            server.submit(words(160, seed=1), max_tokens=8)
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
        server.submit(words(150, seed=1), max_tokens=8)
        server.run()

    def test_a_tenant_at_its_limit_waits_and_others_overtake(self):
        server = Server(blocks=20, tenant_share=0.5, max_seqs=8, max_batch_tokens=200)
        greedy = [server.submit(words(60, seed=each), tenant="greedy", max_tokens=4) for each in range(4)]
        modest = server.submit(words(60, seed=9), tenant="modest", max_tokens=4)
        server.step()
        assert set(server.ranks.trace[0]) == {*greedy[:2], modest}
        server.run()
        assert all(server.ids(number) == server.expected(number) for number in (*greedy, modest))
        server.assert_idle()

    @pytest.mark.parametrize("hot_window", [None, NARROW], ids=str)
    def test_a_tenant_at_its_limit_preempts_its_own_requests_only(self, hot_window):
        """The pool is full, and the youngest request is another tenant's: to preempt it would not help."""
        server = Server(
            blocks=20,
            cold_blocks=0 if hot_window is None else 12,
            hot_window=hot_window,
            tenant_share=0.5,
            max_batch_tokens=400,
        )
        lengths = (70, 145) if hot_window is None else (90, 130)
        greedy = [server.submit(words(lengths[0], seed=each), tenant="greedy", max_tokens=30) for each in range(2)]
        modest = server.submit(words(lengths[1], seed=9), tenant="modest", max_tokens=13)
        pool = server.pool.hot if hot_window is None else server.pool.cold
        while not server.scheduler.sequences.preemptions:
            free = pool.free
            assert server.step()
        assert free == 0
        assert server.finish_reason(modest) is None
        while server.step():
            assert pool.used_by("greedy") <= pool.total // 2
        assert [count for _, count in server.computed(modest)[1:]] == [1] * 12
        assert [count for _, count in server.computed(greedy[0])[1:]] == [1] * 29
        assert server.restarts() == 1
        assert all(server.ids(number) == server.expected(number) for number in (*greedy, modest))
        server.assert_idle()

    def test_a_shared_prefix_is_counted_once(self):
        server = Server(blocks=40, tenant_share=0.5, max_seqs=8, max_batch_tokens=400)
        shared = words(12 * BLOCK_SIZE, seed=1)
        server.submit(shared, tenant="a", max_tokens=1)
        server.run()
        for each in range(5):
            server.submit([*shared, each], tenant="a", max_tokens=3)
        server.step()
        assert len(server.scheduler.sequences.running) == 5
        assert server.pool.hot.used_by("a") == 12 + 5


@pytest.mark.parametrize("prefix_cache", [True, fast_if(False, False)])
@pytest.mark.parametrize("hot_window", [fast_if(n == 1, each) for n, each in enumerate(HOT_WINDOWS[:3])], ids=str)
def test_soak_with_random_cancels(hot_window, prefix_cache):
    soak(600, hot_window=hot_window, prefix_cache=prefix_cache, seed=1, blocks=3 * hot_window.blocks, cold_blocks=20)


@pytest.mark.exhaustive
def test_ten_thousand_requests_leave_every_block_free():
    soak(10_000, hot_window=NARROW, prefix_cache=True, seed=2, blocks=14, cold_blocks=16, tenant_share=0.8)


def soak(count, *, hot_window, prefix_cache, seed, **settings):
    """Requests with too few blocks: every stream is the same as alone, and no block is lost."""
    choose = random.Random(seed)
    server = serve(
        hot_window,
        max_seqs=6,
        max_batch_tokens=40,
        max_queue=12,
        context_length=160,
        prefix_cache=prefix_cache,
        **settings,
    )
    shared = [words(length, seed * 10 + length) for length in (0, 16, 40, 90)]
    live, cancelled = set(), set()

    def submit():
        prompt = [*choose.choice(shared), *words(choose.randint(1, 40), choose.random())]
        total, request_seed = choose.randint(1, 30), choose.randrange(2**64)
        resumed = choose.randrange(total) if choose.random() < 0.3 else 0
        live.add(
            server.submit(
                prompt,
                emitted=expected_ids(prompt, resumed, seed=request_seed),
                priority=choose.choice([0, 0, 0, 1, -1]),
                tenant=choose.choice(["", "other"]),
                max_tokens=total,
                seed=request_seed,
            )
        )

    def cancel_some():
        for number in sorted(live):
            if choose.random() < 0.003 and server.cancel(number):
                cancelled.add(number)

    while len(server.outputs) < count:
        while len(server.scheduler.sequences.waiting) < choose.randint(0, 8):
            submit()
        cancel_some()
        plan = server.scheduler.schedule()
        if plan is not None:
            result = server.ranks.execute(plan)
            cancel_some()
            server.finish(result)
        live -= {number for number in live if server.finish_reason(number) is not None} | cancelled
    server.run()
    server.assert_idle()
    for number in range(len(server.outputs)):
        ids, expected = server.ids(number), server.expected(number)
        assert ids == (expected[: len(ids)] if number in cancelled else expected), f"request {number}, seed {seed}"
    assert cancelled
    assert server.restarts() > 5
    assert server.ranks.compressed
