"""Tallies are shown as Prometheus' own metrics are."""

import re

import pytest
from lockstep_common.distributions import Distribution, Distributions
from lockstep_common.tallies import Tallies, Tally
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

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


def test_several_equal_values_at_once():
    registry = CollectorRegistry()
    seconds = Distribution("lockstep_seconds", "Their time.", buckets=BUCKETS, registry=registry)
    seconds.observe(0.25, 3)
    seconds.observe(0.75, 0)
    assert registry.get_sample_value("lockstep_seconds_count") == 3
    assert registry.get_sample_value("lockstep_seconds_sum") == 0.75
    assert registry.get_sample_value("lockstep_seconds_bucket", {"le": "0.5"}) == 3


def test_values_are_read_from_the_registry():
    registry = CollectorRegistry()
    tally = Tally("lockstep_things", "Things that happened.", registry=registry)
    tally.inc(5)
    assert registry.get_sample_value("lockstep_things_total") == 5


def labelled(counter, histogram, values, generate):
    registry = CollectorRegistry()
    count = counter("lockstep_things", "Things that happened.", ["face", "code"], registry=registry)
    seconds = histogram("lockstep_seconds", "Their time.", ["face"], buckets=BUCKETS, registry=registry)
    for index, value in enumerate(values):
        count.labels(f"face{index % 2}", str(200 + index % 3)).inc()
        seconds.labels(f"face{index % 2}").observe(value)
    return re.sub(r"(_created\{?.*) .*", r"\1", generate(registry).decode())


@pytest.mark.parametrize("values", [VALUES, ()])
@pytest.mark.parametrize("generate", [generate_latest, generate_openmetrics])
def test_exposition_with_labels_is_that_of_the_client_library(values, generate):
    assert labelled(Tallies, Distributions, values, generate) == labelled(Counter, Histogram, values, generate)


def test_exposition_of_a_gauge_is_that_of_the_client_library():
    registries = CollectorRegistry(), CollectorRegistry()
    gauge = Gauge("lockstep_things", "Things now.", registry=registries[0])
    tally = Tally("lockstep_things", "Things now.", registry=registries[1], is_gauge=True)
    gauge.set(3)
    tally.value = 3
    assert generate_latest(registries[1]) == generate_latest(registries[0])
