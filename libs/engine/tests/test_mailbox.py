"""The shared segment between driver and ranks: messages arrive as they were sent and do not overlap."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_engine.mailbox import NOTHING_DONE, Mailbox, RankTimes

SIZES = (3, 100, 50)


@pytest.fixture
def sides():
    """Driver and rank, each with a mapping of its own."""
    fd = Mailbox.create(Mailbox.segment_bytes(*SIZES), "test")
    made = Mailbox(fd, *SIZES), Mailbox(fd, *SIZES)
    os.close(fd)
    return made


@settings(derandomize=True, deadline=None, database=None, max_examples=50)
@given(st.lists(st.tuples(st.binary(max_size=100), st.binary(max_size=50)), max_size=8))
def test_messages_arrive_as_they_were_sent(messages):
    fd = Mailbox.create(Mailbox.segment_bytes(*SIZES), "test")
    driver, rank = Mailbox(fd, *SIZES), Mailbox(fd, *SIZES)
    os.close(fd)
    for step, (plan, result) in enumerate(messages):
        driver.put_plan(step, plan)
        assert rank.get_plan(step) == plan
        rank.put_result(step, result)
        assert driver.get_result(step) == result


def test_a_plan_stays_while_the_next_one_is_placed(sides):
    driver, rank = sides
    driver.put_plan(1, b"first")
    driver.put_plan(2, b"second" * 16)
    assert rank.get_plan(1) == b"first"
    assert rank.get_plan(2) == b"second" * 16
    driver.put_plan(3, b"")
    assert rank.get_plan(3) == b""
    assert rank.get_plan(2) == b"second" * 16


def test_a_result_stays_while_the_next_one_is_placed(sides):
    driver, rank = sides
    rank.put_result(1, b"first")
    rank.put_result(2, b"second")
    assert (driver.get_result(1), driver.get_result(2)) == (b"first", b"second")


def test_places_do_not_overlap_when_they_are_full(sides):
    driver, rank = sides
    for number in range(3):
        rank.steps[number] = -1 - number
        rank.collectives[number] = 2**62 + number
    driver.put_plan(0, b"\xaa" * 100)
    driver.put_plan(1, b"\xbb" * 100)
    rank.put_result(0, b"\xcc" * 50)
    rank.put_result(1, b"\xdd" * 50)
    assert driver.steps.tolist() == [-1, -2, -3]
    assert driver.collectives.tolist() == [2**62, 2**62 + 1, 2**62 + 2]
    assert (rank.get_plan(0), rank.get_plan(1)) == (b"\xaa" * 100, b"\xbb" * 100)
    assert (driver.get_result(0), driver.get_result(1)) == (b"\xcc" * 50, b"\xdd" * 50)


def test_a_message_that_is_too_large_is_refused_and_changes_nothing(sides):
    driver, rank = sides
    driver.put_plan(4, b"plan")
    rank.put_result(4, b"result")
    with pytest.raises(ValueError, match="101 bytes in a place for 100"):
        driver.put_plan(4, bytes(101))
    with pytest.raises(ValueError, match="51 bytes in a place for 50"):
        rank.put_result(4, bytes(51))
    assert rank.get_plan(4) == b"plan"
    assert driver.get_result(4) == b"result"


def test_counters_of_ranks_start_at_zero_and_lie_on_different_cache_lines(sides):
    driver, rank = sides
    counters = ("steps", "collectives", "device_bytes")
    assert {name: getattr(driver, name).tolist() for name in counters} == {name: [0, 0, 0] for name in counters}
    assert {getattr(driver, name).strides for name in counters} == {(64,)}
    rank.note_step(1, 1, 2, 3, 4)
    for number, name in enumerate(counters):
        getattr(rank, name)[1] = number + 1
    assert [getattr(driver, name).tolist() for name in counters] == [[0, number + 1, 0] for number in range(3)]


def test_times_of_ranks_add_up(sides):
    driver, rank = sides
    rank.note_step(0, 3_000_000, 2_500_000, 1_000_000, 500_000)
    before = driver.times()
    rank.note_step(0, 2_000_000, 1_500_000, 250_000, 0)
    rank.note_step(1, 2_000_000, 2_000_000, 750_000, 0)
    assert before == (RankTimes(1, 3.0, 2.5, 1.0, 0.5), NOTHING_DONE, NOTHING_DONE)
    assert [new - old for new, old in zip(driver.times(), before, strict=True)] == [
        RankTimes(1, 2.0, 1.5, 0.25, 0.0),
        RankTimes(1, 2.0, 2.0, 0.75, 0.0),
        NOTHING_DONE,
    ]
    assert driver.collectives.tolist() == [0, 0, 0]
