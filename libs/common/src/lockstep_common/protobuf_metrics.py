"""Writes metrics in Prometheus' protobuf format, the only one that carries native histograms to its scrapers.

The messages are those of io.prometheus.client (github.com/prometheus/client_model), each after its length. Numbers of
fields below are of its metrics.proto. A `_created` of the text is a created timestamp here, not a series of its own.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from lockstep_common.distributions import DistributionFamily
from lockstep_common.exponential import ZERO_THRESHOLD, Exponential, Row
from lockstep_common.wire import delimited, fields, part, varint, zigzag

CONTENT_TYPE = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"

_MAX_SERIES = 16_384
"""Whose labels are remembered, as in `openmetrics`."""
_DOUBLE = struct.Struct("<d")
_COUNTER, _GAUGE, _SUMMARY, _UNTYPED, _HISTOGRAM, _GAUGE_HISTOGRAM = range(6)
_TYPES = {
    "counter": _COUNTER,
    "summary": _SUMMARY,
    "histogram": _HISTOGRAM,
    "gaugehistogram": _GAUGE_HISTOGRAM,
    "unknown": _UNTYPED,
}
"""Others are gauges."""
_VALUE_FIELDS = {_COUNTER: 3, _GAUGE: 2, _SUMMARY: 4, _UNTYPED: 5, _HISTOGRAM: 7, _GAUGE_HISTOGRAM: 7}
"""Of a Metric, by its family's type."""
_NAME, _METRIC = 1, 4
"""Fields of a MetricFamily."""
_SUFFIXES = {"counter": "_total", "info": "_info"}
"""What the text adds to each series' name is part of the family's here."""
_BOUND, _QUANTILE = "le", "quantile"

_Labels = tuple[tuple[str, str], ...]


def protobuf_metrics(registry: Collector) -> bytes:
    """The metrics. From the first call on its histograms count in exponential buckets too."""
    return b"".join(_with_length(_family(family)) for family in registry.collect() if family.samples)


@dataclass
class WrittenFamily:
    """A metric as it was written, in parts to which labels can be added."""

    head: bytes
    metrics: list[bytes]

    def add(self, other: "WrittenFamily", label: str, value: str) -> None:
        """Add the series of another process, with a label that they do not have."""
        more = part(1, _label(label, value))
        self.metrics += [each + more for each in other.metrics]

    @property
    def encoded(self) -> bytes:
        """The whole message after its length."""
        return _with_length(self.head + b"".join(part(_METRIC, each) for each in self.metrics))


def read_families(body: bytes) -> Iterator[tuple[str, WrittenFamily]]:
    """What `protobuf_metrics` has written, with the families' names."""
    for message in delimited(body):
        name, head, metrics = "", b"", []
        for number, content, whole in fields(message):
            if number == _METRIC:
                metrics.append(content)
                continue
            head += whole
            if number == _NAME:
                name = content.decode()
        yield name, WrittenFamily(head, metrics)


def _with_length(message: bytes) -> bytes:
    return varint(len(message)) + message


def _family(family: Metric) -> bytes:
    kind = _TYPES.get(family.type, _GAUGE)
    metrics = _with_buckets(family, kind) if kind in (_SUMMARY, _HISTOGRAM, _GAUGE_HISTOGRAM) else _plain(family, kind)
    head = _head(family.name + _SUFFIXES.get(family.type, ""), family.documentation, kind)
    return head + b"".join(part(_METRIC, each) for each in metrics)


@lru_cache(_MAX_SERIES)
def _head(name: str, documentation: str, kind: int) -> bytes:
    return part(_NAME, name.encode()) + part(2, documentation.encode()) + b"\x18" + varint(kind)


def _plain(family: Metric, kind: int) -> Iterator[bytes]:
    """Metrics of one value each."""
    created: dict[_Labels, float] = {}
    samples: Iterable[Sample] = family.samples
    if kind == _COUNTER:
        created = {tuple(each.labels.items()): each.value for each in samples if each.name.endswith("_created")}
        samples = [each for each in samples if not each.name.endswith("_created")]
    for sample in samples:
        key = tuple(sample.labels.items())
        value = _double(1, sample.value)
        if sample.exemplar is not None:
            value += part(2, _exemplar(sample.exemplar))
        if key in created:
            value += part(3, _time(created[key]))
        yield _metric(key, kind, value, sample)


def _with_buckets(family: Metric, kind: int) -> Iterator[bytes]:
    """Metrics of several samples each."""
    series: dict[_Labels, list[Sample]] = {}
    for sample in family.samples:
        series.setdefault(_key(sample.labels), []).append(sample)
    for key, samples in series.items():
        exponential = None
        if isinstance(family, DistributionFamily):
            exponential = family.distributions[key].exponential()
        value = _summary(samples) if kind == _SUMMARY else _histogram(samples, exponential)
        yield _metric(key, kind, value, samples[0])


def _metric(key: _Labels, kind: int, value: bytes, sample: Sample) -> bytes:
    at = b""
    if sample.timestamp is not None:
        at = b"\x30" + varint(int(float(sample.timestamp) * 1000))
    return _labels(key) + part(_VALUE_FIELDS[kind], value) + at


def _summary(samples: Iterable[Sample]) -> bytes:
    message = b""
    for sample in samples:
        if sample.name.endswith("_count"):
            message += b"\x08" + varint(int(sample.value))
        elif sample.name.endswith("_sum"):
            message += _double(2, sample.value)
        elif sample.name.endswith("_created"):
            message += part(4, _time(sample.value))
        else:
            message += part(3, _double(1, float(sample.labels[_QUANTILE])) + _double(2, sample.value))
    return message


def _histogram(samples: Iterable[Sample], exponential: Exponential | None) -> bytes:
    """The counts are in both kinds of buckets, and there is one total. It is that of the exponential ones, which are
    read later: Prometheus refuses it if they have more.
    """
    message = b"" if exponential is None else b"\x08" + varint(exponential.count) + _exponential(exponential)
    for sample in samples:
        if sample.name.endswith("_bucket"):
            bound, count = float(sample.labels[_BOUND]), int(sample.value)
            if exponential is not None and bound == float("inf"):
                count = exponential.count
            bucket = b"\x08" + varint(count) + _double(2, bound)
            message += part(3, bucket + (b"" if sample.exemplar is None else part(3, _exemplar(sample.exemplar))))
        elif sample.name.endswith("count"):
            message += b"" if exponential is not None else b"\x08" + varint(int(sample.value))
        elif sample.name.endswith("sum"):
            message += _double(2, sample.value)
        else:
            message += part(15, _time(sample.value))
    return message


def _exponential(counted: Exponential) -> bytes:
    """The fields of a Histogram by which it is a native one."""
    return b"".join(
        (
            b"\x28" + varint(zigzag(counted.schema)),
            _double(6, ZERO_THRESHOLD),
            b"\x38" + varint(counted.zero_count),
            _row(9, 10, counted.negative),
            _row(12, 13, counted.positive),
        )
    )


def _row(span_field: int, delta_field: int, row: Row) -> bytes:
    spans = b"".join(
        part(span_field, b"\x08" + varint(zigzag(offset)) + b"\x10" + varint(length)) for offset, length in row.spans
    )
    deltas = b"".join(varint(zigzag(delta)) for delta in row.deltas)
    return spans + (part(delta_field, deltas) if deltas else b"")


def _key(labels: dict[str, str]) -> _Labels:
    """The labels of a series: of all samples, without what is of a bucket alone."""
    return tuple([each for each in labels.items() if each[0] != _BOUND and each[0] != _QUANTILE])


@lru_cache(_MAX_SERIES)
def _labels(labels: _Labels) -> bytes:
    return b"".join(part(1, _label(name, value)) for name, value in labels)


def _label(name: str, value: str) -> bytes:
    return part(1, name.encode()) + part(2, value.encode(errors="replace"))


def _exemplar(exemplar: Exemplar) -> bytes:
    message = b"".join(part(1, _label(name, value)) for name, value in exemplar.labels.items())
    message += _double(2, exemplar.value)
    return message if exemplar.timestamp is None else message + part(3, _time(float(exemplar.timestamp)))


def _time(since_1970_s: float) -> bytes:
    """A google.protobuf.Timestamp."""
    seconds, nanos = divmod(round(since_1970_s * 1e9), 10**9)
    return b"\x08" + varint(seconds) + b"\x10" + varint(nanos)


def _double(number: int, value: float) -> bytes:
    return b"%c%b" % (number << 3 | 1, _DOUBLE.pack(value))
