"""`lockstep trace --file`: both forms of files, and what is said of one that is of neither."""

import json

import pytest
from lockstep_common.tracing import names
from lockstep_tools import cli
from lockstep_tools.failure import CommandError
from lockstep_tools.trace.files import from_file

TRACE, OTHER = "ab" * 16, "cd" * 16
MS = 1_000_000


def text(value):
    return {"stringValue": value}


def exported(*spans, service="router", instance="vm-1"):
    """A line of the collector's file exporter."""
    resource = {"service.name": text(f"lockstep-{service}"), "service.instance.id": text(instance)}
    return json.dumps(
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": [{"key": key, "value": value} for key, value in resource.items()]},
                    "scopeSpans": [{"scope": {"name": "lockstep"}, "spans": spans}],
                }
            ]
        }
    )


def span(span_id, parent_id, name, begin_ms, end_ms, trace_id=TRACE, **attributes):
    return {
        "traceId": trace_id,
        "spanId": span_id,
        "parentSpanId": parent_id,
        "name": name,
        "kind": 2,
        "startTimeUnixNano": str(begin_ms * MS),
        "endTimeUnixNano": str(end_ms * MS),
        "attributes": [{"key": key, "value": value} for key, value in attributes.items()],
        "events": [{"timeUnixNano": str(begin_ms * MS), "name": "begun"}],
        "status": {},
    }


REQUEST = span("01", "", "request", 0, 200, **{names.REQUEST_ID: text("req-1"), names.STREAM: text("r-1")})
ATTEMPT = span(
    "02", "01", "attempt", 10, 200, **{names.ATTEMPT: {"intValue": "1"}, names.WORKER: text("w0"), "x": {}}
) | {"status": {"code": 2}}
DECODE = span("03", "02", "decode", 20, 190, many={"arrayValue": {"values": [text("a"), {"boolValue": True}]}})
STRANGER = span("09", "", "request", 0, 1, OTHER, **{names.REQUEST_ID: text("req-2")})


@pytest.fixture
def written(tmp_path):
    """Writes a file."""

    def write(*lines):
        path = tmp_path / "traces.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def test_a_request_is_found_in_the_files_of_a_collector(written):
    """The worker's spans come first there: they end first."""
    path = written(
        exported(DECODE, service="worker", instance="w0"),
        "",
        json.dumps({"resourceMetrics": []}),
        exported(STRANGER),
        exported(ATTEMPT, REQUEST),
    )
    found = from_file(path, "req-1")
    assert from_file(path, "r-1") == found
    assert [(each.span_id, each.parent_id, each.process) for each in found] == [
        ("03", "02", "worker w0"),
        ("02", "01", "router vm-1"),
        ("01", "", "router vm-1"),
    ]
    decode, attempt, _ = found
    assert (decode.attributes["many"], decode.events, decode.error) == ("a, True", [("begun", 20 * MS)], "")
    assert (attempt.label, attempt.error, attempt.attributes["x"]) == ("attempt 1 → w0", "error", "")
    assert from_file(path, TRACE) == found
    assert from_file(path, "req-3") == []


def test_no_span_of_a_large_export_is_left_out(written):
    """A collector's batches have 8,192 spans by default."""
    others = [span(f"{number:04x}", "", "request", 0, 1, OTHER) for number in range(8191)]
    (found,) = from_file(written(exported(*others, REQUEST)), "req-1")
    assert found.span_id == "01"


def test_a_line_that_is_being_written_is_not_read(written):
    path = written(exported(REQUEST))
    with path.open("a") as file:
        file.write(exported(ATTEMPT)[:-9])
    assert [each.span_id for each in from_file(path, "req-1")] == ["01"]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_download_from_a_jaeger_is_drawn(written, indent, capsys):
    trace = {
        "traceID": TRACE,
        "processes": {"p1": {"serviceName": "lockstep-router", "tags": []}},
        "spans": [
            {
                "traceID": TRACE,
                "spanID": "01",
                "operationName": "request",
                "references": [],
                "startTime": 5,
                "duration": 7000,
                "tags": [{"key": names.REQUEST_ID, "value": "req-1"}],
                "logs": [],
                "processID": "p1",
            }
        ],
    }
    path = written(json.dumps({"data": [trace]}, indent=indent))
    assert cli.main(["trace", "req-1", "--file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "7.0 ms, 1 spans of 1 processes" in printed
    assert "request  (router)" in printed
    assert cli.main(["trace", "req-2", "--file", str(path)]) == 1
    assert f"no spans of req-2 in {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([exported(REQUEST), "{"], "line 2 is no JSON"),
        (["[" * 100_000], "line 1 is no JSON"),
        (["ÿ"], "line 1 is no JSON"),
        ([exported(REQUEST), "{}"], "line 2 has neither `resourceSpans` (OTLP) nor `data` (Jaeger)"),
        (["[]"], "line 1 has neither"),
        (["7"], "line 1 has a span that is not"),
        ([exported({"name": "x"})], "line 1 has a span that is not as OTLP or Jaeger write it ('traceId' is missing)"),
        ([exported(REQUEST | {"endTimeUnixNano": str(1 << 70)})], "line 1 has a span that is not"),
        ([json.dumps({"resourceSpans": 7})], "line 1 has a span that is not"),
        ([json.dumps({"data": [{"spans": []}]})], "'processes' is missing"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(written, lines, reason):
    path = written(*lines)
    with pytest.raises(CommandError) as caught:
        from_file(path, "req-1")
    assert caught.value.message.startswith(f"--file {path}: ")
    assert reason in caught.value.message
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    assert cli.main(["trace", "req-1", "--file", str(tmp_path / "no")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert cli.main(["trace", "req-1", "--file", str(tmp_path)]) == 2
    assert "is not a file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["trace", "req-1", "--file", "x", "--jaeger", "http://j"])
    assert "argument --jaeger: not allowed with argument --file" in capsys.readouterr().err
