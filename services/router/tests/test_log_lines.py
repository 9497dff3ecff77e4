"""What the router's log says of a stream: enough to find the lines of one request, and to find its trace."""

import json
import logging

import pytest
from lockstep_common.telemetry import JsonFormatter
from lockstep_common.tracing import Tracing
from scripted_worker import Script
from span_attributes import all_attributes

ID = "client-chose.this_1"


def lines_of(caplog, request_id=ID):
    lines = [json.loads(JsonFormatter("router").format(record)) for record in caplog.records]
    return [line for line in lines if line.get("request_id") == request_id]


async def test_lines_of_a_request_that_moves_name_it_its_attempts_and_their_spans(make_cluster, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    cluster = await make_cluster()
    spans = []
    cluster.router.tracing = Tracing(ratio=1.0, slow_s=60.0, export=spans.extend)
    own, (other,) = cluster.worker_of("user:u")
    own.script = Script(die_after=3)
    assert (await cluster.complete(headers={"X-Request-ID": ID})).status_code == 200
    moved, ended = lines_of(caplog)
    (request,) = [span for span in spans if span.name == "request"]
    first, _ = [span for span in spans if span.name == "attempt"]
    assert (moved["message"], ended["message"]) == ("stream leaves worker", "request")
    assert moved["trace_id"] == ended["trace_id"] == f"{request.trace.trace_id:032x}"
    assert (moved["span_id"], ended["span_id"]) == (f"{first.span_id:016x}", f"{request.span_id:016x}")
    assert (moved["attempt"], moved["worker"]) == (1, own.worker_id)
    assert moved["epoch"] == all_attributes(first)["lockstep.epoch"]
    assert [submit.request_id for worker in (own, other) for submit in worker.submits] == [ID, ID]
    assert moved["stream"] == own.submits[0].stream_id


async def test_without_traces_a_callers_trace_is_named(make_cluster, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    cluster = await make_cluster()
    own, _ = cluster.worker_of("user:u")
    own.script = Script(die_after=3)
    headers = {"X-Request-ID": ID, "traceparent": f"00-{10:032x}-{11:016x}-01"}
    assert (await cluster.complete(headers=headers)).status_code == 200
    moved, ended = lines_of(caplog)
    assert (moved["trace_id"], moved["span_id"]) == (f"{10:032x}", f"{11:016x}")
    assert "trace_id" not in ended


@pytest.mark.parametrize("stream", [False, True])
async def test_the_line_of_a_resumable_request_counts_its_moves(make_cluster, caplog, stream):
    caplog.set_level(logging.INFO, "lockstep")
    cluster = await make_cluster()
    own, _ = cluster.worker_of("user:u")
    own.script = Script(die_after=3)
    begun = await cluster.complete(stream=stream, resumable=True)
    await cluster.client.get(f"/v1/streams/{begun.headers['x-lockstep-stream-id']}")
    first, resumed = [record for record in caplog.records if record.getMessage() == "request"]
    assert (first.failovers, first.resumed) == (1, False)
    assert (resumed.failovers, resumed.resumed) == (0, True), "it read what was kept"
