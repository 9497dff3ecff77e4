"""The newest spans of kept traces in this process, for people who have no collector, or none that answers.

They are given by the id of their trace, or by the id of a request as clients see it, on the management port.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep_common.tracing import names
from lockstep_common.tracing.spans import Span

MAX_KEPT_SPANS = 4096
"""About 4 MB."""
MAX_GIVEN_SPANS = 1024
_TRACE_CHARS = 32


class KeptSpans:
    """A ring of spans that have ended. `add` is called in the service's loop, `find` in any thread."""

    def __init__(self, most: int = MAX_KEPT_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self.resource: dict[str, str] = {}
        """Names the process; empty: it has no traces."""

    def configure(self, resource: Mapping[str, str]) -> None:
        """Begin anew, with the process's names."""
        self._spans.clear()
        self.resource = dict(resource)

    def add(self, spans: Sequence[Span]) -> None:
        """Keep spans; the oldest ones go."""
        self._spans.extend(spans)

    def find(self, wanted: str) -> dict[str, Any]:
        """The spans of a trace or of a request, as JSON types; no spans: it is not known here."""
        spans = self._spans.copy()
        traces = {int(wanted, 16)} if _is_trace_id(wanted) else set()
        traces |= {span.trace.trace_id for span in spans if span.attributes.get(names.REQUEST_ID) == wanted}
        found = [_as_json(span) for span in spans if span.trace.trace_id in traces]
        return {"tracing": bool(self.resource), "resource": self.resource, "spans": found[-MAX_GIVEN_SPANS:]}


def _is_trace_id(text: str) -> bool:
    return len(text) == _TRACE_CHARS and all(character in "0123456789abcdef" for character in text)


def _as_json(span: Span) -> dict[str, Any]:
    return {
        "trace_id": f"{span.trace.trace_id:032x}",
        "span_id": f"{span.span_id:016x}",
        "parent_id": f"{span.parent_id:016x}" if span.parent_id else "",
        "name": span.name,
        "begin_ns": span.begin_ns,
        "end_ns": span.end_ns,
        "error": span.error,
        "attributes": span.all_attributes,
        "events": [[name, at_ns] for name, at_ns, _ in list(span.events)],
        "links": [f"{link.span_id:016x}" for link in span.links],
    }


KEPT_SPANS = KeptSpans()
"""Of this process."""
