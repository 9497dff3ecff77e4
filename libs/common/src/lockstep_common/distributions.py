"""Histograms that tokens and requests change: plain numbers, turned into Prometheus' samples when they are read.

The client library's own take a lock for each change, which costs more than the rest of what is counted. Only the event
loop's thread changes these. They count in exponential buckets too, from the first time that somebody reads those.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from lockstep_common.exponential import Exponential, ExponentialBuckets


class Distribution(Collector):
    """A histogram without labels.

    Args:
        name: the metric's name.
        documentation: one sentence.
        buckets: upper bounds, in increasing order; one without a bound is added.
        registry: shows it.
    """

    def __init__(
        self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry | None = None
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._has_exponential = False
        self._exponential: ExponentialBuckets | None = None
        """Of the thread that observes, which makes them. What was counted before is put at the bounds."""
        self._exemplars: dict[int, tuple[int, float, float]] = {}
        """The last one of each bucket that has had any: its trace's id, its value, and when it was. Tokens come more
        often than anyone reads it, so they do not write it out.
        """
        self._created = time.time()
        if registry is not None:
            registry.register(self)

    def observe(self, value: float, count: int = 1, trace_id: int = 0) -> None:
        """Count a value, several times if it came so often. `trace_id`: of a trace that is kept; 0: there is none."""
        if self._has_exponential:
            # First, so that a reader of both finds no more in the others.
            (self._exponential or self._seed()).add(value, count)
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += count
        self._sum += count * value
        if trace_id:
            self._exemplars[bucket] = (trace_id, value, time.time())

    def exponential(self) -> Exponential:
        """The same values in exponential buckets, in any thread. The first call has `observe` count in these; what it
        has counted before is at the upper bounds of its buckets.
        """
        counts = self._counts.copy()
        self._has_exponential = True
        counted = self._exponential
        return (ExponentialBuckets.seeded(self._bounds, counts) if counted is None else counted).snapshot()

    def _seed(self) -> ExponentialBuckets:
        self._exponential = ExponentialBuckets.seeded(self._bounds, self._counts)
        return self._exponential

    def collect(self) -> Iterator[Metric]:
        """The present counts, each with those of the smaller buckets."""
        family = DistributionFamily(self._name, self._documentation)
        self.add_to(family, (), {})
        yield family

    def add_to(self, family: "DistributionFamily", values: Sequence[str], labels: dict[str, str]) -> None:
        """Add the present counts to those of a metric with labels."""
        count = 0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for number, (bound, counted) in enumerate(zip((*self._bounds, float("inf")), self._counts, strict=True)):
            count += counted
            name: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
            exemplar = self._exemplars.get(number)
            if exemplar is None:
                buckets.append((name, float(count)))
            else:
                trace_id, value, at = exemplar
                buckets.append((name, float(count), Exemplar({"trace_id": f"{trace_id:032x}"}, value, at)))
        family.add_metric(values, buckets=buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", labels, self._created)
        family.distributions[tuple(labels.items())] = self


class DistributionFamily(HistogramMetricFamily):
    """The samples of a histogram, and what else can be asked of each series."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str] | None = None) -> None:
        super().__init__(name, documentation, labels=labels)
        self.distributions: dict[tuple[tuple[str, str], ...], Distribution] = {}
        """By the series' labels."""


class Distributions(Collector):
    """A histogram with labels, whose values are few.

    Args:
        name: the metric's name.
        documentation: one sentence.
        names: of the labels.
        buckets: as for `Distribution`.
        registry: shows it.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        names: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self.names = tuple(names)
        self._buckets = buckets
        self._distributions: dict[tuple[str, ...], Distribution] = {}
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        """The histogram of these labels."""
        distribution = self._distributions.get(values)
        if distribution is None:
            distribution = Distribution(self._name, self._documentation, buckets=self._buckets)
            self._distributions[values] = distribution
        return distribution

    def collect(self) -> Iterator[Metric]:
        """The present counts."""
        family = DistributionFamily(self._name, self._documentation, labels=self.names)
        for values, distribution in list(self._distributions.items()):
            distribution.add_to(family, values, dict(zip(self.names, values, strict=True)))
        yield family
