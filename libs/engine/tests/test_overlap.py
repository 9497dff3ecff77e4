"""Plans that are sent before the results of earlier plans: every stream is the same as without overlap, and superfluous
tokens leave no trace.
"""

import random

import pytest
from fast_cases import fast_if, further
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.request import FinishReason, PromptScores, Request, SamplingParams
from scripted_ranks import EOS, Server, expected_ids, words

LAZY = HotWindow(sink=1, size=4)
NARROW = HotWindow(sink=1, size=1)
IMMEDIATE = HotWindow(sink=0, size=0)
HOT_WINDOWS = [None, NARROW, IMMEDIATE]


def serve(hot_window=None, *, depth=2, **settings_):
    cold = 0 if hot_window is None else 64
    return Server(depth=depth, **{"hot_window": hot_window, "cold_blocks": cold, **settings_})


class TestPlanningAhead:
    @pytest.mark.parametrize("depth", [2, 3])
    def test_a_decoding_sequence_is_planned_before_its_token_is_known(self, depth):
        server = serve(depth=depth)
        number = server.submit(words(20, seed=1), max_tokens=30)
        server.run()
        assert server.ids(number) == server.expected(number)
        assert server.ranks.ahead == 29
        assert server.computed(number) == [(0, 20), *[(position, 1) for position in range(20, 49)]]
        server.assert_idle()

    def test_prompts_and_decoding_sequences_share_steps(self):
        server = serve(max_batch_tokens=32)
        early = server.submit(words(5, seed=1), max_tokens=20)
        server.step()
        late = server.submit(words(100, seed=2), max_tokens=5)
        server.run()
        both = [step for step in server.ranks.trace if early in step and late in step]
        assert len(both) >= 4
        assert server.ranks.ahead == 19 + 4
        assert [server.ids(each) for each in (early, late)] == [server.expected(each) for each in (early, late)]

    @pytest.mark.parametrize("count", [1, 2, 3, 17])
    def test_nothing_is_planned_beyond_the_last_token(self, count):
        server = serve()
        number = server.submit(words(4, seed=1), max_tokens=count)
        server.run()
        assert sum(tokens for _, tokens in server.computed(number)) == 4 + count - 1
        assert server.finish_reason(number) is FinishReason.LENGTH

    def test_nothing_is_planned_beyond_the_context(self):
        server = serve(context_length=64)
        number = server.submit(words(60, seed=1), max_tokens=50)
        server.run()
        assert server.computed(number)[-1] == (62, 1)
        assert len(server.ids(number)) == 4

    def test_nothing_is_planned_while_all_wait_for_a_result(self):
        server = serve()
        server.submit(words(4, seed=1), max_tokens=1)
        server.plan()
        assert len(server.ranks.trace) == 1
        assert server.scheduler.schedule() is None

    def test_logprobs_come_with_the_token_they_belong_to(self):
        server = serve()
        number = server.submit(words(4, seed=1), logprobs=1)
        server.run()
        for output in server.outputs[number]:
            (id_,), (logprobs,) = output.ids, output.logprobs
            assert (logprobs.chosen.id, logprobs.chosen.logprob) == (id_, -float(id_))


class TestSuperfluousTokens:
    @pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_tokens_after_the_end_are_neither_emitted_nor_cached(self, hot_window, depth):
        """End of text fills a block: its KV is computed with overlap and not computed without."""
        server = serve(hot_window, depth=depth, max_batch_tokens=200)
        prompt = words(2 * BLOCK_SIZE - 3, seed=1)
        script = [5, 6, EOS, 7, 8, 9]
        number = server.submit(prompt, script=script, max_tokens=40)
        server.run()
        assert server.ids(number) == [5, 6, EOS]
        assert server.finish_reason(number) is FinishReason.STOP
        assert server.computed(number)[-1] == (2 * BLOCK_SIZE - 2 + depth - 1, 1)
        server.assert_idle()
        again = server.submit([*prompt, *script], max_tokens=2)
        server.run()
        assert server.outputs[again][0].cached_tokens == BLOCK_SIZE
        assert server.ids(again) == server.expected(again)

    @pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
    def test_the_output_is_found_by_a_later_turn_as_it_is_without_overlap(self, hot_window):
        cached = []
        for depth in (1, 2, 3):
            server = serve(hot_window, depth=depth, max_batch_tokens=200)
            prompt = words(20, seed=1)
            first = server.submit(prompt, max_tokens=100)
            server.run()
            second = server.submit([*prompt, *server.ids(first), *words(8, seed=2)])
            server.run()
            assert server.ids(second) == server.expected(second)
            cached.append(server.outputs[second][0].cached_tokens)
        assert cached == [119 // BLOCK_SIZE * BLOCK_SIZE] * 3

    def test_a_sampling_row_is_reused_while_a_step_of_its_last_request_is_in_flight(self):
        server = serve(max_seqs=1)
        ends = server.submit(words(4, seed=1), script=[5, EOS, 6, 7], max_tokens=30)
        numbers = [server.submit(words(4, seed=each), max_tokens=5) for each in range(3)]
        server.run()
        assert server.ids(ends) == [5, EOS]
        assert all(server.ids(number) == server.expected(number) for number in numbers)
        server.assert_idle()

    def test_blocks_of_a_cancelled_request_are_allocated_at_once(self):
        server = serve(blocks=4, max_batch_tokens=64)
        cancelled = server.submit(words(3 * BLOCK_SIZE, seed=1), max_tokens=10)
        server.step()
        server.cancel(cancelled)
        number = server.submit(words(3 * BLOCK_SIZE, seed=2), max_tokens=10)
        server.run()
        assert server.ids(cancelled) == server.expected(cancelled)[:1]
        assert server.ids(number) == server.expected(number)
        server.assert_idle()

    def test_an_id_that_is_used_again_does_not_get_what_is_in_flight(self):
        server = serve()
        number = server.submit(words(4, seed=1), max_tokens=20)
        server.step()
        server.cancel(number)
        server.scheduler.submit(Request(str(number), (1, 2), SamplingParams(max_tokens=3, logit_bias={number: 0.0})))
        before = len(server.outputs[number])
        server.run()
        given_ids = [id_ for output in server.outputs[number][before:] for id_ in output.ids]
        assert given_ids == expected_ids([1, 2], 3)


class TestPreemption:
    @pytest.mark.parametrize("depth", [2, 3])
    def test_a_preempted_sequence_keeps_the_tokens_in_flight(self, depth):
        server = serve(blocks=8, depth=depth)
        numbers = [server.submit(words(2 * BLOCK_SIZE, seed=each), max_tokens=40) for each in range(2)]
        server.run()
        assert server.restarts() > 0
        assert [server.ids(number) for number in numbers] == [server.expected(number) for number in numbers]
        server.assert_idle()

    def test_a_sequence_preempted_with_its_last_token_in_flight_does_not_run_again(self):
        server = serve(blocks=4, max_batch_tokens=128)
        older = server.submit(words(2 * BLOCK_SIZE - 1, seed=1), max_tokens=20)
        newer = server.submit(words(2 * BLOCK_SIZE - 2, seed=2), max_tokens=2)
        server.run()
        assert server.restarts() == 0
        assert [server.ids(each) for each in (older, newer)] == [server.expected(each) for each in (older, newer)]
        server.assert_idle()

    def test_a_preempted_sequence_ends_with_the_token_in_flight(self):
        server = serve(blocks=4, max_batch_tokens=128)
        older = server.submit(words(2 * BLOCK_SIZE - 1, seed=1), max_tokens=20)
        newer = server.submit(words(2 * BLOCK_SIZE - 2, seed=2), script=[5, EOS, 6, 7], max_tokens=30)
        server.run()
        assert server.ids(newer) == [5, EOS]
        assert server.ids(older) == server.expected(older)
        server.assert_idle()


class TestNoMemory:
    """A plan that could not be sent is dropped while the one before it is in flight."""

    @staticmethod
    def shed(server):
        """The number of the request that ends."""
        assert server.scheduler.schedule() is not None
        (output,) = server.scheduler.shed(seen=1)
        return int(output.request_id)

    @pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
    def test_requests_that_stay_emit_the_same_and_are_not_overtaken(self, hot_window):
        server = serve(hot_window, max_seqs=3)
        numbers = [server.submit(words(20, seed=each), max_tokens=30) for each in range(6)]
        for _ in range(5):
            server.step()
        ended = self.shed(server)
        assert ended == 2
        began = len(server.ranks.trace)
        server.run()
        stay = [number for number in numbers if number != ended]
        assert [server.ids(number) for number in stay] == [server.expected(number) for number in stay]
        again = server.ranks.trace[began:]
        started = [next(at for at, step in enumerate(again) if number in step) for number in stay]
        assert started == sorted(started)
        server.assert_idle()

    def test_scores_of_a_prompt_come_once(self):
        server = serve(max_batch_tokens=16, max_seqs=2)
        prompt = words(60, seed=1)
        scored = server.submit(prompt, prompt_scores=PromptScores.TOKENS, priority=1)
        other = server.submit(words(3, seed=2), max_tokens=40)
        for _ in range(4):
            server.step()
        assert self.shed(server) == other
        server.run()
        parts = [each.prompt_logprobs for each in server.outputs[scored] if each.prompt_logprobs]
        positions = [part.position + at for part in parts for at in range(len(part.tokens))]
        assert positions == list(range(1, len(prompt)))
        assert server.ids(scored) == server.expected(scored)

    def test_a_cancelled_request_is_not_the_one_that_ends(self):
        server = serve()
        first, last = (server.submit(words(20, seed=each), max_tokens=20) for each in range(2))
        server.step()
        server.cancel(last)
        assert [output.request_id for output in server.scheduler.shed(seen=1)] == [str(first)]
        server.run()
        server.assert_idle()


class TestPlans:
    def test_penalties_count_tokens_that_were_in_flight(self):
        server = serve(blocks=4, max_batch_tokens=64, prefix_cache=False)
        server.submit(words(BLOCK_SIZE, seed=1), max_tokens=40)
        newer = server.submit(words(BLOCK_SIZE, seed=2), max_tokens=40, presence_penalty=0.5)
        added = []
        execute = server.ranks.execute

        def note(plan):
            added.extend((len(server.ids(newer)), each) for each in plan.added if each.emitted_ids)
            return execute(plan)

        server.ranks.execute = note
        server.run()
        assert [each.emitted_ids for _, each in added] == [server.ids(newer)[:known] for known, _ in added]
        assert added
        assert server.ids(newer) == server.expected(newer)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    hot_window=st.sampled_from([*HOT_WINDOWS, LAZY]),
    prefix_cache=st.booleans(),
    tight=st.booleans(),
)
def test_any_streams_at_any_depth(seed, depth, hot_window, prefix_cache, tight):
    """Stops, cancels, preemptions, compression: every stream is the same as alone, and all blocks are free at the
    end."""
    soak(25, seed=seed, depth=depth, hot_window=hot_window, prefix_cache=prefix_cache, tight=tight)


@pytest.mark.parametrize("depth", [further(1), 2, fast_if(False, 3)])
@pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
def test_soak(hot_window, depth):
    restarts = soak(400, seed=7, depth=depth, hot_window=hot_window, prefix_cache=True, tight=True)
    assert restarts > 5


def soak(count, *, seed, depth, hot_window, prefix_cache, tight):
    choose = random.Random(seed)
    server = serve(
        hot_window,
        depth=depth,
        blocks=(12 if hot_window is None else 3 * hot_window.blocks + 2) if tight else 64,
        cold_blocks=0 if hot_window is None else 16 if tight else 64,
        max_seqs=6,
        max_batch_tokens=40,
        max_queue=12,
        context_length=160,
        prefix_cache=prefix_cache,
    )
    expected, cancelled = {}, set()

    def cancel_some():
        for number in expected:
            if choose.random() < 0.005 and server.cancel(number):
                cancelled.add(number)

    while len(expected) < count:
        while len(server.scheduler.sequences.waiting) < choose.randint(0, 8):
            number, ids = submit_some(server, choose)
            expected[number] = ids
        cancel_some()
        if choose.random() < 0.5:
            server.plan()
            cancel_some()
        server.step()
    server.run()
    server.assert_idle()
    for number, whole in expected.items():
        ids = server.ids(number)
        assert ids == (whole[: len(ids)] if number in cancelled else whole), f"request {number}"
    return server.restarts()


def submit_some(server, choose):
    """A random request, and the tokens expected of it."""
    beginning = choose.choice((0, 16, 40, 90))
    prompt = [*words(beginning, beginning), *words(choose.randint(1, 40), choose.random())]
    most, seed = choose.randint(1, 30), choose.randrange(2**64)
    ids = expected_ids(prompt, most, seed=seed)
    resumed = choose.randrange(most) if choose.random() < 0.3 else 0
    stop = ids[choose.randrange(resumed, most)]
    stops = (stop,) if choose.random() < 0.4 and stop not in ids[:resumed] else ()
    number = server.submit(
        prompt,
        emitted=ids[:resumed],
        priority=choose.choice([0, 0, 0, 1, -1]),
        tenant=choose.choice(["", "other"]),
        max_tokens=most,
        seed=seed,
        stop_token_ids=stops,
    )
    return number, ids[resumed : ids.index(stop) + 1 if stops else most]
