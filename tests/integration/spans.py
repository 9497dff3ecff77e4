"""Spans that a collector has got: requests that begin traces, and the edges that each trace must have."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import httpx
from otlp_receiver import Received
from system import MODEL, System

CALLER = "00-{:032x}-{:016x}-01"
CALLERS_SPAN = f"{7:016x}"
SKEW_NS = 1_000_000
"""Clocks of processes on one host: each trace reads the wall clock once in each process."""
PARENTS = {"route": "request", "attempt": "route", "queue": "attempt", "prefill": "attempt", "decode": "attempt"}
"""The spans of a request, but for its first one and those of ranks."""
_OTHERS = {"route": "takeover", "kv fetch": "queue", "client": "request"}


class Collector(Protocol):
    """What has arrived at a collector: at the test double, or at a real one."""

    address: str
    """host:port for OTLP over gRPC."""

    @property
    def spans(self) -> list[Received]:
        """The spans of all traces."""

    @property
    def raw(self) -> bytes:
        """All that has arrived, to search for what must not be in it."""

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of one trace."""


class Collecting(NamedTuple):
    """A collector that runs until `end` is closed."""

    receiver: Collector
    end: ExitStack


def headers(number: int) -> dict[str, str]:
    """Of a request that belongs to the trace with this number, which its caller keeps."""
    return {"traceparent": CALLER.format(number, 7), "baggage": "canary=1"}


def complete(system: System, number: int, tokens: int) -> httpx.Response:
    """An answer whose request belongs to the trace with this number."""
    body = {"model": MODEL, "prompt": "canary", "max_tokens": tokens, "ignore_eos": True, "seed": 3}
    return httpx.post(f"{system.api}/completions", json=body, headers=headers(number), timeout=60, trust_env=False)


def spans_of(collector: Collector, number: int) -> list[Received]:
    return collector.trace(f"{number:032x}")


def named(spans: Sequence[Received], name: str) -> list[Received]:
    return [span for span in spans if span.name == name]


def check_edges(spans: Sequence[Received], lost: Collection[str] = ()) -> None:
    """Each span has the parent that it should have, and is inside it. `lost` are ids of spans that never came."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if span.name == "request":
            # A client that comes back is below the one that began, which may have gone before.
            began = by_id[span.parent_id].name if span.parent_id in by_id else ""
            is_child = began == "request" or span.parent_id in lost
            assert is_child if span.attributes["lockstep.resumed"] else span.parent_id == CALLERS_SPAN
            continue
        if span.parent_id in lost:
            continue
        parent = by_id[span.parent_id]
        if "." in span.name:  # a call: the callee's span is below the caller's, of the same name
            expected = {span.name, "kv fetch", "request"}
        elif span.name == "rank":
            expected = {"prefill", "decode"}
        else:
            expected = {names[span.name] for names in (PARENTS, _OTHERS) if span.name in names}
        assert parent.name in expected, (span.name, parent.name)
        assert parent.begin_ns - SKEW_NS <= span.begin_ns <= span.end_ns <= parent.end_ns + SKEW_NS, (span, parent)


def check_ranks(spans: Sequence[Received], phase: Received, ranks: int) -> None:
    """A phase of a worker has a span of each of its ranks."""
    below = [span for span in spans if span.name == "rank" and span.parent_id == phase.span_id]
    assert sorted(span.attributes["lockstep.rank"] for span in below) == list(range(ranks))
    assert {span.resource["service.instance.id"] for span in below} == {phase.resource["service.instance.id"]}
