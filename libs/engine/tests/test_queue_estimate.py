"""The estimate of a queue's wait, in times that the tests give."""

import pytest
from lockstep_common.seniority import CLASS_HEAD_START_S
from lockstep_engine.queue_estimate import QueueEstimate

TOKENS = 10
"""Tokens of each request, unless a test says otherwise."""


def measured(*seconds):
    """An estimate that has seen requests run for so long, one after the other."""
    estimate = QueueEstimate()
    for number, ran_s in enumerate(seconds):
        run(estimate, str(number), 0.0)
        estimate.end(str(number), TOKENS, ran_s)
    return estimate


def run(estimate, name, now, limit=1000):
    estimate.add(name, 0, limit, reaches_limit=False)
    estimate.start(name, now)


def queue(estimate, count, limit=1000, first=0):
    for number in range(first, first + count):
        estimate.add(f"queued {number}", 0, limit, reaches_limit=False)


def test_nothing_is_promised_before_anything_was_measured():
    estimate = QueueEstimate()
    assert estimate.waits(places=4, is_full=False, now=0.0) == (0.0, 0.0)
    queue(estimate, 9)
    assert estimate.waits(places=4, is_full=True, now=0.0) == (0.0, 0.0)


@pytest.mark.parametrize(("queued", "wait_s"), [(0, 2.0), (1, 7.0), (23, 117.0)])
def test_one_place_and_a_queue(queued, wait_s):
    estimate = measured(5.0)
    run(estimate, "running", 10.0)
    queue(estimate, queued)
    assert estimate.waits(places=1, is_full=True, now=13.0) == (wait_s, 5.0)


def test_several_places_are_taken_in_the_order_in_which_they_become_free():
    estimate = measured(4.0)
    for name, at in (("a", 0.0), ("b", 1.0), ("c", 3.0)):
        run(estimate, name, at)
    waits = []
    for number in range(6):
        waits.append(estimate.waits(places=3, is_full=True, now=3.0)[0])
        queue(estimate, 1, first=number)
    assert waits == [1.0, 2.0, 4.0, 5.0, 6.0, 8.0]


def test_free_places_mean_no_wait_and_the_rest_waits():
    estimate = measured(6.0)
    run(estimate, "a", 0.0)
    assert estimate.waits(places=3, is_full=False, now=1.0) == (0.0, 2.0)


def test_a_request_that_takes_longer_than_the_mean_may_end_at_any_time():
    estimate = measured(2.0)
    run(estimate, "a", 0.0)
    assert estimate.waits(places=1, is_full=True, now=50.0) == (0.0, 2.0)


def test_before_the_first_end_the_running_ones_are_the_measure():
    estimate = QueueEstimate()
    run(estimate, "a", 0.0)
    queue(estimate, 2)
    assert estimate.waits(places=1, is_full=True, now=3.0) == (6.0, 3.0)


def test_the_mean_follows_the_last_requests():
    estimate = measured(*[1.0] * 50, *[9.0] * 50)
    run(estimate, "a", 0.0)
    assert estimate.waits(places=1, is_full=True, now=0.0)[0] == pytest.approx(9.0, abs=0.01)


def test_short_requests_are_expected_to_be_short():
    estimate = measured(10.0)  # a second for each token
    run(estimate, "a", 0.0, limit=4)
    assert estimate.waits(places=1, is_full=True, now=1.0) == (3.0, 10.0)
    queue(estimate, 3, limit=2)
    assert estimate.waits(places=1, is_full=True, now=1.0) == (9.0, 10.0)


def test_requests_that_ignore_the_end_of_text_are_expected_to_reach_their_limit():
    estimate = measured(10.0)
    estimate.add("long", 0, 50, reaches_limit=True)
    estimate.start("long", 0.0)
    assert estimate.waits(places=1, is_full=True, now=20.0) == (30.0, 10.0)


def test_requests_that_are_about_to_start_count_too():
    estimate = measured(5.0)
    queue(estimate, 4)
    assert estimate.waits(places=2, is_full=True, now=0.0)[0] == 10.0


def test_tokens_of_earlier_attempts_need_no_time():
    estimate = measured(10.0)
    estimate.add("moved", 16, 20, reaches_limit=False)
    estimate.start("moved", 0.0)
    assert estimate.waits(places=1, is_full=True, now=0.0)[0] == 4.0
    estimate.end("moved", 20, 4.0)
    run(estimate, "long", 4.0, limit=8)
    assert estimate.waits(places=1, is_full=True, now=4.0)[0] == pytest.approx(8.0)


def test_cancelled_and_failed_requests_are_no_measure():
    estimate = measured(5.0)
    for number in range(100):
        run(estimate, str(number), 0.0)
    estimate.drop(map(str, range(50)))
    estimate.clear()
    estimate.end("70", 10, 100.0)
    run(estimate, "a", 0.0)
    assert estimate.waits(places=1, is_full=True, now=0.0)[0] == 5.0


def test_a_preempted_request_is_measured_from_its_first_start():
    estimate = QueueEstimate()
    run(estimate, "a", 0.0)
    estimate.start("a", 8.0)
    estimate.end("a", TOKENS, 10.0)
    run(estimate, "b", 0.0)
    assert estimate.waits(places=1, is_full=True, now=0.0)[0] == 10.0


def test_preempted_requests_run_before_those_that_have_not_run():
    estimate = measured(8.0)
    run(estimate, "a", 0.0)
    run(estimate, "preempted", 2.0)
    queue(estimate, 1)
    assert estimate.waits(places=1, is_full=True, now=4.0)[0] == 4.0 + 6.0 + 8.0


def test_embeddings_are_expected_to_take_what_they_took_and_do_not_change_what_tokens_take():
    estimate = QueueEstimate()
    estimate.add("text", 0, 10, reaches_limit=False)
    estimate.start("text", 0.0)
    estimate.end("text", 10, 5.0)
    for name in ("a", "b", "c", "d"):
        estimate.add(name, 0, 1, reaches_limit=False, embeds=True)
    estimate.start("a", 10.0)
    estimate.end("a", 0, 12.0)
    estimate.start("b", 12.0)
    assert estimate.waits(places=1, is_full=True, now=13.0) == (1.0 + 2.0 + 2.0, 5.0)


def test_before_any_text_embeddings_are_the_measure():
    estimate = QueueEstimate()
    estimate.add("a", 0, 1, reaches_limit=False, embeds=True)
    estimate.start("a", 0.0)
    estimate.end("a", 0, 2.0)
    assert estimate.waits(places=4, is_full=False, now=3.0) == (0.0, 0.5)


def test_a_request_waits_for_queued_ones_of_its_class_and_of_higher_ones():
    estimate = QueueEstimate()
    estimate.add("text", 0, 10, reaches_limit=True)
    estimate.start("text", 0.0)
    estimate.end("text", 10, 10.0)
    estimate.add("running", 0, 10, reaches_limit=True, priority=-1)
    estimate.start("running", 10.0)
    for name, priority in (("a", -1), ("b", 0), ("c", 0), ("d", 1)):
        estimate.add(name, 0, 10, reaches_limit=True, priority=priority)
    waits = {each: estimate.waits(places=1, is_full=True, now=15.0, priority=each)[0] for each in (-1, 0, 1)}
    assert waits == {1: 5.0 + 10.0, 0: 5.0 + 30.0, -1: 5.0 + 40.0}


def test_an_old_request_of_a_low_class_is_before_a_new_one_of_a_higher_class():
    estimate = QueueEstimate()
    estimate.add("text", 0, 10, reaches_limit=True)
    estimate.start("text", 0.0)
    estimate.end("text", 10, 10.0)
    forced(estimate, "running", 10)
    estimate.start("running", 100.0)
    forced(estimate, "low", 10, priority=-1, arrived_at=100.0)
    for now, before in ((100.0 + CLASS_HEAD_START_S - 1, 0), (100.0 + CLASS_HEAD_START_S, 1)):
        assert estimate.waits(places=1, is_full=True, now=now, priority=0)[0] == before * 10.0
        assert estimate.waits(places=1, is_full=True, now=now, priority=1)[0] == 0.0
        assert estimate.waits(places=1, is_full=True, now=now, priority=-1)[0] == 10.0


def calibrated(step_s=0.5, token_s=0.25):
    """An estimate that knows the pace of the ranks' self-test and nothing else."""
    estimate = QueueEstimate()
    estimate.calibrate(step_s, token_s)
    return estimate


def forced(estimate, name, limit, prompt_tokens=4, **fields):
    """A request of which it is known how long its answer becomes."""
    estimate.add(name, 0, limit, reaches_limit=True, prompt_tokens=prompt_tokens, **fields)


def test_before_the_first_tokens_the_self_test_is_the_measure():
    estimate = calibrated()
    forced(estimate, "a", 10)
    estimate.start("a", 100.0)
    each_s = 4 * 0.25 + 10 * (0.5 + 0.25)
    assert estimate.waits(places=1, is_full=True, now=101.0) == (each_s - 1.0, each_s)
    for number in range(1, 200):
        forced(estimate, str(number), 10)
        assert estimate.waits(places=1, is_full=True, now=101.0)[0] == pytest.approx((number + 1) * each_s - 1.0)


def test_requests_that_run_together_share_the_steps():
    estimate = calibrated()
    for number in range(8):
        forced(estimate, str(number), 10)
    each_s = 4 * 0.25 + 10 * (0.5 + 4 * 0.25)
    wait_s, per_request_s = estimate.waits(places=4, is_full=True, now=0.0)
    assert (wait_s, per_request_s) == (2 * each_s, each_s / 4)


def test_long_prompts_are_expected_to_take_longer():
    estimate = calibrated()
    forced(estimate, "long", 1, prompt_tokens=400)
    forced(estimate, "embeds", 1, prompt_tokens=40, embeds=True)
    assert estimate.waits(places=1, is_full=True, now=0.0)[0] == 400 * 0.25 + 0.75 + 40 * 0.25


def test_the_first_tokens_replace_the_self_test():
    estimate = calibrated()
    forced(estimate, "a", 10)
    estimate.start("a", 0.0)
    estimate.progress("a", 1, 3.0)  # its prompt took three seconds
    forced(estimate, "b", 10)
    for tokens in range(2, 6):
        estimate.progress("a", tokens, 3.0 + 2.0 * (tokens - 1))
    assert estimate.waits(places=1, is_full=True, now=11.0)[0] == (3.0 + 10 * 2.0 - 11.0) + (4 * 0.25 + 10 * 2.0)
    estimate.end("a", 10, 20.0)
    assert estimate.has_measured
    assert estimate.waits(places=1, is_full=True, now=20.0)[0] == 20.0


def test_answers_of_unknown_length_count_as_what_the_running_ones_have_had():
    """Refusing a request that would not have waited is worse than letting one wait."""
    estimate = calibrated()
    estimate.add("a", 0, 10_000, reaches_limit=False, prompt_tokens=4)
    estimate.start("a", 0.0)
    queue(estimate, 10, limit=10_000)
    waits = [estimate.waits(places=1, is_full=True, now=0.0)[0]]
    for tokens in range(1, 40):
        estimate.progress("a", tokens, float(tokens))
        waits.append(estimate.waits(places=1, is_full=True, now=float(tokens))[0])
    assert waits[0] == 1.0 + 11 * 0.75
    assert waits[1:] == sorted(waits[1:])
    assert waits[-1] == pytest.approx(10 * 39.0, abs=1.5)


def test_tokens_of_earlier_attempts_are_computed_again_but_do_not_come_again():
    estimate = calibrated()
    estimate.add("moved", 16, 20, reaches_limit=True, prompt_tokens=20)
    estimate.start("moved", 0.0)
    assert estimate.waits(places=1, is_full=True, now=0.0)[0] == 20 * 0.25 + 4 * 0.75
    estimate.progress("moved", 16, 1.0)
    estimate.progress("moved", 17, 2.0)
    estimate.progress("moved", 18, 5.0)
    assert estimate.waits(places=1, is_full=True, now=5.0)[0] == 2.0 + 4 * 3.0 - 5.0
    estimate.progress("nobody", 3, 5.0)


def test_a_worker_without_a_pace_estimates_as_soon_as_tokens_come():
    estimate = QueueEstimate()
    forced(estimate, "a", 100)
    estimate.start("a", 0.0)
    estimate.progress("a", 1, 1.0)
    estimate.progress("a", 3, 2.0)
    assert estimate.waits(places=1, is_full=True, now=2.0)[0] == 1.0 + 100 * 0.5 - 2.0
