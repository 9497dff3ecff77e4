"""The simulation finds a broken product: each mutation breaks one rule of the protocol and is found within few seeds.

Journals are doubles that accept too much; the transport loses, repeats or changes what the rules depend on; routers
forget to clean up.
"""

from dataclasses import replace

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_router.router import Router
from lockstep_router.streams.journal import Acceptance, Journal
from simulated.plan import Scale, make_plan
from simulated.runner import explain, outcomes
from simulated.world import Mutation, World

_SEEDS = 40
_SCALE = Scale(requests=40)


class JournalThatIgnoresAttempts(Journal):
    def accept(self, update):
        return super().accept(_changed(update, attempt=self.attempt))


class JournalThatAcceptsGaps(Journal):
    def accept(self, update):
        return super().accept(_changed(update, position=min(update.position, len(self.emitted_ids))))


class JournalThatAcceptsDuplicates(Journal):
    def accept(self, update):
        return super().accept(_changed(update, position=max(update.position, len(self.emitted_ids))))


class JournalThatForgetsTheLastToken(Journal):
    """A resumed attempt begins one token too early, and its first token is taken as the next one."""

    def next_submit(self, worker_id, **times):
        submit = super().next_submit(worker_id, **times)
        del submit.emitted_ids[-1:]
        return submit

    def accept(self, update):
        if self.attempt > 1:
            update = _changed(update, position=len(self.emitted_ids))
        return super().accept(update)


class JournalThatAcceptsMalformed(Journal):
    def accept(self, update):
        acceptance = super().accept(update)
        if acceptance is Acceptance.MALFORMED and update.attempt == self.attempt and update.ids:
            self.emitted_ids.extend(update.ids)
            update.finish = 1
            return Acceptance.ACCEPTED
        return acceptance


class JournalThatSwapsTokens(Journal):
    def accept(self, update):
        if len(update.ids) > 1:
            update.ids[:] = [update.ids[1], update.ids[0], *update.ids[2:]]
        return super().accept(update)


class RouterThatForgetsSuspects(Router):
    """It never clears the records of streams that were in a death."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.workers.suspects.forget = lambda stream_id: None


class RouterThatLosesCount(Router):
    def _count(self, streams):
        super()._count(max(streams, 0))


ENDLESS = {"heartbeat_timeout_s": 1e6, "first_token_deadline_s": 1e6, "inter_token_deadline_s": 1e6}


def _changed(update, **fields):
    changed = worker_pb2.StreamTokens()
    changed.CopyFrom(update)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def accept_stale_epochs():
    """Every frame but Hello says the newest epoch that was seen: routers cannot tell old ones."""
    newest = {}

    def relabel(frame):
        key = "epoch"
        newest[key] = max(newest.get(key, 0), frame.epoch)
        frame.epoch = newest[key]
        return [frame]

    return relabel


def lose_cancels(frame):
    return [] if frame.WhichOneof("frame") == "cancel" else [frame]


def forget_arrivals(frame):
    if frame.WhichOneof("frame") == "submit":
        frame.submit.arrived_s = 0.0
    return [frame]


def forget_emitted(frame):
    """What a resumed stream has so far does not arrive: the worker begins again."""
    if frame.WhichOneof("frame") == "submit":
        frame.submit.ClearField("emitted_ids")
    return [frame]


def lose_ends(frame):
    """The last tokens of streams do not arrive."""
    if frame.WhichOneof("frame") == "tokens":
        kept = [each for each in frame.tokens.streams if not each.finish]
        frame.tokens.ClearField("streams")
        frame.tokens.streams.extend(kept)
    return [frame]


def change_tokens(frame):
    """One in some thousand tokens is another one."""
    if frame.WhichOneof("frame") == "tokens":
        for each in frame.tokens.streams:
            each.ids[:] = [token ^ (token % 257 == 0) for token in each.ids]
    return [frame]


WRONG = {"wrong tokens"}
STUCK = {"silence", "no end", "unexplained error"}
MISCHIEF = ("mischief",)
MOVES = ("lose ranks", "crash", "reset")
SILENCES = ("stop", "lose node", "cut down")

MUTATIONS = {
    "attempts are ignored": (MISCHIEF, lambda: Mutation(journal=JournalThatIgnoresAttempts), WRONG),
    "gaps are accepted": (MISCHIEF, lambda: Mutation(journal=JournalThatAcceptsGaps), WRONG),
    "duplicates are accepted": (MISCHIEF, lambda: Mutation(journal=JournalThatAcceptsDuplicates), WRONG),
    "malformed updates are accepted": (MISCHIEF, lambda: Mutation(journal=JournalThatAcceptsMalformed), WRONG),
    "stale epochs are accepted": (MISCHIEF, lambda: Mutation(to_router=accept_stale_epochs()), WRONG),
    "the last token is forgotten": (MOVES, lambda: Mutation(journal=JournalThatForgetsTheLastToken), WRONG),
    "emitted tokens are not sent": (MOVES, lambda: Mutation(to_worker=forget_emitted), {"begins again"}),
    "tokens are swapped": (MOVES, lambda: Mutation(journal=JournalThatSwapsTokens), WRONG),
    "tokens are changed": (MOVES, lambda: Mutation(to_router=change_tokens), WRONG),
    "ends are lost": (MOVES, lambda: Mutation(to_router=lose_ends), STUCK),
    "nothing is cancelled": (MOVES, lambda: Mutation(to_worker=lose_cancels), {"runs on", "leak"}),
    "arrivals are forgotten": (MOVES, lambda: Mutation(to_worker=forget_arrivals), {"seniority"}),
    "silence is not noticed": (SILENCES, lambda: Mutation(settings=ENDLESS), STUCK),
    "suspects are never forgotten": (MOVES, lambda: Mutation(router=RouterThatForgetsSuspects), {"leak"}),
    "streams are counted wrongly": (MOVES, lambda: Mutation(router=RouterThatLosesCount), {"leak"}),
}
"""The faults that provoke it, the mutation, and the kinds of violations of which one must be found."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(name):
    kinds, make, wanted = MUTATIONS[name]
    scale = replace(_SCALE, kinds=kinds, longest_s=20.0 if kinds is SILENCES else _SCALE.longest_s)
    for seed in range(_SEEDS):
        violations = World(make_plan(seed, scale), make()).run().violations
        if found := wanted & {violation.kind for violation in violations}:
            print(f"{name}: {sorted(found)} with seed {seed}")
            return
    pytest.fail(f"not found with seeds 0 to {_SEEDS - 1}")


@pytest.mark.parametrize("kinds", [MISCHIEF, MOVES, SILENCES])
def test_without_a_mutation_nothing_is_found(kinds):
    found = [outcome.violations for outcome in outcomes(0, 200, replace(_SCALE, kinds=kinds)) if outcome.violations]
    assert found == []


def test_explanation_names_the_seed_and_a_smaller_plan():
    mutation = Mutation(journal=JournalThatSwapsTokens)
    outcome = World(make_plan(1, _SCALE), mutation).run()
    text = explain(outcome, _SCALE, mutation)
    assert "seed 1:" in text
    assert "smallest plan: 1 requests, 0 faults" in text
    assert "wrong tokens: r" in text
    assert " submit worker-" in text
