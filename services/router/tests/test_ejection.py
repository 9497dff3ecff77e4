"""Breakers: a worker that fails what others complete is ejected, probed, and taken back or ejected for longer."""

import random

import pytest
from health_limits import Limits
from lockstep_router.workers.health import Breaker, BreakerState
from lockstep_router.workers.health.ejection import may_eject


def make(**limits):
    return Breaker(Limits(**limits), random.Random(1))


def well(now=0.0, streams=20, **limits):
    breaker = make(**limits)
    for number in range(streams):
        breaker.note_success(str(number), now)
    return breaker


def test_faults_in_a_row_are_a_reason():
    breaker = well()
    for fault in range(3):
        assert breaker.verdict([well()], 0.0) == "", fault
        breaker.note_fault(0.0)
    assert breaker.verdict([well()], 0.0) == "3 faults in a row"


def test_success_ends_the_row():
    breaker = well()
    for _ in range(2):
        breaker.note_fault(0.0)
        breaker.note_fault(0.0)
        breaker.note_success("s", 0.0)
    assert breaker.in_a_row == 0
    assert breaker.verdict([well()], 0.0) == ""


def test_share_of_faults_is_a_reason_though_some_streams_succeed():
    breaker = make()
    for number in range(12):
        breaker.note_success(str(number), 0.0)
        breaker.note_fault(0.0)
    breaker.note_success("last", 0.0)
    assert breaker.verdict([well()], 0.0) == "48% of its streams fail"
    assert breaker.verdict([well()], 600.0) == "", "it is long ago"


def test_what_fails_everywhere_is_nobodys_fault():
    one, other = make(), make()
    for breaker in (one, other):
        for _ in range(10):
            breaker.note_fault(0.0)
            breaker.note_death(0.0)
    assert one.verdict([other], 0.0) == ""
    assert one.verdict([well()], 0.0)


def test_deaths_are_a_reason_though_streams_succeed_between_them():
    breaker = make()
    for minute in range(3):
        for number in range(100):
            breaker.note_success(str(number), 20.0 * minute)
        assert breaker.verdict([well()], 20.0 * minute) == ""
        breaker.note_death(20.0 * minute)
    assert "died" in breaker.verdict([well()], 40.0)
    rare = make()
    for hour in range(10):
        rare.note_death(3600.0 * hour)
        rare.note_success("s", 3600.0 * hour)
        assert rare.verdict([well()], 3600.0 * hour) == ""


def test_internal_errors_of_one_session_count_once():
    breaker = well()
    for _ in range(50):
        breaker.note_internal("one client", 0.0)
    assert breaker.in_a_row == 1
    for session in ("b", "c", "d", "e"):
        breaker.note_internal(session, 0.0)
    assert breaker.in_a_row == 3, "bounded"


def test_zero_never_ejects():
    breaker = make(eject_after=0)
    for _ in range(100):
        breaker.note_fault(0.0)
        breaker.note_death(0.0)
    assert breaker.verdict([well()], 0.0) == ""


def test_probe_closes_the_breaker():
    breaker = well()
    breaker.eject("test", 100.0)
    assert (breaker.is_ejected, breaker.state) == (True, BreakerState.OPEN)
    assert not breaker.tick(breaker.until - 0.1)
    assert breaker.tick(breaker.until) is BreakerState.HALF_OPEN
    assert not breaker.is_ejected, "one stream may come"
    breaker.note_sent("probe")
    assert breaker.is_ejected, "no other one"
    breaker.note_sent("another")
    assert not breaker.note_success("another", breaker.until), "it began before the ejection"
    assert breaker.note_success("probe", breaker.until)
    assert (breaker.is_ejected, breaker.state) == (False, BreakerState.CLOSED)
    assert breaker.verdict([well()], breaker.until) == ""


def test_probe_that_shows_nothing_is_followed_by_another():
    breaker = well()
    breaker.eject("test", 0.0)
    breaker.tick(breaker.until)
    breaker.note_sent("left by its client")
    breaker.note_over("left by its client")
    assert not breaker.is_ejected
    breaker.note_sent("next")
    assert breaker.is_probe("next")


def test_a_router_without_streams_does_not_call_a_worker_ejected_for_ever():
    breaker = well()
    breaker.note_death(99.0)
    breaker.eject("test", 100.0)
    length_s = breaker.until - 100.0
    breaker.tick(breaker.until)
    breaker.note_sent("probe")
    over = breaker.until + 3.1 * length_s
    assert breaker.tick(over) is None, "its probe runs"
    breaker.note_over("probe")
    assert breaker.tick(over + 2.9 * length_s) is None
    later = over + 3.1 * length_s
    assert breaker.tick(later) is BreakerState.CLOSED
    assert breaker.verdict([well()], later) == ""
    breaker.eject("test", later)
    assert breaker.until - later <= 12.5, "the next ejection is short again"


def test_a_worker_that_dies_with_its_probe_after_a_long_start_is_ejected_for_longer_each_time():
    breaker = well()
    breaker.eject("test", 100.0)
    lengths = [breaker.until - 100.0]
    for _ in range(3):
        now = breaker.until
        breaker.tick(now, is_ready=False)
        for _ in range(50):  # its ranks are started again
            now += lengths[-1]
            assert breaker.tick(now, is_ready=False) is None
        assert breaker.state is BreakerState.HALF_OPEN, "nothing has shown that it is well"
        breaker.note_sent("probe")
        breaker.note_death(now)
        breaker.eject("test", now)
        lengths.append(breaker.until - now)
    assert breaker.ejections == 4
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 80.0


@pytest.mark.parametrize("seed", range(5))
def test_ejections_double_up_to_the_limit_with_jitter_and_are_forgiven(seed):
    breaker, now, lengths = Breaker(Limits(), random.Random(seed)), 0.0, []
    for _ in range(8):
        breaker.eject("test", now)
        lengths.append(breaker.until - now)
        now = breaker.until
        breaker.tick(now)
    for number, length in enumerate(lengths):
        least = min(10.0 * 2**number, 300.0)
        assert least <= length <= 1.25 * least
    breaker.note_sent("probe")
    breaker.note_success("probe", now)
    now += 4 * lengths[-1]
    breaker.eject("test", now)
    assert breaker.until - now <= 12.5


@pytest.mark.parametrize(
    ("states", "ready", "share", "may"),
    [
        ("cc", "yy", 0.5, True),
        ("co", "yy", 0.5, False),
        ("c", "y", 0.5, False),
        ("cc", "yn", 0.5, False),
        ("cc", "ny", 0.5, True),
        ("ccc", "yyy", 0.1, True),
        ("cco", "yyy", 0.5, False),
        ("ccoc", "yyyy", 0.5, True),
        ("chcc", "yyyy", 0.25, False),
        ("co", "yy", 1.0, False),
    ],
)
def test_who_may_be_ejected(states, ready, share, may):
    """The first worker, of workers that are closed, open or half open, and ready or not."""
    names = {"c": BreakerState.CLOSED, "o": BreakerState.OPEN, "h": BreakerState.HALF_OPEN}
    breakers = [make() for _ in states]
    for breaker, state in zip(breakers, states, strict=True):
        breaker.state = names[state]
    able = [breaker for breaker, each in zip(breakers, ready, strict=True) if each == "y"]
    ejected = sum(breaker.state is not BreakerState.CLOSED for breaker in breakers)
    assert may_eject(breakers[0], able, len(states), ejected, Limits(eject_share=share)) is may


def simulate(rng, *, workers, streams, fault_of, until_ejected=None):
    """Streams go to random workers that are not ejected; returns how many were lost before each ejection."""
    limits = Limits()
    breakers = [Breaker(limits, rng) for _ in range(workers)]
    ejections, lost = [], 0
    for number in range(streams):
        now = 0.2 * number
        for breaker in breakers:
            breaker.tick(now)
        worker = rng.choice([index for index, breaker in enumerate(breakers) if not breaker.is_ejected])
        breaker, stream = breakers[worker], str(number)
        breaker.note_sent(stream)
        if rng.random() >= fault_of[worker]:
            breaker.note_success(stream, now)
            continue
        lost += 1
        if breaker.is_probe(stream):
            breaker.eject("probe", now)
            continue
        breaker.note_fault(now)
        if breaker.verdict([each for each in breakers if each is not breaker], now):
            ejected = sum(each.state is not BreakerState.CLOSED for each in breakers)
            if may_eject(breaker, breakers, workers, ejected, limits):
                breaker.eject("row", now)
                ejections.append((worker, number, lost))
                if until_ejected == worker:
                    break
    return ejections


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("workers", [2, 4])
def test_broken_worker_is_ejected_after_few_streams(seed, workers):
    print(f"seed {seed}")
    fault_of = [0.9] + [0.005] * (workers - 1)
    ejections = simulate(random.Random(seed), workers=workers, streams=400, fault_of=fault_of, until_ejected=0)
    assert [worker for worker, _, _ in ejections] == [0]
    assert ejections[0][2] <= 10, "streams lost before"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("workers", [2, 4])
def test_workers_with_rare_faults_are_not_ejected(seed, workers):
    print(f"seed {seed}")
    assert simulate(random.Random(seed), workers=workers, streams=3000, fault_of=[0.02] * workers) == []
