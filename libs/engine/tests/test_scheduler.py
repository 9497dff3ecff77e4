"""The scheduler with ranks that have no model: what runs in a step, what is preempted, and complete streams."""

import itertools
import random

import numpy as np
import pytest
from fast_cases import fast_if
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.seniority import CLASS_HEAD_START_S
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.plan import mask_words
from lockstep_engine.request import FinishReason, Grammar, GrammarKind, Phase
from scripted_ranks import EOS, Server, expected_ids, words


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


class TestPreemption:
    def test_the_newest_is_preempted_and_every_stream_is_complete(self):
        server = Server(blocks=8, max_batch_tokens=64)
        numbers = [server.submit(words(2 * BLOCK_SIZE, seed=each), max_tokens=40) for each in range(2)]
        server.run()
        older, newer = (server.computed(number) for number in numbers)
        assert older == [(0, 32), *[(position, 1) for position in range(32, 71)]]
        assert server.scheduler.sequences.preemptions == len([count for _, count in newer[1:] if count > 1]) > 0
        assert (server.scheduler.sequences.prompt_tokens, server.scheduler.sequences.cached_tokens) == (
            4 * BLOCK_SIZE,
            0,
        )
        assert [server.ids(number) for number in numbers] == [server.expected(number) for number in numbers]
        assert [len(server.ids(number)) for number in numbers] == [40, 40]
        server.assert_idle()

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_a_preempted_sequence_is_recomputed_from_prompt_and_output(self, prefix_cache):
        server = Server(blocks=4, max_batch_tokens=64, prefix_cache=prefix_cache)
        older = server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40)
        newer = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40)
        server.run()
        restarts = [(start, count) for start, count in server.computed(newer)[1:] if count > 1]
        assert len(restarts) == 1
        assert sum(restarts[0]) > BLOCK_SIZE + 1
        assert server.ids(newer) == server.expected(newer)
        assert all(count == 1 for _, count in server.computed(older)[1:])
        server.assert_idle()

    def test_the_lowest_priority_is_preempted_even_if_it_is_the_oldest(self):
        server = Server(blocks=4)
        slight = server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40, priority=-1)
        weighty = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40, priority=1)
        server.run()
        assert all(count == 1 for _, count in server.computed(weighty)[1:])
        assert any(count > 1 for _, count in server.computed(slight)[1:])
        assert server.ids(slight) == server.expected(slight)
        server.assert_idle()

    def test_cached_tokens_are_those_of_the_first_admission(self):
        """The newer one is preempted within its prompt, and finds most of its own blocks when it starts again."""
        server = Server(blocks=8, max_batch_tokens=BLOCK_SIZE + 1)
        older = server.submit(words(BLOCK_SIZE - 1, seed=1), max_tokens=20)
        server.step()
        newer = server.submit(words(100, seed=2))
        server.run()
        assert server.computed(newer)[-9:-7] == [(80, 17), (97, 3)]
        assert server.restarts() == 1
        assert [output.cached_tokens for output in server.outputs[newer]] == [0] * 8
        assert server.ids(newer) == server.expected(newer)
        assert server.ids(older) == server.expected(older)

    def test_a_sequence_that_fills_the_pool_alone_is_never_preempted(self):
        server = Server(blocks=4)
        number = server.submit(words(10, seed=1), max_tokens=4 * BLOCK_SIZE - 10)
        server.run()
        assert all(count == 1 for _, count in server.computed(number)[1:])
        assert server.ids(number) == server.expected(number)
        server.assert_idle()


class TestPriority:
    def test_higher_priorities_are_admitted_first(self):
        server = Server(max_seqs=1)
        low, normal, high = (server.submit(words(3, seed=each), priority=each, max_tokens=1) for each in (-5, 0, 5))
        server.run()
        assert [set(step) for step in server.ranks.trace] == [{high}, {normal}, {low}]

    def test_equal_priorities_are_admitted_in_order_of_arrival(self):
        server = Server(max_seqs=1)
        numbers = [server.submit(words(3, seed=each), max_tokens=1) for each in range(5)]
        server.run()
        assert [set(step) for step in server.ranks.trace] == [{number} for number in numbers]

    def test_a_prompt_of_higher_priority_gets_the_budget_first(self):
        server = Server(max_batch_tokens=32)
        low = server.submit(words(40, seed=1))
        server.step()
        high = server.submit(words(60, seed=2), priority=1)
        for _ in range(3):
            server.step()
        assert server.ranks.trace[1:] == [
            {low: (32, 8), high: (0, 24)},
            {high: (24, 31), low: (40, 1)},
            {high: (55, 5), low: (41, 1)},
        ]
        server.run()
        assert server.ids(low) == server.expected(low)


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


class TestCancel:
    def test_unknown_requests_are_ignored(self):
        server = Server()
        assert not server.cancel(0)
        number = server.submit(words(4, seed=1))
        server.run()
        assert not server.cancel(number)

    def test_while_waiting(self):
        server = Server(max_seqs=1)
        first, second = server.submit(words(4, seed=1)), server.submit(words(4, seed=2))
        server.step()
        assert server.cancel(second)
        server.run()
        assert server.outputs[second] == []
        assert server.ids(first) == server.expected(first)
        server.assert_idle()

    @pytest.mark.parametrize("steps", [1, 2, 4, 6], ids=["first chunk", "second chunk", "first token", "decoding"])
    def test_between_steps(self, steps):
        server = Server(max_batch_tokens=32)
        number = server.submit(words(100, seed=1), max_tokens=20)
        for _ in range(steps):
            server.step()
        given = server.ids(number)
        assert server.cancel(number)
        server.assert_idle()
        assert server.ids(number) == given

    @pytest.mark.parametrize("steps", [0, 1, 3, 5], ids=["first chunk", "second chunk", "first token", "decoding"])
    def test_while_a_step_is_in_flight(self, steps):
        server = Server(max_batch_tokens=40)
        number = server.submit(words(100, seed=1), max_tokens=20)
        other = server.submit(words(3, seed=2), max_tokens=20)
        for _ in range(steps):
            server.step()
        given = len(server.ids(number))
        result = server.ranks.execute(server.scheduler.schedule())
        assert server.cancel(number)
        server.finish(result)
        server.run()
        assert len(server.ids(number)) == given
        assert server.ids(other) == server.expected(other)
        server.assert_idle()

    def test_of_all_while_a_step_is_in_flight(self):
        server = Server()
        numbers = [server.submit(words(30, seed=each)) for each in range(3)]
        result = server.ranks.execute(server.scheduler.schedule())
        for number in numbers:
            server.cancel(number)
        server.finish(result)
        server.assert_idle()
        assert server.outputs == [[], [], []]

    def test_the_same_id_can_be_submitted_again_while_the_step_is_in_flight(self):
        server = Server()
        number = server.submit(words(30, seed=1), max_tokens=5)
        result = server.ranks.execute(server.scheduler.schedule())
        server.cancel(number)
        assert server.scheduler.submit(server.requests[number]) is None
        server.finish(result)
        assert server.outputs[number] == []
        server.run()
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_a_freed_sampling_row_serves_the_next_request(self):
        server = Server(max_seqs=1)
        first, second = server.submit(words(30, seed=1)), server.submit(words(30, seed=2))
        result = server.ranks.execute(server.scheduler.schedule())
        server.cancel(first)
        server.finish(result)
        server.run()
        assert server.ids(second) == server.expected(second)

    def test_of_a_preempted_sequence(self):
        server = Server(blocks=4)
        older = server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40)
        newer = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40)
        while len(server.scheduler.sequences.waiting) == 0:
            server.step()
        assert server.cancel(newer)
        server.run()
        assert server.ids(older) == server.expected(older)
        server.assert_idle()


class TestResume:
    @pytest.mark.parametrize("count", [1, 7, 16, 29])
    def test_continues_at_the_position_after_the_emitted_ids(self, count):
        prompt = words(20, seed=1)
        whole = expected_ids(prompt, 30, seed=5)
        server = Server()
        number = server.submit(prompt, emitted=whole[:count], max_tokens=30, seed=5)
        server.run()
        assert server.outputs[number][0].position == count
        assert server.ids(number) == whole[count:]
        server.assert_idle()

    def test_cached_tokens_count_the_prompt_alone(self):
        server = Server()
        prompt = words(20, seed=1)
        first = server.submit(prompt, max_tokens=60)
        server.run()
        second = server.submit(prompt, emitted=server.ids(first)[:50], max_tokens=60)
        server.run()
        assert server.computed(second)[0][0] == 4 * BLOCK_SIZE
        assert server.outputs[second][0].cached_tokens == 20

    @pytest.mark.parametrize(
        ("emitted", "settings", "reason"),
        [
            ([5, 6, EOS], {}, FinishReason.STOP),
            ([5, 6, 7], {"stop_token_ids": (7,)}, FinishReason.STOP),
            ([5] * 8, {}, FinishReason.LENGTH),
            ([5] * 9, {}, FinishReason.LENGTH),
            ([*[5] * 7, EOS], {}, FinishReason.STOP),
        ],
    )
    def test_complete_ids_give_one_last_output_and_no_step(self, emitted, settings, reason):
        server = Server()
        number = server.submit(words(4, seed=1), emitted=emitted, **settings)
        (output,) = server.outputs[number]
        assert (output.position, output.ids, output.finish) == (len(emitted), (), reason)
        server.assert_idle()

    def test_complete_ids_are_answered_even_if_queue_or_pool_have_no_room(self):
        server = Server(blocks=2, max_queue=1)
        server.submit(words(4, seed=1))
        number = server.submit(words(400, seed=1), emitted=[5] * 8)
        assert server.finish_reason(number) is FinishReason.LENGTH

    def test_complete_at_the_context_limit(self):
        server = Server(context_length=64)
        number = server.submit(words(60, seed=1), emitted=[5] * 4, max_tokens=50)
        assert server.finish_reason(number) is FinishReason.LENGTH

    @pytest.mark.parametrize(
        ("emitted", "settings"),
        [([EOS], {"ignore_eos": True}), ([EOS], {"min_tokens": 2}), ([EOS, 5], {}), ([7, 5], {"stop_token_ids": (7,)})],
    )
    def test_emitted_ids_that_do_not_end_the_stream_are_continued(self, emitted, settings):
        server = Server()
        number = server.submit(words(4, seed=1), emitted=emitted, **settings)
        server.run()
        assert server.ids(number) == server.expected(number)


class TestEnd:
    def run_script(self, script, **settings):
        server = Server(context_length=settings.pop("context_length", 512))
        number = server.submit(settings.pop("prompt", words(4, seed=1)), script=script, **settings)
        server.run()
        server.assert_idle()
        return server.ids(number), server.finish_reason(number)

    def test_end_of_text_stops_and_is_among_the_ids(self):
        assert self.run_script([5, 6, EOS, 7], max_tokens=10) == ([5, 6, EOS], FinishReason.STOP)

    def test_a_stop_id_stops_and_is_among_the_ids(self):
        ids = self.run_script([5, 6, 7, 8], max_tokens=10, stop_token_ids=(50, 7))
        assert ids == ([5, 6, 7], FinishReason.STOP)

    def test_ignored_end_of_text_does_not_stop(self):
        assert self.run_script([EOS, EOS, 5], max_tokens=3, ignore_eos=True) == ([EOS, EOS, 5], FinishReason.LENGTH)

    def test_stop_ids_count_when_end_of_text_is_ignored(self):
        assert self.run_script([EOS, 7], max_tokens=5, ignore_eos=True, stop_token_ids=(7,))[1] is FinishReason.STOP

    def test_nothing_stops_before_min_tokens(self):
        script = [EOS, 7, 7, EOS, 5]
        assert self.run_script(script, max_tokens=5, min_tokens=4, stop_token_ids=(7,)) == (
            script[:4],
            FinishReason.STOP,
        )

    def test_max_tokens_come_before_min_tokens(self):
        assert self.run_script([5] * 9, max_tokens=3, min_tokens=8) == ([5, 5, 5], FinishReason.LENGTH)

    @pytest.mark.parametrize("count", [1, 2, 17])
    def test_max_tokens(self, count):
        assert self.run_script([5] * 20, max_tokens=count) == ([5] * count, FinishReason.LENGTH)

    @pytest.mark.parametrize("length", [60, 63])
    def test_the_context_limit(self, length):
        ids, reason = self.run_script([5] * 20, prompt=words(length, seed=1), max_tokens=50, context_length=64)
        assert (len(ids), reason) == (64 - length, FinishReason.LENGTH)

    def test_ids_forbidden_before_min_tokens_are_in_the_plan(self):
        server = Server()
        server.submit(words(4, seed=1), stop_token_ids=(7, 8), min_tokens=3)
        server.submit(words(4, seed=1), stop_token_ids=(7, 8), min_tokens=3, ignore_eos=True)
        server.submit(words(4, seed=1), stop_token_ids=(7, 8))
        both, stops, none = server.scheduler.schedule().added
        assert sorted(both.forbidden_ids) == [7, 8, EOS]
        assert sorted(stops.forbidden_ids) == [7, 8]
        assert none.forbidden_ids == []


class TestReset:
    def test_starts_with_an_empty_pool_of_the_new_size(self):
        server = Server(blocks=8)
        number = server.submit(words(40, seed=1))
        server.step()
        server.cancel(number)
        server.scheduler.reset(PoolSizes(3))
        assert server.pool.free == server.pool.total == 3
        with pytest.raises(LockstepError, match="this engine has 3"):
            server.submit(words(40, seed=1), max_tokens=9)

    def test_nothing_is_found_in_the_new_pool(self):
        server = Server(blocks=8)
        number = server.submit(words(40, seed=1))
        server.run()
        server.scheduler.reset(PoolSizes(8))
        number = server.submit(words(40, seed=1))
        plan = server.scheduler.schedule()
        assert len(plan.token_ids) == 40
        assert number in plan.added[0].logit_bias


class TestFairness:
    def test_a_large_request_is_not_starved_by_small_ones(self):
        server = Server(blocks=16, max_seqs=8)
        small = 0
        for _ in range(5):
            server.submit(words(20, seed=small), max_tokens=12)
            small += 1
        server.step()
        large = server.submit(words(200, seed=99), max_tokens=40)
        for _ in range(200):
            while len(server.scheduler.sequences.waiting) < 5:
                server.submit(words(20, seed=small), max_tokens=12)
                small += 1
            server.step()
            if server.finish_reason(large) is not None:
                break
        assert server.ids(large) == server.expected(large)
        assert len(server.ids(large)) == 40

    def test_requests_that_wait_for_a_prefix_are_not_starved(self):
        server = Server(blocks=16, max_seqs=2, max_batch_tokens=32)
        prompt = words(60, seed=1)
        server.submit(prompt, max_tokens=2)
        follower = server.submit(prompt, max_tokens=2)
        others = 0
        for _ in range(60):
            while len(server.scheduler.sequences.waiting) < 5:
                others += 1
                server.submit(words(20, seed=others), max_tokens=5)
            server.step()
        assert server.ids(follower) == server.expected(follower)
        assert len(server.ids(follower)) == 2


def documents(seed):
    """Prefixes that requests share."""
    return [words(length, seed * 10 + length) for length in (0, 16, 40, 90)]


@pytest.mark.parametrize(
    ("seed", "prefix_cache"), [(1, True), fast_if(False, 1, False), fast_if(False, 2, True), fast_if(False, 2, False)]
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


class TestSeniority:
    """The request that arrived first runs first, wherever it was queued before; a class and output are head starts."""

    def order(self, server, numbers):
        """The requests in the order of their first tokens."""
        firsts = []
        while server.step():
            firsts.extend(number for number in numbers if server.outputs[number] and number not in firsts)
        return firsts

    def test_a_moved_request_is_queued_by_its_first_arrival(self):
        server = Server(max_seqs=1)
        running = server.submit(words(5, seed=1), arrived_at=10.0)
        server.step()
        late = server.submit(words(5, seed=2), arrived_at=12.0)
        moved = server.submit(words(5, seed=3), arrived_at=11.0)
        assert self.order(server, [running, late, moved]) == [running, moved, late]

    def test_priority_goes_before_arrival(self):
        server = Server(max_seqs=1)
        server.submit(words(5, seed=1))
        server.step()
        early = server.submit(words(5, seed=2), arrived_at=1.0)
        urgent = server.submit(words(5, seed=3), arrived_at=2.0, priority=1)
        assert self.order(server, [early, urgent]) == [urgent, early]

    def steps_until_it_starts(self, priority, others, most=500):
        """Steps of a second each that a request waits, behind one of its age, while requests of another class fill the
        engine: whenever one starts, the next one arrives.
        """
        server = Server(max_seqs=1, max_queue=10)
        fill = {"max_tokens": 4, "priority": others}
        server.submit(words(5, seed=1), arrived_at=-1.0, **fill)
        server.submit(words(5, seed=2), arrived_at=0.0, **fill)
        number = server.submit(words(5, seed=3), arrived_at=0.0, priority=priority)
        for second in range(most):
            server.step()
            if server.outputs[number]:
                return second
            if len(server.scheduler.sequences.waiting) == 1:
                server.submit(words(5, seed=second + 10), arrived_at=float(second), **fill)
        return None

    @pytest.mark.parametrize(("priority", "others"), [(-1, 0), (0, 1), (-1, 1)])
    def test_a_lower_class_starts_after_its_head_start_under_steady_load(self, priority, others):
        head_start_s, each_s = (others - priority) * CLASS_HEAD_START_S, 4
        waited_s = self.steps_until_it_starts(priority, others)
        assert head_start_s <= waited_s <= head_start_s + 3 * each_s

    def test_a_higher_class_starts_next_under_steady_load(self):
        assert self.steps_until_it_starts(1, 0) <= 4

    def test_in_a_short_burst_the_higher_class_goes_first_whatever_it_arrived_after(self):
        server = Server(max_seqs=1)
        running = server.submit(words(5, seed=1), arrived_at=0.0)
        server.step()
        low = server.submit(words(5, seed=2), arrived_at=0.0, priority=-1)
        burst = [server.submit(words(5, seed=3 + each), arrived_at=5.0 * each) for each in range(10)]
        assert self.order(server, [running, low, *burst]) == [running, *burst, low]

    def test_an_old_request_of_a_low_class_is_not_preempted_for_a_young_one(self):
        server = Server(blocks=4)
        low = server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40, arrived_at=0.0, priority=-1)
        server.step()
        normal = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40, arrived_at=CLASS_HEAD_START_S + 1.0)
        server.run()
        assert all(count == 1 for _, count in server.computed(low)[1:])
        assert any(count > 1 for _, count in server.computed(normal)[1:])

    def test_a_moved_request_with_output_does_not_preempt_an_older_one_with_output(self):
        server = Server(blocks=4)
        older = server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40, arrived_at=1.0)
        server.step()
        moved = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40, arrived_at=2.0, emitted=(3,))
        server.run()
        assert all(count == 1 for _, count in server.computed(older)[1:])
        assert any(count > 1 for _, count in server.computed(moved)[1:])

    @pytest.mark.parametrize("priority", [-1, 0, 1])
    def test_within_a_class_a_moved_request_with_output_goes_before_those_without(self, priority):
        server = Server(max_seqs=1)
        server.submit(words(5, seed=1), priority=1)
        server.step()
        early = server.submit(words(5, seed=2), arrived_at=1.0, priority=priority)
        moved = server.submit(words(5, seed=3), arrived_at=2.0, priority=priority, emitted=(3,))
        assert self.order(server, [early, moved]) == [moved, early]

    def test_a_class_goes_before_output(self):
        server = Server(max_seqs=1)
        server.submit(words(5, seed=1), priority=1)
        server.step()
        begun = {each: server.submit(words(5, seed=5 + each), priority=each, emitted=(3,)) for each in (-1, 0)}
        fresh = {each: server.submit(words(5, seed=9 + each), priority=each) for each in (-1, 0, 1)}
        numbers = [*begun.values(), *fresh.values()]
        assert self.order(server, numbers) == [fresh[1], begun[0], fresh[0], begun[-1], fresh[-1]]

    def test_the_lowest_class_is_preempted_first_also_if_it_has_output(self):
        server = Server(blocks=4)
        low = server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40, arrived_at=1.0, priority=-1, emitted=(3,))
        server.step()
        normal = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40, arrived_at=2.0)
        server.run()
        assert all(count == 1 for _, count in server.computed(normal)[1:])
        assert any(count > 1 for _, count in server.computed(low)[1:])
        assert server.ids(low) == server.expected(low)

    def test_requests_that_arrived_together_start_as_they_were_submitted(self):
        server = Server(max_seqs=1)
        numbers = [server.submit(words(5, seed=seed), arrived_at=7.0) for seed in range(6)]
        assert self.order(server, numbers) == numbers

    @pytest.mark.parametrize("seed", range(20))
    def test_first_tokens_come_in_the_order_of_arrival(self, seed):
        dice = random.Random(seed)
        server = Server(max_seqs=2, blocks=64)
        arrivals = list(range(12))
        dice.shuffle(arrivals)
        server.submit(words(5, seed=100), arrived_at=-1.0, max_tokens=30)
        server.submit(words(5, seed=101), arrived_at=-1.0, max_tokens=32)
        server.step()
        numbers = {server.submit(words(9, seed=each), arrived_at=each, max_tokens=4): each for each in arrivals}
        order = [numbers[number] for number in self.order(server, numbers)]
        assert order == sorted(order)

    def test_the_last_to_arrive_is_preempted_first(self):
        server = Server(blocks=4)
        late = server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40, arrived_at=2.0)
        early = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40, arrived_at=1.0)
        server.run()
        assert all(count == 1 for _, count in server.computed(early)[1:])
        assert any(count > 1 for _, count in server.computed(late)[1:])


class TestPhases:
    """Who waits and who runs is known before the first token, and a long prompt shows that it goes on."""

    def phases(self, server):
        return [(int(change.request_id), change.phase) for change in server.scheduler.sequences.take_phases()]

    def test_a_request_runs_from_its_first_plan_on(self):
        server = Server(max_seqs=1)
        first, second = server.submit(words(5, seed=1), max_tokens=2), server.submit(words(5, seed=2), max_tokens=2)
        assert self.phases(server) == []
        server.plan()
        assert self.phases(server) == [(first, Phase.RUNNING)]
        while server.step() and not server.outputs[second]:
            pass
        assert (second, Phase.RUNNING) in self.phases(server)
        server.run()
        assert self.phases(server) == []

    def test_each_part_of_a_prompt_is_a_sign_of_progress(self):
        server = Server(max_batch_tokens=32)
        number = server.submit(words(100, seed=1), max_tokens=2)
        for _ in range(3):
            server.step()
            assert self.phases(server) == [(number, Phase.RUNNING)]
        server.run()
        assert self.phases(server) == []

    def test_a_preempted_request_waits_and_runs_again(self):
        server = Server(blocks=4, max_batch_tokens=64)
        server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40)
        newer = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40)
        seen = []
        while server.step():
            seen.extend(phase for number, phase in self.phases(server) if number == newer)
        assert seen == [Phase.RUNNING, Phase.WAITING, Phase.RUNNING]

    def test_requests_that_are_gone_have_no_phase(self):
        server = Server()
        number = server.submit(words(5, seed=1))
        server.plan()
        server.cancel(number)
        assert self.phases(server) == []

    def test_requests_wait_again_when_the_pools_are_emptied(self):
        server = Server()
        kept, ended = server.submit(words(5, seed=1)), server.submit(words(5, seed=2))
        server.step()
        self.phases(server)
        server.scheduler.shed(0)
        assert self.phases(server) == [(kept, Phase.WAITING)]
        assert str(ended) not in server.scheduler.sequences.by_id


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


class ScriptedConstraint:
    """A grammar whose masks become ready when the test says so."""

    def __init__(self):
        self.mask = np.full(mask_words(1000), -1, np.int32)
        self.error = None
        self.tokens = []

    def advance(self, token):
        self.tokens.append(token)
        self.mask = None

    def finish(self):
        self.mask = np.full(mask_words(1000), len(self.tokens), np.int32)


class TestGrammars:
    def submit(self, server, prompt, **settings):
        constraint = ScriptedConstraint()
        number = server.submit(prompt, constraint=constraint, grammar=Grammar(GrammarKind.REGEX, "a"), **settings)
        return number, constraint

    def test_a_stream_waits_for_its_mask_and_others_do_not(self):
        server = Server()
        free = server.submit(words(5, seed=1), max_tokens=6)
        bound, constraint = self.submit(server, words(5, seed=2), max_tokens=3)
        for _ in range(3):
            server.step()
        assert [len(server.ids(number)) for number in (free, bound)] == [3, 1]
        constraint.finish()
        server.step()
        assert [len(server.ids(number)) for number in (free, bound)] == [4, 2]
        constraint.finish()
        server.run()
        assert server.ids(bound) == server.expected(bound)
        assert constraint.tokens == server.ids(bound)[:-1]
        server.assert_idle()

    def test_the_plan_has_the_masks_of_those_that_sample(self):
        server = Server(max_batch_tokens=16)
        server.submit(words(4, seed=1))
        _, constraint = self.submit(server, words(4, seed=2))
        self.submit(server, words(40, seed=3))  # its prompt takes several steps
        constraint.mask[:] = 5
        plan = server.scheduler.schedule()
        assert plan.samples.tolist() == [True, True, False]
        assert plan.masked.tolist() == [1]
        assert (plan.masks == 5).all()
        assert plan.masks.shape == (1, mask_words(1000))

    def test_plans_without_grammars_have_no_masks(self):
        server = Server()
        server.submit(words(4, seed=1))
        plan = server.scheduler.schedule()
        assert plan.masked is None
        assert plan.masks is None

    def test_a_prompt_is_computed_but_for_its_last_token_while_the_mask_is_computed(self):
        server = Server(max_batch_tokens=16)
        bound, constraint = self.submit(server, words(40, seed=3), max_tokens=1)
        server.step()
        constraint.mask = None
        assert server.run() == 2
        assert server.computed(bound) == [(0, 16), (16, 16), (32, 7)]
        constraint.finish()
        server.run()
        assert server.computed(bound)[3:] == [(39, 1)]
        assert server.ids(bound) == server.expected(bound)

    def test_with_two_plans_in_flight_a_stream_has_one_of_them(self):
        server = Server(depth=2)
        free = server.submit(words(5, seed=1), max_tokens=8)
        bound, constraint = self.submit(server, words(5, seed=2), max_tokens=4)
        while server.step():
            constraint.finish()
        for number in (free, bound):
            assert server.ids(number) == server.expected(number)
        steps = [bound in step for step in server.ranks.trace]
        assert not any(first and second for first, second in itertools.pairwise(steps))

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_preempted_stream_keeps_its_place(self, depth):
        server = Server(blocks=7, depth=depth, prefix_cache=False)
        numbers = [self.submit(server, words(20, seed=seed), max_tokens=40) for seed in (1, 2)]
        for _ in range(500):
            if not server.step():
                break
            for _, constraint in numbers:
                constraint.finish()
        assert server.restarts() > 0
        for number, constraint in numbers:
            assert server.ids(number) == server.expected(number)
            assert constraint.tokens == server.ids(number)[:-1]
        server.assert_idle()

    def test_a_stream_whose_grammar_fails_ends_with_its_error(self):
        server = Server()
        free = server.submit(words(5, seed=1), max_tokens=4)
        _, constraint = self.submit(server, words(5, seed=2), max_tokens=4)
        server.step()
        constraint.error = LockstepError(ErrorCode.INVALID_REQUEST, "grammar is wrong", field="grammar")
        (output,) = server.scheduler.end_broken()
        assert (output.error, output.position) == (constraint.error, 1)
        server.run()
        assert server.ids(free) == server.expected(free)
        server.assert_idle()

    def test_an_end_of_text_always_ends_it(self):
        """Its mask allowed that id only because nothing else could follow."""
        server = Server()
        bound, constraint = self.submit(
            server, words(5, seed=1), max_tokens=9, min_tokens=5, ignore_eos=True, script=[7, 999]
        )
        server.step()
        constraint.finish()
        server.run()
        assert server.ids(bound) == [7, 999]
        assert server.finish_reason(bound) is FinishReason.STOP
        server.assert_idle()

    def test_min_tokens_are_left_to_the_masks(self):
        server = Server()
        self.submit(server, words(5, seed=1), min_tokens=5)
        (added,) = server.scheduler.schedule().added
        assert added.forbidden_ids == []
