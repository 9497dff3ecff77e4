"""The scheduler with ranks that have no model: what runs in a step, what is refused, and complete streams."""

import random

import pytest
from fast_cases import fast_if, further
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.request import PromptScores
from scripted_ranks import Server, expected_ids, words


class TestBatching:
    def test_a_long_prompt_is_computed_in_chunks_of_the_budget(self):
        server = Server(max_batch_tokens=32)
        number = server.submit(words(100, seed=1), max_tokens=3)
        server.run()
        assert server.computed(number) == [(0, 32), (32, 32), (64, 32), (96, 4), (100, 1), (101, 1)]
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_nothing_is_emitted_before_the_full_prompt_is_computed(self):
        server = Server(max_batch_tokens=32)
        number = server.submit(words(65, seed=1))
        for _ in range(2):
            server.step()
            assert server.outputs[number] == []
        server.step()
        assert len(server.ids(number)) == 1

    def test_decoding_continues_while_a_prompt_is_computed(self):
        server = Server(max_batch_tokens=32)
        early = server.submit(words(5, seed=1), max_tokens=20)
        server.step()
        late = server.submit(words(100, seed=2), max_tokens=2)
        for _ in range(4):
            server.step()
        assert server.computed(early)[1:] == [(5, 1), (6, 1), (7, 1), (8, 1)]
        assert server.computed(late) == [(0, 31), (31, 31), (62, 31), (93, 7)]
        server.run()
        assert server.ids(early) == server.expected(early)
        assert server.ids(late) == server.expected(late)

    def test_decoding_continues_while_the_prompt_of_a_more_important_request_is_computed(self):
        """A stream that moves here is computed again from its first token; those that are here go on meanwhile."""
        server = Server(max_batch_tokens=32)
        here = [server.submit(words(5, seed=seed), max_tokens=20, arrived_at=2.0) for seed in (1, 2)]
        server.step()
        moved = server.submit(words(100, seed=3), max_tokens=2, arrived_at=1.0, priority=1)
        for _ in range(4):
            server.step()
        for number in here:
            assert server.computed(number)[1:] == [(5, 1), (6, 1), (7, 1), (8, 1)]
        assert server.computed(moved) == [(0, 30), (30, 30), (60, 30), (90, 10)]
        server.run()
        assert server.ids(moved) == server.expected(moved)

    def test_the_budget_that_a_prompt_leaves_goes_to_the_next_one(self):
        server = Server(max_batch_tokens=32)
        first = server.submit(words(20, seed=1))
        second = server.submit(words(20, seed=2))
        server.step()
        assert server.ranks.trace == [{first: (0, 20), second: (0, 12)}]
        server.run()
        assert server.ids(second) == server.expected(second)

    def test_at_most_max_seqs_run_at_once(self):
        server = Server(max_seqs=3)
        numbers = [server.submit(words(4, seed=each), max_tokens=2 + each) for each in range(7)]
        server.step()
        assert len(server.scheduler.sequences.running) == 3
        assert len(server.scheduler.sequences.waiting) == 4
        server.run()
        assert max(len(step) for step in server.ranks.trace) == 3
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        server.assert_idle()

    def test_sampling_rows_get_the_settings_of_their_new_requests(self):
        server = Server(max_seqs=1)
        server.submit(words(4, seed=1), max_tokens=1, temperature=0.5)
        plan = server.scheduler.schedule()
        assert [entry.temperature for entry in plan.added] == [0.5]
        server.finish(server.ranks.execute(plan))
        server.submit(words(4, seed=1), max_tokens=2, temperature=0.25, top_k=3, logprobs=2)
        plan = server.scheduler.schedule()
        assert [(entry.temperature, entry.top_k, entry.logprobs) for entry in plan.added] == [(0.25, 3, 2)]
        server.finish(server.ranks.execute(plan))
        assert server.scheduler.schedule().added == []

    def test_only_requests_with_penalties_send_their_past(self):
        server = Server()
        server.submit(words(4, seed=1), emitted=[5, 6], presence_penalty=0.5)
        server.submit(words(4, seed=1), emitted=[5, 6])
        penalised, plain = server.scheduler.schedule().added
        assert penalised.prompt_ids == words(4, seed=1)
        assert penalised.emitted_ids == [5, 6]
        assert plain.prompt_ids == plain.emitted_ids == []

    def test_logprobs_come_with_the_token_they_belong_to(self):
        server = Server()
        number = server.submit(words(4, seed=1), logprobs=1)
        server.run()
        for output in server.outputs[number]:
            (id_,), (logprobs,) = output.ids, output.logprobs
            assert (logprobs.chosen.id, logprobs.chosen.logprob) == (id_, -float(id_))
            assert [each.id for each in logprobs.top] == [id_]

    def test_equal_seeds_give_equal_outputs_and_other_seeds_others(self):
        server = Server()
        numbers = [server.submit(words(4, seed=1), seed=seed) for seed in (7, 7, 8)]
        server.run()
        first, second, third = (server.ids(number) for number in numbers)
        assert first == second != third


class TestPrefixCache:
    def test_after_a_hit_only_new_tokens_are_computed(self):
        server = Server(max_batch_tokens=200)
        prompt = words(3 * BLOCK_SIZE + 5, seed=1)
        first = server.submit(prompt)
        server.run()
        longer = server.submit([*prompt, *words(10, seed=2)])
        server.run()
        assert server.computed(longer)[0] == (3 * BLOCK_SIZE, 15)
        assert server.outputs[first][0].cached_tokens == 0
        assert server.outputs[longer][0].cached_tokens == 3 * BLOCK_SIZE
        assert all(output.cached_tokens == 0 for output in server.outputs[longer][1:])
        assert server.ids(longer) == server.expected(longer)

    def test_the_output_of_an_earlier_turn_is_found(self):
        server = Server(max_batch_tokens=200)
        prompt = words(20, seed=1)
        first = server.submit(prompt, max_tokens=30)
        server.run()
        turn = [*prompt, *server.ids(first), *words(8, seed=2)]
        second = server.submit(turn)
        server.run()
        assert server.computed(second)[0][0] == 3 * BLOCK_SIZE  # 49 tokens had been computed: the last one never is
        assert server.ids(second) == server.expected(second)

    @pytest.mark.parametrize("blocks", [1, 2, 3])
    def test_the_last_token_is_computed_even_if_all_are_cached(self, blocks):
        server = Server(max_batch_tokens=200)
        prompt = words(blocks * BLOCK_SIZE, seed=1)
        server.submit(prompt)
        server.run()
        again = server.submit(prompt)
        server.run()
        assert server.outputs[again][0].cached_tokens == (blocks - 1) * BLOCK_SIZE
        assert server.computed(again)[0] == ((blocks - 1) * BLOCK_SIZE, BLOCK_SIZE)
        assert server.ids(again) == server.expected(again)

    def test_other_tenants_do_not_hit(self):
        server = Server()
        prompt = words(50, seed=1)
        server.submit(prompt, tenant="a")
        server.run()
        other, same = server.submit(prompt, tenant="b"), server.submit(prompt, tenant="a")
        server.run()
        assert server.outputs[other][0].cached_tokens == 0
        assert server.outputs[same][0].cached_tokens == 48

    def test_nothing_is_shared_when_the_cache_is_off(self):
        server = Server(prefix_cache=False)
        prompt = words(50, seed=1)
        numbers = [server.submit(prompt) for _ in range(2)]
        server.run()
        numbers.append(server.submit(prompt))
        server.run()
        assert [server.computed(number)[0][0] for number in numbers] == [0, 0, 0]
        assert all(server.outputs[number][0].cached_tokens == 0 for number in numbers)
        server.assert_idle()

    def test_equal_prompts_in_flight_share_one_prefill(self):
        server = Server(max_batch_tokens=32, max_seqs=8)
        prompt = words(6 * BLOCK_SIZE + 3, seed=1)
        numbers = [server.submit([*prompt, each]) for each in range(5)]
        server.run()
        computed = [sum(count for _, count in server.computed(number)) for number in numbers]
        assert computed == [6 * BLOCK_SIZE + 4 + 7, *[4 + 7] * 4]
        assert [server.outputs[number][0].cached_tokens for number in numbers] == [0, *[6 * BLOCK_SIZE] * 4]
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        server.assert_idle()

    def test_equal_prompts_share_a_prefill_that_began_in_the_same_step(self):
        server = Server(max_batch_tokens=200)
        prompt = words(3 * BLOCK_SIZE + 1, seed=1)
        first, second = server.submit(prompt), server.submit(prompt)
        server.step()
        assert set(server.ranks.trace[0]) == {first}
        server.step()
        assert server.computed(second) == [(3 * BLOCK_SIZE, 1)]

    def test_a_request_that_waits_for_a_prefill_runs_when_that_one_is_cancelled(self):
        server = Server(max_batch_tokens=32)
        prompt = words(100, seed=1)
        first, second = server.submit(prompt), server.submit(prompt)
        server.step()
        server.cancel(first)
        server.run()
        assert server.computed(second)[0][0] == 32  # what had been computed is not lost either
        assert server.ids(second) == server.expected(second)
        server.assert_idle()

    def test_a_request_with_another_prefix_overtakes_one_that_waits_for_a_prefill(self):
        server = Server(max_batch_tokens=64)
        prompt = words(100, seed=1)
        server.submit(prompt)
        waits, other = server.submit(prompt), server.submit(words(5, seed=2))
        server.step()
        server.step()
        assert server.computed(other)
        assert not server.computed(waits)

    def test_shared_blocks_stay_while_any_sequence_uses_them(self):
        server = Server(max_batch_tokens=200)
        prompt = words(4 * BLOCK_SIZE, seed=1)
        server.submit(prompt, max_tokens=1)
        server.run()
        numbers = [server.submit([*prompt, *words(5, seed=each)], max_tokens=3 + 9 * each) for each in range(4)]
        server.run()
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        server.assert_idle()


class TestManyEqualPrompts:
    """Each wants to begin with the blocks of the first one."""

    @staticmethod
    def count(server, monkeypatch):
        """The blocks that were looked up, and counts them in place of the server's own look-ups."""
        looked_up, look_up = [], server.pool.look_up

        def noting(sequence, keys):
            looked_up.append(len(keys))
            return look_up(sequence, keys)

        monkeypatch.setattr(server.pool, "look_up", noting)
        return looked_up

    def test_no_step_looks_up_all_of_them(self, monkeypatch):
        """That would keep the driver from all else for seconds."""
        server = Server(max_seqs=64, max_batch_tokens=2000, context_length=8192, blocks=1000)
        looked_up, most, prompt = self.count(server, monkeypatch), 0, words(8000, seed=1)
        numbers = [server.submit(prompt, max_tokens=1) for _ in range(60)]
        while server.step():
            most = max(most, sum(looked_up))
            looked_up.clear()
        assert 0 < most <= 8192 + 500
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        assert list(dict.fromkeys(number for step in server.ranks.trace for number in step)) == numbers, "in order"
        server.assert_idle()

    def test_those_that_wait_for_the_same_block_are_looked_up_once(self, monkeypatch):
        """The first prompt leaves room in each step, because few of its tokens are scored at once."""
        server = Server(max_seqs=32, max_batch_tokens=64, context_length=1024, blocks=200)
        looked_up, prompt = self.count(server, monkeypatch), words(640, seed=1)
        server.submit(prompt, max_tokens=1, prompt_scores=PromptScores.TOKENS)
        server.step()
        numbers = [server.submit(prompt, max_tokens=1) for _ in range(20)]
        other = server.submit(words(10, seed=2), max_tokens=1)
        server.step()
        assert len(looked_up) == 1 + 20 + 1
        assert server.ids(other) == server.expected(other), "it need not wait for their block"
        looked_up.clear()
        for _ in range(15):
            server.step()
        assert len(looked_up) == 15
        server.run()
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        server.assert_idle()


class TestRefusal:
    def test_a_request_that_can_never_fit_is_refused_with_numbers(self):
        server = Server(blocks=4)
        with pytest.raises(LockstepError, match=r"need 5 blocks of KV cache, this engine has 4") as caught:
            server.submit(words(50, seed=1), max_tokens=15)
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
        assert not caught.value.meaning.retryable
        server.assert_idle()
        number = server.submit(words(50, seed=1), max_tokens=14)
        server.run()
        assert server.ids(number) == server.expected(number)

    def test_a_full_queue_is_overloaded(self):
        server = Server(max_queue=3)
        for each in range(3):
            server.submit(words(4, seed=each))
        with pytest.raises(LockstepError, match="queue of 3") as caught:
            server.submit(words(4, seed=9))
        assert caught.value.code is ErrorCode.OVERLOADED
        assert caught.value.retry_after_s > 0
        server.step()
        server.submit(words(4, seed=9))
        server.run()
        server.assert_idle()

    def test_an_id_in_use_is_refused_and_can_be_used_again_later(self):
        server = Server()
        number = server.submit(words(4, seed=1))
        request = server.requests[number]
        with pytest.raises(LockstepError, match="in use") as caught:
            server.scheduler.submit(request)
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        server.run()
        assert server.scheduler.submit(request) is None


def documents(seed):
    """Prefixes that requests share."""
    return [words(length, seed * 10 + length) for length in (0, 16, 40, 90)]


@pytest.mark.parametrize(
    ("seed", "prefix_cache"), [fast_if(False, 1, True), further(1, False), further(2, True), fast_if(False, 2, False)]
)
def test_soak_with_random_cancels(seed, prefix_cache):
    """Thousands of requests with too few blocks: every stream is the same as alone, and no block is lost."""
    choose = random.Random(seed)
    server = Server(
        blocks=24, max_seqs=6, max_batch_tokens=40, max_queue=12, context_length=256, prefix_cache=prefix_cache
    )
    shared = documents(seed)
    live = set()
    cancelled = set()

    def submit():
        prompt = [*choose.choice(shared), *words(choose.randint(1, 40), choose.random())]
        count = choose.randint(1, 30)
        request_seed = choose.randrange(2**64)
        resumed = choose.randrange(count) if choose.random() < 0.3 else 0
        live.add(
            server.submit(
                prompt,
                emitted=expected_ids(prompt, resumed, seed=request_seed),
                priority=choose.choice([0, 0, 0, 1, -1]),
                tenant=choose.choice(["", "other"]),
                max_tokens=count,
                seed=request_seed,
            )
        )

    def cancel_some(chance):
        for number in sorted(live):
            if choose.random() < chance and server.cancel(number):
                cancelled.add(number)

    while len(server.outputs) < 1500:
        while len(server.scheduler.sequences.waiting) < choose.randint(0, 8):
            submit()
        cancel_some(0.003)
        plan = server.scheduler.schedule()
        if plan is not None:
            result = server.ranks.execute(plan)
            cancel_some(0.003)
            server.finish(result)
        live -= {number for number in live if server.finish_reason(number) is not None} | cancelled
    server.run()
    server.assert_idle()
    for number in range(len(server.outputs)):
        ids, expected = server.ids(number), server.expected(number)
        assert ids == (expected[: len(ids)] if number in cancelled else expected), f"request {number}, seed {seed}"
    assert 100 < len(cancelled) < 750
    assert server.restarts() > 50


def test_free_places_are_those_of_an_empty_queue():
    server = Server(max_seqs=2)
    assert server.scheduler.sequences.free_seqs == 2
    server.submit(words(5, seed=1), max_tokens=30)
    server.step()
    assert server.scheduler.sequences.free_seqs == 1
    for seed in (2, 3):
        server.submit(words(5, seed=seed), max_tokens=30)
    server.step()
    assert (len(server.scheduler.sequences.waiting), server.scheduler.sequences.free_seqs) == (1, 0)
