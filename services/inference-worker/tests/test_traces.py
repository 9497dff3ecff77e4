"""The worker's spans: phases of an attempt, a span for each rank, bounds, and which traces it keeps by itself."""

import time
from pathlib import Path

import pytest
from harness import PATIENCE_S, make_settings, served, submit, until
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import Span, Tracing
from lockstep_common.tracing.spans import CURRENT
from lockstep_engine import FinishReason, Output, Phase, RankTimes
from lockstep_worker.traces import AttemptTrace, begin_attempt
from otlp_receiver import Received, grpc_receiver

KEPT = TraceContext(0xA, 0xB, True, "vendor=1")
NOT_KEPT = TraceContext(0xA, 0xB, False)
IDLE = (RankTimes(0, 0.0, 0.0, 0.0, 0.0),) * 2


def traced(context: TraceContext = KEPT, *, slow_s: float = 60.0) -> tuple[AttemptTrace, list[Span]]:
    spans: list[Span] = []
    tracing = Tracing(ratio=1.0, slow_s=slow_s, export=spans.extend)
    return AttemptTrace(tracing, context, lambda: IDLE), spans


def token(position: int, **fields: object) -> Output:
    return Output("r", position, (1,), **fields)  # type: ignore[arg-type]


def names_of(spans: list[Span]) -> list[str]:
    return [span.name for span in spans if span.name != "rank"]


def test_an_attempt_waits_computes_its_prompt_and_decodes():
    attempt, spans = traced()
    attempt.on_running()
    attempt.on_running()
    attempt.on_output(token(0, cached_tokens=16))
    attempt.on_output(token(1, finish=FinishReason.LENGTH))
    assert names_of(spans) == ["queue", "prefill", "decode"]
    phases = {span.name: span for span in spans if span.name != "rank"}
    assert all(
        (span.context.trace_id, span.parent_id, span.has_remote_parent) == (0xA, 0xB, True) for span in phases.values()
    )
    assert phases["prefill"].attributes["gen_ai.usage.cache_read.input_tokens"] == 16
    assert [name for name, *_ in phases["prefill"].events] == ["chunk"]
    assert phases["decode"].attributes["lockstep.tokens"] == 2
    assert [attributes for _, _, attributes in phases["decode"].events] == [
        {"lockstep.tokens": 1},
        {"lockstep.tokens": 2},
    ]
    assert phases["queue"].end_ns <= phases["prefill"].begin_ns <= phases["prefill"].end_ns <= phases["decode"].begin_ns
    assert [span.parent_id for span in spans if span.name == "rank"] == [
        phases["prefill"].span_id,
        phases["prefill"].span_id,
        phases["decode"].span_id,
        phases["decode"].span_id,
    ]


def test_a_preempted_attempt_has_its_phases_again():
    attempt, spans = traced()
    attempt.on_running()
    attempt.on_output(token(0))
    attempt.on_waiting()
    attempt.on_running()
    attempt.on_output(token(1))
    attempt.end(is_cancelled=True)
    assert names_of(spans) == ["queue", "prefill", "decode"] * 2
    first, second = (span for span in spans if span.name == "decode")
    assert sorted(name for name, *_ in first.events) == ["preempted", "step"]
    assert [attributes for _, _, attributes in second.events] == [{"lockstep.tokens": 1}]
    assert (first.error, second.error) == ("", "")  # what the router does not want any more has not failed
    assert "lockstep.outcome" not in first.attributes
    assert second.attributes["lockstep.outcome"] == "cancelled"


def test_a_long_answer_has_few_events():
    attempt, spans = traced()
    attempt.on_running()
    for position in range(100_000):
        attempt.on_output(token(position))
    attempt.end()
    decode = next(span for span in spans if span.name == "decode")
    assert 24 <= len(decode.events) <= 64
    marks = [attributes["lockstep.tokens"] for _, _, attributes in decode.events]
    assert marks == sorted(set(marks))
    assert marks[-1] > 90_000  # they are spread over the whole answer
    assert decode.attributes["lockstep.steps"] == 100_000


@pytest.mark.parametrize(("phase_s", "plan_wait_s"), [(10.0, 0.25), (1.125, 0.125), (0.5, 0.0)])
def test_ranks_have_what_they_spent_in_the_phase(
    monkeypatch: pytest.MonkeyPatch, phase_s: float, plan_wait_s: float
) -> None:
    """Of a wait that may have begun before the phase, what the phase has room for."""
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    readings = iter(
        [
            (RankTimes(5, 1.0, 0.9, 0.5, 0.0), RankTimes(5, 1.0, 0.9, 0.75, 0.0)),
            (RankTimes(9, 2.0, 1.8, 0.75, 0.25), RankTimes(9, 2.0, 1.8, 1.5, 0.25)),
        ]
    )
    spans: list[Span] = []
    attempt = AttemptTrace(Tracing(ratio=1.0, slow_s=60.0, export=spans.extend), KEPT, lambda: next(readings))
    attempt.on_running()
    now_ns[0] += int(phase_s * 1e9)
    attempt.end()
    first, second = (span.attributes for span in spans if span.name == "rank")
    assert first == {
        "lockstep.rank": 0,
        "lockstep.steps": 4,
        "lockstep.rank.compute_s": 0.75,
        "lockstep.rank.collective_s": 0.25,
        "lockstep.rank.peer_wait_s": 0.0,  # the others wait for this one
        "lockstep.rank.plan_wait_s": plan_wait_s,
    }
    assert (second["lockstep.rank.compute_s"], second["lockstep.rank.peer_wait_s"]) == (0.25, 0.5)


def test_the_compilation_of_a_grammar_is_before_the_queue():
    attempt, spans = traced()
    now_ns = time.monotonic_ns()
    attempt.on_compiled(now_ns, now_ns + 1000)
    attempt.end()
    grammar, queue = spans
    assert (grammar.name, grammar.end_ns - grammar.begin_ns) == ("grammar", 1000)
    assert grammar.end_ns == queue.begin_ns


@pytest.mark.parametrize(
    ("failure", "is_kept"),
    [(None, False), (ErrorCode.WORKER_LOST, True), (ErrorCode.INTERNAL, True), (ErrorCode.INVALID_REQUEST, False)],
)
def test_the_worker_keeps_traces_of_failures_that_the_router_did_not_foresee(failure: ErrorCode | None, is_kept: bool):
    attempt, spans = traced(NOT_KEPT)
    attempt.on_running()
    error = None if failure is None else LockstepError(failure, "canary")
    attempt.on_output(Output("r", 0, (), finish=None if error else FinishReason.STOP, error=error))
    assert bool(spans) is is_kept
    assert "canary" not in repr([(span.attributes, span.error) for span in spans])


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED])
def test_an_end_that_the_client_has_chosen_is_no_error(code: ErrorCode):
    attempt, spans = traced()
    attempt.on_running()
    attempt.on_output(token(0))
    attempt.end(LockstepError(code, "canary"))
    assert [span.error for span in spans] == [""] * len(spans)
    decode = next(span for span in spans if span.name == "decode")
    assert decode.attributes["lockstep.outcome"] == str(code)
    attempt, spans = traced(NOT_KEPT)
    attempt.end(LockstepError(code, "canary"))
    assert spans == []


def test_what_the_engine_begins_for_a_request_belongs_to_its_wait():
    attempt, spans = traced()
    with attempt.submitting():
        span = CURRENT.get()
    assert CURRENT.get() is None
    assert (span.name, span.trace.trace_id) == ("queue", 0xA)
    attempt.end()
    assert names_of(spans) == ["queue"]


def test_a_request_that_is_refused_has_no_spans():
    attempt, spans = traced()
    with pytest.raises(LockstepError), attempt.submitting():
        raise LockstepError(ErrorCode.OVERLOADED, "full")
    assert CURRENT.get() is None
    assert spans == []


def test_the_worker_keeps_slow_traces():
    attempt, spans = traced(NOT_KEPT, slow_s=1e-9)
    attempt.on_running()
    attempt.on_output(token(0))
    assert names_of(spans) == ["queue", "prefill"]


def test_there_are_no_spans_without_a_context_or_without_tracing():
    tracing = traced()[0]._trace._tracing
    assert begin_attempt(None, KEPT.traceparent, "", lambda: IDLE) is None
    assert begin_attempt(tracing, "", "", lambda: IDLE) is None


async def test_a_worker_exports_the_spans_of_its_attempts(model_dir: Path, socket_path: str):
    with grpc_receiver() as receiver:
        async with served(make_settings(model_dir, socket_path, otlp_endpoint=receiver.address)) as worker:
            router = await worker.greeted()
            await router.send(
                submit=submit(max_tokens=2, traceparent=KEPT.traceparent, tracestate=KEPT.state, prompt_ids=[77, 78])
            )
            await until(lambda: worker.engine.requests)
            await router.next("phases")
            (request_id,) = worker.engine.requests
            worker.engine.change_phase(request_id, Phase.RUNNING)
            await router.next("phases")
            worker.engine.step()
            worker.engine.step()
            await router.next("tokens")
        spans: list[Received] = receiver.wait({"queue": 1, "prefill": 1, "decode": 1, "rank": 4}, PATIENCE_S)
    assert {span.trace_id for span in spans} == {f"{0xA:032x}"}
    assert {span.state for span in spans} == {"vendor=1"}
    assert spans[0].resource["service.name"] == "lockstep-worker"
    assert spans[0].resource["service.instance.id"] == "w0"
    decode = next(span for span in spans if span.name == "decode")
    ranks = [span for span in spans if span.parent_id == decode.span_id]
    assert sorted(span.attributes["lockstep.rank"] for span in ranks) == [0, 1]
    assert all(decode.begin_ns <= span.begin_ns <= span.end_ns <= decode.end_ns for span in ranks)
