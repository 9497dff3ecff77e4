"""Idempotency keys of `lockstep_client` on real routers: a repeat joins its answer, and none is refused."""

import asyncio
import contextlib

import pytest
from lockstep_client.openai import AsyncOpenAI, OpenAI
from test_client_over_grpc import POLICY, TEXT, Async, Sync, over_rest, ports, relay
from test_router_deaths import prefer

FIELDS = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
"""Without a seed."""
KEY = {"Idempotency-Key": "order-17"}


@pytest.fixture(params=[Sync, Async])
async def connect(request):
    async with contextlib.AsyncExitStack() as stack:

        def make(urls):
            client = request.param(urls)
            stack.push_async_callback(client.close)
            return client

        yield make


def submits(cluster):
    return sum(len(worker.submits) for worker in cluster.workers)


def ask(address, stream):
    """The text of an answer from the blocking drop-in."""
    with OpenAI(base_url=address, api_key="k", policy=POLICY) as client:
        answer = client.chat.completions.create(**FIELDS, stream=stream, extra_headers=KEY)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        return answer.choices[0].message.content


async def ask_with_asyncio(address, stream):
    """The same of the one for asyncio."""
    async with AsyncOpenAI(base_url=address, api_key="k", policy=POLICY) as client:
        answer = await client.chat.completions.create(**FIELDS, stream=stream, extra_headers=KEY)
        if stream:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])
        return answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_with_the_callers_key_are_one(cluster, stream):
    async with cluster.over_http() as http:
        address = f"http://127.0.0.1:{http.base_url.port}/v1"
        texts = [await asyncio.to_thread(ask, address, stream), await ask_with_asyncio(address, stream)]
    assert texts[0]
    assert texts[0] == texts[1]
    assert submits(cluster) == 1


async def test_whole_answer_that_http_cannot_complete_comes_over_grpc(cluster, connect):
    whole, _ = await over_rest(cluster, "complete", TEXT)
    # The first connection breaks in the answer, and there is no other one.
    async with ports(cluster) as port, relay(port["http"], cuts := [1000] + [0] * 1000, scheme="http") as broken:
        client = connect([broken, f"grpc://127.0.0.1:{port['grpc']}"])
        prefer(client.client._transport, f"{broken}/")
        assert (await client.whole("complete", TEXT)).choices == whole.choices
        assert len(cuts) < 1000, "HTTP was not asked again"
