"""Metrics of the path that each token takes: plain numbers, turned into Prometheus' samples when they are read.

The client library's own metrics take a lock for each change, which costs more than the rest of what is counted. Only
the event loop's thread changes these.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter without labels.

    Args:
        name: the metric's name, without `_total`.
        documentation: one sentence.
        registry: shows it.
    """

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name = name
        self._documentation = documentation
        self._created = time.time()
        registry.register(self)

    def inc(self, amount: int = 1) -> None:
        """Count."""
        self.value += amount

    def collect(self) -> Iterator[Metric]:
        """The present value."""
        yield CounterMetricFamily(self._name, self._documentation, float(self.value), created=self._created)


class Distribution(Collector):
    """A histogram without labels.

    Args:
        name: the metric's name.
        documentation: one sentence.
        buckets: upper bounds, in increasing order; one without a bound is added.
        registry: shows it.
    """

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The present counts, each with those of the smaller buckets."""
        count, buckets = 0, []
        for bound, values in zip((*self._bounds, float("inf")), self._counts, strict=True):
            count += values
            buckets.append((floatToGoString(bound), float(count)))  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        yield family
