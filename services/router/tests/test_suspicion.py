"""Late heartbeats: a stopped worker is suspected long before the hard deadline, a healthy one hardly ever."""

import random

import pytest
from lockstep_router.workers.health import Suspicion

TICK_S = 0.05
BEAT_S = 0.1
DEADLINE_S = 1.5
SEEDS = range(5)


def make(threshold=8.0):
    return Suspicion(threshold, TICK_S, DEADLINE_S)


def feed(suspicion, arrivals, until):
    """Give heartbeats at the clock's resolution; the times at which the suspicion began."""
    began, index, tick = [], 0, 0
    arrivals = [*arrivals, float("inf")]
    while tick * TICK_S < until:
        now = tick * TICK_S
        while arrivals[index] <= now:
            suspicion.note_frame(now)
            suspicion.note_heartbeat(now)
            index += 1
        before = suspicion.is_suspected
        suspicion.check(now)
        if suspicion.is_suspected and not before:
            began.append(now)
        tick += 1
    return began


def beats(rng, count, jitter):
    """Times of heartbeats with random delays."""
    at, times = 0.0, []
    for _ in range(count):
        at += BEAT_S + jitter(rng)
        times.append(at)
    return times


JITTERS = {
    "none": lambda rng: 0.0,
    "uniform": lambda rng: rng.uniform(0.0, 0.1),
    "exponential": lambda rng: rng.expovariate(20.0),
    "heavy tail": lambda rng: min(0.02 * rng.paretovariate(1.5), 1.0),
    "a long pause now and then": lambda rng: 0.8 if rng.random() < 0.004 else rng.uniform(0.0, 0.02),
}


@pytest.mark.parametrize("name", JITTERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_worker_is_hardly_ever_suspected(name, seed):
    print(f"seed {seed}")
    arrivals = beats(random.Random(seed), 2000, JITTERS[name])
    began = feed(make(), arrivals, arrivals[-1])
    assert len(began) / len(arrivals) < 0.01
    if name in ("none", "uniform"):
        assert began == []


@pytest.mark.parametrize("seed", SEEDS)
def test_stopped_worker_is_suspected_before_the_hard_deadline(seed):
    print(f"seed {seed}")
    for name in ("none", "uniform", "exponential"):
        arrivals = beats(random.Random(seed), 300, JITTERS[name])
        began = feed(make(), arrivals, arrivals[-1] + DEADLINE_S)
        assert began, name
        assert began[-1] > arrivals[-1], name
        assert began[-1] - arrivals[-1] < (0.5 if name == "none" else 0.8 * DEADLINE_S), name


def test_irregular_worker_is_given_more_time():
    regular, irregular = make(), make()
    feed(regular, beats(random.Random(1), 300, JITTERS["none"]), 30.0)
    feed(irregular, beats(random.Random(1), 300, lambda rng: rng.expovariate(10.0)), 60.0)
    assert irregular.patience_s > 1.3 * regular.patience_s


def test_higher_threshold_gives_more_time_and_zero_all():
    patience = []
    for threshold in (2.0, 8.0, 16.0):
        suspicion = make(threshold)
        feed(suspicion, beats(random.Random(1), 100, JITTERS["none"]), 10.0)
        patience.append(suspicion.patience_s)
    assert patience == sorted(set(patience))
    never = make(0.0)
    assert feed(never, [BEAT_S * number for number in range(100)], 60.0) == []


def test_level_grows_with_the_silence_and_crosses_the_threshold_with_the_suspicion():
    suspicion = make()
    feed(suspicion, [BEAT_S * number for number in range(101)], 10.2)
    levels, crossed = [], []
    for now in (10.2 + 0.01 * number for number in range(100)):
        suspicion.check(now)
        levels.append(suspicion.phi(now))
        crossed.append((suspicion.phi(now) > 8.0) == suspicion.is_suspected)
    assert levels == sorted(levels)
    assert levels[0] < 8.0 < levels[-1]
    assert all(crossed)
    assert suspicion.phi(1e6) == 300.0


def test_nothing_is_suspected_before_it_is_known_what_is_usual():
    suspicion = make()
    assert feed(suspicion, [0.1, 0.2, 0.3], 60.0) == []
    assert suspicion.phi(60.0) == 0.0


def test_suspicion_ends_after_three_heartbeats_in_time():
    suspicion = make()
    feed(suspicion, [BEAT_S * number for number in range(50)], 6.0)
    assert suspicion.is_suspected
    states = []
    for number in range(4):
        suspicion.note_heartbeat(6.0 + BEAT_S * number)
        states.append(suspicion.is_suspected)
    assert states == [True, True, True, False], "the first of the four was late itself"


def test_tokens_are_a_sign_of_life():
    suspicion = make()
    feed(suspicion, [BEAT_S * number for number in range(50)], 5.0)
    for number in range(100):
        suspicion.note_frame(5.0 + 0.2 * number)
        suspicion.check(5.0 + 0.2 * number + 0.1)
    assert not suspicion.is_suspected


def test_heartbeats_read_at_once_after_a_pause_of_the_router_count_as_one():
    """The awake clock counts a pause of 3 s as two ticks; then 30 heartbeats are read."""
    suspicion = make()
    feed(suspicion, [BEAT_S * number for number in range(100)], 10.0)
    before = suspicion.patience_s
    now = 10.0 + 2 * TICK_S
    suspicion.check(now)
    for _ in range(30):
        suspicion.note_heartbeat(now)
    assert not suspicion.is_suspected
    assert suspicion.patience_s == pytest.approx(before, rel=0.1)


def test_new_connection_begins_without_suspicion():
    suspicion = make()
    feed(suspicion, [BEAT_S * number for number in range(50)], 10.0)
    assert suspicion.is_suspected
    suspicion.begin(10.0)
    assert not suspicion.is_suspected
    suspicion.check(1000.0)
    assert not suspicion.is_suspected
