"""Answers have OpenAI's shapes and contain the workers' tokens."""

import asyncio
import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_api.v1 import inference_pb2
from lockstep_common.telemetry import exposition_for
from lockstep_router.faces.openai.format import ChatFormat, CompletionFormat, Head
from lockstep_router.faces.rest.access import AccessMiddleware
from lockstep_router.faces.rest.app import create_app
from lockstep_router.generation.choices import Delta, TokenEntry
from lockstep_router.status import status_body
from pydantic_core import to_json
from router_cluster import EVENT_IDS, events_of, eventually
from scripted_worker import Script, model_card, token_at, tokenizer_files


async def test_completion(cluster):
    response = await cluster.complete("hello world", max_tokens=5)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "reference"
    assert body["choices"] == [
        {
            "index": 0,
            "text": cluster.undisturbed("hello world", 7, 5),
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_chat(cluster):
    body = (await cluster.chat(max_completion_tokens=5, max_tokens=None)).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    expected = cluster.undisturbed("[user] hi\n[assistant]", 7, 5)
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert choice["finish_reason"] == "length"


async def test_chat_fills_the_context_by_default(cluster):
    body = (await cluster.chat(max_tokens=None)).json()
    assert body["usage"]["total_tokens"] == 256


async def test_completion_has_sixteen_tokens_by_default(cluster):
    assert (await cluster.complete(max_tokens=None)).json()["usage"]["completion_tokens"] == 16


async def test_message_parts_are_lines(cluster):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    together = await cluster.chat(messages=[{"role": "user", "content": "one\ntwo"}])
    apart = await cluster.chat(messages=[{"role": "user", "content": parts}])
    assert apart.json()["choices"] == together.json()["choices"]


async def test_answer_can_be_sent_back_as_it_came(cluster):
    message = (await cluster.chat()).json()["choices"][0]["message"]
    history = [{"role": "developer", "content": "be nice"}, message | {"tool_calls": None}]
    assert (await cluster.chat(messages=[*history, {"role": "user", "content": "and?"}])).status_code == 200


async def test_streamed_chat(cluster):
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
    response = await cluster.chat(**options, headers=EVENT_IDS)
    assert response.headers["content-type"].startswith("text/event-stream")
    request_id = response.headers["x-request-id"]
    events = events_of(response)
    assert events.pop() == (None, "[DONE]")
    assert [event_id for event_id, _ in events] == [f"{request_id}:{n}" for n in (0, 1, 2, 3, 4, 4)]
    first, *middle, usage = [data for _, data in events]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {data["object"] for data in middle} == {"chat.completion.chunk"}
    assert all(data["usage"] is None for data in [first, *middle])
    assert [data["choices"][0]["finish_reason"] for data in middle] == [None, None, None, "length"]
    text = "".join(data["choices"][0]["delta"].get("content", "") for data in middle)
    assert text == (await cluster.chat(max_tokens=4)).json()["choices"][0]["message"]["content"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4


async def test_no_usage_unless_asked_for(cluster):
    events = events_of(await cluster.complete(stream=True))
    assert all("usage" not in data for _, data in events[:-1])


async def test_several_prompts_and_choices_are_ordered(cluster):
    alone = [(await cluster.complete(prompt, n=2)).json()["choices"] for prompt in ("hello", "world")]
    together = (await cluster.complete(["hello", "world"], n=2)).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in together["choices"]] == [c["text"] for pair in alone for c in pair]
    assert together["usage"]["prompt_tokens"] == sum(len(cluster.tokenizer.encode(p)) for p in ("hello", "world"))
    assert together["usage"]["completion_tokens"] == 48


async def test_prompt_as_ids_is_the_same_prompt(cluster):
    ids = cluster.tokenizer.encode("hello world")
    texts = [(await cluster.complete(form)).json()["choices"][0]["text"] for form in ("hello world", ids, [ids])]
    assert len(set(texts)) == 1


async def test_echo(cluster):
    plain, echoed = await cluster.complete("hello"), await cluster.complete("hello", echo=True)
    assert echoed.json()["choices"][0]["text"] == "hello" + plain.json()["choices"][0]["text"]
    ids = cluster.tokenizer.encode("hello")
    assert (await cluster.complete(ids, echo=True)).json()["choices"][0]["text"].startswith("hello")
    events = events_of(await cluster.complete("hello", echo=True, stream=True))
    assert events[0][1]["choices"][0]["text"] == "hello"


async def test_seed_decides_and_its_absence_does_not_repeat(cluster):
    same = [(await cluster.complete()).json()["choices"][0]["text"] for _ in range(2)]
    assert same[0] == same[1]
    other = [(await cluster.complete(seed=None)).json()["choices"][0]["text"] for _ in range(2)]
    assert other[0] != other[1]
    negative = await cluster.complete(seed=-1)
    assert negative.json()["choices"][0]["text"] == cluster.undisturbed("hello world", 2**64 - 1, 12)


async def test_sampling_reaches_the_worker(cluster):
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 40,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    await cluster.complete(**fields, logit_bias={"17": -100}, stop_token_ids=[9], logprobs=3)
    worker, _ = cluster.worker_of("user:u")
    sampling = worker.submits[0].sampling
    for name, value in fields.items():
        assert getattr(sampling, name) == value, name
    assert dict(sampling.logit_bias) == {17: -100}
    assert list(sampling.stop_token_ids) == [9]
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == (7, 12, 3)


async def test_absent_sampling_is_left_to_the_worker(cluster):
    await cluster.complete(top_k=-1, top_p=0, temperature=0)
    worker, _ = cluster.worker_of("user:u")
    sampling = worker.submits[0].sampling
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0
    assert 0 < sampling.top_p < 1e-5
    assert sampling.top_k == 0
    assert not sampling.HasField("repetition_penalty")
    assert not sampling.HasField("logprobs")


async def test_chat_logprobs(cluster):
    body = (await cluster.chat(logprobs=True, top_logprobs=2, max_tokens=3)).json()
    (choice,) = body["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    assert bytes(b for token in content for b in token["bytes"]).decode() == choice["message"]["content"]
    assert [token["logprob"] for token in content] == [-0.5] * 3
    assert [[top["logprob"] for top in token["top_logprobs"]] for token in content] == [[-1.5, -2.5]] * 3
    plain = (await cluster.chat(logprobs=True, max_tokens=3)).json()["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in plain] == [[]] * 3


async def test_streamed_logprobs_are_the_same(cluster):
    whole = (await cluster.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    events = events_of(await cluster.chat(logprobs=True, top_logprobs=1, stream=True))
    chunks = [data["choices"][0]["logprobs"] for _, data in events[:-1]]
    assert [token for chunk in chunks if chunk for token in chunk["content"]] == whole


async def test_completion_logprobs(cluster):
    body = (await cluster.complete(logprobs=2, max_tokens=4)).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {4}
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert (len(top), top[token]) == (3, -0.5), "the chosen token is none of the two most likely ones"
    (none,) = (await cluster.complete(logprobs=0, max_tokens=4)).json()["choices"]
    assert none["logprobs"]["top_logprobs"] == [{token: -0.5} for token in logprobs["tokens"]]


@pytest.mark.parametrize("logprob", ["-inf", "inf", "nan"])
def test_impossible_tokens_have_a_finite_logprob(tokenizer, logprob):
    impossible = inference_pb2.TokenLogprob(id=5, logprob=float(logprob))
    entry = TokenEntry(inference_pb2.Logprobs(chosen=impossible, top=[impossible]), 0)
    answer = CompletionFormat(Head("id", "reference"), tokenizer, choices=1, logprobs=True, include_usage=False)
    logprobs = json.loads(answer.chunk(Delta(0, "a", 1, entries=[entry]), {}))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert list(logprobs["top_logprobs"][0].values()) == [-9999.0]


async def test_stop_string_ends_the_stream_and_its_worker(cluster):
    whole = cluster.undisturbed("hello world", 7, 12)
    ids = [token_at(cluster.tokenizer.encode("hello world"), 7, position) for position in range(12)]
    stop = whole[9:13]
    needed = next(n for n in range(13) if stop in cluster.tokenizer.decode(ids[:n]))
    for worker in cluster.workers:
        worker.script = Script(hang_after=needed)
    body = (await cluster.complete(stop=stop)).json()
    cut = whole.index(stop)
    assert body["choices"][0]["text"] == whole[:cut]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == needed
    worker, _ = cluster.worker_of("user:u")
    await eventually(lambda: worker.cancels)
    assert worker.ended_streams == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_end_with_the_text_at_a_stop_string(cluster, stream):
    whole = cluster.undisturbed("hello world", 7, 12)
    stop = whole[9:13]
    response = await cluster.complete(stop=["never", stop], logprobs=0, stream=stream)
    bodies = [data for _, data in events_of(response)[:-1]] if stream else [response.json()]
    choices = [body["choices"][0] for body in bodies]
    text = "".join(choice["text"] for choice in choices)
    offsets = [at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
    assert text == whole[: whole.index(stop)]
    assert offsets
    assert all(at < len(text) for at in offsets)


async def test_stop_that_never_comes_loses_no_text(cluster):
    whole = cluster.undisturbed("hello world", 7, 12)
    body = (await cluster.complete(stop=[whole[-1] + "x"])).json()
    assert body["choices"][0]["text"] == whole


async def test_end_of_text_is_a_stop(cluster):
    for worker in cluster.workers:
        worker.script = Script(stop_after=3)
    body = (await cluster.complete()).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


async def test_cached_tokens_are_told(cluster):
    for worker in cluster.workers:
        worker.script = Script(cached_tokens=2)
    usage = (await cluster.complete(n=2)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_frames_with_several_tokens(cluster):
    for worker in cluster.workers:
        worker.script = Script(batch=5)
    body = (await cluster.complete(logprobs=1)).json()
    assert body["choices"][0]["text"] == cluster.undisturbed("hello world", 7, 12)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 12


async def test_sessions_stick(cluster):
    for header in ({"x-session-id": "a"}, {"authorization": "Bearer k"}):
        for _ in range(4):
            await cluster.complete(headers=header, user=None)
    assert {len(worker.submits) % 4 for worker in cluster.workers} == {0}


async def test_crowded_worker_is_left(cluster):
    first, (second,) = cluster.worker_of("user:u")
    first.queued = 9
    first.announce()
    own = next(link for link in cluster.router.workers.links if link.worker_id == first.worker_id)
    await eventually(lambda: own.status.queued == 9)
    await cluster.complete()
    assert (len(first.submits), len(second.submits)) == (0, 1)


async def test_tenant_and_trace_reach_the_worker(cluster):
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await cluster.complete(headers={"authorization": "Bearer secret", "traceparent": trace})
    worker, _ = cluster.worker_of("user:u")
    submit = worker.submits[0]
    assert submit.traceparent == trace
    assert len(submit.tenant) == 32
    assert "secret" not in str(submit)


async def test_models(cluster):
    listed = (await cluster.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["created"]) == ("reference", "model", 1_700_000_000)
    assert model["root"] == "reference"
    assert (await cluster.client.get("/v1/models/reference")).json() == model
    missing = await cluster.client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_two_models(make_cluster):
    cluster = await make_cluster(2)
    one, other = cluster.workers
    other.card = model_card(name="org/other", digest="model-2")
    other.announce(epoch=2)
    await eventually(lambda: "org/other" in cluster.router.workers.models)
    await cluster.complete(model="org/other")
    await cluster.complete(model="reference")
    assert (len(one.submits), len(other.submits)) == (1, 1)
    assert (await cluster.client.get("/v1/models/org/other")).json()["id"] == "org/other"


async def test_model_of_an_absent_worker_is_still_known(make_cluster):
    cluster = await make_cluster(1, max_queue_wait_s=0.1)
    await cluster.workers[0].kill()
    await eventually(lambda: not cluster.router.workers.ready())
    assert (await cluster.client.get("/v1/models")).json()["data"]
    assert (await cluster.complete()).status_code == 503
    assert (await cluster.complete(model="other")).status_code == 404


async def test_tokenize_and_back(cluster):
    tokens = (await cluster.client.post("/tokenize", json={"model": "reference", "prompt": "hello world"})).json()
    assert tokens["tokens"] == cluster.tokenizer.encode("hello world")
    assert tokens["count"] == len(tokens["tokens"])
    back = await cluster.client.post("/detokenize", json={"model": "reference", "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": "hello world"}
    messages = [{"role": "user", "content": "hi"}]
    chat = (await cluster.client.post("/tokenize", json={"model": "reference", "messages": messages})).json()
    assert chat["tokens"] == cluster.tokenizer.encode("[user] hi\n[assistant]")


async def test_long_prompt_is_tokenized_off_the_loop(make_cluster):
    cluster = await make_cluster(1)
    cluster.workers[0].card = model_card(context_length=1 << 16)
    cluster.workers[0].announce(epoch=2)
    await eventually(lambda: cluster.router.workers.models["reference"].context_length == 1 << 16)
    prompt = "hello world " * 4000
    response = await cluster.complete(prompt, max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == len(cluster.tokenizer.encode(prompt))


async def test_model_without_chat_template_says_so(make_cluster):
    cluster = await make_cluster(1, ready=False)
    worker = cluster.workers[0]
    worker.files = tokenizer_files(template="")
    await worker.restart()
    await eventually(cluster.router.workers.ready)
    cluster.router.workers.tokenizers.keep_only(())
    await worker.restart()
    await eventually(lambda: worker.tokenizer_calls >= 2 and cluster.router.workers.ready())
    response = await cluster.chat()
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]


async def test_health_status_and_metrics(cluster):
    await cluster.complete()
    assert (await cluster.client.get("/healthz")).json() == {"status": "alive"}
    assert (await cluster.client.get("/readyz")).status_code == 200
    status = status_body(cluster.router)
    assert status["router"]["streams"] == 0
    assert [model["name"] for model in status["models"]] == ["reference"]
    worker = status["workers"][0]
    assert (worker["id"], worker["state"], worker["epoch"], worker["tp"]) == ("w0", "ready", 1, 2)
    assert [rank["pid"] for rank in worker["ranks"]] == [1000, 1001]
    metrics = exposition_for("")[0].decode()
    for name in (
        'lockstep_router_requests_total{code="200",endpoint="/v1/completions",face="http"}',
        "lockstep_router_request_duration_seconds_bucket",
        "lockstep_router_time_to_first_token_seconds_bucket",
        "lockstep_router_inter_token_latency_seconds_bucket",
        "lockstep_router_prompt_tokens_total",
        "lockstep_router_generated_tokens_total",
        "lockstep_router_failover_gap_seconds_bucket",
        'lockstep_router_workers{state="ready"} 2.0',
    ):
        assert name in metrics, name


async def test_status_counts_the_streams_of_a_worker(cluster):
    """As soon as they begin and end: what the worker says of itself comes with its next heartbeat."""

    def streams():
        return {worker["id"]: worker["streams"] for worker in status_body(cluster.router)["workers"]}

    for worker in cluster.workers:
        worker.script = Script(delay_s=0.01)
        worker.heartbeat_s = 3600.0
    worker, (other,) = cluster.worker_of("user:u")
    asking = asyncio.create_task(cluster.complete())
    await eventually(lambda: worker.submits)
    assert streams() == {worker.worker_id: 1, other.worker_id: 0}
    await asking
    assert streams() == {worker.worker_id: 0, other.worker_id: 0}


async def test_openapi_describes_the_bodies(cluster):
    schema = (await cluster.client.get("/openapi.json")).json()
    assert "messages" in schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert "/v1/chat/completions" in schema["paths"]


@pytest.mark.parametrize("make", [ChatFormat, CompletionFormat])
@given(text=st.text(min_size=1), index=st.integers(0, 1), include_usage=st.booleans())
def test_chunks_of_text_are_those_that_json_makes(make, tokenizer, text, index, include_usage):
    """A chunk with nothing but text is put together from parts, any other one is made from a dict."""
    answer = make(Head("id", "reference"), tokenizer, choices=2, logprobs=False, include_usage=include_usage)
    delta = Delta(index, text, 1)
    whole = json.loads(answer.chunk(delta, {"more": 1}))
    del whole["more"]
    assert answer.chunk(delta, {}) == to_json(whole)


def requests_to_compare():
    body = {"model": "reference", "prompt": "hello world", "max_tokens": 5, "seed": 7}
    chat = {"model": "reference", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 7}
    yield "POST", "/v1/completions", body
    yield "POST", "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    yield "POST", "/v1/chat/completions", chat
    yield "POST", "/v1/chat/completions", chat | {"stream": True, "n": 2, "logprobs": True}
    yield "POST", "/v1/chat/completions", {}
    yield "POST", "/v1/completions", body | {"model": "unknown"}
    yield "POST", "/v1/completions", body | {"max_tokens": 0}
    yield "POST", "/v1/completions/", body
    yield "GET", "/v1/completions", None
    yield "HEAD", "/v1/chat/completions", None
    yield "GET", "/v1/streams/{kept}", None
    yield "GET", "/v1/streams/{kept}?last_event_id={kept}:3", None
    yield "GET", "/v1/streams/%6Eobody", None
    yield "GET", "/v1/streams/nobody?last_event_id=1", None
    yield "GET", "/v1/streams/nobody/", None
    yield "GET", "/v1/streams/", None
    yield "HEAD", "/v1/streams/nobody", None
    yield "DELETE", "/v1/streams/nobody", None


@pytest.mark.parametrize(("method", "path", "body"), list(requests_to_compare()))
async def test_direct_routes_answer_as_fastapi_does(cluster, method, path, body):
    through_fastapi = create_app(cluster.router)
    through_fastapi.entry = AccessMiddleware(through_fastapi.inner, cluster.router)
    answers, kept = [], ""
    if "{kept}" in path:
        kept = (await cluster.complete(resumable=True, stream=True)).headers["X-Lockstep-Stream-ID"]
    for app in (cluster.app, through_fastapi):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            url, headers = path.format(kept=kept), {"X-Request-ID": "same"}
            response = await client.request(method, url, json=body, headers=headers)
        events = re.sub(r'"created":\d+', "", response.text).split("\n\n")
        # Two choices are generated side by side: which of them is ahead differs.
        answers.append((response.status_code, response.headers, sorted(events)))
    assert answers[0] == answers[1]
    assert not kept or answers[0][0] == 200
