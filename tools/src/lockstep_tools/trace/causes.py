"""What a request's time went to, in one line: the parts of its spans that each explain a wait, the longest first."""

from collections.abc import Iterable, Sequence

from lockstep_common.tracing import names

from lockstep_tools.trace.spans import Span, duration

_CAUSES = {
    "client": "waiting for the client to read",
    "limits": "Redis of the limits",
    "queue": "waiting for a turn",
    "kv fetch": "fetching KV blocks",
    "grammar": "compiling the grammar",
    "prefill": "computing the prompt",
    "decode": "generating",
}
_STATE_CALLS = "Journal."
_STATE = "state", "state server"
_STORE_CALLS = "redis "
_STORE = "redis", "Redis of the state server"
_MOST_SHOWN = 4
_LEAST_SHARE = 0.01
_NS = 1_000_000_000


def causes(spans: Sequence[Span]) -> str:
    """The parts of the time by cause, with their shares of the whole; they may overlap. Empty: nothing explains it."""
    whole_ns = max(each.end_ns for each in spans) - min(each.begin_ns for each in spans)
    by_cause: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        cause = _cause(span.name)
        if cause is not None:
            by_cause.setdefault(cause, []).append(span)
    spent = sorted(((_spent_ns(name, of_it), name, words) for (name, words), of_it in by_cause.items()), reverse=True)
    shown = [
        f"{words} ({name}) {duration(ns)}, {100 * ns / whole_ns:.0f} %"
        for ns, name, words in spent[:_MOST_SHOWN]
        if ns >= _LEAST_SHARE * whole_ns > 0
    ]
    return f"its time: {'; '.join(shown)}" if shown else ""


def _cause(name: str) -> tuple[str, str] | None:
    if name.startswith(_STATE_CALLS):
        return _STATE
    if name.startswith(_STORE_CALLS):
        return _STORE
    return (name, _CAUSES[name]) if name in _CAUSES else None


def _spent_ns(name: str, spans: Iterable[Span]) -> int:
    """The time in which at least one of these spans was open; a client's span has what it waited within it."""
    total = until = 0
    for span in sorted(spans, key=lambda each: each.begin_ns):
        begin = max(span.begin_ns, until)
        if span.end_ns > begin:
            total += min(span.end_ns - begin, _waited_ns(span)) if name == "client" else span.end_ns - begin
            until = span.end_ns
    return total


def _waited_ns(span: Span) -> int:
    try:
        return max(0, int(float(span.attributes[names.CLIENT_WAIT_S]) * _NS))
    except (KeyError, ValueError, OverflowError):
        return span.end_ns - span.begin_ns
