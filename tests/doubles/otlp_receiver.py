"""A collector that keeps what it gets: OTLP over gRPC or HTTP, on a free port, in threads of the test's process."""

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

Value = bool | int | float | str | list[object]


@dataclass(frozen=True)
class Received:
    """A span that has arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none."""
    begin_ns: int
    end_ns: int
    attributes: dict[str, Value]
    events: tuple[tuple[str, int, dict[str, Value]], ...]
    links: tuple[str, ...]
    """Ids of spans."""
    is_error: bool
    state: str
    resource: dict[str, Value]


class Receiver:
    """Everything that has arrived so far."""

    def __init__(self) -> None:
        self.address = ""
        self.raw = b""
        """All messages as they came, to search for what must not be in them."""
        self._spans: list[Received] = []
        self._arrival = threading.Condition()

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    @property
    def spans(self) -> list[Received]:
        """The spans in the order in which they came."""
        with self._arrival:
            return list(self._spans)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Keep the spans of a message."""
        with self._arrival:
            self.raw += request.SerializeToString()
            self._spans += received(request.resource_spans)
            self._arrival.notify_all()

    def wait(self, names: dict[str, int], timeout_s: float = 20.0) -> list[Received]:
        """All spans, once there are at least so many of each of these names."""
        until = time.monotonic() + timeout_s
        with self._arrival:
            while True:
                counts = {name: sum(span.name == name for span in self._spans) for name in names}
                if all(counts[name] >= count for name, count in names.items()):
                    return list(self._spans)
                left_s = until - time.monotonic()
                assert left_s > 0, f"wanted {names}, there are {counts} of {len(self._spans)} spans"
                self._arrival.wait(left_s)


def received(messages: Iterable[trace_pb2.ResourceSpans]) -> list[Received]:
    """The spans of messages of OTLP, in their order."""
    return [
        _received(span, _attributes(resource_spans.resource.attributes))
        for resource_spans in messages
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _received(span: trace_pb2.Span, resource: dict[str, Value]) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        tuple((event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
        tuple(link.span_id.hex() for link in span.links),
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        span.trace_state,
        resource,
    )


def _attributes(pairs: object) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}  # type: ignore[attr-defined]


def _value(value: common_pb2.AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else ""


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    """A collector for OTLP over gRPC; its address is host:port."""
    receiver = Receiver()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            receiver.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait(5)


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """A collector for OTLP over HTTP; its address is a URL without a path."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
