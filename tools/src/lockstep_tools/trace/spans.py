"""Spans as they are drawn, their readers for the services' own form and for Jaeger's, and their tree.

Nothing in a span is trusted: it may come from a collector that others write to.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_common.tracing import names

MAX_SPANS = 4096
_MAX_TEXT = 300
_MAX_NS = 1 << 63
_US = 1000
_PAUSED = "slow_client"


@dataclass(frozen=True)
class Span:
    """One piece of work. Times are ns since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it begins the trace."""
    name: str
    process: str
    """Who made it: `router`, `worker w0`."""
    begin_ns: int
    end_ns: int
    error: str = ""
    """Its type; empty: none."""
    attributes: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name, with what tells it from the others: an attempt's worker and outcome, a rank's number."""
        attributes = self.attributes
        if self.name == "attempt":
            parts = [
                attributes.get(names.ATTEMPT, ""),
                "→",
                attributes.get(names.WORKER, "?"),
                attributes.get(names.OUTCOME, ""),
            ]
            return " ".join(["attempt", *(part for part in parts if part)])
        if self.name == "rank" and names.RANK in attributes:
            return f"rank {attributes[names.RANK]}{self._computes()}"
        return f"{self.name}{self._parts()}"

    def _parts(self) -> str:
        """How many chunks a prompt had, or how often an answer waited for its client to read."""
        if self.name == "prefill":
            chunks = 1 + sum(name == "chunk" for name, _ in self.events)
            return f" in {chunks} chunks" if chunks > 1 else ""
        waits = self.attributes.get(names.CLIENT_WAITS, "")
        return f" was slow {_times(int(waits))}" if waits.isdecimal() and waits.isascii() else ""

    def _computes(self) -> str:
        """The part of a rank's time in which it computes: a low one waits for something."""
        try:
            seconds = float(self.attributes[names.COMPUTE_S])
        except (KeyError, ValueError):
            return ""
        whole_ns = self.end_ns - self.begin_ns
        return f" computes {min(100.0, 100e9 * seconds / whole_ns):.0f} %" if whole_ns > 0 and seconds >= 0 else ""


def of_service(body: Mapping[str, Any]) -> list[Span]:
    """The spans of a process's answer.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: it is not of this form.
    """
    resource = body["resource"]
    process = as_process(str(resource.get("service.name", "")), str(resource.get("service.instance.id", "")))
    return [
        Span(
            as_text(each["trace_id"]),
            as_text(each["span_id"]),
            as_text(each["parent_id"]),
            as_text(each["name"]),
            process,
            as_time(each["begin_ns"]),
            as_time(each["end_ns"]),
            as_text(each["error"]),
            {as_text(key): as_text(value) for key, value in each["attributes"].items()},
            [(as_text(name), as_time(at_ns)) for name, at_ns in each["events"]],
        )
        for each in body["spans"][:MAX_SPANS]
    ]


def of_jaeger(body: Mapping[str, Any]) -> list[Span]:
    """The spans of an answer of Jaeger's HTTP API.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: it is not of this form.
    """
    found = []
    for trace in body["data"] or []:
        processes = {key: _jaeger_process(value) for key, value in trace["processes"].items()}
        for each in trace["spans"][:MAX_SPANS]:
            tags = _tags(each["tags"])
            parents = [link["spanID"] for link in each.get("references") or [] if link.get("refType") == "CHILD_OF"]
            begin_ns = as_time(int(each["startTime"]) * _US)
            error = tags.get("error", "") in ("True", "true")
            found.append(
                Span(
                    as_text(each["traceID"]),
                    as_text(each["spanID"]),
                    as_text(parents[0]) if parents else "",
                    as_text(each["operationName"]),
                    processes.get(each["processID"], "?"),
                    begin_ns,
                    as_time(begin_ns + int(each["duration"]) * _US),
                    tags.get(names.ERROR_TYPE, "error") if error else "",
                    tags,
                    [
                        (_tags(log["fields"]).get("event", "event"), as_time(int(log["timestamp"]) * _US))
                        for log in each.get("logs") or []
                    ],
                )
            )
    return found


def tree(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """The spans with their depths, each once and after its parent, children by begin. One whose parent is not known
    begins a tree of its own.
    """
    known: dict[str, Span] = {}
    for span in spans:
        known.setdefault(span.span_id, span)
    children: dict[str, list[Span]] = {}
    for span in sorted(known.values(), key=lambda each: (each.begin_ns, -each.end_ns)):
        parent = span.parent_id if span.parent_id in known and span.parent_id != span.span_id else ""
        children.setdefault(parent, []).append(span)
    ordered: list[tuple[int, Span]] = []
    waiting = [(0, span) for span in reversed(children.get("", []))]
    while waiting:
        depth, span = waiting.pop()
        ordered.append((depth, span))
        waiting += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]
    seen = {span.span_id for _, span in ordered}
    return ordered + [(0, span) for span in known.values() if span.span_id not in seen]  # parents in a circle


def headline(spans: Sequence[Span]) -> str:
    """What happened, in a line: how long, which workers tried, and how it ended. Of several streams, the one with the
    most attempts.
    """
    begin, end = min(each.begin_ns for each in spans), max(each.end_ns for each in spans)
    streams: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda each: each.begin_ns):
        if span.name == "attempt":
            streams.setdefault(span.attributes.get(names.STREAM, ""), []).append(span)
    parts = [f"{duration(end - begin)}, {len(spans)} spans of {len({each.process for each in spans})} processes"]
    if streams:
        parts += [f"{len(streams)} streams"] if len(streams) > 1 else []
        parts += _ways(max(streams.values(), key=len))
    return "; ".join(parts)


def _ways(attempts: Sequence[Span]) -> list[str]:
    """A stream's workers. After a pause for its client it goes on with a new attempt: that is no failover."""
    moves = [each for each in attempts[:-1] if each.attributes.get(names.OUTCOME) != _PAUSED] + [attempts[-1]]
    ways = " → ".join(
        f"{each.attributes.get(names.WORKER, '?')} ({each.attributes.get(names.OUTCOME, each.error or '?')})"
        for each in moves
    )
    failovers, pauses = len(moves) - 1, len(attempts) - len(moves)
    what = f"{failovers} failover{'s' if failovers > 1 else ''}: " if failovers else "worker "
    return [what + ways, *([f"paused {_times(pauses)} for its client"] if pauses else [])]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def duration(ns: int) -> str:
    """A time for people."""
    return f"{ns / 1e9:.2f} s" if ns >= 1_000_000_000 else f"{ns / 1e6:.1f} ms"


def _jaeger_process(value: Mapping[str, Any]) -> str:
    return as_process(str(value["serviceName"]), _tags(value.get("tags") or []).get("service.instance.id", ""))


def _tags(tags: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {as_text(each["key"]): as_text(each["value"]) for each in tags}


def as_process(service: str, instance: str) -> str:
    """Who made a span: `router`, `worker w0`."""
    kind = service.removeprefix("lockstep-")
    return as_text(kind if instance in ("", kind) else f"{kind} {re.sub(f'^{re.escape(kind)}[ -]', '', instance)}")


def as_time(ns: Any) -> int:
    """Nanoseconds since 1970, of anything.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    if not 0 <= (found := int(ns)) < _MAX_NS:
        raise ValueError("no time")
    return found


def as_text(value: object) -> str:
    """A text of anything, no longer than it can be drawn."""
    return str(value)[:_MAX_TEXT]
