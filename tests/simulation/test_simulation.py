"""Routers, workers and clients under seeded faults on virtual time: every history is right.

`--simulated-streams 100000` makes it as long as you like, `--simulation-seed` begins with another seed.
"""

import gc
import itertools
import os
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
from lockstep_router.streams.journal import Journal
from simulated.faults import KINDS
from simulated.plan import Scale, make_plan
from simulated.runner import explain, run_seeds
from simulated.world import Mutation, World

_HERE = Path(__file__).parent
_FEW, _MANY = 2_500, 20_000


def check(first_seed, streams, summarize):
    report = run_seeds(first_seed, streams)
    summarize(str(report))
    assert not report.failures, "\n".join(explain(failure) for failure in report.failures)
    return report


def test_every_history_under_faults_is_right(pytestconfig, summarize):
    streams, seed = pytestconfig.getoption("simulated_streams"), pytestconfig.getoption("simulation_seed")
    report = check(seed, streams or _FEW, summarize)
    if streams is None or streams >= _FEW:
        assert report.counts["resumed"] > report.streams / 10, "faults must hit streams"
        assert {kind for kind in KINDS if report.counts[kind]} == set(KINDS)


@pytest.mark.exhaustive
def test_many_histories_under_faults_are_right(pytestconfig, summarize):
    check(pytestconfig.getoption("simulation_seed") + 1_000, _MANY, summarize)


def note_held(references, held):
    gc.collect()
    held.append(sum(reference() is not None for reference in references))


def test_journals_are_freed():
    """After the last stream nothing refers to any journal, whatever happened to the streams."""
    alive, held = [], []

    class WatchedJournal(Journal):
        def __init__(self, **fields):
            super().__init__(**fields)
            alive.append(weakref.ref(self))

    for seed in range(4):
        world = World(make_plan(seed, Scale(requests=40)), Mutation(journal=WatchedJournal))
        world.on_idle = partial(note_held, alive, held)
        # Dead routers are part of the world until its end, and what they held is with them.
        world.plan = world.plan.without(
            faults=frozenset(
                n for n, fault in enumerate(world.plan.faults) if fault.kind in ("kill router", "drain router")
            )
        )
        assert world.run().violations == []
    assert len(alive) > 100
    assert held == [0, 0, 0, 0]


@pytest.mark.slow
def test_same_seed_gives_the_same_trace():
    first, again = (World(make_plan(5)).run() for _ in range(2))
    assert first.trace_hash == again.trace_hash
    assert World(make_plan(6)).run().trace_hash != first.trace_hash


def test_time_that_the_machine_takes_changes_nothing(monkeypatch):
    plan = make_plan(5, Scale(requests=40, visits=0.8))
    first = World(plan).run()
    monkeypatch.setattr(time, "thread_time", partial(next, itertools.count(step=0.01)))  # a body takes 10 ms
    assert World(plan).run().trace_hash == first.trace_hash


@pytest.mark.parametrize("seed", [2, 3])
def test_wall_clocks_of_routers_change_nothing(seed):
    """Every client sees the same at the same moments, however their clocks jump."""
    scale = Scale(requests=40, kinds=("router clock",), visits=0.8)
    jumping = make_plan(seed, scale)
    assert jumping.faults
    calm = jumping.without(faults=frozenset(range(len(jumping.faults))))
    first, second = World(jumping).run(), World(calm).run()
    assert first.violations == second.violations == []
    assert [each.events for each in first.histories] == [each.events for each in second.histories]


@pytest.mark.slow
def test_trace_does_not_depend_on_the_process():
    """Neither on Python's random hashes nor on addresses of objects."""
    hashes = set()
    for hash_seed in ("1", "2"):
        paths = os.pathsep.join([str(_HERE), *sys.path])
        run = subprocess.run(
            [sys.executable, "-m", "simulated", "--seed", "11"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        hashes.add(run.stdout)
    assert len(hashes) == 1
    assert World(make_plan(11)).run().trace_hash == hashes.pop().split()[0]


def test_a_request_whose_workers_faults_hit_one_after_the_other_may_be_quarantined():
    """Each time it was alone on the worker: routers cannot tell it from one that kills workers."""
    outcome = World(make_plan(50002053)).run()
    quarantined = [
        each for each in outcome.histories if each.events[-1].value == "request_quarantined" and not each.is_poison
    ]
    assert quarantined
    assert outcome.violations == []


def test_leaving_faults_out_leaves_the_requests_as_they_are():
    plan = make_plan(3, Scale(requests=10))
    calm = plan.without(faults=frozenset(range(len(plan.faults))))
    outcome = World(calm).run()
    assert outcome.violations == []
    assert calm.requests == plan.requests
    assert not any(outcome.counts[kind] for kind in KINDS)
