"""A histogram counts in exponential buckets from when they are first read, without losing what came before."""

import sys
import threading

import pytest
from lockstep_common.distributions import Distribution, Distributions
from prometheus_client import CollectorRegistry, generate_latest

BUCKETS = (0.001, 0.5, 1, 300)


@pytest.fixture
def seconds():
    return Distribution("lockstep_seconds", "Their time.", buckets=BUCKETS, registry=CollectorRegistry())


def test_what_was_counted_before_is_at_the_bounds_and_the_rest_where_it_is(seconds):
    seconds.observe(0.3, 2)
    seconds.observe(1000)
    first = seconds.exponential()
    assert (first.count, first.positive.spans) == (3, [(-8, 1), (74, 1)])
    seconds.observe(0.25)
    second = seconds.exponential()
    assert (second.count, second.positive.spans, second.positive.deltas) == (4, [(-16, 1), (7, 1), (74, 1)], [1, 1, -1])


def test_the_text_is_the_same_whether_exponential_buckets_are_counted_or_not():
    registry = CollectorRegistry()
    seconds = Distributions("lockstep_seconds", "Their time.", ["face"], buckets=BUCKETS, registry=registry)
    seconds.labels("http").observe(0.3)
    before = generate_latest(registry)
    seconds.labels("http").exponential()
    assert generate_latest(registry) == before


def test_no_value_is_lost_when_the_first_reader_comes_while_values_are_counted(seconds):
    """Whenever it reads, exponential buckets have no fewer values than the others had before."""
    ended = threading.Event()

    def read():
        while not ended.is_set():
            (family,) = seconds.collect()
            classic = next(each.value for each in family.samples if each.name.endswith("_count"))
            behind.append(seconds.exponential().count < classic)

    behind = []
    reader, interval_s = threading.Thread(target=read), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for number in range(50_000):
            seconds.observe(number / 1000)
    finally:
        sys.setswitchinterval(interval_s)
        ended.set()
        reader.join()
    assert not any(behind)
    assert seconds.exponential().count == 50_000
