"""The official client, unmodified."""

import openai
import pytest
from lockstep_api.v1 import worker_pb2
from router_cluster import eventually
from scripted_worker import Script

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(cluster):
    async with cluster.over_http() as http:
        yield openai.AsyncOpenAI(base_url=f"{http.base_url}/v1".replace("//v1", "/v1"), api_key="k", max_retries=0)


async def test_chat(client, cluster):
    answer = await client.chat.completions.create(
        model="reference", messages=MESSAGES, max_tokens=4, seed=7, logprobs=True, top_logprobs=2, n=2
    )
    assert answer.choices[0].message.content == cluster.undisturbed("[user] hi\n[assistant]", 7, 4)
    assert len(answer.choices[1].logprobs.content) == 4
    assert answer.usage.completion_tokens == 8


async def test_streamed_chat(client, cluster):
    stream = await client.chat.completions.create(
        model="reference",
        messages=MESSAGES,
        max_completion_tokens=4,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == cluster.undisturbed("[user] hi\n[assistant]", 7, 4)
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 4


async def test_completion_with_stop_and_logprobs(client):
    whole = await client.completions.create(model="reference", prompt="hello", max_tokens=8, seed=3, logprobs=2)
    text = whole.choices[0].text
    assert "".join(whole.choices[0].logprobs.tokens) == text
    stopped = await client.completions.create(model="reference", prompt="hello", max_tokens=8, seed=3, stop=[text[5:8]])
    assert stopped.choices[0].text == text[: text.index(text[5:8])]
    assert stopped.choices[0].finish_reason == "stop"


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["reference"]
    assert (await client.models.retrieve("reference")).id == "reference"


async def test_errors_have_their_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="reference", messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"


@pytest.mark.parametrize(
    ("code", "requests"), [("stream_moved", 1), ("deadline_exceeded", 1), ("numerical_error", 1), ("internal", 3)]
)
async def test_final_errors_are_not_tried_again(client, cluster, code, requests):
    for worker in cluster.workers:
        worker.script = Script(rejection=worker_pb2.Rejected(code=code, message="bad"), reject_after=0)
    with pytest.raises(openai.APIStatusError) as failed:
        await client.with_options(max_retries=2).completions.create(model="reference", prompt="hello")
    assert failed.value.code == code
    assert sum(len(worker.submits) for worker in cluster.workers) == requests


async def test_error_in_a_stream_is_raised(client, cluster):
    rejected = worker_pb2.Rejected(code="internal", message="bad")
    for worker in cluster.workers:
        worker.script = Script(rejection=rejected, reject_after=2)
    stream = await client.completions.create(model="reference", prompt="hello", stream=True)
    with pytest.raises(openai.APIError, match="bad"):
        [chunk async for chunk in stream]


async def test_closing_a_stream_cancels_it(client, cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    stream = await client.chat.completions.create(model="reference", messages=MESSAGES, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await eventually(lambda: any(worker.cancels for worker in cluster.workers))
    await eventually(lambda: cluster.router.streams == 0)
