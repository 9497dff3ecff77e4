"""Metrics as OpenMetrics text are byte for byte those of prometheus-client."""

import math

import pytest
from lockstep_common.openmetrics import openmetrics_text
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Summary
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
from prometheus_client.samples import Exemplar

VALUES = (
    0,
    1,
    7,
    128,
    999999.5,
    1e6,
    -1e6,
    1234567.0,
    12345678901.5,
    1e21,
    1e-9,
    0.1 + 0.2,
    -2.5,
    math.inf,
    -math.inf,
    math.nan,
)
TEXTS = ("plain", "", 'a "quoted" \\ text', "two\nlines", "one\rline", "\x0b\x1c\x85\u2028", "ü", "{}", " # ")


class Families:
    """What a collector of one's own may give."""

    def __init__(self, *families):
        self.families = families

    def collect(self):
        return self.families


def same(registry):
    expected = generate_latest(registry, ALLOWUTF8)
    assert openmetrics_text(registry) == expected
    assert openmetrics_text(registry) == expected  # what is remembered now
    return expected.decode()


def test_every_kind_of_metric():
    registry = CollectorRegistry()
    Counter("made", "Counted.", registry=registry).inc(3)
    Gauge("vllm:num_requests", "A colon.", ["model_name"], registry=registry).labels("a").set(1)
    Gauge("wait", "With a unit.", unit="seconds", registry=registry)
    Summary("size", "Sums.", registry=registry).observe(2)
    Info("build", "Facts.", registry=registry).info({"version": "1"})
    Enum("state", "States.", states=["on", "off"], registry=registry)
    Histogram("took", "Times.", ["face"], buckets=(0.1, 1), registry=registry).labels("http").observe(0.5)
    assert "vllm:num_requests{" in same(registry)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_escaped(text):
    registry = CollectorRegistry()
    gauge = Gauge("some", f"About {text}.", ["b", "a"], registry=registry)
    for value in TEXTS:
        gauge.labels(text, value).set(1)
    same(registry)


@pytest.mark.parametrize("value", VALUES)
def test_values(value):
    registry = CollectorRegistry()
    Gauge("some", "Any.", registry=registry).set(value)
    same(registry)


def test_values_change_and_series_stay_apart():
    registry = CollectorRegistry()
    gauge = Gauge("some", "Any.", ["a", "b"], registry=registry)
    for number in range(5):
        gauge.labels("x", str(number % 3)).set(number)
        gauge.labels(str(number % 3), "x").inc()
        same(registry)


@pytest.mark.parametrize("text", TEXTS)
def test_examples(text):
    registry = CollectorRegistry()
    histogram = Histogram("took", "Times.", buckets=(1, 2), registry=registry)
    histogram.observe(0.5, {"trace_id": text, "b": "c"})
    Counter("made", "Counted.", registry=registry).inc(1, {"trace_id": text})
    assert same(registry).count(" # {") >= 2


def test_a_collector_of_ones_own():
    timed = Metric("timed", "With times.", "gauge")
    timed.add_sample("timed", {"a": "b"}, 1, timestamp=1.5)
    counted = CounterMetricFamily("counted", "Counted.", labels=["a"])
    counted.add_metric(["b"], 2, created=1.25, exemplar=Exemplar({"trace_id": "1"}, 1.0))
    odd = Metric("ódd name", "UTF-8.", "gauge")
    odd.add_sample("ódd name", {"ü b": "c"}, 1)
    odd.add_sample("ódd name", {}, 2)
    nothing = Metric("nothing", "No samples.", "unknown")
    same(Families(timed, counted, odd, nothing))
