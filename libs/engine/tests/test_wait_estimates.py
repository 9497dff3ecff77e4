"""What the estimate for one more request is made of. The estimates of its parts are tested by themselves."""

import asyncio
from types import SimpleNamespace

import pytest
from lockstep_engine.wait_estimates import WaitEstimates
from scripted_ranks import Server, words


def estimates_of(backlog=0):
    """With a pace of 0.5 s for each token of a prompt."""
    sequences = SimpleNamespace(running=[], free_seqs=1, places=1, backlog=backlog, waiting_for_share=frozenset())
    estimates = WaitEstimates(sequences, step_tokens=4)
    estimates.pace.token_s = 0.5
    assert estimates.pace.step_s == 0
    return estimates


async def test_the_wait_for_a_turn_is_estimated_once_in_a_turn_of_the_loop():
    estimates = estimates_of()
    asked = []
    estimates.queue.waits = lambda **_: (asked.append(1) or 2.0, 0.0)
    assert [estimates.prompt_s(tokens) for tokens in (0, 2, 4)] == [2.0, 3.0, 4.0]
    assert len(asked) == 1
    await asyncio.sleep(0)
    estimates.prompt_s(1)
    assert len(asked) == 2


async def test_the_prompts_that_came_first_are_not_counted_twice():
    """The wait for a place has them, too."""
    estimates = estimates_of(backlog=3)
    wait_s = 2.0
    estimates.queue.waits = lambda **_: (wait_s, 0.0)
    assert estimates.prompt_s(2) == 3.0
    await asyncio.sleep(0)
    wait_s = 0.0
    assert estimates.prompt_s(2) == 2.5


class TestShares:
    """Two tenants with half of the blocks each; a request has a quarter of them. A token takes one second."""

    def serve(self, **settings):
        server = Server(**{"blocks": 20, "tenant_share": 0.5, "max_seqs": 4, "max_batch_tokens": 400} | settings)
        self.estimates = WaitEstimates(server.scheduler.sequences, step_tokens=400)
        self.estimates.calibrate(1.0, 0.0)
        return server

    def submit(self, server, tenant, count):
        for _ in range(count):
            number = server.submit(words(70, seed=len(server.requests)), tenant=tenant, max_tokens=10, ignore_eos=True)
            self.estimates.add(server.requests[number], 0.0)

    def step(self, server):
        server.step()
        self.estimates.note_phases(server.scheduler.sequences.take_phases())

    def wait_s(self):
        return self.estimates.waits()[0][0]

    async def test_one_at_its_limit_is_not_counted_in_what_others_wait(self):
        server = self.serve()
        self.submit(server, "greedy", 30)
        assert self.wait_s() > 60.0
        self.step(server)
        sequences = server.scheduler.sequences
        assert (len(sequences.running), len(sequences.waiting)) == (2, 28)
        assert (sequences.free_seqs, sequences.backlog, self.wait_s()) == (2, 0, 0.0)
        assert self.estimates.prompt_s(0) == 0.0
        self.submit(server, "greedy", 1)  # nor is its next request
        assert (sequences.free_seqs, self.wait_s()) == (2, 0.0)
        self.submit(server, "modest", 1)
        assert sequences.free_seqs == 1
        self.step(server)
        assert (len(sequences.running), sequences.free_seqs, self.wait_s()) == (3, 1, 0.0)

    async def test_with_all_rows_in_use_others_wait_for_a_row_only(self):
        server = self.serve(max_seqs=3)
        self.submit(server, "greedy", 30)
        self.step(server)
        self.submit(server, "modest", 1)
        self.step(server)
        assert server.scheduler.sequences.free_seqs == 0
        assert 0.0 < self.wait_s() <= 10.0

    async def test_with_no_room_for_others_they_do_wait(self):
        """Both have all that they may have, so that a third one's requests wait for theirs."""
        server = self.serve(max_seqs=8)
        for tenant in ("greedy", "modest"):
            self.submit(server, tenant, 10)
        self.step(server)
        self.step(server)
        assert (len(server.scheduler.sequences.running), server.pool.free) == (4, 0)
        assert server.scheduler.sequences.free_seqs == 0
        assert self.wait_s() > 20.0

    async def test_without_shares_a_tenant_that_has_all_blocks_is_counted(self):
        server = self.serve(tenant_share=1.0, blocks=14)
        self.submit(server, "greedy", 30)
        self.step(server)
        assert len(server.scheduler.sequences.running) == 2
        assert server.scheduler.sequences.free_seqs == 0
        assert self.wait_s() > 60.0

    async def test_a_tenant_below_its_limit_again_is_counted(self):
        server = self.serve()
        self.submit(server, "greedy", 7)
        self.step(server)
        assert server.scheduler.sequences.free_seqs == 2
        for number in range(2, 6):
            server.cancel(number)
        while server.scheduler.sequences.waiting:
            self.step(server)
        assert server.scheduler.sequences.free_seqs == 3
        self.submit(server, "greedy", 1)
        assert server.scheduler.sequences.free_seqs == 2


class TestPlaces:
    """A request takes 20 s, and a token of a prompt no time."""

    def serve(self, **settings):
        server = Server(max_seqs=64, blocks=4000, max_batch_tokens=512, context_length=4200, **settings)
        self.estimates = WaitEstimates(server.scheduler.sequences, step_tokens=512)
        self.estimates.calibrate(2.5, 0.0)
        return server

    def submit(self, server, prompt):
        number = server.submit(prompt, max_tokens=8, ignore_eos=True)
        self.estimates.add(server.requests[number], 0.0)

    def wait_s(self):
        return self.estimates.waits()[0][0]

    def step(self, server):
        server.step()
        self.estimates.note_phases(server.scheduler.sequences.take_phases())

    @pytest.mark.parametrize("are_equal", [True, False])
    async def test_those_that_wait_for_their_turn_in_a_step_have_places(self, are_equal):
        """The prompt that runs takes all tokens of each step; rows and blocks are free."""
        server = self.serve()
        for seed in range(16):
            self.submit(server, words(4000, 0 if are_equal else seed))
        sequences = server.scheduler.sequences
        assert (sequences.free_seqs, self.wait_s()) == (48, 0.0)
        self.step(server)
        assert (len(sequences.running), len(sequences.waiting)) == (1, 15)
        assert (sequences.places, sequences.free_seqs, self.wait_s()) == (64, 48, 0.0)

    async def test_a_queue_as_long_as_there_are_rows_is_waited_for(self):
        server = self.serve()
        for seed in range(80):
            self.submit(server, words(300, seed))
        self.step(server)
        assert server.scheduler.sequences.free_seqs == 0
        assert 20.0 <= self.wait_s() < 40.0

    @pytest.mark.parametrize("settings", [{}, {"prefix_cache": False}])
    async def test_those_that_wait_for_blocks_have_none(self, settings):
        """Also while the prompt that runs takes all tokens of each step, so that nothing of the others is looked up."""
        server = Server(max_seqs=64, blocks=260, max_batch_tokens=512, context_length=4200, **settings)
        self.estimates = WaitEstimates(server.scheduler.sequences, step_tokens=512)
        self.estimates.calibrate(2.5, 0.0)
        for seed in range(16):
            self.submit(server, words(4000, seed))
        for _ in range(12):
            self.step(server)
            sequences = server.scheduler.sequences
            assert (len(sequences.running), sequences.places, sequences.free_seqs) == (1, 1, 0)
            assert self.wait_s() > 200.0

    async def test_one_that_was_preempted_waits_for_blocks(self):
        server = Server(max_seqs=8, blocks=8)
        for seed in range(2):
            server.submit(words(40, seed), max_tokens=60)
        sequences = server.scheduler.sequences
        while not sequences.preemptions:
            assert sequences.free_seqs == 8 - len(sequences.by_id)
            server.step()
        assert (sequences.places, sequences.free_seqs) == (1, 0)
        server.run()
        assert (sequences.places, sequences.free_seqs) == (8, 8)
