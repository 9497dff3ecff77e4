"""Clients that leave, that do not read, and routers that are full: nothing is left running, nothing grows."""

import asyncio
import json

import httpx
import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_common.tracing import Tracing
from lockstep_router import metrics
from lockstep_router.text.tokenizer import Tokenizer
from router_cluster import events_of, eventually
from scripted_worker import Script, model_card
from span_attributes import all_attributes

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 200, "seed": 7, "user": "u"}


def slow(cluster, delay_s=0.02):
    for worker in cluster.workers:
        worker.script = Script(delay_s=delay_s)


async def assert_left_clean(cluster):
    """The worker got a Cancel, and the router holds nothing of the stream."""
    worker, _ = cluster.worker_of("user:u")
    await eventually(lambda: worker.cancels)
    await eventually(lambda: cluster.router.streams == 0 and cluster.router.requests == 0)
    assert not any(link.has_streams for link in cluster.router.workers.links)
    assert worker.ended_streams == 0


async def test_events_come_as_the_tokens_do(cluster):
    slow(cluster)
    worker, _ = cluster.worker_of("user:u")
    async with (
        cluster.over_http() as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as r,
    ):
        async for line in r.aiter_lines():
            if line.startswith("data: "):
                break
        assert worker.ended_streams == 0
        assert json.loads(line[6:])["choices"][0]["finish_reason"] is None


async def test_events_have_ids_only_for_clients_that_ask(cluster):
    fields = {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    for headers in ({}, {"X-Lockstep-Event-IDs": "FALSE"}):
        plain = await cluster.chat(**fields, headers=headers)
        assert all(block.startswith("data: ") and "\n" not in block for block in plain.text.split("\n\n")[:-1])
    numbered = events_of(await cluster.chat(**fields, headers={"X-Lockstep-Event-IDs": "True"}))
    assert all(event_id is not None for event_id, _ in numbered[:-1])
    refused = await cluster.chat(**fields, headers={"X-Lockstep-Event-IDs": "1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Lockstep-Event-IDs")


async def test_client_that_leaves_its_stream_cancels_it(cluster):
    slow(cluster)
    async with cluster.over_http() as client:
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            await anext(response.aiter_lines())
        await assert_left_clean(cluster)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_before_the_first_token_cancels_its_request(cluster, stream):
    for worker in cluster.workers:
        worker.script = Script(hang_after=0)
    worker, _ = cluster.worker_of("user:u")
    async with cluster.over_http() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": stream}))
        await eventually(lambda: worker.submits)
        asking.cancel()
        await assert_left_clean(cluster)


async def test_client_that_leaves_a_whole_answer_cancels_it(cluster):
    slow(cluster)
    worker, _ = cluster.worker_of("user:u")
    before = metrics.REQUESTS.labels("http", "/v1/completions", "499").value
    async with cluster.over_http() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await eventually(lambda: worker.submits)
        asking.cancel()
        await assert_left_clean(cluster)
    assert metrics.REQUESTS.labels("http", "/v1/completions", "499").value == before + 1


async def test_client_that_leaves_while_no_worker_is_there_is_forgotten(make_cluster):
    cluster = await make_cluster(0, ready=False)
    async with cluster.over_http() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await eventually(lambda: cluster.router.requests == 1)
        asking.cancel()
        await eventually(lambda: cluster.router.requests == 0)


async def test_all_choices_are_cancelled(cluster):
    slow(cluster)
    worker, _ = cluster.worker_of("user:u")
    async with cluster.over_http() as client:
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True, "n": 4}) as response:
            await anext(response.aiter_lines())
        await eventually(lambda: len(worker.cancels) == 4)


async def unread_request(client, body):
    """Send a request over a connection that is never read."""
    host, port = client.base_url.host, client.base_url.port
    reader, writer = await asyncio.open_connection(host, port, limit=1)
    writer.transport.pause_reading()
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def test_client_that_never_reads_is_paused_and_then_cut_off(make_cluster):
    cluster = await make_cluster(1, max_unread_tokens=64 * 22, write_timeout_s=0.3)
    worker = cluster.workers[0]
    worker.card = model_card(context_length=1 << 20)
    worker.script = Script(batch=16)
    worker.announce(epoch=2)
    await eventually(lambda: cluster.router.workers.models["reference"].context_length == 1 << 20)
    before = metrics.FAILOVERS.labels("slow_client")._value.get()
    async with cluster.over_http() as client:
        # More than all buffers between the two ends can hold.
        body = BODY | {"stream": True, "max_tokens": 1 << 19, "logprobs": 20}
        _, writer = await unread_request(client, body)
        await eventually(lambda: worker.submits)
        await eventually(lambda: cluster.router.requests == 0, timeout_s=240)
        writer.close()
    assert metrics.FAILOVERS.labels("slow_client")._value.get() > before
    await eventually(lambda: worker.cancels)
    assert cluster.router.streams == 0


async def test_slow_reader_gets_every_token_once(make_cluster):
    cluster = await make_cluster(1, max_unread_tokens=8)
    worker = cluster.workers[0]
    worker.script = Script(batch=4)
    spans = []
    cluster.router.tracing = Tracing(ratio=0.0, slow_s=60.0, export=spans.extend)
    # Each event takes a while to be written: the worker is faster and has to be paused.
    response = await httpx.AsyncClient(transport=SlowTransport(cluster.app), base_url="http://router").post(
        "/v1/completions", json=BODY | {"stream": True}
    )
    events = events_of(response)
    assert events[-1] == (None, "[DONE]")
    text = "".join(data["choices"][0]["text"] for _, data in events[:-1])
    assert text == cluster.undisturbed("hello world", 7, 200)
    assert len(worker.submits) > 1
    assert cluster.router.failovers == 0, "a pause is no failover"
    (record,) = cluster.router.workers.history.streams
    assert len(record.attempts) > 1
    assert all(attempt.first_token_at is not None for attempt in record.attempts if attempt.tokens)
    (request,), (client,) = ([span for span in spans if span.name == name] for name in ("request", "client"))
    assert all_attributes(request)["lockstep.trace.kept_because"] == "slow"
    assert (client.parent_id, client.error) == (request.span_id, "")
    assert request.begin_ns <= client.begin_ns <= client.end_ns <= request.end_ns
    waits, wait_s = client.attributes["lockstep.client.waits"], client.attributes["lockstep.client.wait_s"]
    assert 0.01 * waits <= wait_s <= (client.end_ns - client.begin_ns) / 1e9
    assert waits > 5


class SlowTransport(httpx.ASGITransport):
    """A client that takes its time over each message."""

    def __init__(self, app):
        async def slow_app(scope, receive, send):
            async def slow_send(message):
                await asyncio.sleep(0.01)
                await send(message)

            await app(scope, receive, slow_send)

        super().__init__(app=slow_app)


class PausingTransport(httpx.ASGITransport):
    """A client that stops reading after its first message, until it is let."""

    def __init__(self, app):
        self.may_read = asyncio.Event()

        async def pausing_app(scope, receive, send):
            async def pausing_send(message):
                if message["type"] == "http.response.body":
                    await self.may_read.wait()
                await send(message)

            await app(scope, receive, pausing_send)

        super().__init__(app=pausing_app)


@pytest.mark.parametrize("n", [1, 2])
async def test_failure_after_a_stop_string_is_not_the_answers(make_cluster, n):
    """A slow reader's stop string is found when it reads: its stream has gone on until then."""
    cluster = await make_cluster(1)
    ids = cluster.tokenizer.encode("one two three four five six", add_special_tokens=False)
    rejected = worker_pb2.Rejected(code="internal", message="bad")
    worker = cluster.workers[0]
    worker.script = Script(token=lambda _prompt_ids, _seed, at: ids[at % len(ids)], reject_after=40, rejection=rejected)
    transport = PausingTransport(cluster.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        body = BODY | {"stream": True, "stop": " six", "n": n, "stream_options": {"include_usage": True}}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: len(worker.submits) == n)
        records = cluster.router.workers.history.streams
        await eventually(lambda: all(record.outcome == "internal" for record in records))
        transport.may_read.set()
        events = events_of(await asking)
    assert events[-1] == (None, "[DONE]")
    choices = [data["choices"][0] for _, data in events[:-1] if data["choices"]]
    for index in range(n):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == "one two three four five"
        assert own[-1]["finish_reason"] == "stop"
    assert events[-2][1]["usage"]["completion_tokens"] == n * len(ids)


async def test_full_router_says_when_to_come_back(make_cluster):
    cluster = await make_cluster(max_streams=2)
    slow(cluster, 0.1)
    running = [asyncio.create_task(cluster.complete()) for _ in range(2)]
    await eventually(lambda: cluster.router.streams == 2)
    refused = await cluster.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "1"
    assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
    assert (await cluster.complete(n=3)).status_code == 503
    assert (await cluster.complete()).status_code == 200


async def test_journals_have_a_budget_together(make_cluster):
    cluster = await make_cluster(max_journals_bytes=1 << 20)
    for worker in cluster.workers:
        worker.card = model_card(context_length=1 << 16)
        worker.announce(epoch=2)
    slow(cluster, 1)
    await eventually(lambda: cluster.router.workers.models["reference"].context_length == 1 << 16)
    long = {"prompt": [5] * 20_000, "max_tokens": 100}
    running = asyncio.create_task(cluster.complete(**long))
    await eventually(lambda: cluster.router.streams == 1)
    refused = await cluster.complete(**long)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert "journals" in refused.json()["error"]["message"]
    running.cancel()
    await eventually(lambda: cluster.router.streams == 0)
    slow(cluster, 0)
    async with asyncio.timeout(30):
        while (await cluster.complete(**long | {"max_tokens": 1})).status_code != 200:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "more", [{"n": 8, "logprobs": 20}, {"prompt": ["hello " * 20_000] * 4, "echo": True}], ids=["logprobs", "echo"]
)
async def test_what_is_kept_for_whole_answers_counts_in_the_budget(make_cluster, more):
    cluster = await make_cluster(max_journals_bytes=1 << 20)
    for worker in cluster.workers:
        worker.card = model_card(context_length=1 << 16)
        worker.announce(epoch=2)
    await eventually(lambda: cluster.router.workers.models["reference"].context_length == 1 << 16)
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.001, hang_after=100)  # it does not end by itself
    running = asyncio.create_task(cluster.complete(**more, max_tokens=200))
    await eventually(lambda: cluster.router.streams or running.done())
    async with asyncio.timeout(30):
        while not running.done() and (await cluster.complete(max_tokens=1)).status_code == 200:
            await asyncio.sleep(0.02)
    if running.done():
        assert running.result().status_code == 503
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(30):
        while (await cluster.complete(max_tokens=1)).status_code != 200:
            await asyncio.sleep(0.02)


async def test_prompts_that_are_tokens_count_before_the_last_one_is(make_cluster, monkeypatch):
    cluster = await make_cluster(max_journals_bytes=1 << 20)
    for worker in cluster.workers:
        worker.card = model_card(context_length=1 << 16)
        worker.announce(epoch=2)
    await eventually(lambda: cluster.router.workers.models["reference"].context_length == 1 << 16)
    encoded, encode = [], Tokenizer.encode

    def counting(tokenizer, text, **options):
        encoded.append(text)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    refused = await cluster.complete(prompt=["hello " * 10_000] * 32)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert 0 < len(encoded) < 32
    assert cluster.router.in_progress.other_bytes == 0


async def test_draining_router_finishes_and_takes_nothing_new(cluster):
    slow(cluster, 0.1)
    running = asyncio.create_task(cluster.complete())
    await eventually(lambda: cluster.router.streams == 1)
    draining = asyncio.create_task(cluster.router.leave())
    await asyncio.sleep(0)
    assert (await cluster.client.get("/readyz")).status_code == 503
    assert (await cluster.client.get("/healthz")).status_code == 200
    refused = await cluster.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert not draining.done()
    assert (await running).status_code == 200
    await draining


async def test_drain_has_an_end(make_cluster):
    """What outlasts it gets a typed error: whole answers, streams and resumable streams."""
    cluster = await make_cluster(drain_timeout_s=0.05)
    for worker in cluster.workers:
        worker.script = Script(hang_after=1)
    bodies = ({}, {"n": 2}, {"stream": True}, {"stream": True, "n": 2}, {"stream": True, "resumable": True})
    running = [asyncio.create_task(cluster.complete(**body)) for body in bodies]
    await eventually(lambda: cluster.router.streams == 7)
    async with asyncio.timeout(30):
        await cluster.router.leave()
    answers = await asyncio.gather(*running)
    for body, answer in zip(bodies, answers, strict=True):
        if "stream" not in body:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"
        else:
            last = answer.text.strip().rpartition("data: ")[2]
            assert json.loads(last)["error"]["code"] == "draining", body
    await eventually(lambda: cluster.router.streams == 0)
    assert cluster.router.runs.running == 0


async def test_what_waits_for_a_worker_when_the_drain_is_over_gets_a_typed_error(make_cluster):
    """It is not prepared yet, so that it has no stream: whole answers, streams, resumable streams and embeddings."""
    cluster = await make_cluster(0, ready=False, drain_timeout_s=0.05)
    bodies = ({}, {"stream": True}, {"stream": True, "resumable": True})
    running = [asyncio.create_task(cluster.complete(**body)) for body in bodies]
    embedding = {"model": "reference", "input": "a text"}
    running.append(asyncio.create_task(cluster.client.post("/v1/embeddings", json=embedding)))
    await eventually(lambda: len(cluster.router.in_progress.preparations) == 4)
    async with asyncio.timeout(30):
        await cluster.router.leave()
    for answer in await asyncio.gather(*running):
        assert answer.json()["error"]["code"] == "draining", answer.text
    assert cluster.router.requests == 0
    assert not cluster.router.in_progress.preparations


async def test_failure_in_the_middle_cannot_be_taken_for_the_end(cluster):
    cluster.fail_after(6)
    slow(cluster)
    async with cluster.over_http() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json=BODY | {"stream": True})
    await assert_left_clean(cluster)


async def test_many_streams_at_once(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.001)
    prompts = [f"prompt {index}" for index in range(40)]
    responses = await asyncio.gather(*(cluster.complete(prompt, user=prompt) for prompt in prompts))
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.json()["choices"][0]["text"] == cluster.undisturbed(prompt, 7, 12)
    assert all(worker.submits for worker in cluster.workers)
