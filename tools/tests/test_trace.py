"""`lockstep trace`: where it finds spans, the tree that it makes of them, and its two drawings."""

import json
import re
from html.parser import HTMLParser

import httpx
import pytest
from lockstep_tools import cli
from lockstep_tools.debug.process import Process
from lockstep_tools.failure import CommandError
from lockstep_tools.trace.causes import causes
from lockstep_tools.trace.drawing import lines, page
from lockstep_tools.trace.sources import from_jaeger, from_services
from lockstep_tools.trace.spans import Span, duration, headline, of_jaeger, tree

MS = 1_000_000
TRACE = "ab" * 16
HOSTILE = '"><script>alert(1)</script><style>*{}</style>\x1b[31m\u202e'


def span(span_id, parent_id, name, begin_ms, end_ms, process="router", **rest):
    return Span(TRACE, span_id, parent_id, name, process, begin_ms * MS, end_ms * MS, **rest)


def attempt(span_id, number, worker, outcome, begin_ms, end_ms, error=""):
    reported = {"lockstep.attempt": str(number), "lockstep.worker": worker, "lockstep.outcome": outcome}
    return span(span_id, "1", "attempt", begin_ms, end_ms, attributes=reported, error=error)


FAILOVER = [
    attempt("3", 2, "w0", "finished", 60, 200),
    span("4", "2", "decode", 20, 50, "worker w1", error="worker_lost"),
    attempt("2", 1, "w1", "lost", 10, 50, error="restarting"),
    span("1", "", "request", 0, 200),
    span("5", "3", "decode", 70, 200, "worker w0"),
    span("6", "5", "rank", 70, 200, "worker w0", attributes={"lockstep.rank": "1", "lockstep.rank.compute_s": "0.065"}),
]


def test_children_follow_their_parents_in_the_order_of_time():
    placed = [(depth, each.span_id) for depth, each in tree(FAILOVER)]
    assert placed == [(0, "1"), (1, "2"), (2, "4"), (1, "3"), (2, "5"), (3, "6")]


def test_spans_without_a_parent_or_in_a_circle_are_drawn_once():
    odd = [span("1", "9", "lost its parent", 0, 1), span("2", "3", "a", 1, 2), span("3", "2", "b", 1, 2)]
    odd += [span("4", "4", "its own parent", 2, 3), span("1", "9", "twice", 0, 1)]
    assert sorted(each.span_id for _, each in tree(odd)) == ["1", "2", "3", "4"]


def test_the_headline_tells_the_failover():
    assert headline(FAILOVER) == "200.0 ms, 6 spans of 3 processes; 1 failover: w1 (lost) → w0 (finished)"
    assert "worker w0 (finished)" in headline([FAILOVER[0]])
    assert (duration(1_500 * MS), duration(0)) == ("1.50 s", "0.0 ms")


def test_the_causes_come_with_the_longest_first():
    """Parts that overlap count once; what a client let the answer wait is less than the span around its waits."""
    waits = {"lockstep.client.wait_s": "0.5", "lockstep.client.waits": "3"}
    spans = [
        span("1", "", "request", 0, 1000),
        span("2", "1", "limits", 0, 100),
        span("3", "1", "limits", 50, 200),
        span("4", "1", "client", 300, 1000, attributes=waits),
        span("5", "1", "prefill", 200, 260, events=[("chunk", 220 * MS), ("chunk", 240 * MS)]),
        span("6", "1", "Journal.Find", 0, 20),
        span("7", "6", "redis GET", 5, 15),
        span("8", "1", "queue", 200, 201),
    ]
    assert causes(spans) == (
        "its time: waiting for the client to read (client) 500.0 ms, 50 %; "
        "Redis of the limits (limits) 200.0 ms, 20 %; "
        "computing the prompt (prefill) 60.0 ms, 6 %; state server (state) 20.0 ms, 2 %"
    )
    assert [each.label for each in spans[3:5]] == ["client was slow 3 times", "prefill in 3 chunks"]
    assert causes(spans[:1]) == causes([span("1", "", "prefill", 5, 5)]) == ""
    hostile = [span("1", "", "client", 0, 10, attributes={"lockstep.client.wait_s": wait}) for wait in ("nan", "x")]
    assert all("10.0 ms, 100 %" in causes([each]) for each in hostile)


def test_a_pause_for_a_client_is_no_failover():
    paused = [attempt(str(number), number, "w0", "slow_client", number, number + 1) for number in (1, 2)]
    reported = headline([*paused, attempt("3", 3, "w0", "finished", 3, 9)])
    assert reported.endswith("; worker w0 (finished); paused 2 times for its client")


def test_several_streams_are_no_failovers():
    spans = [attempt(str(number), 1, "w0", "finished", 0, 9) for number in (1, 2)]
    spans.append(attempt("3", 2, "w1", "lost", 0, 5))
    for each, stream in zip(spans, ("a", "b", "b"), strict=True):
        each.attributes["lockstep.stream"] = stream
    assert headline(spans[:2]).endswith("; 2 streams; worker w0 (finished)")
    assert headline(spans).endswith("; 2 streams; 1 failover: w0 (finished) → w1 (lost)")


@pytest.mark.parametrize("width", [10, 60, 80, 200])
def test_bars_share_one_axis_that_fits(width):
    head, spent, *drawn = [line.plain for line in lines(FAILOVER, width)]
    assert head.startswith("200.0 ms")
    assert spent == "its time: generating (decode) 160.0 ms, 80 %"
    assert len(drawn) == len(FAILOVER)
    bars = [line.partition("✗")[0] for line in drawn]
    assert max(len(bar.rstrip()) for bar in bars) <= max(width, 8 + 20 + 4 + len("200.0 ms"))
    attempts = bars[1], bars[3]
    assert attempts[0].index("█") < attempts[1].index("█")


def test_lines_name_attempts_ranks_and_errors():
    text = "\n".join(line.plain for line in lines(FAILOVER, 160))
    for wanted in ("attempt 1 → w1 lost", "✗ restarting", "rank 1 computes 50 %  (worker w0)", "140.0 ms"):
        assert wanted in text


def test_nothing_of_a_span_acts_on_the_terminal():
    hostile = span("1", "", HOSTILE, 0, 1, HOSTILE, error=HOSTILE)
    text = "\n".join(line.plain for line in lines([hostile], 160))
    assert "\x1b" not in text
    assert "\u202e" not in text


class Tags(HTMLParser):
    """The tags of a page, and the addresses in it."""

    def __init__(self, text):
        super().__init__()
        self.names, self.addresses = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") or name.startswith("on")]


def test_the_page_runs_nothing_and_loads_nothing():
    hostile = span("7", HOSTILE, HOSTILE, 0, 1, HOSTILE, error=HOSTILE, attributes={HOSTILE: HOSTILE})
    hostile.events.append((HOSTILE, 5))
    text = page([*FAILOVER, hostile], HOSTILE)
    tags = Tags(text)
    assert "script" not in tags.names
    assert tags.addresses == []
    assert text.count("<style>") == 1
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<details") == len(FAILOVER) + 1
    assert text.count("class=bad>") == 3
    places = [float(left) for left in re.findall(r"left:([\d.]+)%", text)]
    assert all(0 <= left <= 100 for left in places)


def body_of(*spans, tracing=True, service="worker", instance="worker w0"):
    return {
        "tracing": tracing,
        "resource": {"service.name": f"lockstep-{service}", "service.instance.id": instance} if tracing else {},
        "spans": [
            {
                "trace_id": each.trace_id,
                "span_id": each.span_id,
                "parent_id": each.parent_id,
                "name": each.name,
                "begin_ns": each.begin_ns,
                "end_ns": each.end_ns,
                "error": each.error,
                "attributes": each.attributes,
                "events": [["first token", each.begin_ns]],
                "links": [],
            }
            for each in spans
        ],
    }


def client_of(pages):
    """A client of pages: (host, path) -> a JSON body or a status."""

    def answer(request):
        found = pages.get((request.url.host, request.url.path), 404)
        return httpx.Response(found) if isinstance(found, int) else httpx.Response(200, json=found)

    return httpx.Client(transport=httpx.MockTransport(answer))


def test_workers_are_asked_for_the_trace_that_the_router_names():
    empty = body_of()
    pages = {
        ("r", "/debug/trace/req-1"): {"processes": {"0": body_of(FAILOVER[3], service="router"), "1": None}},
        ("r", f"/debug/trace/{TRACE}"): {"processes": {"0": body_of(FAILOVER[3], service="router")}},
        ("w", "/debug/trace/req-1"): empty,
        ("w", f"/debug/trace/{TRACE}"): body_of(FAILOVER[1]),
        ("off", "/debug/trace/req-1"): body_of(tracing=False),
        ("bad", "/debug/trace/req-1"): ["?"],
        ("old", "/debug/trace/req-1"): 500,
    }
    names = ("r", "w", "off", "bad", "old")
    spans, remarks = from_services(client_of(pages), [Process(name, f"http://{name}") for name in names], "req-1")
    assert sorted((each.span_id, each.name) for each in spans) == [("1", "request"), ("4", "decode")]
    assert spans[-1].process == "worker w0"
    assert remarks == [
        "off makes no traces",
        "bad: its answer is not of this version",
        "old: HTTP status 500",
    ]


def test_an_id_that_many_requests_have_does_not_ask_for_each_of_them():
    """Clients choose the ids of their requests."""
    many = [
        Span(f"{number:032x}", "1", "", "request", "router", number * MS, (number + 1) * MS) for number in range(40)
    ]
    asked = []

    def answer(request):
        asked.append(request.url.path)
        found = many if request.url.path.endswith("req-1") else []
        return httpx.Response(200, json=body_of(*found))

    client = httpx.Client(transport=httpx.MockTransport(answer))
    spans, remarks = from_services(client, [Process("r", "http://r")], "req-1")
    assert [each.begin_ns // MS for each in spans] == [*range(32, 40)]
    assert remarks == ["40 traces have this id; these are the newest 8"]
    assert len(asked) == 9


@pytest.mark.parametrize("number", [10**30, -(10**30), float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["begin_ns", "end_ns"])
def test_a_span_outside_of_time_is_not_drawn(field, number):
    body = body_of(FAILOVER[3])
    body["spans"][0][field] = number
    text = json.dumps(body)
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=text)))
    assert from_services(client, [Process("r", "http://r")], "req-1") == (
        [],
        ["r: its answer is not of this version"],
    )


def test_an_answer_that_is_too_deep_is_a_remark():
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, text="[" * 100_000)))
    assert from_services(client, [Process("r", "http://r")], "req-1")[1] == ["r: its answer is not of this version"]


JAEGER = {
    "data": [
        {
            "traceID": TRACE,
            "processes": {
                "p1": {"serviceName": "lockstep-worker", "tags": [{"key": "service.instance.id", "value": "w0"}]}
            },
            "spans": [
                {
                    "traceID": TRACE,
                    "spanID": "5",
                    "operationName": "decode",
                    "references": [{"refType": "FOLLOWS_FROM", "spanID": "9"}, {"refType": "CHILD_OF", "spanID": "3"}],
                    "startTime": 70_000,
                    "duration": 130_000,
                    "tags": [
                        {"key": "error", "value": True},
                        {"key": "error.type", "value": "worker_lost"},
                        {"key": "lockstep.tokens", "value": 7},
                    ],
                    "logs": [{"timestamp": 80_000, "fields": [{"key": "event", "value": "step"}]}],
                    "processID": "p1",
                }
            ],
        }
    ]
}


def test_a_jaeger_is_asked_by_trace_by_request_and_by_stream():
    asked = []

    def answer(request):
        asked.append(request.url)
        is_stream = "r-1" in request.url.params.get("tags", "")
        return httpx.Response(200, json={"data": []} if is_stream and len(asked) == 3 else JAEGER)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    (found,) = from_jaeger(client, "http://j", TRACE)
    assert (found.parent_id, found.process, found.error, found.begin_ns, found.end_ns, found.events) == (
        "3", "worker w0", "worker_lost", 70 * MS, 200 * MS, [("step", 80 * MS)],
    )  # fmt: skip
    assert from_jaeger(client, "http://j", "req-1") == [found]
    assert asked[0].path == f"/api/traces/{TRACE}"
    assert json.loads(asked[1].params["tags"]) == {"lockstep.request_id": "req-1"}
    assert from_jaeger(client, "http://j", "r-1") == [found]
    assert [json.loads(url.params["tags"]) for url in asked[2:]] == [
        {"lockstep.request_id": "r-1"}, {"lockstep.stream": "r-1"},
    ]  # fmt: skip
    assert of_jaeger({"data": None}) == []


def test_a_request_id_that_looks_like_a_traces_is_searched_in_jaeger_too():
    def answer(request):
        if request.url.path == f"/api/traces/{TRACE}":
            return httpx.Response(404, json={"data": None, "errors": [{"code": 404, "msg": "trace not found"}]})
        assert json.loads(request.url.params["tags"]) == {"lockstep.request_id": TRACE}
        return httpx.Response(200, json=JAEGER)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    assert len(from_jaeger(client, "http://j", TRACE)) == 1


def test_what_is_no_answer_of_jaeger_is_said():
    for pages, reason in (({}, "not that of Jaeger"), ({("j", f"/api/traces/{TRACE}"): ["x"]}, "not that of Jaeger")):
        with pytest.raises(CommandError, match=reason):
            from_jaeger(client_of(pages), "http://j", TRACE)


def test_the_command_says_what_is_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lockstep_tools.debug.local.from_router", lambda *_: [])
    found = []
    monkeypatch.setattr("lockstep_tools.commands.trace.from_services", lambda *_: (found, ["worker-w1: gone"]))
    assert cli.main(["trace", "req-1"]) == 1
    streams = capsys.readouterr()
    assert "not complete: worker-w1: gone" in streams.out
    assert "no spans of req-1: its trace was not kept, or is too old" in streams.err
    for wrong in ("", "x" * 65, "a\nb", "ü"):
        assert cli.main(["trace", wrong]) == 2
        assert "REQUEST must be an id" in capsys.readouterr().err
    found += FAILOVER
    target = tmp_path / "page.html"
    assert cli.main(["trace", "req-1", "--html", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed, "no colour outside of a terminal"
    assert "1 failover" in printed
    assert target.read_text().startswith("<!doctype html>")
    assert cli.main(["trace", "req-1", "--html", str(target)]) == 2
    assert "there is such a file already" in capsys.readouterr().err
    capsys.readouterr()
    assert cli.main(["trace", "req-1", "--html", str(tmp_path / "no" / "page")]) == 2
    streams = capsys.readouterr()
    assert (streams.out, "page: No such file or directory" in streams.err) == ("", True), (
        "before any span is looked for"
    )
    found.clear()
    assert cli.main(["trace", "req-1", "--html", str(tmp_path / "none.html")]) == 1
    assert not (tmp_path / "none.html").exists()
