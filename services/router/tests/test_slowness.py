"""Slow workers: found by comparison with work of the same size, avoided with hysteresis, and tried again."""

import random

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_router.workers.health.hotspots import Hotspots, Load
from lockstep_router.workers.health.pace import Pace, size_class
from lockstep_router.workers.health.slowness import Slowness
from lockstep_router.workers.health.step_meter import StepMeter

# Times by size.


def filled(times, *, now=0.0, floor_s=0.0, samples=16):
    """A pace with so many samples of each time: {size: time}."""
    pace = Pace(floor_s)
    for size, time_s in times.items():
        for _ in range(samples):
            pace.note(size, time_s, now, is_usual=True)
    return pace


def test_sizes_of_a_class_differ_by_less_than_two():
    classes = {}
    for size in range(1, 5000):
        classes.setdefault(size_class(size), []).append(size)
    assert all(max(sizes) < 2 * min(sizes) for sizes in classes.values())
    assert len(classes) < 15


def test_workers_are_compared_at_equal_sizes_only():
    own, other = filled({(1,): 0.01, (5,): 0.05}, samples=8), filled({(5,): 0.05, (9,): 0.5})
    assert own.ratio([other.medians(0.0)], 0.0) == 1.0
    assert own.ratio([], 0.0) is None


def test_ratio_is_to_the_median_of_the_others():
    others = [filled({(1,): time_s}).medians(0.0) for time_s in (0.01, 0.02, 5.0)]
    assert filled({(1,): 0.04}).ratio(others, 0.0) == pytest.approx(2.0)


def test_samples_of_different_sizes_count_together():
    others = [filled({(1,): 0.01, (2,): 0.02, (3,): 0.04}).medians(0.0)]
    assert filled({(1,): 0.05, (2,): 0.1, (3,): 0.2}, samples=3).ratio(others, 0.0) == pytest.approx(5.0)


def test_few_samples_and_old_ones_say_nothing():
    other, reference = filled({(1,): 0.01}), [{(1,): 0.01}]
    assert filled({(1,): 0.01}, samples=4).medians(0.0) == {}
    assert (other.medians(30.0), other.medians(30.1)) == ({(1,): 0.01}, {})
    assert filled({(1,): 0.01}, samples=7).ratio(reference, 0.0) is None
    assert (other.ratio(reference, 10.0), other.ratio(reference, 10.1)) == (1.0, None)


def test_times_below_the_floor_are_alike():
    assert filled({(1,): 0.0001}, floor_s=0.002).medians(0.0) == filled({(1,): 0.0019}, floor_s=0.002).medians(0.0)


def test_single_long_steps_do_not_decide():
    pace = filled({(1,): 0.01})
    for _ in range(7):
        pace.note((1,), 3.0, 0.0, is_usual=True)
    assert pace.ratio([{(1,): 0.01}], 0.0) == 1.0
    for _ in range(2):
        pace.note((1,), 3.0, 0.0, is_usual=True)
    assert pace.ratio([{(1,): 0.01}], 0.0) == pytest.approx(300.0)


def test_sizes_are_bounded():
    assert len(filled({(size,): 0.01 for size in range(1000)}).medians(0.0)) == 32


def test_habit_is_learnt_slowly_and_not_while_slow():
    pace = Pace(0.0)
    for number in range(40):
        assert pace.habits() == {}, number
        pace.note((1,), 0.01, 0.0, is_usual=True)
    for _ in range(1000):
        pace.note((1,), 1.0, 0.0, is_usual=False)
    assert pace.habits() == {(1,): pytest.approx(0.01)}
    assert pace.ratio([], 0.0) == pytest.approx(100.0), "no other worker to compare with"
    assert pace.ratio([{(1,): 1.0}], 0.0) == 1.0, "all are slow"
    pace.forget()
    assert pace.ratio([], 0.0) is None
    assert pace.habits() == {(1,): pytest.approx(0.01)}


def test_less_work_is_compared_with_more_if_there_is_nothing_else():
    own, others = filled({(1, 1): 0.05}), [{(3, 1): 0.02, (1, 2): 0.01, (0, 9): 0.001}, {(3, 3): 0.04}]
    assert own.ratio(others, 0.0) is None
    assert own.ratio(others, 0.0, with_bounds=True) == pytest.approx(5.0)
    assert own.ratio([*others, {(1, 1): 0.025}], 0.0, with_bounds=True) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("others", "expected_s"),
    [
        ([{(1,): 0.01}], 0.08),  # proportional
        ([{(1,): 0.01, (2,): 0.01}, {(2,): 0.01}], 0.01),  # the same for every size
        ([{(1,): 0.01}, {(2,): 0.012}], 0.012 + 9 * 0.002 / 1.5),
        ([{(1,): 0.01, (2,): 0.08}], 0.32),  # no more than proportional
        ([{(1,): 0.08, (2,): 0.01}], 0.01),
    ],
)
def test_more_work_is_compared_with_a_bound_from_less(others, expected_s):
    own = filled({(4,): 0.5})
    assert own.ratio(others, 0.0) is None
    assert own.ratio(others, 0.0, with_bounds=True) == pytest.approx(0.5 / expected_s)
    assert own.ratio([{}], 0.0, with_bounds=True) is None
    assert filled({(4, 1): 0.5}).ratio([{(1, 1): 0.1}], 0.0, with_bounds=True) is None


# Steps from statuses.


class Statuses:
    """A worker's statuses ten times a second."""

    def __init__(self):
        self.meter = StepMeter()
        self.now = 0.0
        self.steps = 0.0
        self.samples = []

    def run(self, seconds, step_s, running=4):
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.steps += 0.1 / step_s
            status = worker_pb2.Status(steps=int(self.steps), running=running)
            if (sample := self.meter.note(status, self.now)) is not None:
                self.samples.append(sample)


@pytest.mark.parametrize("step_s", [0.004, 0.05, 0.3, 2.0])
def test_time_of_a_step_is_measured(step_s):
    worker = Statuses()
    worker.run(30.0, step_s)
    assert {size for size, _ in worker.samples} == {size_class(4)}
    times = [time_s for _, time_s in worker.samples]
    assert len(times) >= 10
    assert sum(times) / len(times) == pytest.approx(step_s, rel=0.1)


def test_idle_time_is_left_out():
    worker = Statuses()
    worker.run(5.0, 0.05)
    worker.run(60.0, 1e9, running=0)
    worker.run(5.0, 0.05)
    assert all(time_s == pytest.approx(0.05, rel=0.2) for _, time_s in worker.samples)


def test_steps_with_prompts_are_left_out():
    worker = Statuses()
    worker.run(2.0, 0.05)
    count = len(worker.samples)
    for _ in range(20):
        worker.meter.note_prompt()
        worker.run(0.1, 1.0)
    assert len(worker.samples) == count
    worker.run(1.0, 1.0)  # a prompt's last steps are still in flight
    worker.run(5.0, 0.05)
    times = sorted(time_s for _, time_s in worker.samples[count:])
    assert len(times) >= 5
    assert times[len(times) // 2] == pytest.approx(0.05, rel=0.3)


def test_new_life_counts_steps_from_the_beginning():
    worker = Statuses()
    worker.run(3.0, 0.05)
    worker.meter.reset()
    worker.steps, worker.samples = 0.0, []
    worker.run(3.0, 0.05)
    assert worker.samples
    worker.steps = 0.0  # without a reset: a malformed count
    worker.run(0.1, 0.05)
    assert all(time_s > 0 for _, time_s in worker.samples)


# The decision.


def judge(slowness, ratios, began=0.0):
    """One judgement a second; the states after each."""
    states = []
    for second, each in enumerate(ratios):
        slowness.judge(each, began + second)
        states.append(slowness.is_slow)
    return states


def test_three_judgements_in_a_row_decide():
    slowness = Slowness(3.0, random.Random(1))
    assert judge(slowness, [4, 4, 1, 4, 4, 4, 4]) == [False] * 5 + [True] * 2


def test_slow_worker_must_recover_clearly():
    slowness = Slowness(3.0, random.Random(1))
    assert judge(slowness, [3.1, 3.1, 3.1, 2.5, 2.5, 2.5, 2.5, 1.7, 1.7, 1.7])[2:] == [True] * 7 + [False]


def test_worker_that_is_no_longer_measured_is_tried_again_after_a_time_that_doubles():
    slowness, now, lengths = Slowness(3.0, random.Random(1)), 0.0, []
    for _ in range(7):
        judge(slowness, [5.0] * 3, now)
        assert slowness.is_slow
        began = now + 2
        now = began
        while slowness.is_slow:
            now += 1
            is_tried = slowness.judge(None, now)
        assert is_tried
        lengths.append(now - began)
    assert 15 <= lengths[0] <= 20
    assert lengths[:4] == sorted(lengths[:4])
    assert lengths[3] > 4 * lengths[0]
    assert lengths[-1] <= 1.25 * 300 + 1


def on_trial():
    """One whose trial has begun; and when."""
    slowness = Slowness(3.0, random.Random(1))
    judge(slowness, [5.0] * 3)
    assert slowness.judge(None, 30.0)
    assert (slowness.is_slow, slowness.is_on_trial) == (False, True)
    return slowness


def test_trial_ends_well_after_three_good_judgements_in_a_row():
    slowness = on_trial()
    for second, ratio in enumerate([1.0, 1.0, 2.0, 1.0, 1.0]):
        slowness.judge(ratio, 31.0 + second)
        assert slowness.is_on_trial
    slowness.judge(1.0, 36.0)
    assert not slowness.is_impaired


def test_trial_that_finds_it_slow_begins_a_longer_time():
    slowness = on_trial()
    assert judge(slowness, [4.0, 1.0, 4.0, 4.0, 4.0], 31.0) == [False] * 4 + [True]
    assert not slowness.is_on_trial
    assert not slowness.judge(None, 35.0 + 29.0), "twice as long as the first time"


def test_trial_that_cannot_be_judged_ends_well():
    slowness = on_trial()
    assert judge(slowness, [None, 2.0] * 14, 31.0) == [False] * 28
    assert slowness.is_on_trial
    slowness.judge(None, 60.0)
    assert not slowness.is_impaired


def test_worker_that_was_well_for_long_begins_with_a_short_time_again():
    slowness = Slowness(3.0, random.Random(1))
    judge(slowness, [5.0] * 3)
    judge(slowness, [1.0] * 3, 3.0)
    assert not slowness.is_slow
    judge(slowness, [5.0] * 3, 1000.0)
    assert slowness.is_slow
    assert slowness.judge(None, 1002.0 + 15.0 * 1.25 + 1)


def test_factor_zero_is_never():
    assert not any(judge(Slowness(0.0, random.Random(1)), [100.0] * 50))


# Simulated workers.


def simulate(rng, *, slow=None, slow_from=120.0, seconds=160, factor=6.0, idle=(), gathers=False):
    """Seconds in which each of several workers counted as slow. Batches and step times differ at random. `gathers`: the
    slow one has larger batches than all others ever had.
    """
    paces, judges = [Pace(0.002) for _ in range(3)], [Slowness(3.0, rng) for _ in range(3)]
    running, began = [1, 4, 16], {}
    for half in range(2 * seconds):
        now = half / 2
        for index, pace in enumerate(paces):
            if rng.random() < 0.1:
                running[index] = rng.choice((1, 2, 4, 8, 16, 32))
            if index in idle:
                continue
            is_slowed = index == slow and now >= slow_from
            if gathers:
                running[index] = 32 if is_slowed else min(8, running[index])
            # A step grows with its batch, is noisy, and sometimes has another router's long prompt in it.
            step_s = 0.01 * (1 + 0.2 * running[index]) * rng.lognormvariate(0.0, 0.3)
            step_s *= 10.0 if rng.random() < 0.1 else 1.0
            pace.note(
                (size_class(running[index]),),
                step_s * (factor if is_slowed else 1.0),
                now,
                is_usual=not judges[index].is_slow,
            )
        if half % 2:
            medians = [pace.medians(now) for pace in paces]
            for index, each in enumerate(judges):
                others = [medians[other] for other in range(3) if other != index and other not in idle]
                each.judge(paces[index].ratio(others, now, with_bounds=not each.is_slow), now)
                if each.is_slow:
                    began.setdefault(index, now)
    return began


@pytest.mark.parametrize("seed", range(10))
def test_healthy_workers_with_different_batches_are_not_taken_for_slow(seed):
    print(f"seed {seed}")
    assert simulate(random.Random(seed), seconds=600) == {}


@pytest.mark.parametrize("seed", range(10))
def test_slow_worker_is_found_within_the_limit(seed):
    print(f"seed {seed}")
    began = simulate(random.Random(seed), slow=1)
    assert list(began) == [1]
    assert began[1] - 120.0 <= 15.0


@pytest.mark.parametrize("seed", range(10))
def test_slow_worker_that_gathers_streams_is_found_within_the_limit(seed):
    print(f"seed {seed}")
    began = simulate(random.Random(seed), slow=1, gathers=True, factor=8.0)
    assert list(began) == [1]
    assert began[1] - 120.0 <= 15.0


@pytest.mark.parametrize("seed", range(10))
def test_healthy_worker_that_gathers_streams_is_not_taken_for_slow(seed):
    print(f"seed {seed}")
    assert simulate(random.Random(seed), slow=1, gathers=True, factor=1.0, seconds=300) == {}


# Hotspots.


def test_queue_beside_an_idle_worker_is_a_hotspot_after_a_while():
    hotspots = Hotspots()
    loads = {"a": Load(queued=3, free_seqs=0), "b": Load(queued=0, free_seqs=4)}
    assert [hotspots.find(loads, now) for now in (0.0, 4.9, 5.0, 9.0)] == [set(), set(), {"a"}, {"a"}]
    assert hotspots.find(loads | {"a": Load(0, 1)}, 10.0) == set()
    assert hotspots.find(loads, 11.0) == set(), "it begins again"


@pytest.mark.parametrize(
    "other", [Load(queued=1, free_seqs=4), Load(queued=0, free_seqs=0), Load(queued=9, free_seqs=0)]
)
def test_queue_while_nobody_has_room_is_no_hotspot(other):
    hotspots = Hotspots()
    for now in range(100):
        assert hotspots.find({"a": Load(5, 0), "b": other}, float(now)) == set()
