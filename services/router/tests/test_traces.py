"""The router's spans: their tree, what they say of the route and of each attempt, and which traces are kept."""

import asyncio

import pytest
from lockstep_api.v1 import inference_pb2, inference_pb2_grpc
from lockstep_common.telemetry import REGISTRY
from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import Kept, Span, Tracing
from lockstep_router.traces import RequestTrace
from router_cluster import Cluster, eventually
from scripted_worker import Script
from span_attributes import all_attributes
from takeover_cluster import Sharing, mirrored
from websocket_client import socket_of

CALLER = TraceContext(0xA << 64, 0xB, True, "vendor=1")
HEADERS = {"traceparent": CALLER.traceparent, "tracestate": CALLER.state, "baggage": "canary=baggage"}
OTHER = TraceContext(0xC << 64, 0xD, True)
"""Of a client that comes back."""
CANARY = "canary words nobody else uses"


def trace(cluster: Cluster, *, ratio: float = 1.0, slow_s: float = 60.0) -> list[Span]:
    spans: list[Span] = []
    cluster.router.tracing = Tracing(ratio=ratio, slow_s=slow_s, export=spans.extend)
    return spans


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def check_tree(spans: list[Span]) -> None:
    """All but the requests have a parent, which they are inside."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        if span.name == "request":
            continue
        parent = by_id[span.parent_id]
        assert {"route": "request", "attempt": "route"}[span.name] == parent.name
        assert parent.begin_ns <= span.begin_ns <= span.end_ns <= parent.end_ns


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_a_route_and_an_attempt(make_cluster, stream):
    cluster = await make_cluster()
    spans = trace(cluster)
    response = await cluster.complete(CANARY, headers=HEADERS, stream=stream)
    assert response.status_code == 200
    assert sorted(span.name for span in spans) == ["attempt", "request", "route"]
    check_tree(spans)
    (request,), (route,), (attempt,) = (named(spans, name) for name in ("request", "route", "attempt"))
    assert (request.context.trace_id, request.parent_id, request.has_remote_parent) == (0xA << 64, 0xB, True)
    assert all_attributes(request) | {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "reference",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length",),
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "lockstep.trace.kept_because": "parent",
    } == all_attributes(request)
    assert all_attributes(request)["gen_ai.response.time_to_first_chunk"] > 0
    assert all_attributes(route)["lockstep.route.candidates"] == 2
    assert all_attributes(route)["lockstep.route.reason"] == "policy"
    assert all_attributes(attempt) | {"lockstep.outcome": "finished", "lockstep.tokens": 12} == all_attributes(attempt)
    (submit,) = [submit for worker in cluster.workers for submit in worker.submits]
    assert (submit.traceparent, submit.tracestate) == (attempt.context.traceparent, "vendor=1")
    assert "canary" not in repr([(all_attributes(span), span.events) for span in spans])
    assert b"canary" not in submit.SerializeToString()  # baggage goes nowhere


def streams_ended(outcome: str) -> float:
    return REGISTRY.get_sample_value("lockstep_router_streams_ended_total", {"outcome": outcome}) or 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_finishes_a_stream(make_cluster, stream):
    """The router finds it, and cancels what the worker would go on with."""
    cluster = await make_cluster()
    whole = (await cluster.complete()).json()["choices"][0]["text"]
    spans, before = trace(cluster), [streams_ended(outcome) for outcome in ("finished", "cancelled")]
    for worker in cluster.workers:
        worker.script = Script(hang_after=8)
    response = await cluster.complete(stop=whole[4:6], stream=stream)
    assert response.status_code == 200
    await eventually(lambda: named(spans, "attempt") and named(spans, "request"))
    check_tree(spans)
    (attempt,) = named(spans, "attempt")
    assert (all_attributes(attempt)["lockstep.outcome"], attempt.error) == ("finished", "")
    (request,) = named(spans, "request")
    assert all_attributes(request)["gen_ai.response.finish_reasons"] == ("stop",)
    after = [streams_ended(outcome) for outcome in ("finished", "cancelled")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0]


@pytest.mark.parametrize("form", ["whole", "streamed", "resumable", "two"])
@pytest.mark.parametrize("place", ["stream", "tokens"])
async def test_a_defect_is_an_error_and_no_cancellation(make_cluster, monkeypatch, form, place):
    cluster = await make_cluster()
    spans, before = trace(cluster, ratio=0.0), [streams_ended(outcome) for outcome in ("internal", "cancelled")]

    def fail(*_):
        raise RuntimeError("secret detail")

    if place == "stream":
        monkeypatch.setattr(cluster.router.workers, "note_sent", fail)
    else:
        cluster.fail_after(0)
    fields = {"streamed": {"stream": True}, "resumable": {"resumable": True, "stream": True}, "two": {"n": 2}}
    response = await cluster.complete(**fields.get(form, {}))
    assert "internal" in response.text
    await eventually(lambda: named(spans, "request"))
    assert "internal" in {span.error for span in named(spans, "route") + named(spans, "attempt")}
    assert all_attributes(named(spans, "request")[0])["lockstep.trace.kept_because"] == "error"
    after = [streams_ended(outcome) for outcome in ("internal", "cancelled")]
    gained = [now - then for now, then in zip(after, before, strict=True)]
    assert gained[0] >= 1
    assert sum(gained) == (2 if form == "two" else 1)
    ended = {stream.outcome for stream in cluster.router.workers.history.streams}
    assert "internal" in ended
    assert "secret" not in repr([(all_attributes(span), span.events) for span in spans])


async def test_a_request_that_moves_is_one_trace_with_linked_attempts(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster, ratio=0.0)
    own, others = cluster.worker_of("user:u")
    own.script = Script(die_after=3)
    response = await cluster.complete()
    assert response.status_code == 200
    check_tree(spans)
    first, second = named(spans, "attempt")
    assert first.context.trace_id == second.context.trace_id
    assert [link.span_id for link in second.links] == [first.span_id]
    assert all_attributes(first)["lockstep.outcome"] == "lost"
    assert first.error
    assert (all_attributes(second)["lockstep.attempt"], all_attributes(second)["lockstep.outcome"]) == (2, "finished")
    assert all_attributes(second)["lockstep.attempt.emitted_before"] == 3
    assert all_attributes(first)["lockstep.worker"] != all_attributes(second)["lockstep.worker"]
    (request,) = named(spans, "request")
    assert all_attributes(request)["lockstep.trace.kept_because"] == "failed_over"
    assert len(named(spans, "route")) == 2
    # The first worker did not know that the trace would be kept, the second does.
    assert own.submits[0].traceparent.endswith("-00")
    assert others[0].submits[0].traceparent.endswith("-01")


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_request_says_how_often_its_streams_moved(make_cluster, resumable):
    cluster = await make_cluster()
    spans = trace(cluster)
    own, _ = cluster.worker_of("user:u")
    own.script = Script(die_after=3)
    assert (await cluster.complete(stream=True, resumable=resumable)).status_code == 200
    await eventually(lambda: named(spans, "request"))
    (request,) = named(spans, "request")
    assert all_attributes(request)["lockstep.failovers"] == len(named(spans, "attempt")) - 1 == 1


async def test_only_what_is_slow_or_fails_is_kept_at_a_ratio_of_zero(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster, ratio=0.0)
    assert (await cluster.complete()).status_code == 200
    assert (await cluster.complete(model="nobody's")).status_code == 404
    assert spans == []
    assert cluster.router.tracing.waiting == 0
    cluster.fail_after(0)
    assert (await cluster.complete()).status_code == 500
    (request,) = named(spans, "request")
    assert (request.error, all_attributes(request)["lockstep.trace.kept_because"]) == ("500", "error")
    assert "secret detail" not in repr([(all_attributes(span), span.events) for span in spans])


async def test_a_clients_own_timeout_is_no_reason_to_keep_a_trace(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster, ratio=0.0)
    for worker in cluster.workers:
        worker.script = Script(hang_after=0)
    assert (await cluster.complete(headers={"X-Request-Timeout": "0.3"})).status_code == 504
    assert spans == []


async def test_a_clients_own_timeout_is_an_error_of_the_answer_alone(make_cluster):
    """By the conventions a server's span of a 504 is an error; the attempt and its route have done nothing wrong."""
    cluster = await make_cluster()
    spans = trace(cluster)
    for worker in cluster.workers:
        worker.script = Script(hang_after=0)
    assert (await cluster.complete(headers={"X-Request-Timeout": "2"})).status_code == 504
    (request,), (route,), (attempt,) = (named(spans, name) for name in ("request", "route", "attempt"))
    assert (request.error, route.error, attempt.error) == ("504", "", "")
    assert all_attributes(attempt)["lockstep.outcome"] == "deadline_exceeded"


async def test_slow_requests_are_kept(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster, ratio=0.0, slow_s=1e-6)
    await cluster.complete()
    (request,) = named(spans, "request")
    assert all_attributes(request)["lockstep.trace.kept_because"] == "slow"


async def test_models_that_do_not_exist_are_not_named(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster)
    await cluster.complete(model="canary")
    assert "canary" not in repr([all_attributes(span) for span in spans])


async def test_each_choice_has_a_route_and_an_attempt(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster)
    await cluster.complete(n=3)
    check_tree(spans)
    assert len(named(spans, "attempt")) == len(named(spans, "route")) == 3


async def test_a_client_that_leaves_ends_its_trace(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster)
    for worker in cluster.workers:
        worker.script = Script(hang_after=2)
    async with cluster.over_http() as client:
        body = {"model": "reference", "prompt": "hello", "max_tokens": 12, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
        await eventually(lambda: named(spans, "request"))
    check_tree(spans)
    (attempt,) = named(spans, "attempt")
    assert all_attributes(attempt)["lockstep.outcome"] == "cancelled"
    assert cluster.router.tracing.waiting == 0


@pytest.mark.parametrize("face", ["grpc", "websocket"])
async def test_a_call_that_is_cancelled_while_its_stream_is_forgotten_ends_its_trace(make_cluster, monkeypatch, face):
    cluster = await make_cluster()
    spans = trace(cluster)
    cancel = cluster.router.runs.cancel

    async def cancelled(request_id: str, owner: str) -> None:
        await cancel(request_id, owner)
        raise asyncio.CancelledError

    monkeypatch.setattr(cluster.router.runs, "cancel", cancelled)
    for worker in cluster.workers:
        worker.script = Script(hang_after=2)
    if face == "grpc":
        async with cluster.over_grpc() as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            sampling = inference_pb2.Sampling(max_tokens=12)
            message = inference_pb2.GenerateRequest(
                model="reference", prompt="hello", sampling=sampling, resumable=False
            )
            call = stub.Generate(message)
            await call.read()
            call.cancel()
            await eventually(lambda: named(spans, "request"))
    else:
        async with cluster.over_http() as client, socket_of(client) as socket:
            await socket.generate("a", model="reference", prompt="hello", max_tokens=12, resumable=False)
            await eventually(lambda: any(worker.submits for worker in cluster.workers))
        await eventually(lambda: named(spans, "request"))
    await eventually(lambda: cluster.router.tracing.waiting == 0)


@pytest.mark.parametrize("headers", [{}, HEADERS])
async def test_a_resumed_client_joins_the_trace_of_its_stream(make_cluster, headers):
    cluster = await make_cluster()
    spans = trace(cluster)
    begun = await cluster.complete(stream=True, resumable=True)
    stream_id = begun.headers["x-lockstep-stream-id"]
    await cluster.client.get(f"/v1/streams/{stream_id}", headers=headers)
    first, second = named(spans, "request")
    assert [all_attributes(each)["lockstep.stream"] for each in (first, second)] == [stream_id, stream_id]
    assert first.links == ()
    assert (second.context.trace_id, second.parent_id) == (first.context.trace_id, first.span_id)
    assert second.has_remote_parent, "the context is that of the journal"
    assert list(second.links) == ([CALLER] if headers else [])
    assert all_attributes(second)["lockstep.resumed"] is True
    assert len(named(spans, "attempt")) == 1


async def test_the_trace_of_a_stream_decides_whether_a_reader_of_it_is_kept(make_cluster):
    """The reader's own decision does not count."""
    cluster = await make_cluster()
    spans = trace(cluster, ratio=0.0)
    begun = await cluster.complete(stream=True, resumable=True)
    resumed = await cluster.client.get(f"/v1/streams/{begun.headers['x-lockstep-stream-id']}", headers=HEADERS)
    assert resumed.status_code == 200
    assert spans == []
    assert cluster.router.tracing.waiting == 0


async def test_a_reader_of_a_stream_that_runs_is_kept_with_it(make_cluster):
    """Its client has left, and another one reads it when it moves: all three are kept because of that."""
    cluster = await make_cluster()
    spans = trace(cluster, ratio=0.0)
    own, _ = cluster.worker_of("user:u")
    own.script = Script(hang_after=3)
    body = {"model": "reference", "prompt": "hello", "max_tokens": 12, "stream": True, "resumable": True, "user": "u"}
    async with cluster.over_http() as client:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
            stream_id = response.headers["x-lockstep-stream-id"]
        async with client.stream("GET", f"/v1/streams/{stream_id}", headers=HEADERS) as response:
            lines = response.aiter_lines()
            await anext(lines)
            assert spans == []
            await own.kill()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await eventually(lambda: len(named(spans, "request")) == 2)
    first, second = sorted(named(spans, "request"), key=lambda span: span.begin_ns)
    assert second.trace is first.trace
    assert (second.parent_id, second.has_remote_parent, list(second.links)) == (first.span_id, False, [CALLER])
    assert {span.trace.kept for span in spans} == {Kept.FAILED_OVER}
    assert cluster.router.tracing.waiting == 0


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_a_client_that_finds_no_stream_has_a_trace_of_its_own(make_cluster, ratio):
    cluster = await make_cluster()
    spans = trace(cluster, ratio=ratio)
    assert (await cluster.client.get("/v1/streams/nothing")).status_code == 404
    assert (await cluster.client.get("/v1/streams/nothing", headers=HEADERS)).status_code == 404
    parents = [(span.parent_id, span.links) for span in named(spans, "request")]
    assert parents == ([(0, ()), (0xB, ())] if ratio else [(0xB, ())])
    assert cluster.router.tracing.waiting == 0


async def test_a_repeated_request_has_a_trace_of_its_own_with_a_link(make_cluster):
    """It was begun for its own sake: only a client that asks for a stream joins the stream's trace."""
    cluster = await make_cluster()
    spans = trace(cluster)
    for _ in range(2):
        await cluster.complete(headers={"Idempotency-Key": "k"})
    first, second = named(spans, "request")
    assert second.context.trace_id != first.context.trace_id
    assert [link.span_id for link in second.links] == [first.span_id]
    assert all_attributes(second)["lockstep.resumed"] is True


async def test_a_call_over_grpc_has_a_trace_which_a_resumed_one_joins(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster)
    async with cluster.over_grpc() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = inference_pb2.GenerateRequest(
            model="reference", prompt="hello", sampling=inference_pb2.Sampling(max_tokens=12)
        )
        call = stub.Generate(message, metadata=tuple(HEADERS.items()))
        metadata = dict(await call.initial_metadata())
        async for _ in call:
            pass
        resume = inference_pb2.ResumeRequest(request_id=metadata["x-lockstep-stream-id"])
        async for _ in stub.Resume(resume, metadata=(("traceparent", OTHER.traceparent),)):
            pass
    await eventually(lambda: len(named(spans, "request")) == 2)
    first, second = named(spans, "request")
    assert (first.parent_id, first.context.state) == (0xB, "vendor=1")
    assert (all_attributes(first)["lockstep.face"], all_attributes(second)["http.route"]) == (
        "grpc",
        "/v1/streams/{stream_id}",
    )
    assert (second.context.trace_id, second.parent_id, list(second.links)) == (
        first.context.trace_id,
        first.span_id,
        [OTHER],
    )


async def test_each_request_on_a_websocket_has_a_trace(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster)
    async with cluster.over_http() as client, socket_of(client, headers=HEADERS) as socket:
        await socket.generate("a", model="reference", prompt="hello", max_tokens=12)
        await socket.answer("a")
        await eventually(lambda: named(spans, "request"))
    (request,) = named(spans, "request")
    assert (request.parent_id, all_attributes(request)["lockstep.face"]) == (0xB, "websocket")
    assert named(spans, "attempt")[0].context.trace_id == request.context.trace_id


async def test_a_resumed_request_on_a_websocket_joins_the_trace_of_its_stream(make_cluster):
    cluster = await make_cluster()
    spans = trace(cluster)
    begun = await cluster.complete(stream=True, resumable=True)
    async with cluster.over_http() as client, socket_of(client, headers=HEADERS) as socket:
        await socket.send(type="resume", id="a", stream=begun.headers["x-lockstep-stream-id"])
        await socket.answer("a")
        await eventually(lambda: len(named(spans, "request")) == 2)
    first, second = named(spans, "request")
    assert (second.context.trace_id, second.parent_id, list(second.links)) == (
        first.context.trace_id,
        first.span_id,
        [CALLER],
    )


async def test_a_stream_that_another_router_goes_on_with_stays_one_trace(tmp_path, tokenizer):
    async with Sharing(tmp_path, tokenizer) as sharing:
        one, two = await sharing.router("one"), await sharing.router("two")
        spans, others = trace(one), trace(two, ratio=0.0)
        for worker in sharing.workers:
            worker.script = Script(hang_after=2)
        body = {"model": "reference", "prompt": "hello", "max_tokens": 12, "stream": True, "resumable": True}
        async with one.over_http() as client, client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
            stream_id = response.headers["x-lockstep-stream-id"]
            await mirrored(one)
            for worker in sharing.workers:
                worker.script = Script()
            resumed = await two.client.get(f"/v1/streams/{stream_id}", headers={"traceparent": OTHER.traceparent})
            assert resumed.status_code == 200
        await eventually(lambda: named(others, "takeover") and named(others, "request") and named(spans, "request"))
        (begun,), (takeover,), (reader,) = (
            named(spans, "request"),
            named(others, "takeover"),
            named(others, "request"),
        )
        assert (takeover.context.trace_id, takeover.parent_id) == (begun.context.trace_id, begun.span_id)
        assert (reader.context.trace_id, reader.parent_id) == (begun.context.trace_id, begun.span_id)
        assert reader.has_remote_parent
        assert list(reader.links) == [OTHER]
        assert takeover.links == (reader.context,)
        (read,), (take,) = named(others, "Journal.Read"), named(others, "Journal.Take")
        for call in (read, take):
            assert (call.context.trace_id, call.parent_id) == (reader.context.trace_id, reader.span_id)
        (attempt,) = named(others, "attempt")
        assert attempt.context.trace_id == begun.context.trace_id


async def test_without_tracing_the_callers_context_is_passed_on(make_cluster):
    cluster = await make_cluster()
    await cluster.complete(headers=HEADERS)
    (submit,) = [submit for worker in cluster.workers for submit in worker.submits]
    assert (submit.traceparent, submit.tracestate) == (CALLER.traceparent, CALLER.state)


def test_requests_that_are_alike_share_their_attributes():
    tracing = Tracing(ratio=1.0, slow_s=60.0, export=lambda _: None)
    sampling = inference_pb2.Sampling(max_tokens=7, temperature=0.5)
    first, second, other = (RequestTrace(tracing.trace()) for _ in range(3))
    for request in (first, second):
        request.describe("m" * 1000, 2, sampling)
    first_span, second_span = first.complete(), second.complete()
    assert first_span.shared[0] is second_span.shared[0]
    expected = {
        "gen_ai.request.model": "m" * 256,
        "gen_ai.response.model": "m" * 256,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.0,
    }
    assert all_attributes(first_span) == expected
    other.describe("m", 1, inference_pb2.Sampling(max_tokens=7, temperature=0.25))
    assert all_attributes(other.complete())["gen_ai.request.temperature"] == 0.25
    assert all_attributes(first_span) == expected
