"""Metrics in Prometheus' protobuf format, decoded by classes that are made here from the numbers of its fields."""

import math

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.timestamp_pb2 import Timestamp
from lockstep_common.distributions import Distribution, Distributions
from lockstep_common.protobuf_metrics import CONTENT_TYPE, WrittenFamily, protobuf_metrics, read_families
from lockstep_common.telemetry import OPENMETRICS, exposition_for, prefers_protobuf
from lockstep_common.wire import delimited
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Summary, generate_latest
from prometheus_client.metrics_core import GaugeHistogramMetricFamily, Metric

ACCEPTS = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
    "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""Of Prometheus 2.42 with native histograms."""
KINDS = {"double": 1, "uint64": 4, "uint32": 13, "int64": 3, "string": 9, "enum": 5, "sint32": 17, "sint64": 18}
MESSAGES = {
    "LabelPair": "name:1:string value:2:string",
    "Gauge": "value:1:double",
    "Counter": "value:1:double exemplar:2:Exemplar created_timestamp:3:Timestamp",
    "Quantile": "quantile:1:double value:2:double",
    "Summary": "sample_count:1:uint64 sample_sum:2:double quantile:3:*Quantile created_timestamp:4:Timestamp",
    "Untyped": "value:1:double",
    "Histogram": "sample_count:1:uint64 sample_sum:2:double bucket:3:*Bucket created_timestamp:15:Timestamp "
    "schema:5:sint32 zero_threshold:6:double zero_count:7:uint64 negative_span:9:*BucketSpan "
    "negative_delta:10:*sint64 positive_span:12:*BucketSpan positive_delta:13:*sint64",
    "Bucket": "cumulative_count:1:uint64 upper_bound:2:double exemplar:3:Exemplar",
    "BucketSpan": "offset:1:sint32 length:2:uint32",
    "Exemplar": "label:1:*LabelPair value:2:double timestamp:3:Timestamp",
    "Metric": "label:1:*LabelPair gauge:2:Gauge counter:3:Counter summary:4:Summary untyped:5:Untyped "
    "histogram:7:Histogram timestamp_ms:6:int64",
    "MetricFamily": "name:1:string help:2:string type:3:enum metric:4:*Metric",
}
COUNTER, GAUGE, SUMMARY, UNTYPED, HISTOGRAM, GAUGE_HISTOGRAM = range(6)


def family_class():
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package="test", syntax="proto2")
    file.dependency.append("google/protobuf/timestamp.proto")
    for name, described in MESSAGES.items():
        message = file.message_type.add(name=name)
        for each in described.split():
            field, number, kind = each.split(":")
            added = message.field.add(name=field, number=int(number), label=3 if kind[0] == "*" else 1)
            kind = kind.lstrip("*")
            if kind in KINDS:
                added.type = KINDS[kind]
            else:
                added.type = 11
                added.type_name = ".google.protobuf.Timestamp" if kind == "Timestamp" else f".test.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(Timestamp.DESCRIPTOR.file.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.MetricFamily"))


FAMILY = family_class()


def families(body):
    """The families of an answer by their names, each of whose bytes is a known field."""
    found = [FAMILY.FromString(each) for each in delimited(body)]
    for each in found:
        known = FAMILY.FromString(each.SerializeToString())
        known.DiscardUnknownFields()
        assert known == each
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def one(registry, name):
    """The only metric of a family."""
    (metric,) = families(protobuf_metrics(registry))[name].metric
    return metric


def labels(metric):
    return {each.name: each.value for each in metric.label}


def test_every_kind_of_metric():
    registry = CollectorRegistry()
    counter = Counter("made", "Counted.", ["ü"], registry=registry)
    counter.labels('a"\n').inc(3, {"trace_id": "1f"})
    Gauge("vllm:size", "A colon.", ["le"], registry=registry).labels("1").set(-2.5)
    Summary("took", "Sums.", registry=registry).observe(2)
    Info("build", "Facts.", registry=registry).info({"version": "1"})
    Enum("state", "States.", states=["on", "off"], registry=registry)
    Histogram("waited", "Times.", buckets=(0.1, 1), registry=registry).observe(0.5, {"trace_id": "2f"})

    class Others:
        def collect(self):
            odd = Metric("odd", "Unknown.", "unknown")
            odd.add_sample("odd", {}, math.inf, timestamp=1.5)
            yield odd
            yield Metric("none", "No samples.", "gauge")
            yield GaugeHistogramMetricFamily("sizes", "Now.", buckets=[("1", 2), ("+Inf", 3)], gsum_value=4)

    registry.register(Others())
    found = families(protobuf_metrics(registry))
    types = {name: (each.type, len(each.metric)) for name, each in found.items()}
    assert types == {
        "made_total": (COUNTER, 1), "vllm:size": (GAUGE, 1), "took": (SUMMARY, 1), "build_info": (GAUGE, 1),
        "state": (GAUGE, 2), "waited": (HISTOGRAM, 1), "odd": (UNTYPED, 1), "sizes": (GAUGE_HISTOGRAM, 1),
    }  # fmt: skip
    assert found["made_total"].help == "Counted."
    (made,) = found["made_total"].metric
    assert (labels(made), made.counter.value) == ({"ü": 'a"\n'}, 3)
    assert (labels(made.counter.exemplar), made.counter.exemplar.value) == ({"trace_id": "1f"}, 3)
    assert made.counter.created_timestamp.ToNanoseconds() == pytest.approx(1e9 * created(registry, "made"), abs=1e3)
    (size,) = found["vllm:size"].metric
    assert (labels(size), size.gauge.value) == ({"le": "1"}, -2.5)
    (took,) = found["took"].metric
    assert (took.summary.sample_count, took.summary.sample_sum) == (1, 2)
    (odd,) = found["odd"].metric
    assert (odd.untyped.value, odd.timestamp_ms) == (math.inf, 1500)
    (waited,) = found["waited"].metric
    assert [(each.upper_bound, each.cumulative_count) for each in waited.histogram.bucket] == [
        (0.1, 0),
        (1, 1),
        (math.inf, 1),
    ]
    assert labels(waited.histogram.bucket[1].exemplar) == {"trace_id": "2f"}
    assert not waited.histogram.HasField("schema")
    (sizes,) = found["sizes"].metric
    assert (sizes.histogram.sample_count, sizes.histogram.sample_sum) == (3, 4)


def created(registry, name):
    (value,) = (
        sample.value for family in registry.collect() for sample in family.samples if sample.name == f"{name}_created"
    )
    return value


def test_a_distribution_has_both_kinds_of_buckets_and_one_count():
    registry = CollectorRegistry()
    seconds = Distribution("took_seconds", "Times.", buckets=(0.5, 1), registry=registry)
    seconds.observe(2.0, 1, 0x1F)
    first = one(registry, "took_seconds").histogram
    assert (first.sample_count, first.sample_sum, first.schema) == (1, 2, 3)
    assert (first.zero_threshold, first.zero_count) == (2.0**-128, 0)
    assert [(each.offset, each.length) for each in first.positive_span] == [(1, 1)]  # above the last bound
    assert list(first.positive_delta) == [1]
    seconds.observe(0.25, 3)
    seconds.observe(0.0)
    seconds.observe(-1.0)
    second = one(registry, "took_seconds").histogram
    assert (second.sample_count, second.sample_sum, second.zero_count) == (6, 1.75, 1)
    assert [(each.offset, each.length) for each in second.positive_span] == [(-16, 1), (16, 1)]
    assert list(second.positive_delta) == [3, -2]
    assert [(each.offset, each.length) for each in second.negative_span] == [(0, 1)]
    assert list(second.negative_delta) == [1]
    counts = [(each.upper_bound, each.cumulative_count) for each in second.bucket]
    assert counts == [(0.5, 5), (1, 5), (math.inf, 6)]
    assert labels(second.bucket[2].exemplar) == {"trace_id": f"{0x1F:032x}"}
    assert second.created_timestamp.ToNanoseconds() == pytest.approx(1e9 * created(registry, "took_seconds"), abs=1e3)


def test_what_is_no_number_is_counted_and_in_no_bucket():
    """Prometheus takes a count that is larger than all buckets together if the sum is no number."""
    registry = CollectorRegistry()
    seconds = Distribution("took_seconds", "Times.", buckets=(0.5, 1), registry=registry)
    one(registry, "took_seconds")
    seconds.observe(math.nan)
    seconds.observe(1.0)
    found = one(registry, "took_seconds").histogram
    assert (found.sample_count, sum(found.positive_delta)) == (2, 1)
    assert math.isnan(found.sample_sum)


def test_a_distribution_without_values_is_a_native_histogram():
    registry = CollectorRegistry()
    Distribution("took_seconds", "Times.", buckets=(0.5, 1), registry=registry)
    found = one(registry, "took_seconds").histogram
    assert (found.sample_count, found.HasField("zero_threshold"), len(found.positive_span)) == (0, True, 0)


def test_series_of_distributions_stay_apart():
    registry = CollectorRegistry()
    seconds = Distributions("took_seconds", "Times.", ["face", "code"], buckets=(0.5, 1), registry=registry)
    seconds.labels("http", "200").observe(1.0)
    assert len(families(protobuf_metrics(registry))["took_seconds"].metric) == 1
    seconds.labels("http", "404").observe(1.0, 2)
    seconds.labels("http", "200").observe(1.0)
    found = families(protobuf_metrics(registry))["took_seconds"].metric
    assert [(labels(each), each.histogram.sample_count) for each in found] == [
        ({"face": "http", "code": "200"}, 2),
        ({"face": "http", "code": "404"}, 2),
    ]


def test_families_of_several_processes_are_one_with_a_label():
    registries = CollectorRegistry(), CollectorRegistry()
    for number, registry in enumerate(registries):
        Counter("made", "Counted." * 40, ["a"], registry=registry).labels("b").inc(number)
        Distribution("took_seconds", "Times.", buckets=(0.5, 1), registry=registry).observe(1, number + 1)
    together = {}
    for number, registry in enumerate(registries):
        for name, family in read_families(protobuf_metrics(registry)):
            together.setdefault(name, WrittenFamily(family.head, [])).add(family, "process", str(number))
    found = families(b"".join(each.encoded for each in together.values()))
    assert found["made_total"].help == "Counted." * 40
    assert [(labels(each), each.counter.value) for each in found["made_total"].metric] == [
        ({"a": "b", "process": "0"}, 0),
        ({"a": "b", "process": "1"}, 1),
    ]
    assert [each.histogram.sample_count for each in found["took_seconds"].metric] == [1, 2]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (ACCEPTS, True),
        (CONTENT_TYPE, True),
        ("application/vnd.google.protobuf", True),
        (ACCEPTS.replace("encoding=delimited", "encoding=delimited;q=0.1"), False),
        (ACCEPTS.replace("encoding=delimited", "encoding=delimited;q=0.8"), True),
        (ACCEPTS.replace("encoding=delimited", "encoding=text"), False),
        (ACCEPTS.replace("MetricFamily", "Other"), False),
        ("application/vnd.google.protobuf;q=0", False),
        ("application/vnd.google.protobuf;q=x", False),
        (OPENMETRICS, False),
        ("text/plain", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_only_a_scraper_that_prefers_it_gets_protobuf(accept, expected):
    assert prefers_protobuf(accept) is expected


def test_without_the_setting_such_a_scraper_gets_text():
    registry = CollectorRegistry()
    Gauge("some", "Any.", registry=registry)
    assert exposition_for(ACCEPTS, registry)[1] == CONTENT_TYPE
    body, content_type = exposition_for(ACCEPTS, registry, has_native=False)
    assert content_type.startswith(OPENMETRICS)
    assert body.endswith(b"# EOF\n")
    assert exposition_for("text/plain", registry)[0] == generate_latest(registry)
