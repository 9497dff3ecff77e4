"""One trace from the client to each rank, from real processes: edges, times, a failover, a collector that goes away."""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from lockstep_tools.debug.local import from_router
from machine import left_since, traces, wait_for
from otlp_receiver import Received
from serving import Serve, run
from slow_steps import SLOW_TOKENS, SlowSteps
from spans import (
    CALLERS_SPAN,
    PARENTS,
    SKEW_NS,
    Collecting,
    Collector,
    check_edges,
    check_ranks,
    complete,
    headers,
    named,
    spans_of,
)
from system import MODEL, System
from tcp_proxy import TcpProxy, proxy_before

pytestmark = pytest.mark.slow

EXPORT_TIMEOUT_S = 5
"""Of one export, with its retries."""
STARTS = 20
"""Most starts of a worker's ranks until their clocks have been measured well enough."""


class Traced(NamedTuple):
    system: System
    log: Path
    receiver: Collector
    way: TcpProxy
    """To the receiver."""
    end: ExitStack
    """Ends the receiver."""


@pytest.fixture(scope="module")
def traced(
    tmp_path_factory: pytest.TempPathFactory,
    private_tmp: object,
    receiver: Collector,
    collecting: Collecting,
    slow_steps: SlowSteps,
) -> Iterator[Traced]:
    """Two workers with two ranks each, that send their traces to a receiver."""
    before = traces()
    with pytest.MonkeyPatch.context() as patch, proxy_before(int(receiver.address.rpartition(":")[2])) as way:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{way.port}")
        patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        with Serve(tmp_path_factory.mktemp("serve"), "--workers", "2", "--tp", "2", "--log-level", "info") as serve:
            yield Traced(serve.ready().system, serve.log, receiver, way, collecting.end)
            serve.interrupt(signal.SIGINT)
            assert serve.end() == 0
            assert "Traceback" not in serve.notes, serve.notes
    assert left_since(before) == []


def test_a_trace_reaches_from_the_request_to_each_rank(traced: Traced) -> None:
    assert complete(traced.system, 1, 20).status_code == 200
    wait_for(
        lambda: named(spans_of(traced.receiver, 1), "request") and len(spans_of(traced.receiver, 1)) == 10, "spans"
    )
    spans = spans_of(traced.receiver, 1)
    assert sorted(span.name for span in spans) == sorted([*PARENTS, "request", *["rank"] * 4])
    check_edges(spans)
    (decode,), (attempt,), (route,) = (named(spans, name) for name in ("decode", "attempt", "route"))
    assert decode.attributes["lockstep.tokens"] == attempt.attributes["lockstep.tokens"] == 20
    assert decode.resource["service.instance.id"] == attempt.attributes["lockstep.worker"]
    assert route.attributes["lockstep.route.candidates"] == 2
    ranks = [span for span in spans if span.parent_id == decode.span_id]
    assert sorted(span.attributes["lockstep.rank"] for span in ranks) == [0, 1]
    for rank in ranks:
        assert 15 <= rank.attributes["lockstep.steps"] <= 25
        assert rank.attributes["lockstep.rank.compute_s"] > 0
        assert rank.attributes["lockstep.rank.collective_s"] > 0
    assert min(span.attributes["lockstep.rank.peer_wait_s"] for span in ranks) == 0


def test_a_streamed_request_says_when_its_first_token_came(traced: Traced) -> None:
    """Each choice has its own route, and all have one trace."""
    body = {"model": MODEL, "prompt": "canary", "max_tokens": 20, "n": 2, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{traced.system.api}/completions", json=body, timeout=60, trust_env=False, headers=headers(20)
    ) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
    # A phase's span comes after those of its ranks.
    wait_for(lambda: len(named(spans_of(traced.receiver, 20), "decode")) == 2, "the worker's spans have come")
    wait_for(lambda: named(spans_of(traced.receiver, 20), "request"), "the request's span has come")
    spans = spans_of(traced.receiver, 20)
    check_edges(spans)
    (request,) = named(spans, "request")
    assert 0 < request.attributes["gen_ai.response.time_to_first_chunk"] * 1e9 <= request.end_ns - request.begin_ns
    assert (request.attributes["gen_ai.usage.output_tokens"], request.attributes["http.response.status_code"]) == (
        40,
        200,
    )
    for attempt in named(spans, "attempt"):
        (decode,) = (span for span in named(spans, "decode") if span.parent_id == attempt.span_id)
        assert attempt.attributes["lockstep.tokens"] == decode.attributes["lockstep.tokens"] == 20
        assert [name for name, *_ in attempt.events] == ["first_token"]
        assert {name for name, *_ in decode.events} == {"step"}
        check_ranks(spans, decode, 2)


def test_a_request_whose_worker_dies_is_one_trace_with_linked_attempts(
    traced: Traced, slow_steps: SlowSteps, tmp_path: Path
) -> None:
    body = {"model": MODEL, "prompt": "canary", "max_tokens": SLOW_TOKENS, "ignore_eos": True, "stream": True}
    with slow_steps.during(), httpx.stream(
        "POST", f"{traced.system.api}/completions", json=body, timeout=60, trust_env=False,
        headers=headers(2) | {"x-request-id": "req-moved"},
    ) as response:  # fmt: skip
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        psutil.Process(traced.system.serving()["ranks"][1]["pid"]).kill()
        slow_steps.end()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    wait_for(lambda: named(spans_of(traced.receiver, 2), "request"), "the request's span has come")
    wait_for(lambda: len(named(spans_of(traced.receiver, 2), "decode")) == 2, "both workers' spans have come")
    spans = spans_of(traced.receiver, 2)
    first, second = sorted(named(spans, "attempt"), key=lambda span: span.begin_ns)
    assert second.links == (first.span_id,)
    assert (first.attributes["lockstep.outcome"], second.attributes["lockstep.outcome"]) == ("lost", "finished")
    assert first.attributes["lockstep.worker"] != second.attributes["lockstep.worker"]
    assert first.is_error
    check_edges(spans)
    decodes = named(spans, "decode")
    assert {decode.parent_id for decode in decodes} == {first.span_id, second.span_id}
    for decode in decodes:
        check_ranks(spans, decode, 2)
    check_lines(traced.log, [first, second])
    check_drawings(traced.system, first, second, tmp_path / "page.html")


def check_drawings(system: System, first: Received, second: Received, path: Path) -> None:
    """`lockstep trace` finds the request by its id in the services' memory, with both attempts and all ranks."""
    command = ("trace", "req-moved", "--url", system.management_url, "--html", str(path))
    code, output, notes = run(*command, within_s=60.0)
    assert code == 0, notes
    lost, last = (str(each.attributes["lockstep.worker"]) for each in (first, second))
    assert f"1 failover: {lost} (lost) → {last} (finished)" in output
    assert output.index(f"attempt 1 → {lost} lost") < output.index(f"attempt 2 → {last} finished")
    assert all(f"(worker {worker})" in output for worker in (lost, last))
    assert len(re.findall(r"^ +rank [01] ", output, re.MULTILINE)) >= 4
    assert "not complete" not in output
    assert "<script" not in path.read_text()
    assert f"attempt 2 → {last} finished" in path.read_text()


def check_lines(log: Path, attempts: list[Received]) -> None:
    """The router's and both workers' lines of the request are found by its id, and name the spans of their attempts."""

    def lines() -> list[dict[str, Any]]:
        code, found, problem = run("logs", str(log), "--request", "req-moved", "--json")
        assert code == (0 if found else 1), problem
        return [json.loads(line) for line in found.splitlines()]

    expected = {"attempt failed", "stream leaves worker", "stream begins", "request"}

    def written() -> list[dict[str, Any]]:
        """Each process writes its lines a little later, and the router's last one may be there first."""
        found = lines()
        return found if expected <= {line["message"] for line in found} else []

    found = wait_for(written, "the log is written")
    by_message = {line["message"]: line for line in found}
    assert set(by_message) == expected
    assert {line["trace_id"] for line in found} == {f"{2:032x}"}
    lost, moved = by_message["attempt failed"], by_message["stream begins"]
    for line, attempt in ((lost, attempts[0]), (by_message["stream leaves worker"], attempts[0]), (moved, attempts[1])):
        assert line["span_id"] == attempt.span_id
        assert (line["attempt"], line["epoch"]) == (attempt.attributes["lockstep.attempt"], 1)
    assert lost["service"] != moved["service"]


def test_a_client_that_comes_back_is_in_the_trace_of_its_stream(traced: Traced) -> None:
    """One trace has the request from its first client to its last; what the others said of themselves is a link."""
    tokens = traced.system.tokens_lasting(1.0)
    body = {"model": MODEL, "prompt": "canary", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{traced.system.api}/completions", json=body, timeout=60, trust_env=False,
        headers=headers(21) | {"x-lockstep-resumable": "true"},
    ) as response:  # fmt: skip
        lines = response.iter_lines()
        assert next(lines).startswith("id: ")
        stream = f"{traced.system.api}/streams/{response.headers['x-lockstep-stream-id']}"
        read_again(stream)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    read_again(stream)  # it has ended
    wait_for(lambda: len(named(spans_of(traced.receiver, 21), "request")) == 3, "the requests' spans have come")
    wait_for(lambda: named(spans_of(traced.receiver, 21), "decode"), "the worker's spans have come")
    spans = spans_of(traced.receiver, 21)
    check_edges(spans)
    first, *others = sorted(named(spans, "request"), key=lambda span: span.begin_ns)
    assert (first.parent_id, first.links) == (CALLERS_SPAN, ())
    assert [(span.parent_id, span.links) for span in others] == [(first.span_id, (CALLERS_SPAN,))] * 2
    assert len(named(spans, "attempt")) == 1
    assert spans_of(traced.receiver, 22) == []


def read_again(stream: str) -> None:
    """Read a stream from its beginning, as a client with a trace of its own."""
    with httpx.stream("GET", stream, timeout=60, trust_env=False, headers=headers(22)) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def rank_clocks(system: System) -> list[dict[tuple[str, str], float]]:
    """What each worker says of its ranks' clocks, by bound and rank."""
    with httpx.Client(timeout=60, trust_env=False) as client:
        workers = from_router(client, system.management_url)[1:]
        pages = [client.get(f"{worker.url}/metrics").raise_for_status().text for worker in workers]
    metric = r'^lockstep_worker_rank_clock_skew_seconds\{bound="(\w+)",rank="(\d)"\} (\S+)$'
    return [
        {(bound, rank): float(value) for bound, rank, value in re.findall(metric, page, re.MULTILINE)} for page in pages
    ]


def restart_ranks(system: System, pid: int) -> None:
    """Kill rank 0 of w0, which is this process."""
    psutil.Process(pid).kill()
    system.until(lambda workers: workers["w0"]["ranks"][0]["pid"] != pid, "its ranks start again")


def test_the_clocks_of_ranks_are_that_of_their_worker(traced: Traced) -> None:
    """What the messages of their starts prove of a difference is within what a trace may have. A message that takes
    long proves little: the best measurement of several starts counts, as all processes have one clock here.
    """
    system, best_s = traced.system, 1.0
    for _ in range(STARTS):
        workers = system.until_ready()
        for skews in (clocks := rank_clocks(system)):
            assert len(skews) == 4, clocks
            for rank in "01":
                assert 0 <= skews["least", rank] * 1e9 <= SKEW_NS
                assert skews["most", rank] > skews["least", rank], "it was measured"
                best_s = min(best_s, skews["most", rank])
        if best_s * 1e9 <= SKEW_NS:
            return
        restart_ranks(system, workers["w0"]["ranks"][0]["pid"])
    raise AssertionError(f"at most {best_s} s in the best of {STARTS} starts")


def test_no_text_is_in_any_message(traced: Traced) -> None:
    assert b"canary" not in traced.receiver.raw


def test_nothing_waits_for_a_collector_that_does_not_answer(traced: Traced) -> None:
    """What it does not take is counted as lost, and traces are exported again when it answers."""
    traced.way.silence()
    began_s = time.monotonic()
    for number in range(30, 40):
        assert complete(traced.system, number, 5).status_code == 200
    assert time.monotonic() - began_s < 10 * EXPORT_TIMEOUT_S, "no request has waited for an export"
    wait_for(lambda: lost_spans(traced.system) > 0, "the router has given an export up")
    traced.way.pass_on()

    def has_come() -> bool:
        complete(traced.system, 40, 5)
        return bool(named(spans_of(traced.receiver, 40), "request"))

    wait_for(has_come, "traces are exported again", every_s=0.5)


def lost_spans(system: System) -> float:
    """Spans that the router's exporter has failed to export."""
    with httpx.Client(timeout=60, trust_env=False) as client:
        page = client.get(f"{system.management_url}/metrics").raise_for_status().text
    found = re.search(r'^lockstep_trace_spans_total\{outcome="failed"\} (\S+)$', page, re.MULTILINE)
    assert found is not None, page
    return float(found[1])


@pytest.mark.slow
def test_serving_goes_on_when_the_collector_is_gone(traced: Traced) -> None:
    traced.end.close()
    for number in range(3, 13):
        assert complete(traced.system, number, 5).status_code == 200
