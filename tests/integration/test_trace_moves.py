"""One trace of a request that moves: off a worker that drains, and off a router that is killed. Real processes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import psutil
import pytest
from machine import left_since, title, traces, wait_for
from serving import Serve
from slow_steps import SLOW_TOKENS, SlowSteps
from spans import CALLERS_SPAN, Collector, check_edges, check_ranks, headers, named, spans_of
from system import MODEL, System

pytestmark = pytest.mark.slow

RANKS = 2
MOVES = SLOW_TOKENS
"""Tokens of a stream that moves: at 50 ms each it lasts longer than a drain."""
STAYS = 8
"""Tokens of a stream that ends in the time of a drain, 5 s, on a busy machine too."""
_PATIENCE_S = 180.0


class Slow(NamedTuple):
    system: System
    serve: Serve
    receiver: Collector
    steps: SlowSteps


@pytest.fixture(scope="module")
def slow(
    tmp_path_factory: pytest.TempPathFactory, private_tmp: object, receiver: Collector, slow_steps: SlowSteps
) -> Iterator[Slow]:
    """Two routers with a state server, before two workers with two ranks each."""
    before = traces()
    directory = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        options = ("--routers", "2", "--workers", "2", "--tp", str(RANKS), "--log-level", "info")
        with Serve(directory, *options) as serve:
            system = serve.ready().system
            system.until_ready()
            yield Slow(system, serve, receiver, slow_steps)
            serve.interrupt(signal.SIGINT)
            assert serve.end() == 0
            assert "Traceback" not in serve.notes, serve.notes
    assert left_since(before) == []


@contextmanager
def begun(url: str, number: int, tokens: int) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    """A stream of which something has come."""
    body = {"model": MODEL, "prompt": "canary", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    more = {"x-session-id": "one for all", "x-lockstep-resumable": "true"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=_PATIENCE_S, trust_env=False, headers=headers(number) | more
    ) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("id: ")
        yield response, lines


def rest(lines: Iterator[str]) -> None:
    assert [line for line in lines if line][-1] == "data: [DONE]"


def has_ended(slow: Slow, number: int) -> object:
    """Whether the request has ended, and the spans of its last decode have come."""
    spans = spans_of(slow.receiver, number)
    ended = {span.parent_id for span in named(spans, "decode")}
    attempts = named(spans, "attempt")
    return named(spans, "request") and attempts and {each.span_id for each in attempts} <= ended


def test_a_drain_moves_what_does_not_end_in_its_time(slow: Slow) -> None:
    """Of two streams of a worker that drains one finishes there, and the other one on the other worker."""
    slow.system.until_idle(_PATIENCE_S)
    with slow.steps.during(), begun(slow.system.url, 1, MOVES) as (_, long):
        worker = slow.system.serving(_PATIENCE_S)
        with begun(slow.system.url, 2, STAYS) as (_, short):
            os.kill(worker["pid"], signal.SIGTERM)
            rest(short)
        wait_for(lambda: named(spans_of(slow.receiver, 1), "attempt"), "it has left the worker", _PATIENCE_S)
        slow.steps.end()
        rest(long)
    for number in (1, 2):
        wait_for(lambda number=number: has_ended(slow, number), "the spans have come", _PATIENCE_S)

    stayed = spans_of(slow.receiver, 2)
    check_edges(stayed)
    (attempt,), (decode,) = named(stayed, "attempt"), named(stayed, "decode")
    assert attempt.attributes["lockstep.worker"] == worker["id"] == decode.resource["service.instance.id"]
    assert (attempt.attributes["lockstep.outcome"], attempt.is_error, decode.is_error) == ("finished", False, False)
    assert attempt.attributes["lockstep.tokens"] == decode.attributes["lockstep.tokens"] == STAYS
    check_ranks(stayed, decode, RANKS)

    moved = spans_of(slow.receiver, 1)
    check_edges(moved)
    first, second = sorted(named(moved, "attempt"), key=lambda span: span.begin_ns)
    assert second.links == (first.span_id,)
    assert (first.attributes["lockstep.outcome"], second.attributes["lockstep.outcome"]) == ("lost", "finished")
    assert (first.attributes["lockstep.worker"], first.attributes["error.type"]) == (worker["id"], "draining")
    assert second.attributes["lockstep.worker"] != worker["id"]
    emitted = first.attributes["lockstep.tokens"]
    assert 0 < emitted == second.attributes["lockstep.attempt.emitted_before"]
    assert second.attributes["lockstep.tokens"] == MOVES - emitted
    for attempt, error in ((first, "draining"), (second, "")):
        (decode,) = (span for span in named(moved, "decode") if span.parent_id == attempt.span_id)
        assert decode.attributes.get("error.type", "") == error
        check_ranks(moved, decode, RANKS)
    (request,) = named(moved, "request")
    assert not request.is_error
    assert request.attributes["lockstep.failovers"] == 1
    slow.system.until_ready(_PATIENCE_S)


def killed_router(serve: Serve, url: str) -> None:
    """Kill the router that listens there."""
    port = int(url.rpartition(":")[2])
    for process in serve.children():
        if title(process) == "lockstep: router" and any(
            each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp")
        ):
            process.kill()
            process.wait(_PATIENCE_S)
            return
    raise AssertionError("no router listens there")


def test_a_trace_survives_its_router(slow: Slow) -> None:
    """A worker dies, then the router, and the client resumes its stream at the other one: what the first router had
    exported is there, and the other one's spans are of the same trace, as is the request that resumes it.
    """
    slow.system.until_ready(_PATIENCE_S)
    slow.system.until_idle(_PATIENCE_S)
    one, other = slow.serve.routers()
    with slow.steps.during():
        with begun(one, 3, MOVES) as (response, lines):
            stream_id = response.headers["x-lockstep-stream-id"]
            psutil.Process(slow.system.serving(_PATIENCE_S)["ranks"][1]["pid"]).kill()
            (lost, *_) = wait_for(
                lambda: named(spans_of(slow.receiver, 3), "attempt"), "the first attempt's span has come", _PATIENCE_S
            )
            # So many come that the other attempt runs.
            count = lost.attributes["lockstep.tokens"] + 8
            given = {
                line for line, _ in zip((line for line in lines if line.startswith("id: ")), range(count), strict=False)
            }
            assert len(given) == count
            slow.serve.until_mirrored()
            killed_router(slow.serve, one)
        with httpx.stream(
            "GET", f"{other}/v1/streams/{stream_id}", timeout=_PATIENCE_S, trust_env=False, headers=headers(4)
        ) as resumed:
            assert resumed.status_code == 200, resumed.read()
            lines = resumed.iter_lines()
            next(lines)
            slow.steps.end()
            rest(lines)
    wait_for(lambda: named(spans_of(slow.receiver, 3), "takeover"), "the takeover's span has come", _PATIENCE_S)
    wait_for(lambda: named(spans_of(slow.receiver, 3), "request"), "the reader's span has come", _PATIENCE_S)
    wait_for(lambda: len(named(spans_of(slow.receiver, 3), "decode")) == 3, "the workers' spans have come", _PATIENCE_S)
    check_survival(slow)


def check_survival(slow: Slow) -> None:
    spans = spans_of(slow.receiver, 3)
    (reader,) = named(spans, "request")  # the first one died with its router
    (takeover,) = named(spans, "takeover")
    first_router, second_router = (
        {span.resource["service.instance.id"] for span in spans if span.attributes.get("lockstep.outcome") == outcome
         and span.name == "attempt"}
        for outcome in ("lost", "finished")
    )  # fmt: skip
    assert second_router == {takeover.resource["service.instance.id"]} != first_router
    lost, finished = sorted(named(spans, "attempt"), key=lambda span: span.begin_ns)
    routes = {span.span_id: span for span in named(spans, "route")}
    assert routes[lost.parent_id].parent_id == takeover.parent_id  # the request's span, which never came
    assert routes[finished.parent_id].parent_id == takeover.span_id
    assert finished.attributes["lockstep.attempt.emitted_before"] > lost.attributes["lockstep.tokens"]
    died, cut, ended = sorted(named(spans, "decode"), key=lambda span: span.begin_ns)
    assert (died.parent_id, died.attributes["error.type"]) == (lost.span_id, "worker_lost")
    assert (cut.attributes["lockstep.outcome"], cut.is_error) == ("cancelled", False)
    assert ended.parent_id == finished.span_id
    for decode in (died, cut, ended):
        check_ranks(spans, decode, RANKS)
    check_edges(spans, lost={takeover.parent_id, cut.parent_id})
    assert takeover.links == (reader.span_id,)
    assert reader.parent_id == takeover.parent_id
    assert reader.links == (CALLERS_SPAN,), "what the client said of itself"
    assert reader.attributes["lockstep.trace.kept_because"] == "parent", "the stream's trace is kept"
    calls = [span for span in spans if span.name in ("Journal.Read", "Journal.Take")]
    assert {span.name for span in calls if span.parent_id == reader.span_id} == {"Journal.Read", "Journal.Take"}
    assert spans_of(slow.receiver, 4) == []
    assert b"canary" not in slow.receiver.raw
