"""Metrics that each token or each request changes: plain numbers, turned into Prometheus' samples when they are read.

The client library's own metrics take a lock for each change, which costs more than the rest of what is counted. Only
the event loop's thread changes these.
"""

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """A counter, or a gauge, without labels.

    Args:
        name: the metric's name, without `_total`.
        documentation: one sentence.
        registry: shows it.
        is_gauge: whether its value can also be set.
    """

    def __init__(
        self, name: str, documentation: str, *, registry: CollectorRegistry | None = None, is_gauge: bool = False
    ) -> None:
        self.value = 0
        self._name = name
        self._documentation = documentation
        self._is_gauge = is_gauge
        self._created = time.time()
        if registry is not None:
            registry.register(self)

    def inc(self, amount: int = 1) -> None:
        """Count."""
        self.value += amount

    def collect(self) -> Iterator[Metric]:
        """The present value."""
        if self._is_gauge:
            yield GaugeMetricFamily(self._name, self._documentation, float(self.value))
        else:
            yield CounterMetricFamily(self._name, self._documentation, float(self.value), created=self._created)

    def add_to(self, family: CounterMetricFamily, labels: Sequence[str]) -> None:
        """Add the present value to those of a metric with labels."""
        family.add_metric(labels, float(self.value), created=self._created)


class Tallies(Collector):
    """A counter with labels, whose values are few.

    Args:
        name: the metric's name, without `_total`.
        documentation: one sentence.
        names: of the labels.
        registry: shows it.
    """

    def __init__(self, name: str, documentation: str, names: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self.names = tuple(names)
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        """The counter of these labels."""
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally(self._name, self._documentation)
        return tally

    def collect(self) -> Iterator[Metric]:
        """The present values."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self.names)
        for values, tally in list(self._tallies.items()):
            tally.add_to(family, values)
        yield family
