import subprocess
import sys
import time

import opentelemetry.semconv._incubating.attributes as conventions
import pytest
from lockstep_common.errors import LockstepError
from lockstep_common.settings import PodSettings
from lockstep_common.trace_context import TraceContext, parse_tracestate
from lockstep_common.tracing import (
    Kept,
    Kind,
    Late,
    Span,
    Trace,
    Tracing,
    names,
    setup_tracing,
    spans,
)
from lockstep_common.tracing.calls import calling
from lockstep_common.tracing.options import DEFAULT_RATIO, TraceOptions, trace_options
from opentelemetry.semconv._incubating.attributes import (
    db_attributes,
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    rpc_attributes,
)
from opentelemetry.semconv.schemas import Schemas
from traces_in_memory import CALLER, Given, count, tracing

# Decisions.


def test_a_trace_that_nothing_keeps_is_dropped_at_its_end():
    made, exported = tracing()
    trace = made.trace()
    trace.end(trace.begin("request"))
    assert made.waiting == 1
    trace.release()
    assert exported == []
    assert made.waiting == 0


def test_the_ratio_keeps_that_part_of_traces():
    made, _ = tracing(0.25)
    kept = sum(made.trace().kept is Kept.RATIO for _ in range(4000))
    assert 850 < kept < 1150  # five standard deviations


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_caller_decides_before_the_ratio(ratio: float):
    made, _ = tracing(ratio)
    assert made.trace(CALLER).kept is None
    assert made.trace(TraceContext(1, 1, True)).kept is Kept.PARENT


def test_what_happens_to_a_request_keeps_its_trace_with_all_spans_so_far():
    made, exported = tracing()
    trace = made.trace(CALLER)
    root = trace.begin("request", kind=Kind.SERVER)
    trace.end(trace.begin("route", root))
    assert not root.context.is_sampled
    trace.keep(Kept.FAILED_OVER)
    trace.keep(Kept.ERROR)
    assert root.context.is_sampled  # so that the next service keeps its part too
    trace.end(root)
    trace.release()
    assert [span.name for span in exported] == ["route", "request"]
    assert trace.kept is Kept.FAILED_OVER
    assert made.waiting == 0


def test_slow_requests_are_kept():
    made, _ = tracing()
    trace = made.trace()
    trace.keep_if_slow(0.9)
    assert trace.kept is None
    trace.keep_if_slow(1.1)
    assert trace.kept is Kept.SLOW


def test_a_trace_ends_with_its_last_part():
    made, exported = tracing()
    trace = made.trace()
    trace.hold()
    trace.end(trace.begin("request"))
    trace.release()  # the client has left, its stream goes on
    assert made.waiting == 1
    trace.keep(Kept.ERROR)
    trace.release()
    assert len(exported) == 1


def test_spans_of_a_kept_trace_are_exported_as_soon_as_they_end():
    made, exported = tracing(1.0)
    trace = made.trace()
    trace.end(trace.begin("route"))
    assert len(exported) == 1


# Bounds.


def test_a_trace_has_a_bounded_number_of_spans():
    made, exported = tracing(1.0)
    trace, before = made.trace(), count("limit")
    for _ in range(spans.MAX_SPANS + 7):
        trace.end(trace.begin("attempt"))
    assert len(exported) == spans.MAX_SPANS
    assert trace.is_full
    assert count("limit") == before + 7


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_span_that_all_others_are_below_is_never_beyond_the_bound(ratio: float):
    made, exported = tracing(ratio)
    trace, before = made.trace(), count("limit")
    root = trace.begin("request")
    for _ in range(spans.MAX_SPANS + 7):
        trace.end(trace.begin("attempt", root))
    trace.end(root)
    trace.keep(Kept.ERROR)
    trace.release()
    assert [span.name for span in exported] == ["attempt"] * spans.MAX_SPANS + ["request"]
    assert count("limit") == before + 7
    assert made.waiting == 0


def test_traces_that_are_not_decided_on_share_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "MAX_WAITING_SPANS", 5)
    made, exported = tracing()
    traces = [made.trace() for _ in range(8)]
    for trace in traces:
        trace.end(trace.begin("request"))
    assert made.waiting == 5
    for trace in traces:
        trace.keep(Kept.ERROR)
        trace.release()
    assert len(exported) == 5
    assert made.waiting == 0


def test_a_span_has_a_bounded_number_of_events():
    span = tracing()[0].trace().begin("decode")
    for _ in range(1000):
        span.event("step")
    assert len(span.events) == spans.MAX_EVENTS


def test_children_are_inside_their_parents():
    trace = tracing()[0].trace()
    parent = trace.begin("attempt", at_ns=1000)
    child = trace.begin("queue", parent, at_ns=900)
    trace.end(child, at_ns=800)
    assert parent.begin_ns == child.begin_ns == child.end_ns


# The context of the caller.


def test_the_callers_span_is_the_parent():
    trace = tracing()[0].trace(CALLER)
    span = trace.begin("request")
    assert (span.parent_id, span.has_remote_parent, span.context.trace_id) == (0xDEF, True, CALLER.trace_id)
    assert span.context.state == "vendor=1"
    assert TraceContext.parse(span.context.traceparent, "vendor=1") == span.context


@pytest.mark.parametrize(
    "text",
    ["=1", "A=1", "a=1,a=2", "a=é", "a", "a=1,b", "a=1 ;x=,", ",".join(f"k{n}=1" for n in range(33)), "a=" + "1" * 600],
)
def test_malformed_tracestate_is_ignored(text: str):
    assert parse_tracestate(text) == ""
    parsed = TraceContext.parse("00-" + "1" * 32 + "-" + "2" * 16 + "-01", text)
    assert parsed is not None
    assert parsed.state == ""


def test_well_formed_tracestate_is_kept():
    assert parse_tracestate("a=1, tenant@vendor=b c,,z_-*/=!") == "a=1,tenant@vendor=b c,z_-*/=!"


def test_without_a_well_formed_traceparent_there_is_no_context():
    assert TraceContext.parse("00-" + "0" * 32 + "-" + "2" * 16 + "-01", "a=1") is None


# Requests that join another trace.


def resumed(made: Tracing, caller: TraceContext | None = CALLER):
    """A request that comes back for a stream, and a call that it has made."""
    trace = made.trace(caller)
    root = trace.begin("request", kind=Kind.SERVER)
    trace.defer()
    trace.end(trace.begin("Journal.Read", root))
    return trace, root


@pytest.mark.parametrize("is_sampled", [False, True])
def test_spans_join_the_trace_of_a_stream_which_decides(is_sampled: bool):
    made, exported = tracing(ratio=1.0)
    trace, root = resumed(made)
    assert exported == []
    trace.join(root, TraceContext(7, 8, is_sampled))
    assert (root.trace.kept is not None) == is_sampled
    root.trace.end(root)
    root.trace.release()
    assert made.waiting == 0
    if not is_sampled:
        assert exported == []
        return
    assert [span.name for span in exported] == ["Journal.Read", "request"]
    assert {span.context.trace_id for span in exported} == {7}
    assert (root.parent_id, root.has_remote_parent, root.links) == (8, True, (CALLER,))
    assert exported[0].parent_id == root.span_id


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_joins_a_trace_that_goes_on_here_shares_its_decision_and_its_bound(is_kept: bool):
    made, exported = tracing()
    stream = made.trace()
    first = stream.begin("request", kind=Kind.SERVER)
    trace, root = resumed(made, None)
    trace.join(root, first.context, first)
    assert (root.trace, root.parent_id, root.has_remote_parent, root.links) == (stream, first.span_id, False, ())
    stream.end(first)
    stream.release()  # the reader goes on
    if is_kept:
        root.trace.keep(Kept.ERROR)
    for _ in range(spans.MAX_SPANS):
        stream.end(stream.begin("client", root))
    stream.end(root)
    stream.release()
    assert len(exported) == (spans.MAX_SPANS if is_kept else 0)
    assert made.waiting == 0


# Spans that are made later.


def late_spans(trace: Trace, root: Span, made: list[str]) -> Late:
    """A span below `root` and one below that, which note that they are made."""
    began_ns = time.monotonic_ns()

    def make(name: str) -> list[Span]:
        made.append(name)
        upper = trace.ended(name, root, began_ns, began_ns + 5, {})
        return [trace.ended("lower", upper, began_ns + 1, began_ns + 4, {}, error="silent"), upper]

    return make, ("upper",), 2, 0


def test_spans_that_are_made_later_are_those_that_end_at_once():
    made, exported = tracing(1.0)
    trace = made.trace()
    root = trace.begin("request")
    trace.end_late(late_spans(trace, root, []))
    lower, upper = exported
    assert (upper.parent_id, lower.parent_id, lower.error) == (root.span_id, upper.span_id, "silent")
    assert lower.attributes == {"error.type": "silent"}
    assert root.begin_ns <= upper.begin_ns
    assert (lower.begin_ns - upper.begin_ns, upper.end_ns - lower.end_ns) == (1, 1)
    early = trace.ended("early", root, 0, 1, {})  # no child is before its parent
    assert early.begin_ns == early.end_ns == root.begin_ns


@pytest.mark.parametrize("is_kept", [False, True])
def test_spans_of_a_trace_that_is_dropped_are_never_made(is_kept: bool):
    made, exported = tracing()
    trace, calls = made.trace(), []
    root = trace.begin("request")
    trace.end_late(late_spans(trace, root, calls))
    trace.end(root)
    assert (calls, exported, made.waiting) == ([], [], 3)
    if is_kept:
        trace.keep(Kept.ERROR)
    trace.release()
    assert [span.name for span in exported] == (["lower", "upper", "request"] if is_kept else [])
    assert calls == ["upper"] * is_kept
    assert made.waiting == 0


def test_spans_that_are_made_later_move_to_the_trace_that_theirs_joins():
    made, exported = tracing()
    reader = made.trace()
    reader.defer()
    root = reader.begin("request")
    reader.end_late(late_spans(reader, root, []))
    reader.join(root, TraceContext(5, 7, True))
    assert {span.context.trace_id for span in (root, *exported)} == {5}
    assert [span.name for span in exported] == ["lower", "upper"]
    assert made.waiting == 0


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_spans_that_are_made_later_count_in_the_limits(ratio: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "MAX_WAITING_SPANS", spans.MAX_SPANS - 1)
    made, exported = tracing(ratio)
    trace, before = made.trace(), count("limit")
    root = trace.begin("request")
    for _ in range(spans.MAX_SPANS):
        trace.end_late(late_spans(trace, root, []))
    waiting = 0 if ratio else spans.MAX_SPANS - 1
    assert (len(exported), made.waiting) == (spans.MAX_SPANS if ratio else 0, waiting)
    assert count("limit") == before + 2 * spans.MAX_SPANS - (len(exported) or waiting)
    trace.release()
    assert made.waiting == 0


def test_traces_made_ahead_have_ids_of_their_own_and_the_time_of_their_beginning():
    made, _ = tracing()
    first = made.trace()
    time.sleep(0.01)
    before_ns = time.time_ns()
    traces = [made.trace() for _ in range(100)]
    assert len({trace.trace_id for trace in (first, *traces)}) == 101
    assert all(before_ns <= trace.begin("request").begin_ns <= time.time_ns() for trace in traces)


@pytest.mark.parametrize("kept", [None, Kept.SLOW])
def test_what_joins_a_trace_that_is_over_goes_by_its_decision(kept: Kept | None):
    made, exported = tracing()
    stream = made.trace()
    first = stream.begin("request")
    if kept is not None:
        stream.keep(kept)
    stream.end(first)
    stream.release()
    trace, root = resumed(made)
    trace.join(root, TraceContext(stream.trace_id, first.span_id, False), first)
    root.trace.end(root)
    root.trace.release()
    assert [span.name for span in exported] == (["request", "Journal.Read", "request"] if kept else [])
    assert root.context.trace_id == stream.trace_id
    assert made.waiting == 0


def test_what_is_kept_before_it_joins_is_kept_there():
    made, exported = tracing()
    trace, root = resumed(made)
    trace.keep(Kept.SLOW)
    assert exported == []
    trace.join(root, TraceContext(7, 8, False))
    assert [(span.name, span.trace.kept) for span in exported] == [("Journal.Read", Kept.SLOW)]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_what_joins_nothing_stays_a_trace_of_its_own(ratio: float):
    made, exported = tracing(ratio)
    trace, root = resumed(made, None)
    trace.settle()
    trace.end(root)
    trace.release()
    assert [span.context.trace_id for span in exported] == [trace.trace_id] * (2 if ratio else 0)
    assert made.waiting == 0


def test_a_call_tells_nobody_of_a_trace_that_its_span_may_leave():
    made, _ = tracing(ratio=1.0)
    trace = made.trace()
    root = trace.begin("request")
    trace.defer()
    spans.CURRENT.set(root)
    with calling("Journal.Read") as metadata:
        assert metadata == ()
    trace.join(root, TraceContext(7, 8, True))
    with calling("Journal.Take") as metadata:
        ((name, value),) = metadata
    assert (name, TraceContext.parse(value).trace_id) == ("traceparent", 7)  # type: ignore[union-attr]
    spans.CURRENT.set(None)


# Settings.


def test_without_an_endpoint_there_are_no_traces():
    assert trace_options(Given(), {}) is None
    assert setup_tracing("router", "r0", Given()) is None


def test_opentelemetrys_variables_count_where_settings_are_open():
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER_ARG": "0.5",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
    }
    options = trace_options(Given(), environment)
    assert options is not None
    assert (options.http_endpoint, options.protocol, options.ratio) == ("http://collector:4318/v1/traces", "http", 0.5)
    assert options.delay_s == 0.25
    options = trace_options(Given("c:4317", "grpc", 0.0), environment)
    assert options is not None
    assert (options.endpoint, options.protocol, options.ratio) == ("c:4317", "grpc", 0.0)
    assert trace_options(Given("c:4317"), {"OTEL_SDK_DISABLED": "true"}) is None
    assert trace_options(Given("c:4317"), {}) == TraceOptions("c:4317", "grpc", DEFAULT_RATIO, 10.0)
    options = trace_options(
        Given(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x", "OTEL_TRACES_SAMPLER": "always_on"}
    )
    assert options is not None
    assert (options.http_endpoint, options.ratio) == ("http://c/x", 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_TRACES_SAMPLER_ARG", "often"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-5"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "99999999"),
    ],
)
def test_unusable_variables_are_named(name: str, value: str):
    with pytest.raises(LockstepError, match=r"must be") as refused:
        trace_options(Given("c:4317"), {name: value})
    assert refused.value.field == name


@pytest.mark.parametrize("endpoint", ["http://user:secret@collector", "ftp://collector", "", "a b"])
def test_unusable_endpoints_are_refused(endpoint: str):
    with pytest.raises(ValueError, match="otlp_endpoint"):
        PodSettings(otlp_endpoint=endpoint)


def test_names_are_those_of_the_conventions():
    modules = (gen_ai_attributes, http_attributes, rpc_attributes, error_attributes, db_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    ours = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    ours -= {names.SCHEMA_URL, names.PROVIDER_NAME}
    assert {name for name in ours if not name.startswith("lockstep.")} <= known
    assert names.SCHEMA_URL in {schema.value for schema in Schemas}
    assert conventions  # the package that they are compared with


def test_the_sdk_is_imported_by_those_who_trace_only():
    code = "import sys, lockstep_common.tracing as t; sys.exit(any(n.startswith('opentelemetry') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
