"""Counts in exponential buckets, as Prometheus' native histograms have them: no bounds to choose, and an error of a few
per cent wherever the values are. It knows no names, labels or formats.

Bucket i of schema s has the values in (base^(i-1), base^i], where base is 2^(2^-s). The finest schema here is 3, a base
of 1.09. When there are too many buckets the schema is lowered: each bucket then has the values of two.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FINEST_SCHEMA = 3
_COARSEST_SCHEMA = -4
MAX_BUCKETS = 160
"""As of Prometheus' client library for Go and of OpenTelemetry. Latencies of 1 ms to 5 min need 147."""
ZERO_THRESHOLD = 2.0**-128
"""Smaller values, of either sign, are in the bucket of zero."""
_MAX_GAP = 2
"""A longer row of empty buckets begins a span."""

_FRACTIONS = tuple(
    tuple(2.0 ** (number / 2**schema - 1) for number in range(2**schema)) for schema in range(FINEST_SCHEMA + 1)
)
"""For each schema from 0 the bounds in [0.5, 1), where `frexp` puts the fraction of a number."""
_FIRST_USUAL, _LAST_USUAL = -14 << FINEST_SCHEMA, 11 << FINEST_SCHEMA
_USUAL_BOUNDS = tuple(
    math.ldexp(_FRACTIONS[FINEST_SCHEMA][number % 2**FINEST_SCHEMA], (number >> FINEST_SCHEMA) + 1)
    for number in range(_FIRST_USUAL, _LAST_USUAL + 1)
)
"""From 61 us, or 61 millionths of anything, to 2048. Values between them are found in a list, in half the time."""


def bucket_of(value: float, schema: int) -> int:
    """The number of the bucket of a positive value. Infinity is one above the largest number."""
    if value == math.inf:
        return bucket_of(math.nextafter(math.inf, 0.0), schema) + 1
    fraction, exponent = math.frexp(value)
    if schema >= 0:
        return bisect_left(_FRACTIONS[schema], fraction) + ((exponent - 1) << schema)
    power = exponent - (fraction == 0.5)  # the least power of 2 that is not below the value
    return -(-power >> -schema)


@dataclass(frozen=True)
class Row:
    """Buckets in the form of the wire: spans of them (empty buckets since the last one, length), and each bucket's
    count less that of the bucket before.
    """

    spans: Sequence[tuple[int, int]]
    deltas: Sequence[int]

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> "Row":
        """The row of counts by the buckets' numbers."""
        spans: list[tuple[int, int]] = []
        deltas: list[int] = []
        following = before = 0
        for number in sorted(counts):
            gap = number - following
            if not spans or gap > _MAX_GAP:
                spans.append((gap, 1))
            else:
                spans[-1] = (spans[-1][0], spans[-1][1] + gap + 1)
                for _ in range(gap):
                    deltas.append(-before)
                    before = 0
            deltas.append(counts[number] - before)
            following, before = number + 1, counts[number]
        return cls(spans, deltas)


@dataclass(frozen=True)
class Exponential:
    """The counts at one moment. `count` is that of all buckets, and of values that are no number."""

    schema: int
    count: int
    zero_count: int
    positive: Row
    negative: Row


class ExponentialBuckets:
    """Counts values, in the finest schema. One thread adds; others may take `snapshot` meanwhile."""

    def __init__(self) -> None:
        self._usual = [0] * len(_USUAL_BOUNDS)
        """The counts up to each usual bound; the first is always 0."""
        self._positive: dict[int, int] = {}
        """Of what is beyond the usual bounds, by the buckets' numbers."""
        self._negative: dict[int, int] = {}
        self._zeros = 0
        self._not_numbers = 0

    @classmethod
    def seeded(cls, bounds: Sequence[float], counts: Sequence[int]) -> "ExponentialBuckets":
        """What buckets with bounds have counted, each at its bound, and the last one's just above the last bound.

        Args:
            bounds: upper ones, in increasing order.
            counts: one more; the last is of the values above all bounds.
        """
        buckets = cls()
        above = bounds[-1] * 2.0 ** (2.0**-FINEST_SCHEMA)
        for bound, count in zip((*bounds, above), counts, strict=True):
            if count:
                buckets.add(bound, count)
        return buckets

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, several times if it came so often."""
        place = bisect_left(_USUAL_BOUNDS, value)
        if 0 < place < len(_USUAL_BOUNDS):
            self._usual[place] += count
        else:
            self._add_unusual(value, count)

    def snapshot(self) -> Exponential:
        """The counts now, in the finest schema with few enough buckets. In any thread: each container is copied at
        once.
        """
        usual, positive, negative, zeros = self._usual.copy(), self._positive.copy(), self._negative.copy(), self._zeros
        positive |= {number: count for number, count in enumerate(usual, _FIRST_USUAL) if count}
        schema = FINEST_SCHEMA
        while len(positive) + len(negative) > MAX_BUCKETS and schema > _COARSEST_SCHEMA:
            schema, positive, negative = schema - 1, _halved(positive), _halved(negative)
        return Exponential(
            schema=schema,
            count=sum(positive.values()) + sum(negative.values()) + zeros + self._not_numbers,
            zero_count=zeros,
            positive=Row.of(positive),
            negative=Row.of(negative),
        )

    def _add_unusual(self, value: float, count: int) -> None:
        if math.isnan(value):
            self._not_numbers += count
        elif abs(value) <= ZERO_THRESHOLD:
            self._zeros += count
        else:
            row, number = self._positive if value > 0 else self._negative, bucket_of(abs(value), FINEST_SCHEMA)
            row[number] = row.get(number, 0) + count


def _halved(counts: Mapping[int, int]) -> dict[int, int]:
    """The counts in the next lower schema."""
    fewer: dict[int, int] = {}
    for number, count in counts.items():
        half = (number + 1) >> 1
        fewer[half] = fewer.get(half, 0) + count
    return fewer
