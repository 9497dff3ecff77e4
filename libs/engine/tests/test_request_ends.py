"""The beginning and the end of requests in the scheduler: cancels, resumed streams, finish reasons, phases."""

import pytest
from lockstep_common.errors import LockstepError
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.request import FinishReason, Phase
from scripted_ranks import EOS, Server, expected_ids, words


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
