"""How a worker refuses, fails and ends: the service's own code, on a scripted engine and with ranks."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import Router
from implementations import REAL, SCRIPTED, Implementation, submit
from lockstep_api.v1 import inference_pb2, worker_pb2
from machine import PATIENCE_S

IMPLEMENTATIONS = (SCRIPTED, REAL)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def changed(**fields: object) -> worker_pb2.Submit:
    """A valid Submit except for these fields."""
    message = submit("s")
    message.MergeFrom(worker_pb2.Submit(**fields))
    return message


def sampling(**fields: object) -> worker_pb2.Submit:
    """A valid Submit except for its sampling."""
    message = submit("s")
    message.sampling.CopyFrom(inference_pb2.Sampling(**({"max_tokens": 4} | fields)))
    return message


def without_prompt() -> worker_pb2.Submit:
    return submit("s", prompt_ids=())


BAD = {
    "stream_id": [submit(""), submit("x" * 129)],
    "attempt": [submit("s", attempt=0)],
    "prompt_ids": [without_prompt(), changed(prompt_ids=[2**31])],
    "emitted_ids": [changed(emitted_ids=[2**32 - 1])],
    "deadline_s": [changed(deadline_s=-1.0), changed(deadline_s=float("nan"))],
    "tenant": [changed(tenant="t" * 129)],
    "max_tokens": [sampling(max_tokens=0)],
    "temperature": [sampling(temperature=-1.0), sampling(temperature=float("inf"))],
    "top_p": [sampling(top_p=1.5)],
    "min_p": [sampling(min_p=2.0)],
    "frequency_penalty": [sampling(frequency_penalty=3.0)],
    "logit_bias": [sampling(logit_bias={2**31: 1.0})],
    "logprobs": [sampling(logprobs=21)],
    "stop_token_ids": [sampling(stop_token_ids=[2**31])],
}


async def rejection(router: Router, message: worker_pb2.Submit) -> worker_pb2.Rejected:
    await router.send(submit=message)
    return (await router.next("rejected")).rejected


async def serves(router: Router, name: str = "fence") -> bool:
    """Whether a stream runs to its end."""
    await router.send(submit=submit(name, max_tokens=3))
    while True:
        for frame in (await router.next("tokens")).tokens.streams:
            if frame.stream_id == name and frame.finish:
                return True


async def health(worker: Implementation, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_bad_input_is_rejected_with_its_field_and_nothing_else_suffers(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    for field, messages in BAD.items():
        for message in messages:
            rejected = await rejection(router, message)
            assert (rejected.field, rejected.code, rejected.retryable) == (field, "invalid_request", False), message
            assert rejected.attempt == message.attempt
            assert rejected.stream_id == message.stream_id[:128]
            assert rejected.message
    assert await serves(router)


async def test_more_than_the_context_is_rejected(worker: Implementation) -> None:
    router, hello = await worker.greeted()
    limit = hello.model.context_length
    rejected = await rejection(router, submit("s", prompt_ids=(5,) * (limit + 1)))
    assert (rejected.code, rejected.field, rejected.retryable) == ("context_length_exceeded", "prompt_ids", False)
    assert str(limit) in rejected.message
    assert str(limit + 1) in rejected.message


async def test_a_later_attempt_replaces_the_live_one_silently(worker: Implementation) -> None:
    router, hello = await worker.greeted()
    for attempt in (1, 3, 5, 7, 9):  # where the machine pauses the test, the first one may end before
        await router.send(submit=submit("s", attempt, max_tokens=hello.model.context_length - 16))
        first = (await router.next("tokens")).tokens.streams[0]
        assert first.attempt == attempt
        await router.send(submit=submit("s", attempt + 1, max_tokens=6))
        frames = []
        while not frames or not (frames[-1].finish and frames[-1].attempt == attempt + 1):
            frames += (await router.next("tokens")).tokens.streams
        attempts = [frame.attempt for frame in frames]
        assert attempts == sorted(attempts)
        assert sum(len(frame.ids) for frame in frames if frame.attempt == attempt + 1) == 6
        assert "rejected" not in router.kinds()
        if not any(frame.finish for frame in frames[:-1]):
            return
    pytest.fail("the first attempt has ended before the second one came, in every try")


async def test_an_older_attempt_is_rejected_and_the_live_one_goes_on(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    with worker.standing(await status_at_rest(router)):
        await router.send(submit=submit("s", 5, max_tokens=20))
        rejected = await rejection(router, submit("s", 4))
    assert (rejected.attempt, rejected.field, rejected.retryable) == (4, "attempt", False)
    tokens = [frame for each in router.seen for frame in each.tokens.streams]
    while not tokens or not tokens[-1].finish:
        tokens += (await router.next("tokens")).tokens.streams
    assert {frame.attempt for frame in tokens} == {5}
    assert sum(len(frame.ids) for frame in tokens) == 20


async def test_the_deadline_ends_a_stream(worker: Implementation) -> None:
    router, hello = await worker.greeted()
    message = submit("s", max_tokens=hello.model.context_length - 16)
    message.deadline_s = 0.05
    rejected = await rejection(router, message)
    assert (rejected.code, rejected.retryable) == ("deadline_exceeded", False)
    assert await serves(router)


async def test_a_router_that_goes_leaves_nothing_running(worker: Implementation) -> None:
    watcher, hello = await worker.greeted()
    before = await status_at_rest(watcher)
    router, _ = await worker.greeted()
    tokens = hello.model.context_length - 16
    with worker.standing(before):
        await router.send(submit=submit("s", max_tokens=tokens))
        while not (await watcher.next("status")).status.running:
            pass
        router.call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while (await watcher.next("status")).status.running:
                pass
    # At its own end the stream has had a step for each token.
    assert (await status_at_rest(watcher)).steps - before.steps < tokens // 2


async def status_at_rest(watcher: Router) -> worker_pb2.Status:
    """The next status of a worker that runs nothing and has all blocks free."""
    async with asyncio.timeout(PATIENCE_S):
        while (status := (await watcher.next("status")).status).running or status.free_blocks < status.total_blocks:
            pass
    return status


@pytest.mark.parametrize("first", [{"submit": submit("s")}, {"cancel": worker_pb2.Cancel(stream_id="s")}])
async def test_a_first_frame_other_than_hello_ends_the_call(worker: Implementation, first: dict) -> None:
    router = worker.router()
    await router.send(**first)
    assert (await router.end())[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert router.seen == []


async def test_an_unknown_tokenizer_is_not_found(worker: Implementation) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Tokenizer(worker_pb2.TokenizerRequest(digest="unknown"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_health_distinguishes_liveness_from_readiness(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    assert await health(worker, "") == SERVING
    assert await health(worker, "lockstep.v1.Worker") == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(worker, "other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert await serves(router)


@pytest.mark.slow
async def test_readiness_is_lost_and_found_again_with_the_ranks(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    watch = health_pb2_grpc.HealthStub(worker.channel).Watch(
        health_pb2.HealthCheckRequest(service="lockstep.v1.Worker")
    )
    async with asyncio.timeout(20):
        assert (await watch.read()).status == SERVING
        await worker.lose_rank(router)
        seen = {(await watch.read()).status}
        while SERVING not in seen:
            assert await health(worker, "") == SERVING
            seen.add((await watch.read()).status)
    watch.cancel()
    assert NOT_SERVING in seen
    await router.next("hello")
    await router.ready()
    assert await serves(router)
