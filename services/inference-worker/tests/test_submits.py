"""Requests as routers submit them: what reaches the engine, what is refused, and in whose place they wait."""

import asyncio

import pytest
from harness import submit, until
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import Grammar, GrammarKind, Output
from lockstep_worker.outbox import Outbox
from scripted_engine import CONTEXT_LENGTH, VOCAB_SIZE

PROMPT = (1, 2, 3)


class UnexpectedError(Exception):
    """Raised by the worker's own code."""


def with_grammar(**grammar):
    return inference_pb2.Sampling(max_tokens=4, grammar=inference_pb2.Grammar(**grammar))


@pytest.mark.parametrize(
    ("kind", "text"),
    [("JSON_OBJECT", ""), ("JSON_SCHEMA", "{}"), ("REGEX", "[0-9]"), ("LARK", 'start: "a"')],
)
async def test_a_grammar_reaches_the_engine(worker, kind, text):
    router = await worker.greeted()
    number = inference_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind}")
    await router.send(submit=submit(sampling=with_grammar(kind=number, text=text, field="response_format")))
    await until(lambda: worker.engine.requests)
    (request,) = worker.engine.requests.values()
    assert request.sampling.grammar == Grammar(GrammarKind(kind.lower()), text, "response_format")


async def test_an_engines_refusal_reaches_the_router(worker):
    router = await worker.greeted()
    worker.engine.submit_error = LockstepError(ErrorCode.OVERLOADED, "queue full", retry_after_s=1.5)
    await router.send(submit=submit())
    rejected = (await router.next("rejected")).rejected
    assert (rejected.code, rejected.message, rejected.retry_after_s) == ("overloaded", "queue full", 1.5)
    assert rejected.retryable


async def test_a_request_that_breaks_the_engine_ends_alone(worker):
    router = await worker.greeted()
    worker.engine.submit_error = ZeroDivisionError()
    await router.send(submit=submit())
    rejected = (await router.next("rejected")).rejected
    assert (rejected.code, rejected.retryable) == ("internal", False)
    worker.engine.submit_error = None
    await router.send(submit=submit(attempt=2))
    await until(lambda: worker.engine.requests)


async def test_the_engines_error_for_one_request_ends_it_alone(worker):
    router = await worker.greeted()
    for name in ("a", "b"):
        await router.send(submit=submit(name, max_tokens=100))
    await until(lambda: len(worker.engine.requests) == 2)
    error = LockstepError(ErrorCode.RESOURCE_EXHAUSTED, "no blocks")
    worker.engine.give([Output("1:a:1", 0, (), error=error), Output("1:b:1", 0, (3,))])
    assert (await router.next("tokens")).tokens.streams[0].stream_id == "b"
    assert (await router.next("rejected")).rejected.code == "resource_exhausted"


BAD_SUBMITS = [
    ("stream_id", {"stream_id": ""}),
    ("stream_id", {"stream_id": "x" * 129}),
    ("attempt", {"attempt": 0}),
    ("prompt_ids", {"prompt_ids": []}),
    ("prompt_ids", {"prompt_ids": [1, VOCAB_SIZE]}),
    ("emitted_ids", {"emitted_ids": [2**32 - 1]}),
    ("prompt_ids", {"prompt_ids": [1] * CONTEXT_LENGTH, "emitted_ids": [1]}),
    ("deadline_s", {"deadline_s": -1.0}),
    ("deadline_s", {"deadline_s": float("nan")}),
    ("deadline_s", {"deadline_s": float("inf")}),
    ("tenant", {"tenant": "t" * 129}),
    ("max_tokens", {"sampling": inference_pb2.Sampling()}),
    ("grammar", {"sampling": with_grammar(kind=99, text="a")}),
    ("grammar", {"sampling": with_grammar(text="a")}),
    ("response_format", {"sampling": with_grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX, field="response_format")}),
    ("grammar", {"sampling": with_grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX, text="a" * 65537)}),
    ("grammar.field", {"sampling": with_grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX, text="a", field="f" * 65)}),
    ("temperature", {"sampling": inference_pb2.Sampling(max_tokens=1, temperature=float("nan"))}),
    ("temperature", {"sampling": inference_pb2.Sampling(max_tokens=1, temperature=-1)}),
    ("top_p", {"sampling": inference_pb2.Sampling(max_tokens=1, top_p=0)}),
    ("min_p", {"sampling": inference_pb2.Sampling(max_tokens=1, min_p=2)}),
    ("repetition_penalty", {"sampling": inference_pb2.Sampling(max_tokens=1, repetition_penalty=0)}),
    ("frequency_penalty", {"sampling": inference_pb2.Sampling(max_tokens=1, frequency_penalty=3)}),
    ("presence_penalty", {"sampling": inference_pb2.Sampling(max_tokens=1, presence_penalty=-3)}),
    ("logit_bias", {"sampling": inference_pb2.Sampling(max_tokens=1, logit_bias={VOCAB_SIZE: 1.0})}),
    ("logit_bias", {"sampling": inference_pb2.Sampling(max_tokens=1, logit_bias={1: float("inf")})}),
    ("logprobs", {"sampling": inference_pb2.Sampling(max_tokens=1, logprobs=21)}),
    ("stop_token_ids", {"sampling": inference_pb2.Sampling(max_tokens=1, stop_token_ids=[VOCAB_SIZE])}),
    ("stop_token_ids", {"sampling": inference_pb2.Sampling(max_tokens=1, stop_token_ids=[1] * 65)}),
]


async def test_bad_submits_name_their_field_and_never_reach_the_engine(worker):
    router = await worker.greeted()
    for field, change in BAD_SUBMITS:
        await router.send(submit=submit(**change))
        rejected = (await router.next("rejected")).rejected
        assert rejected.field == field, (change, rejected)
        assert rejected.code in ("invalid_request", "context_length_exceeded")
        assert not rejected.retryable
        assert rejected.message
        assert len(rejected.stream_id) <= 128
    assert not worker.engine.requests
    await router.send(submit=submit())
    await until(lambda: worker.engine.requests)


async def test_a_large_prompt_fits_into_a_message(worker):
    router = await worker.greeted()
    await router.send(submit=submit(prompt_ids=[999] * 3_000_000))
    assert (await router.next("rejected")).rejected.code == "context_length_exceeded"


async def test_prompts_are_never_logged(worker, caplog):
    caplog.set_level("DEBUG", logger="lockstep")
    ids = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    router = await worker.greeted()
    await router.send(submit=submit(prompt_ids=[717, 719], traceparent=f"00-{ids[0]}-{ids[1]}-01"))
    await router.send(submit=submit("bad", prompt_ids=[717, 719], traceparent="no trace", deadline_s=-1.0))
    await router.next("rejected")
    fields = [str(vars(record)) for record in caplog.records]
    assert any(all(each in entry for each in ids) for entry in fields)
    assert not any(secret in entry for entry in fields for secret in ("717, 719", "no trace"))


async def test_arrivals_keep_their_order_over_routers_and_reconnections(worker):
    """An arrival is relative to the router's Hello, so that no two clocks are compared."""
    first = await worker.greeted("r0")
    await asyncio.sleep(0.05)
    second = await worker.greeted("r1")
    await first.send(submit=submit("a", arrived_s=0.02))
    await second.send(submit=submit("b", arrived_s=-0.01))
    await first.send(submit=submit("c", arrived_s=0.01))
    await until(lambda: len(worker.engine.requests) == 3)
    arrived = {name.split(":")[1]: request.arrived_at for name, request in worker.engine.requests.items()}
    assert arrived["c"] == pytest.approx(arrived["a"] - 0.01)
    assert sorted(arrived, key=arrived.get) == ["c", "a", "b"]


@pytest.mark.parametrize("arrived_s", [float("nan"), float("inf"), float("-inf")])
async def test_an_arrival_that_is_no_time_is_refused_by_name(worker, arrived_s):
    router = await worker.greeted()
    await router.send(submit=submit("a", arrived_s=arrived_s))
    rejected = (await router.next("rejected")).rejected
    assert (rejected.code, rejected.field, rejected.retryable) == ("invalid_request", "arrived_s", False)


async def test_a_stream_whose_last_tokens_could_not_be_sent_is_rejected_when_the_engine_gives_it_up(
    worker, monkeypatch
):
    router = await worker.greeted()
    await router.send(submit=submit(max_tokens=1))
    await until(lambda: worker.engine.requests)
    (request_id,) = worker.engine.requests

    def fail(*_):
        raise UnexpectedError

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "put", fail)
        with pytest.raises(UnexpectedError):
            worker.engine.step()
    error = LockstepError(ErrorCode.WORKER_LOST, "the driver failed")
    worker.engine.give([Output(request_id, 0, (), error=error)])
    assert (await router.next("rejected")).rejected.code == "worker_lost"
