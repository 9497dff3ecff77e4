"""When streams with grammars take part in steps. The masks are scripted, and the ranks have no model."""

import itertools

import numpy as np
import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine.plan import mask_words
from lockstep_engine.request import FinishReason, Grammar, GrammarKind
from scripted_ranks import Server, words


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
