"""The span `request`: one for each request of a client, from its arrival to the end of its answer. And the span
`takeover`, when this router goes on with what another one began.

The spans below it, `route` and `attempt`, are those of its streams. `client` says how long its answer waited for the
client to read.

What it holds of the request are numbers and the name of a model that exists. It never holds text of clients.
"""

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from lockstep_api.v1 import inference_pb2
from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import CURRENT, MAX_TEXT, Attributes, Kept, Kind, Shared, Span, Trace, Tracing, names

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_CLIENTS_TIMEOUT = 504
"""The request's own timeout has passed: its span says so, but that alone is no reason to keep the trace."""
_MIN_CLIENT_WAIT_NS = 10_000_000
"""A write that takes less has waited for the event loop, not for the client."""
_METHODS = frozenset({"http", "websocket"})
"""Faces whose calls have a method of HTTP."""
MAX_SHARED = 1024
"""Sets of values of attributes that are remembered, of each kind: what clients choose may be all different."""


class EndedCall(Protocol):
    """What was called, in words of a bounded set."""

    face: str
    endpoint: str
    method: str


class EndedRequest(Protocol):
    """The facts about a request that has ended."""

    @property
    def request_id(self) -> str: ...  # noqa: D102
    @property
    def status(self) -> int: ...  # noqa: D102
    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def completion_tokens(self) -> int: ...  # noqa: D102
    @property
    def failovers(self) -> int: ...  # noqa: D102
    @property
    def resumed(self) -> bool: ...  # noqa: D102


class RequestTrace:
    """A request's span, and the trace that its streams have in common."""

    __slots__ = ("_asked", "_client", "_client_read_ns", "_first_token_s", "finish_reasons", "root")

    def __init__(self, trace: Trace, name: str = "request", kind: Kind = Kind.SERVER) -> None:
        self.root: Span = trace.begin(name, kind=kind)
        self.finish_reasons: list[str] = []
        self._asked: tuple[str, int, inference_pb2.Sampling | None] | None = None
        self._first_token_s: float | None = None
        self._client: Span | None = None
        """From the first write that waited for the client to the end of the last one; attributes have the waits."""
        self._client_read_ns = 0

    @property
    def trace(self) -> Trace:
        """The trace of its span."""
        return self.root.trace

    def describe(self, model: str, choices: int, sampling: inference_pb2.Sampling | None = None) -> None:
        """Note what is asked for, once it is known to fit a model.

        Args:
            model: the name of a model that exists.
            choices: answers to each prompt.
            sampling: that of the first stream, which nobody changes any more; None: it makes no tokens.
        """
        self._asked = model, choices, sampling

    def note_first_token(self, seconds: float) -> None:
        """Note a stream's first token, which came so long after the request; the first one counts."""
        if self._first_token_s is None:
            self._first_token_s = seconds
            if (trace := self.root.trace).kept is None:
                trace.keep_if_slow(seconds)

    def note_write(self, began_ns: int) -> None:
        """Note that a write to the client has ended, which began at this time of the monotonic clock."""
        now_ns = time.monotonic_ns()
        waited_ns = now_ns - began_ns
        if waited_ns < _MIN_CLIENT_WAIT_NS:
            return
        if self._client is None:
            self._client = self.trace.begin("client", self.root, at_ns=began_ns)
            self._client.attributes = {names.CLIENT_WAIT_S: 0.0, names.CLIENT_WAITS: 0}
        attributes: dict[str, Any] = self._client.attributes
        attributes[names.CLIENT_WAIT_S] += waited_ns / 1e9
        attributes[names.CLIENT_WAITS] += 1
        self._client_read_ns = now_ns

    def end(self, call: EndedCall, record: EndedRequest, seconds: float) -> int:
        """Note the end of the answer. Nobody changes the facts about it any more.

        Returns:
            The trace's id if it is kept; else 0.
        """
        trace = self.root.trace
        if not trace.is_settled:
            trace.settle()
        if trace.kept is None:
            if record.status >= 500 and record.status != _CLIENTS_TIMEOUT:
                trace.keep(Kept.ERROR)
            trace.keep_if_slow(seconds)
        CURRENT.set(None)
        if self._client is not None:
            trace.end(self._client, at_ns=self._client_read_ns)
        kept = trace.kept
        trace.end_late((_answer, (self, call, record, kept, time.monotonic_ns()), 1, 0))
        trace.release()
        return 0 if kept is None else trace.trace_id

    def complete(self) -> Span:
        """Its span, with what was noted until now."""
        root = self.root
        if self._first_token_s is not None:
            root.attributes[names.RESPONSE_FIRST_CHUNK_S] = self._first_token_s
        if self._asked is not None:
            model, choices, sampling = self._asked
            if sampling is None:
                root.shared += (_asked(model, choices),)
            else:
                sampled = sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k
                root.shared += (_asked(model, choices, *sampled),)
        return root


def _answer(request: RequestTrace, call: EndedCall, record: EndedRequest, kept: Kept | None, at_ns: int) -> list[Span]:
    """The span of a request that has ended at this time of the monotonic clock."""
    root = request.complete()
    attributes = root.attributes
    # The client may have chosen it, of 64 harmless characters: it is in the answer and in the log too.
    attributes[names.RESPONSE_ID] = attributes[names.REQUEST_ID] = record.request_id
    attributes[names.INPUT_TOKENS] = record.prompt_tokens
    attributes[names.OUTPUT_TOKENS] = record.completion_tokens
    status = record.status
    root.shared += (
        _answered(call.face, call.endpoint, call.method, status),
        _went(record.failovers, record.resumed, tuple(request.finish_reasons), kept),
    )
    root.trace.close(root, str(status) if status >= 500 else "", at_ns)
    return [root]


@lru_cache(MAX_SHARED)
def _asked(
    model: str,
    choices: int,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 0.0,
    top_k: int = 0,
) -> Shared:
    """What is asked for; without `max_tokens` it makes no tokens."""
    attributes: Attributes = {}
    name = model[:MAX_TEXT]
    attributes |= {names.REQUEST_MODEL: name, names.RESPONSE_MODEL: name}
    if choices != 1:
        attributes[names.REQUEST_CHOICES] = choices
    if max_tokens is not None:
        attributes |= {
            names.REQUEST_MAX_TOKENS: max_tokens,
            names.REQUEST_TEMPERATURE: temperature,
            names.REQUEST_TOP_P: top_p,
        }
    if top_k:
        attributes[names.REQUEST_TOP_K] = top_k
    return Shared(attributes)


@lru_cache(MAX_SHARED)
def _answered(face: str, endpoint: str, method: str, status: int) -> Shared:
    """What was called, and the answer's status."""
    attributes: Attributes = {
        names.PROVIDER: names.PROVIDER_NAME,
        names.FACE: face,
        names.HTTP_ROUTE: endpoint,
        names.HTTP_STATUS: status,
    }
    if operation := _OPERATIONS.get(endpoint):
        attributes[names.OPERATION] = operation
    if face in _METHODS:
        attributes[names.HTTP_METHOD] = method
    return Shared(attributes)


@lru_cache(MAX_SHARED)
def _went(failovers: int, resumed: bool, finish_reasons: tuple[str, ...], kept: Kept | None) -> Shared:
    """How the answer came about, and why its trace is kept."""
    attributes: Attributes = {names.FAILOVERS: failovers, names.RESUMED: resumed}
    if finish_reasons:
        attributes[names.RESPONSE_FINISH_REASONS] = finish_reasons
    if kept is not None:
        attributes[names.KEPT_BECAUSE] = kept.value
    return Shared(attributes)


def begin_request(tracing: Tracing | None, headers: Mapping[str, str]) -> RequestTrace | None:
    """The trace of a request with these headers, by names in lower case; None: there are no traces."""
    if tracing is None:
        return None
    given = headers.get("traceparent")
    context = None if given is None else TraceContext.parse(given, headers.get("tracestate", ""))
    request = RequestTrace(tracing.trace(context))
    CURRENT.set(request.root)  # what the task calls, and the tasks that it starts, is for this request
    return request


def name_stream(stream_id: str) -> None:
    """Note the resumable stream that the task's request reads: clients know it by this id."""
    if (reader := CURRENT.get()) is not None:
        reader.attributes[names.STREAM] = stream_id


def join_stream(traceparent: str, running: RequestTrace | None = None) -> None:
    """The task's request reads what another request began. If it came back for that, its spans join the other one's
    trace; else it was begun for its own sake (with an idempotency key), and gets a link.

    Args:
        traceparent: the context of the request that began the stream.
        running: the trace of what goes on with it in this process; None: nothing does, or it has no trace.
    """
    reader, context = CURRENT.get(), TraceContext.parse(traceparent)
    if reader is None or context is None:
        return
    if reader.parent_id == context.span_id:  # it is there already
        reader.trace.settle()
    elif not reader.trace.is_settled:
        reader.trace.join(reader, context, None if running is None else running.root)
    elif all(link.span_id != context.span_id for link in reader.links):
        reader.link(context)


class Takeover(RequestTrace):
    """A request that another router began and this one goes on with. It joins the trace, which is kept, and so is that
    of the reader who came for it, to which it has a link.
    """

    def __init__(self, trace: Trace, reader: Span | None) -> None:
        super().__init__(trace, "takeover", Kind.INTERNAL)
        trace.keep(Kept.FAILED_OVER)
        if reader is not None:
            reader.trace.keep(Kept.FAILED_OVER)
            self.root.link(reader.context)

    def close(self) -> None:
        """Its streams have ended."""
        self.trace.end(self.complete())
        self.trace.release()


def begin_takeover(tracing: Tracing | None, traceparent: str) -> Takeover | None:
    """The trace of a request that another router began, by the context that it stored; None: there is none."""
    context = None if tracing is None else TraceContext.parse(traceparent)
    return None if tracing is None or context is None else Takeover(tracing.trace(context), CURRENT.get())
