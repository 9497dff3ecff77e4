"""The newest spans of kept traces in this process, for people who have no collector, or none that answers.

They are given by the id of their trace, or by the id of a request or a stream as clients see it, on the management
port. They are kept in the form that the collector gets, which takes a quarter of the memory of the objects.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lockstep_common.tracing import names

MAX_KEPT_SPANS = 4096
"""About 2 MB."""
MAX_GIVEN_SPANS = 1024
_TRACE_CHARS = 32


class KeptSpans:
    """A ring of spans that have ended. Any thread may use it."""

    def __init__(self, most: int = MAX_KEPT_SPANS) -> None:
        self._spans: deque[bytes] = deque(maxlen=most)
        self._fill: Callable[[], None] = lambda: None
        self.resource: dict[str, str] = {}
        """Names the process; empty: it has no traces."""

    def configure(self, resource: Mapping[str, str], fill: Callable[[], None] = lambda: None) -> None:
        """Begin anew, with the process's names. `fill` is called before a search, and adds what there is."""
        self._spans.clear()
        self.resource, self._fill = dict(resource), fill

    def add(self, spans: Sequence[bytes]) -> None:
        """Keep encoded spans; the oldest ones go."""
        self._spans.extend(spans)

    def find(self, wanted: str) -> dict[str, Any]:
        """The spans of a trace, of a request or of a stream, as JSON types; no spans: it is not known here."""
        self._fill()
        spans = self._spans.copy()
        named = _decoded(span for span in spans if wanted.encode(errors="replace") in span)
        traces = {span["trace_id"] for span in named if names.is_called(span["attributes"], wanted)}
        if _is_trace_id(wanted):
            traces.add(wanted)
        ids = [bytes.fromhex(trace_id) for trace_id in traces]
        some = _decoded(span for span in spans if any(trace_id in span for trace_id in ids))
        found = [span for span in some if span["trace_id"] in traces]
        return {"tracing": bool(self.resource), "resource": self.resource, "spans": found[-MAX_GIVEN_SPANS:]}


def _is_trace_id(text: str) -> bool:
    return len(text) == _TRACE_CHARS and all(character in "0123456789abcdef" for character in text)


def _decoded(spans: Iterable[bytes]) -> list[dict[str, Any]]:
    """Spans as JSON types."""
    # Imported when somebody asks: it takes memory and time.
    from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans  # noqa: PLC0415

    return [_as_json(span) for span in ScopeSpans.FromString(b"".join(spans)).spans]


def _as_json(span: Any) -> dict[str, Any]:
    attributes = {each.key: _value(each.value) for each in span.attributes}
    return {
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "name": span.name,
        "begin_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "error": attributes.get(names.ERROR_TYPE, "") if span.status.code else "",
        "attributes": attributes,
        "events": [[event.name, event.time_unix_nano] for event in span.events],
        "links": [link.span_id.hex() for link in span.links],
    }


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


KEPT_SPANS = KeptSpans()
"""Of this process."""
