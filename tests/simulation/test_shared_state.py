"""Routers that share a state server, under seeded faults on virtual time: every history is right, and what is broken is
found.

In half of the simulations no fault touches the state server and one router: there no stream may be lost, whatever
happens to the routers that had it.
"""

from dataclasses import replace

import pytest
from lockstep_router.journals import MirroredJournalStore
from lockstep_state.memory import MemoryBackend
from simulated.faults import KEEPING, SHARED, STATE_FAULTS
from simulated.plan import SHARED_SCALE, make_plan
from simulated.runner import explain, run_seeds
from simulated.world import Mutation, World

_FEW, _MANY = 400, 8_000
_SEEDS = 40


def check(first_seed, streams, summarize):
    report = run_seeds(first_seed, streams, SHARED_SCALE)
    summarize(f"with a state server: {report}")
    assert not report.failures, "\n".join(explain(failure, SHARED_SCALE) for failure in report.failures)
    return report


def test_every_history_with_a_state_server_is_right(pytestconfig, summarize):
    streams, seed = pytestconfig.getoption("simulated_streams"), pytestconfig.getoption("simulation_seed")
    report = check(seed, streams or _FEW, summarize)
    if streams is None or streams >= _FEW:
        assert report.counts["streams taken over"] > report.streams / 100, "routers must take streams over"
        assert {kind for kind in STATE_FAULTS if report.counts[kind]} == set(STATE_FAULTS)


@pytest.mark.exhaustive
def test_many_histories_with_a_state_server_are_right(pytestconfig, summarize):
    check(pytestconfig.getoption("simulation_seed") + 1_000, _MANY, summarize)


@pytest.mark.slow
def test_same_seed_gives_the_same_trace():
    first, again = (World(make_plan(3, SHARED_SCALE)).run() for _ in range(2))
    assert first.trace_hash == again.trace_hash


class StateThatDoesNotFence(MemoryBackend):
    """A router that has lost a stream can still write to it."""

    async def append(self, writes):
        raised = []
        for write in writes:
            stored = await self.read(write.key)
            epoch = write.epoch if stored is None else max(write.epoch, stored.epoch)
            raised.append(replace(write, epoch=epoch))
        return await super().append(raised)


class StateThatRepeatsAToken(MemoryBackend):
    """A router that takes a stream gets its last token twice."""

    async def read(self, key, take=None):
        stored = await super().read(key, take)
        if stored is None or take is None or stored.seal is not None:
            return stored
        return replace(stored, logs=[replace(log, ids=log.ids + log.ids[-1:]) for log in stored.logs])


class StateThatNeverForgets(MemoryBackend):
    async def append(self, writes):
        return await super().append([replace(write, ttl_s=1e4) for write in writes])


class StoreThatMirrorsNothing(MirroredJournalStore):
    def start(self):
        self.client.start()


class StoreThatSharesNoKeys(MirroredJournalStore):
    async def claim(self, scope, claim):
        return await self._front.claim(scope, claim)


class StoreThatDoesNotTellOfTakers(MirroredJournalStore):
    """The run of a stream goes on where it was taken from."""

    def on_taken(self, callback):
        pass


class StoreThatCannotDiscard(MirroredJournalStore):
    """A client's cancel reaches only the router that has the stream."""

    async def discard(self, request_id, owner):
        return False


class StoreThatRemovesHereOnly(MirroredJournalStore):
    async def remove(self, request_id):
        self.mirror.leave(request_id)
        await self._front.remove(request_id)


SLOW = ("slow",)
"""Slow workers have streams that run for longer than a router may not know that one was taken."""

MUTATIONS = {
    "old epochs may write": (SHARED, lambda: Mutation(state=StateThatDoesNotFence), {"lower epoch"}),
    "taken streams repeat a token": (SHARED, lambda: Mutation(state=StateThatRepeatsAToken), {"wrong tokens"}),
    "the state server keeps streams": (SHARED, lambda: Mutation(state=StateThatNeverForgets), {"leak"}),
    "nothing is mirrored": (KEEPING, lambda: Mutation(mirrored=StoreThatMirrorsNothing), {"unexplained error"}),
    "keys are not shared": (KEEPING, lambda: Mutation(mirrored=StoreThatSharesNoKeys), {"generated twice"}),
    "taken streams run on": (SLOW, lambda: Mutation(mirrored=StoreThatDoesNotTellOfTakers), {"runs on"}),
    "cancels stay at one router": (KEEPING, lambda: Mutation(mirrored=StoreThatCannotDiscard), {"lost"}),
    "cancelled streams come back": (KEEPING, lambda: Mutation(mirrored=StoreThatRemovesHereOnly), {"kept too long"}),
}
"""The faults that provoke it, the mutation, and the kinds of violations of which one must be found."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(name):
    kinds, make, wanted = MUTATIONS[name]
    scale = replace(SHARED_SCALE, requests=40, kinds=tuple(kind for kind in SHARED if kind in kinds))
    for seed in range(_SEEDS):
        violations = World(make_plan(seed, scale), make()).run().violations
        if found := wanted & {violation.kind for violation in violations}:
            print(f"{name}: {sorted(found)} with seed {seed}")
            return
    pytest.fail(f"not found with seeds 0 to {_SEEDS - 1}")
