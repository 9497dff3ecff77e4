import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import (
    Attributes,
    Kept,
    Kind,
    Shared,
    Span,
    Tracing,
    make_tracing,
    names,
)
from lockstep_common.tracing.batch import BATCH_PARTS, SpanBatch
from lockstep_common.tracing.encoding import encode_resource, encode_span
from lockstep_common.tracing.kept import KeptSpans
from lockstep_common.tracing.options import TraceOptions, trace_options
from lockstep_common.tracing.queue import BATCH_SPANS, SpanQueue
from otlp_receiver import grpc_receiver, http_receiver
from traces_in_memory import CALLER, Given, count, tracing


def message(spans, resource=None):
    """What the collector gets."""
    from lockstep_common.tracing.otlp import message_of, plain  # noqa: PLC0415 - see the test of imports

    attributes = {} if resource is None else plain(resource)
    return message_of([encode_span(span) for span in spans], encode_resource(attributes))


def parsed(content):
    """The spans of a message of one process."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: PLC0415

    (of_process,) = ExportTraceServiceRequest.FromString(content).resource_spans
    return of_process


@pytest.mark.parametrize(
    ("endpoint", "protocol", "compression"),
    [("http://[::1", "grpc", ""), ("http://[::1", "http", ""), ("http://c:4317", "grpc", "zstd")],
)
def test_what_the_sdk_does_not_take_is_a_sentence(monkeypatch, endpoint: str, protocol, compression: str):
    """Services end with exit code 2 and that sentence: another start cannot help."""
    if compression:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    with pytest.raises(LockstepError, match=r"^otlp_endpoint cannot be used, or .* \(\w+\)$") as refused:
        make_tracing(TraceOptions(endpoint, protocol, 1.0, 10.0), {"service.name": "x"})
    assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_arrive_as_they_were_made(protocol: str):
    with (grpc_receiver if protocol == "grpc" else http_receiver)() as receiver:
        options = TraceOptions(receiver.address, protocol, 1.0, 10.0)  # type: ignore[arg-type]
        made = make_tracing(options, {"service.name": "lockstep-router"})
        trace = made.trace(TraceContext(5, 6, True, "vendor=1"))
        root = trace.begin("request", kind=Kind.SERVER)
        root.attributes |= {"lockstep.failovers": 2, "gen_ai.response.finish_reasons": ["stop"]}
        root.shared = (Shared({"gen_ai.request.model": "m" * 256}),)
        attempt = trace.begin("attempt", root)
        attempt.link(TraceContext(5, 77, True))
        attempt.event("chunk", {"lockstep.tokens": 3})
        trace.end(attempt, "silent")
        trace.end(root)
        trace.release()
        made.close()
        arrived = {span.name: span for span in receiver.wait({"request": 1, "attempt": 1})}
    request, tried = arrived["request"], arrived["attempt"]
    assert request.trace_id == tried.trace_id == f"{5:032x}"
    assert (request.parent_id, tried.parent_id) == (f"{6:016x}", request.span_id)
    assert request.state == "vendor=1"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert request.attributes["gen_ai.request.model"] == "m" * 256
    assert request.resource["service.name"] == "lockstep-router"
    assert tried.links == (f"{77:016x}",)
    assert [(name, attributes) for name, _, attributes in tried.events] == [("chunk", {"lockstep.tokens": 3})]
    assert (tried.is_error, request.is_error) == (True, False)
    assert tried.attributes["error.type"] == "silent"
    assert request.begin_ns <= tried.begin_ns <= tried.end_ns <= request.end_ns


def test_messages_are_those_of_the_sdk():
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import (  # noqa: PLC0415 - see the test of imports
        encode_spans as sdk_message,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from sdk_spans import to_readable  # noqa: PLC0415

    made, exported = tracing(ratio=1.0)
    alike = Shared({"yes": True, "one": 1, "half": 0.5})
    for parent in (None, TraceContext(5, 6, True, "vendor=1,other=2"), TraceContext(7, 8, True)):
        trace = made.trace(parent)
        root = trace.begin("POST /v1/completions", kind=Kind.SERVER)
        values = (True, 1, 1.0, False, 0, 0.0, -1, -(1 << 63), (1 << 63) - 1, 127, 128, 16_384, -2.5, "", "ü" * 100)
        root.attributes |= {f"a{number}": value for number, value in enumerate(values)}
        root.attributes |= {"same": True, "tuple": ("stop",)}
        root.shared = (alike, Shared({"list": ["stop", "", "length"], "none": [], "text": "t" * 200}))
        child = trace.begin("attempt", root, Kind.CLIENT)
        child.attributes |= {"same": 1, "list": ["a"]}
        child.shared = (alike,)
        child.links = (TraceContext(5, 77, True), TraceContext(6, 78, False, "vendor=3"))
        child.event("chunk")
        child.event("first_token", {"same": 1.0, "text": "t" * 300})
        trace.end(child, "silent")
        trace.end(trace.begin("decode", child))
        trace.end(root)
        trace.release()
    resource = Resource({"service.name": "lockstep-router", "process.pid": 7, "process.command_args": ["a", "b"]})
    assert len(exported) == 9
    expected = sdk_message([to_readable(span, resource) for span in exported])
    for _ in range(2):  # the second time with what is remembered
        assert type(expected).FromString(message(exported, resource)) == expected


def test_values_that_never_come_again_are_encoded_too_and_are_not_remembered():
    from lockstep_common.tracing import encoding  # noqa: PLC0415

    made, exported = tracing(ratio=1.0)
    trace = made.trace()
    sizes = (1, 100, 126, 127, 128, 200, 16_400)
    texts = [f"{number:x}" * size for number in range(400) for size in sizes[: 1 + number % len(sizes)]]
    values = [*texts, *range(2000)]
    for value in values:
        exported.append(trace.begin("request"))
        exported[-1].attributes["ever.new"] = value
    found = [span.attributes[0].value for span in parsed(message(exported)).scope_spans[0].spans]
    assert [each.string_value or each.int_value for each in found] == values
    sizes_of_caches = [each.cache_info() for each in vars(encoding).values() if hasattr(each, "cache_info")]
    assert all(0 < each.maxsize <= 1024 for each in sizes_of_caches)


def test_values_of_a_resource_that_are_not_plain_do_not_stop_the_export():
    resource = SimpleNamespace(attributes={"map": {"a": 1}, "nothing": None, "good": "g"})
    attributes = parsed(message([], resource)).resource.attributes
    assert {each.key: each.value.string_value for each in attributes} == {
        "map": "{'a': 1}",
        "nothing": "None",
        "good": "g",
    }


def test_text_that_has_no_utf8_loses_those_characters_only():
    made, exported = tracing(ratio=1.0)
    trace = made.trace()
    root = trace.begin("request")
    root.attributes["lockstep.worker"] = "w\ud8000"
    trace.end(root)
    (attribute,) = parsed(message(exported)).scope_spans[0].spans[0].attributes
    assert attribute.value.string_value == "w?0"


def test_a_full_queue_never_waits_and_counts_what_it_drops():
    let_go, entered = threading.Event(), threading.Event()

    def stuck(_: object) -> bool:
        entered.set()
        return let_go.wait(30)

    before = count("full")
    queue = SpanQueue(stuck, let_go.set, max_spans=2000)
    made = Tracing(ratio=1.0, slow_s=1.0, export=queue.put)
    trace = made.trace()
    batch = [trace.begin("attempt") for _ in range(1200)]
    queue.put(batch)
    assert entered.wait(20)  # its thread hangs in the exporter now, with some of them
    for _ in range(10):
        queue.put(batch)
    assert count("full") - before == 1200 * 11 - BATCH_SPANS - 2000
    queue.close(0.01)


def test_a_failing_exporter_loses_spans_and_nothing_else():
    failed = threading.Event()

    def failing(_: object) -> bool:
        failed.set()
        raise OSError

    before = count("failed")
    queue = SpanQueue(failing)
    trace = Tracing(ratio=1.0, slow_s=1.0, export=queue.put).trace()
    trace.end(trace.begin("request"))
    queue.put([trace.begin("attempt")])
    queue.close(20)
    assert failed.is_set()
    assert count("failed") - before == 2


def test_spans_that_come_between_the_last_export_and_the_end_are_exported():
    """The thread has found nothing more to export and stops there, until `close` has added a span and waits for it."""
    exported, emptied, go_on = [], threading.Event(), threading.Event()
    before = count("failed")
    span = Tracing(ratio=1.0, slow_s=1.0, export=exported.extend).trace().begin("attempt")

    def stop_when_empty(frame, event, _):
        if frame.f_code.co_name == "_empty" and event == "return" and exported and not emptied.is_set():
            emptied.set()
            assert go_on.wait(20)
        return stop_when_empty

    def let_go_at_join(frame, *_):
        if frame.f_code is threading.Thread.join.__code__:
            go_on.set()

    def fill():
        if emptied.is_set():
            queue.put([span])

    traced = threading.gettrace(), sys.gettrace()
    threading.settrace(stop_when_empty)
    try:
        queue = SpanQueue(lambda spans: exported.extend(spans) is None, fill=fill)
        queue.put([span] * BATCH_SPANS)
        assert emptied.wait(20)
        sys.settrace(let_go_at_join)
        queue.close(20)
    finally:
        threading.settrace(traced[0])
        sys.settrace(traced[1])
    assert len(exported) == BATCH_SPANS + 1
    assert count("failed") == before


def test_spans_wait_for_others_only_so_long():
    exported: list[bytes] = []
    has_come = threading.Event()

    def export(spans):
        exported.extend(spans)
        has_come.set()
        return True

    queue = SpanQueue(export, every_s=0.05)
    try:
        queue.put([b"one"])
        assert has_come.wait(20)
    finally:
        queue.close(20)
    assert exported == [b"one"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_exporter_that_is_gone_does_not_keep_the_process(protocol: str):
    before = count("exported"), count("failed")
    made = make_tracing(TraceOptions("127.0.0.1:9", protocol, 1.0, 10.0), {"service.name": "x"})  # type: ignore[arg-type]
    trace = made.trace()
    trace.end(trace.begin("request"))
    made.close(0.2)  # interrupts the exporter's retries
    deadline = time.monotonic() + 20
    while count("failed") == before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (count("exported"), count("failed")) == (before[0], before[1] + 1)


def test_kept_spans_are_found_by_trace_request_and_stream_and_are_bounded() -> None:
    kept = KeptSpans(3)
    assert kept.find("req-1") == {"tracing": False, "resource": {}, "spans": []}
    kept.configure({"service.name": "lockstep-router"})
    made = Tracing(ratio=1.0, slow_s=1.0, export=lambda spans: kept.add([encode_span(span) for span in spans]))
    trace = made.trace(CALLER)
    trace.keep(Kept.ERROR)
    request = trace.begin("request")
    request.attributes |= {names.REQUEST_ID: "req-1", names.STREAM: "r-1", "yes": True, "half": 0.5, "list": ("a", "b")}
    child = trace.begin("route", request)
    child.event("chosen")
    child.link(TraceContext(5, 77, True))
    trace.end(child, "lost")
    trace.end(request)
    body = json.loads(json.dumps(kept.find("req-1")))
    assert [each["name"] for each in body["spans"]] == ["route", "request"]
    first, last = body["spans"]
    assert (first["parent_id"], first["error"], first["events"][0][0]) == (last["span_id"], "lost", "chosen")
    assert (first["links"], last["parent_id"], last["error"]) == ([f"{77:016x}"], f"{CALLER.span_id:016x}", "")
    assert last["attributes"] == request.attributes | {"list": ["a", "b"]}
    assert (last["begin_ns"], last["end_ns"]) == (request.begin_ns, request.end_ns)
    assert kept.find(f"{CALLER.trace_id:032x}") == kept.find("r-1") == body
    assert kept.find("0" * 32)["spans"] == kept.find("req-2")["spans"] == []
    other = made.trace()
    for _ in range(3):
        other.end(other.begin("queue"))
    assert kept.find("req-1")["spans"] == [], "the oldest go"


def test_traces_are_kept_in_memory_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"OTEL_TRACES_EXPORTER": "memory"}
    options = trace_options(Given(), memory)
    assert options == trace_options(Given(otlp_endpoint="memory"), {}) == TraceOptions("", "grpc", 1.0, 10.0)
    assert trace_options(Given(trace_ratio=0.5), memory) == TraceOptions("", "grpc", 0.5, 10.0)
    assert trace_options(Given(), memory | {"OTEL_TRACES_SAMPLER_ARG": "0.2"}) == TraceOptions("", "grpc", 0.2, 10.0)
    monkeypatch.setattr("lockstep_common.tracing.KEPT_SPANS", kept := KeptSpans())
    made = make_tracing(options, {"service.instance.id": "w0"})
    trace = made.trace()
    trace.end(trace.begin("request"))
    made.close()
    found = kept.find(f"{trace.trace_id:032x}")
    assert (found["resource"], [each["name"] for each in found["spans"]]) == (
        {"service.instance.id": "w0"},
        ["request"],
    )


def test_a_span_that_cannot_be_encoded_is_counted_and_its_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep_common.tracing.KEPT_SPANS", kept := KeptSpans())
    made = make_tracing(TraceOptions("", "grpc", 1.0, 10.0), {"service.instance.id": "w0"})
    before, trace = count("failed"), made.trace()
    root = trace.begin("request")
    child = trace.begin("route", root)
    child.attributes["lockstep.worker"] = object()  # type: ignore[assignment]
    trace.end(child)
    trace.end(root)
    trace.release()
    assert [each["name"] for each in kept.find(trace.id_bytes.hex())["spans"]] == ["request"]
    assert count("failed") == before + 1


def test_a_batch_is_encoded_when_it_is_full_or_wanted() -> None:
    taken: list[bytes] = []
    batch = SpanBatch(taken.extend)
    trace = Tracing(ratio=1.0, slow_s=1.0, export=batch.add).trace()
    for _ in range(BATCH_PARTS - 1):
        trace.end(trace.begin("attempt"))
    assert taken == []
    trace.end(trace.begin("attempt"))
    assert len(taken) == BATCH_PARTS
    trace.end(trace.begin("attempt"))
    batch.encode()
    batch.encode()
    assert len(taken) == BATCH_PARTS + 1


def test_spans_that_are_made_later_are_made_in_their_batch() -> None:
    taken: list[bytes] = []
    batch = SpanBatch(taken.extend)
    trace = Tracing(ratio=1.0, slow_s=1.0, export=batch.add, export_late=batch.add_late).trace()
    root, calls, before = trace.begin("request"), [], count("failed")

    def make(worker: object) -> list[Span]:
        calls.append(worker)
        attributes: Attributes = {"lockstep.worker": worker}  # type: ignore[dict-item]
        return [trace.ended(name, root, 1, 2, attributes) for name in ("attempt", "route")]

    for number in range(BATCH_PARTS // 4 - 1):
        trace.end_late((make, (f"w{number}",), 2, 2))
    assert calls == []
    trace.end_late((make, (object(),), 2, 2))  # cannot be encoded
    assert len(calls) == BATCH_PARTS // 4
    assert len(taken) == 2 * (len(calls) - 1)
    assert count("failed") == before + 2


def test_events_count_in_a_batch() -> None:
    taken: list[bytes] = []
    trace = Tracing(ratio=1.0, slow_s=1.0, export=SpanBatch(taken.extend).add).trace()
    for _ in range(2):
        assert taken == []
        span = trace.begin("decode")
        for number in range(BATCH_PARTS // 2):
            span.event("step", {names.TOKENS: number})
        trace.end(span)
    assert len(taken) == 2


def test_threads_that_encode_at_once_lose_and_double_nothing() -> None:
    taken: list[bytes] = []
    batch, is_over = SpanBatch(taken.extend), threading.Event()

    def encode() -> None:
        while not is_over.is_set():
            batch.encode()

    threads = [threading.Thread(target=encode) for _ in range(3)]
    for thread in threads:
        thread.start()
    made = Tracing(ratio=1.0, slow_s=1.0, export=batch.add)
    for _ in range(40):
        trace = made.trace()
        for _ in range(100):
            trace.end(trace.begin("attempt"))
    is_over.set()
    for thread in threads:
        thread.join(20)
    batch.encode()
    assert len(taken) == len(set(taken)) == 4000
