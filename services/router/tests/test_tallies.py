"""Tallies are shown as Prometheus' own metrics are."""

import re

from lockstep_router.tallies import Distribution, Tally
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

BUCKETS = (0.001, 0.5, 1, 300)
VALUES = (0.0, 0.001, 0.0011, 0.75, 1, 1.5, 300, 1000, 0.1, 0.2)


def exposition(counter, histogram, values):
    registry = CollectorRegistry()
    count = counter("lockstep_things", "Things that happened.", registry=registry)
    seconds = histogram("lockstep_seconds", "Their time.", buckets=BUCKETS, registry=registry)
    for value in values:
        count.inc()
        count.inc(3)
        seconds.observe(value)
    return re.sub(r"(_created) .*", r"\1", generate_latest(registry).decode())


def test_exposition_is_that_of_the_client_library():
    assert exposition(Tally, Distribution, VALUES) == exposition(Counter, Histogram, VALUES)


def test_exposition_before_anything_happened_is_that_of_the_client_library():
    assert exposition(Tally, Distribution, ()) == exposition(Counter, Histogram, ())


def test_values_are_read_from_the_registry():
    registry = CollectorRegistry()
    tally = Tally("lockstep_things", "Things that happened.", registry=registry)
    tally.inc(5)
    assert registry.get_sample_value("lockstep_things_total") == 5
