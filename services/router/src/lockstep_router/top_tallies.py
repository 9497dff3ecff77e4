"""Counters by a name of which there may be any number: those that count most have their own, the rest share `other`.

So the number of series is bounded, whatever names come. Only the event loop's thread changes these.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

OTHER = "other"
"""The value of the label for all names without a counter of their own; a name that is `other` is counted there."""

_CANDIDATES_PER_PLACE = 4


class TopTallies(Collector):
    """A counter whose first label has a bounded number of values.

    At the end of each interval a name that had more in it than the least of those with a place takes over its place.
    The displaced name's series end. What it had is not added to `other`, where it would look like a burst of just now;
    so `other` grows by what is counted there only, rates are those of the traffic, and the sum over all names falls
    when a name is displaced. A name that takes a place begins at 0: what it had before stays in `other`.

    Within an interval the candidates are counted in bounded memory, as Misra and Gries do ("Finding repeated elements",
    1982): a key with more than its part of the interval is among them.

    Args:
        name: the metric's name, without `_total`.
        documentation: one sentence.
        names: of the labels; the first one is bounded here, the others must have few values.
        places: how many names have a counter of their own.
        interval_s: the length of an interval.
        registry: shows it.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        names: Sequence[str],
        *,
        places: int,
        interval_s: float = 60.0,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = tuple(names)
        self._name = name
        self._documentation = documentation
        self._places = places
        self._interval_s = interval_s
        self._clock = clock
        self._ends_at = clock() + interval_s
        self._counts: dict[str, dict[tuple[str, ...], int]] = {OTHER: {}}
        """By name, then by the other labels."""
        self._recent: dict[str, int] = {}
        """What the names with a place had in this interval."""
        self._candidates: dict[str, int] = {}
        registry.register(self)

    def add(self, name: str, labels: tuple[str, ...], amount: int) -> None:
        """Count.

        Args:
            name: the first label's value.
            labels: values of the other labels.
            amount: 0 or more.
        """
        if not amount:
            return
        if self._clock() >= self._ends_at:
            self._end_interval()
        if name not in self._counts and len(self._counts) <= self._places:
            self._counts[name] = {}
        if name in self._counts and name != OTHER:
            self._recent[name] = self._recent.get(name, 0) + amount
        else:
            self._note_candidate(name, amount)
            name = OTHER
        counts = self._counts[name]
        counts[labels] = counts.get(labels, 0) + amount

    def _note_candidate(self, name: str, amount: int) -> None:
        candidates = self._candidates
        if name in candidates or len(candidates) < _CANDIDATES_PER_PLACE * self._places:
            candidates[name] = candidates.get(name, 0) + amount
            return
        least = min(amount, *candidates.values())
        self._candidates = {each: count - least for each, count in candidates.items() if count > least}
        if amount > least:
            self._candidates[name] = amount - least

    def _end_interval(self) -> None:
        """Give places to candidates that had more in this interval than names with a place."""
        places = sorted((self._recent.get(name, 0), name) for name in self._counts if name != OTHER)
        rising = sorted(((count, name) for name, count in self._candidates.items() if name != OTHER), reverse=True)
        for (had, leaving), (has, coming) in zip(places, rising, strict=False):
            if has <= had:
                break
            del self._counts[leaving]
            self._counts[coming] = {}
        self._recent, self._candidates = {}, {}
        self._ends_at = self._clock() + self._interval_s

    def collect(self) -> Iterator[Metric]:
        """The present counts."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self.names)
        for name, counts in list(self._counts.items()):
            for labels, count in list(counts.items()):
                family.add_metric((name, *labels), float(count))
        yield family
