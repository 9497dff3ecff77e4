"""The estimate of a queue's wait, in times that the tests give."""

import pytest
from lockstep_engine.queue_estimate import QueueEstimate


def measured(*seconds):
    """An estimate that has seen requests run for so long, one after the other."""
    estimate = QueueEstimate()
    for number, ran_s in enumerate(seconds):
        estimate.start(str(number), 0.0)
        estimate.end(str(number), ran_s)
    return estimate


def test_nothing_is_promised_before_anything_was_measured():
    assert QueueEstimate().waits(queued=0, running=0, free=4, now=0.0) == (0.0, 0.0)
    assert QueueEstimate().waits(queued=9, running=4, free=0, now=0.0) == (0.0, 0.0)


@pytest.mark.parametrize(("queued", "wait_s"), [(0, 2.0), (1, 7.0), (23, 117.0)])
def test_one_place_and_a_queue(queued, wait_s):
    estimate = measured(5.0)
    estimate.start("running", 10.0)
    assert estimate.waits(queued=queued, running=1, free=0, now=13.0) == (wait_s, 5.0)


def test_several_places_are_taken_in_the_order_in_which_they_become_free():
    estimate = measured(4.0)
    for name, at in (("a", 0.0), ("b", 1.0), ("c", 3.0)):
        estimate.start(name, at)
    waits = [estimate.waits(queued=queued, running=3, free=0, now=3.0)[0] for queued in range(6)]
    assert waits == [1.0, 2.0, 4.0, 5.0, 6.0, 8.0]


def test_free_places_mean_no_wait_and_the_rest_waits():
    estimate = measured(6.0)
    estimate.start("a", 0.0)
    assert estimate.waits(queued=0, running=1, free=2, now=1.0) == (0.0, 2.0)


def test_a_request_that_takes_longer_than_the_mean_may_end_at_any_time():
    estimate = measured(2.0)
    estimate.start("a", 0.0)
    assert estimate.waits(queued=0, running=1, free=0, now=50.0) == (0.0, 2.0)


def test_before_the_first_end_the_running_ones_are_the_measure():
    estimate = QueueEstimate()
    estimate.start("a", 0.0)
    assert estimate.waits(queued=2, running=1, free=0, now=3.0) == (6.0, 3.0)


def test_the_mean_follows_the_last_requests():
    estimate = measured(*[1.0] * 50, *[9.0] * 50)
    estimate.start("a", 0.0)
    assert estimate.waits(queued=0, running=1, free=0, now=0.0)[0] == pytest.approx(9.0, abs=0.01)


def test_cancelled_and_failed_requests_are_no_measure():
    estimate = measured(5.0)
    for number in range(100):
        estimate.start(str(number), 0.0)
    estimate.drop(map(str, range(50)))
    estimate.clear()
    estimate.end("70", 100.0)
    estimate.start("a", 0.0)
    assert estimate.waits(queued=0, running=1, free=0, now=0.0)[0] == 5.0


def test_a_preempted_request_is_measured_from_its_first_start():
    estimate = QueueEstimate()
    estimate.start("a", 0.0)
    estimate.start("a", 8.0)
    estimate.end("a", 10.0)
    estimate.start("b", 0.0)
    assert estimate.waits(queued=0, running=1, free=0, now=0.0)[0] == 10.0
