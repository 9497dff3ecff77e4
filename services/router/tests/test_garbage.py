"""A request that is over is freed at once. What waits for the garbage collector stops the event loop when it comes."""

import asyncio
import collections
import gc

import pytest
from router_cluster import eventually

COMPLETION = {"model": "reference", "prompt": ["hello world", "a b c"], "n": 3, "max_tokens": 20}
CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
CASES = {
    "whole": ("/v1/completions", COMPLETION),
    "stream": ("/v1/completions", COMPLETION | {"stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat-stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "refused": ("/v1/completions", COMPLETION | {"max_tokens": -1}),
}


async def ask(client, path, body, times=3):
    for _ in range(times):
        await client.post(path, json=body)


@pytest.fixture
def garbage():
    """Counts the objects of the router, by type, that only the collector would free."""
    yield collect
    gc.enable()


def collect():
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        mine = [type(each) for each in gc.garbage if type(each).__module__.startswith(("lockstep_router", "uvicorn"))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return collections.Counter(kind.__name__ for kind in mine)


@pytest.mark.parametrize("name", list(CASES))
async def test_a_request_leaves_nothing_to_collect(cluster, garbage, name):
    async with cluster.over_http() as client:
        await ask(client, *CASES[name], times=1)
        gc.collect()
        gc.disable()
        before = len(asyncio.all_tasks())
        await ask(client, *CASES[name])
        await eventually(lambda: len(asyncio.all_tasks()) <= before)
        await asyncio.sleep(0.05)
        assert garbage() == {}


async def test_a_request_whose_client_leaves_leaves_nothing_to_collect(make_cluster, garbage):
    cluster = await make_cluster()
    body = COMPLETION | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
    async with cluster.over_http() as client:
        gc.collect()
        gc.disable()
        before = len(asyncio.all_tasks())
        for _ in range(3):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_bytes())
        await eventually(lambda: len(asyncio.all_tasks()) <= before)
        await asyncio.sleep(0.2)
        assert garbage() == {}
