"""Whose turn it is: what is preempted, classes, tenants and time of arrival. The ranks have no model."""

import random

import pytest
from lockstep_common.seniority import CLASS_HEAD_START_S
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.request import PromptScores
from scripted_ranks import Server, words


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


class TestFairness:
    def test_prompts_of_more_important_requests_take_nothing_from_those_that_decode(self):
        """However many prompts are partly computed: one that scores its prompt leaves the next one room to start."""
        server = Server(max_batch_tokens=32)
        decoding = [server.submit(words(5, seed=each), max_tokens=20, arrived_at=2.0) for each in (1, 2)]
        server.step()
        scored = server.submit(
            words(60, seed=3), arrived_at=1.0, priority=1, prompt_scores=PromptScores.TOKENS, max_tokens=2
        )
        server.step()
        first = server.submit(words(100, seed=4), arrived_at=0.0, priority=1, max_tokens=2)
        for _ in range(4):
            server.step()
        assert server.computed(first) == [(0, 26), (26, 30), (56, 30), (86, 14)]
        for number in decoding:
            assert server.computed(number)[1:] == [(position, 1) for position in range(5, 10)]
        server.run()
        assert all(server.ids(number) == server.expected(number) for number in (first, *decoding))
        assert server.computed(scored)[0] == (0, 4)

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

    def test_the_large_request_of_a_tenant_at_its_limit_is_not_starved_by_its_small_ones(self):
        server = Server(blocks=32, tenant_share=0.5, max_seqs=8)
        count = 0

        def submit():
            nonlocal count
            count += 1
            server.submit(words(20, seed=count), tenant="greedy", max_tokens=12)

        for _ in range(5):
            submit()
        server.step()
        large = server.submit(words(200, seed=99), tenant="greedy", max_tokens=40)
        for _ in range(200):
            while len(server.scheduler.sequences.waiting) < 5:
                submit()
            server.step()
            if server.finish_reason(large) is not None:
                break
        assert server.ids(large) == server.expected(large)
        assert len(server.ids(large)) == 40

    def test_a_tenant_at_its_limit_holds_up_no_other_if_its_request_does_not_fit_the_free_blocks_either(self):
        server = Server(blocks=20, tenant_share=0.5, max_seqs=8, max_batch_tokens=300)
        lengths = {"greedy": 60, "modest": 110, "third": 60}
        running = [server.submit(words(each, seed=each), tenant=name, max_tokens=8) for name, each in lengths.items()]
        server.step()
        greedy = server.submit(words(140, seed=8), tenant="greedy", max_tokens=8)
        other = server.submit(words(20, seed=9), tenant="modest", max_tokens=8)
        assert server.pool.free == 5
        server.step()
        assert not server.computed(greedy)
        assert server.computed(other)
        server.run()
        assert all(server.ids(number) == server.expected(number) for number in (*running, greedy, other))

    def test_without_shares_nobody_overtakes_a_request_that_does_not_fit(self):
        server = Server(blocks=14, max_batch_tokens=200)
        running = [server.submit(words(70, seed=each), tenant="a", max_tokens=10) for each in range(2)]
        waiting = [
            server.submit(words(length, seed=length), tenant=tenant, max_tokens=4)
            for tenant, length in (("a", 100), ("b", 20))
        ]
        server.step()
        server.step()
        assert not any(map(server.computed, waiting))
        server.run()
        assert all(server.ids(number) == server.expected(number) for number in (*running, *waiting))

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
