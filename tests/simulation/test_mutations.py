"""The simulation finds a broken product: each mutation breaks one rule of the protocol and is found within few seeds.

Journals are doubles that accept too much; the transport loses, repeats or changes what the rules depend on; routers
forget to clean up. Resumable streams are lost, kept, doubled or generated twice by changed `Runs`, stores and answers.
Each kind of violation has a mutation that must be found by it alone.
"""

import re
import time
from dataclasses import replace

import pytest
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.journals import MemoryJournalStore
from lockstep_router.resumption import After, Runs
from lockstep_router.router import Router
from lockstep_router.running import InProgress
from lockstep_router.streams.journal import Acceptance, Journal
from simulated.checker import KINDS
from simulated.network import Channel
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


class JournalThatEndsEarly(Journal):
    """A stream ends with its third token."""

    def accept(self, update):
        acceptance = super().accept(update)
        if acceptance is Acceptance.ACCEPTED and len(self.emitted_ids) >= 3:
            update.finish = inference_pb2.FINISH_REASON_STOP
        return acceptance


class JournalThatRenamesStreams(Journal):
    """Later attempts have an id that no stream has."""

    def next_submit(self, worker_id, **times):
        submit = super().next_submit(worker_id, **times)
        if self.attempt > 1:
            submit.stream_id += "-again"
        return submit


class CallWithoutEpochs:
    """A call to a worker. What the worker sends in an old epoch looks as if it were of the newest one."""

    def __init__(self, call):
        self.write = call.write
        self._call = call
        self._newest = 0

    async def read(self):
        frame = await self._call.read()
        frame.epoch = self._newest = max(self._newest, frame.epoch)
        return frame


class ChannelWithoutEpochs(Channel):
    def stream_stream(self, method, **options):
        make = super().stream_stream(method, **options)
        return lambda: CallWithoutEpochs(make())


class RouterThatIgnoresEpochs(Router):
    def __init__(self, settings, discovery, dial, *others):
        def dial_without_epochs(target, options):
            channel = dial(target, options)
            return ChannelWithoutEpochs(channel.network, channel.loop, target)

        super().__init__(settings, discovery, dial_without_epochs, *others)


class RouterThatIgnoresTimeouts(Router):
    async def prepare(self, request, account):
        caller = replace(request.caller, timeout_s=None)
        return await super().prepare(replace(request, caller=caller), account)


class RouterThatFailsAtItsEnd(Router):
    async def leave(self, **options):
        await super().leave(**options)
        raise RuntimeError("the drain has a defect")


class RouterThatForgetsSuspects(Router):
    """It never clears the records of streams that were in a death."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.workers.suspects.forget = lambda stream_id: None


class InProgressThatLosesCount(InProgress):
    def add_streams(self, streams):
        super().add_streams(max(streams, 0))


class RouterThatLosesCount(Router):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.in_progress = InProgressThatLosesCount(
            self.settings, self.journals, lambda: self.loop_time, self._note_requests
        )


class RouterWithOtherRuns(Router):
    """Its resumable streams break a rule."""

    runs_class = Runs

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.runs = self.runs_class(self, self.journals, self._note_requests)


def with_runs(runs):
    return type(f"RouterWith{runs.__name__}", (RouterWithOtherRuns,), {"runs_class": runs})


class RunsThatRepeatAToken(Runs):
    """A client that comes back gets the last token again."""

    step = -1

    async def resume(self, request_id, owner, account, after=None, *options):
        if after is not None and (found := re.fullmatch(r"([1-9]\d*)", after.position)):
            position = int(found[1]) + self.step
            try:
                after = After(after.request_id, str(position), after.field)
                return await super().resume(request_id, owner, account, after, *options)
            except Exception:
                pass
        return await super().resume(request_id, owner, account, after, *options)


class RunsThatSkipAToken(RunsThatRepeatAToken):
    step = 1


class RunsThatIgnoreKeys(Runs):
    async def start(self, request, account, style, *, owner, key=None, after=None, **options):
        return await super().start(request, account, style, owner=owner, **options)


class RunsThatIgnoreCancels(Runs):
    async def cancel(self, request_id, owner):
        pass


class RunsThatCannotCancel(Runs):
    async def cancel(self, request_id, owner):
        raise LockstepError(ErrorCode.STREAM_NOT_FOUND, "there is no such stream")


class RunsThatForgetWhoHasEnded(Runs):
    """Streams that have ended cannot be resumed."""

    async def resume(self, request_id, owner, account, after=None, *options):
        if request_id not in self._runs:
            request_id = "r-unknown"
        after = None if after is None else replace(after, request_id=request_id)
        return await super().resume(request_id, owner, account, after, *options)


class RouterThatCutsStreamsOff(Router):
    """The drain leaves streams that outlast it as they are."""

    async def _end_all(self):
        pass


class StoreThatNeverForgets(MemoryJournalStore):
    def expire(self):
        pass


class StoreThatKeepsKeys(MemoryJournalStore):
    """Idempotency keys outlive their streams."""

    def _release(self, request_id):
        pass


class StoreThatFailsToSeal(MemoryJournalStore):
    """The router catches and logs what it raises."""

    async def seal(self, request_id, outcome, keep_s):
        await super().seal(request_id, outcome, keep_s)
        raise RuntimeError("the store has a defect")


class StoreThatLosesTheEnd(MemoryJournalStore):
    """What is read of a stream that has ended lacks its last token."""

    async def read(self, request_id):
        stored = await super().read(request_id)
        if stored is not None and stored.outcome is not None and stored.logs[0].ids:
            log = replace(stored.logs[0], ids=stored.logs[0].ids[:-1])
            stored = replace(stored, logs=[log, *stored.logs[1:]])
        return stored


def with_store(store_class):
    return lambda settings, loop: store_class(
        settings.max_resumable_streams, settings.max_resumable_bytes, clock=loop.time
    )


def by_the_wall_clock(settings, _):
    # Not `time.time` itself: the simulation replaces that one.
    return MemoryJournalStore(
        settings.max_resumable_streams,
        settings.max_resumable_bytes,
        clock=lambda: time.time(),  # noqa: PLW0108
    )


def end_twice(piece):
    """The last event of a choice comes twice."""
    return [piece, piece] if b'"finish_reason":"' in piece else [piece]


def forget_end(piece):
    """No stream has its finish."""
    return [re.sub(rb'"finish_reason":"[a-z]+"', b'"finish_reason":null', piece)]


def go_on_after_the_end(piece):
    """The last event of a choice is followed by one more token."""

    def repeat(event):
        again = re.sub(rb'"finish_reason":"[a-z]+"', b'"finish_reason":null', event[0])
        return event[0] + re.sub(rb'"text":"[^"]*"', b'"text":"004;"', again)

    return [re.sub(rb'id: [^\n]*\ndata: [^\n]*"finish_reason":"[a-z]+"[^\n]*\n\n', repeat, piece)]


def fail_at_the_end(piece):
    """The router's own code fails where it writes the end of an answer."""
    if b'"finish_reason":"' in piece:
        raise RuntimeError("the writer has a defect")
    return [piece]


def split_tokens(piece):
    """The text of tokens lacks its last character."""
    return [re.sub(rb'"text":"([^"]*);"', rb'"text":"\1"', piece)]


def count_one_more(piece):
    """The ids of events count one token too many."""
    return [re.sub(rb"^(id: [^:\n]*:)(\d+)", lambda id_: id_[1] + b"%d" % (int(id_[2]) + 1), piece, flags=re.M)]


def charge_one_more(piece):
    """The usage has one token too many."""
    return [re.sub(rb'("completion_tokens":)(\d+)', lambda usage: usage[1] + b"%d" % (int(usage[2]) + 1), piece)]


def untyped(piece):
    """Errors lose their codes."""
    return [re.sub(rb'"code":"[a-z_]+"', b'"code":null', piece)]


def change_text(piece):
    """Some tokens are other ones on their way to the client."""
    return [piece.replace(b'"text":"1', b'"text":"2')]


IMPATIENT = {"max_queue_wait_s": 0.01}
ENDLESS = {"heartbeat_timeout_s": 1e6, "first_token_deadline_s": 1e6, "inter_token_deadline_s": 1e6}


def _changed(update, **fields):
    changed = worker_pb2.StreamTokens()
    changed.CopyFrom(update)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def accept_stale_epochs():
    """Every frame but Hello says the newest epoch that was seen: routers cannot recognize old ones."""
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
CLIENTS = ("reset clients", "cut clients", "kill router")
DRAINS = ("drain router",)
CLOCKS = ("router clock",)
SILENCES = ("stop", "lose node", "cut down")

MUTATIONS = {
    "attempts are ignored": (MISCHIEF, lambda: Mutation(journal=JournalThatIgnoresAttempts), WRONG),
    "gaps are accepted": (MISCHIEF, lambda: Mutation(journal=JournalThatAcceptsGaps), WRONG),
    "duplicates are accepted": (MISCHIEF, lambda: Mutation(journal=JournalThatAcceptsDuplicates), WRONG),
    "malformed updates are accepted": (MISCHIEF, lambda: Mutation(journal=JournalThatAcceptsMalformed), WRONG),
    "stale epochs are accepted": (MISCHIEF, lambda: Mutation(to_router=accept_stale_epochs()), WRONG),
    "epochs are ignored": (MISCHIEF, lambda: Mutation(router=RouterThatIgnoresEpochs), {"lower epoch"}),
    "streams end early": (MOVES, lambda: Mutation(journal=JournalThatEndsEarly), {"early end"}),
    "streams are renamed": (MOVES, lambda: Mutation(journal=JournalThatRenamesStreams), {"unknown stream"}),
    "the last token is forgotten": (MOVES, lambda: Mutation(journal=JournalThatForgetsTheLastToken), WRONG),
    "emitted tokens are not sent": (MOVES, lambda: Mutation(to_worker=forget_emitted), {"begins again"}),
    "tokens are swapped": (MOVES, lambda: Mutation(journal=JournalThatSwapsTokens), WRONG),
    "tokens are changed": (MOVES, lambda: Mutation(to_router=change_tokens), WRONG),
    "ends are lost": (MOVES, lambda: Mutation(to_router=lose_ends), STUCK),
    "nothing is cancelled": (MOVES, lambda: Mutation(to_worker=lose_cancels), {"runs on"}),
    "arrivals are forgotten": (MOVES, lambda: Mutation(to_worker=forget_arrivals), {"seniority"}),
    "silence is not noticed": (SILENCES, lambda: Mutation(settings=ENDLESS), {"silence"}),
    "timeouts are ignored": (MOVES, lambda: Mutation(router=RouterThatIgnoresTimeouts), {"late"}),
    "streams wait for no worker": (CLIENTS, lambda: Mutation(settings=IMPATIENT), {"unexplained error"}),
    "suspects are never forgotten": (MOVES, lambda: Mutation(router=RouterThatForgetsSuspects), {"leak"}),
    "one death is proof enough": (MOVES, lambda: Mutation(settings={"quarantine_after": 1}), {"unexplained error"}),
    "streams are counted wrongly": (MOVES, lambda: Mutation(router=RouterThatLosesCount), {"leak"}),
    "a resumed stream repeats a token": (CLIENTS, lambda: Mutation(router=with_runs(RunsThatRepeatAToken)), WRONG),
    "a resumed stream skips a token": (CLIENTS, lambda: Mutation(router=with_runs(RunsThatSkipAToken)), WRONG),
    "keys are ignored": (CLIENTS, lambda: Mutation(router=with_runs(RunsThatIgnoreKeys)), {"generated twice"}),
    "cancels are ignored": (
        CLIENTS,
        lambda: Mutation(router=with_runs(RunsThatIgnoreCancels)),
        {"kept too long"},
    ),
    "cancels find nothing": (CLIENTS, lambda: Mutation(router=with_runs(RunsThatCannotCancel)), {"lost"}),
    "ended streams are forgotten": (
        CLIENTS,
        lambda: Mutation(router=with_runs(RunsThatForgetWhoHasEnded)),
        {"lost", "unexplained error"},
    ),
    "orphans run on": (CLIENTS, lambda: Mutation(settings={"resume_window_s": 1e4}), {"runs on", "kept too long"}),
    "orphans end too soon": (
        CLIENTS,
        lambda: Mutation(settings={"resume_window_s": 0.01}),
        {"lost", "unexplained error"},
    ),
    "ended streams are kept": (CLIENTS, lambda: Mutation(store=with_store(StoreThatNeverForgets)), {"leak"}),
    "keys are kept": (CLIENTS, lambda: Mutation(store=with_store(StoreThatKeepsKeys)), {"leak"}),
    "the store loses ends": (CLIENTS, lambda: Mutation(store=with_store(StoreThatLosesTheEnd)), WRONG | {"early end"}),
    "streams are not sealed": (CLIENTS, lambda: Mutation(store=with_store(StoreThatFailsToSeal)), {"exception"}),
    "the wall clock is used": (
        CLOCKS,
        lambda: Mutation(store=by_the_wall_clock),
        {"lost", "unexplained error", "leak"},
    ),
    "answers end twice": (CLIENTS, lambda: Mutation(answer=end_twice), {"several ends"}),
    "answers go on after their ends": (CLIENTS, lambda: Mutation(answer=go_on_after_the_end), {"text after the end"}),
    "answers are not ended": (CLIENTS, lambda: Mutation(answer=fail_at_the_end), {"broken off"}),
    "answers have no finish": (CLIENTS, lambda: Mutation(answer=forget_end), {"no end"}),
    "errors have no code": (DRAINS, lambda: Mutation(answer=untyped), {"untyped error"}),
    "text changes on its way": (CLIENTS, lambda: Mutation(answer=change_text), WRONG),
    "tokens are split": (CLIENTS, lambda: Mutation(answer=split_tokens), {"broken text"}),
    "events count wrongly": (CLIENTS, lambda: Mutation(answer=count_one_more), {"wrong count"}),
    "usage is wrong": (CLIENTS, lambda: Mutation(answer=charge_one_more), {"wrong usage"}),
    "the drain fails": (DRAINS, lambda: Mutation(router=RouterThatFailsAtItsEnd), {"exception"}),
    "the drain cuts streams off": (
        DRAINS,
        lambda: Mutation(router=RouterThatCutsStreamsOff),
        {"cut by the drain"},
    ),
}
"""The faults that provoke it, the mutation, and the kinds of violations of which one must be found."""

NOT_PROVOKED = {"time runs back"}
"""Kinds that no mutation gives. The times of events are the simulation's own: a router cannot turn them back, and the
check is of the simulation itself.
"""


def test_each_kind_of_violation_has_a_mutation_that_gives_it_alone():
    given = {kind for _, _, wanted in MUTATIONS.values() if len(wanted) == 1 for kind in wanted}
    assert sorted(KINDS - given) == sorted(NOT_PROVOKED)
    assert given <= KINDS


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [MISCHIEF, MOVES, SILENCES, CLIENTS, DRAINS, CLOCKS])
def test_without_a_mutation_nothing_is_found(kinds):
    found = [outcome.violations for outcome in outcomes(0, 60, replace(_SCALE, kinds=kinds)) if outcome.violations]
    assert found == []


@pytest.mark.slow
def test_explanation_names_the_seed_and_a_smaller_plan():
    mutation = Mutation(journal=JournalThatSwapsTokens)
    outcome = World(make_plan(3, _SCALE), mutation).run()
    text = explain(outcome, _SCALE, mutation)
    assert "seed 3:" in text
    assert "smallest plan: 1 requests, 0 faults" in text
    assert "wrong tokens: r" in text
    assert " submit worker-" in text
