"""Large answers in one piece: no turn of the event loop takes all of one, and a client that does not read holds it."""

import asyncio
import contextlib

import httpx
import pytest
from pydantic_core import from_json, to_json
from router_cluster import eventually
from scripted_worker import model_card, tokenizer_files

LARGE = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}),
    ("/v1/completions", {"prompt": "hello world", "logprobs": 20}),
    ("/v1/completions", {"prompt": "hello " * 4_000, "echo": True, "max_tokens": 4}),
]
NAMES = ["chat", "completion", "echo"]
BLOCK_BYTES = 64 << 10


def body_of(fields):
    return {"model": "reference", "max_tokens": 100, "n": 16, "seed": 7} | fields


@contextlib.asynccontextmanager
async def client_of(cluster, on_body):
    """A client whose connection calls `on_body` with each message of an answer's body before it takes it."""

    async def app(scope, receive, send):
        async def take(message):
            if message["type"] == "http.response.body":
                await on_body(message)
            await send(message)

        await cluster.app(scope, receive, take)

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
        yield client


@pytest.fixture
async def large(make_cluster):
    return await make_cluster(
        1, model={"card": model_card(context_length=1 << 17), "files": tokenizer_files()}, write_timeout_s=0.3
    )


@pytest.mark.parametrize(("path", "fields"), LARGE, ids=NAMES)
async def test_large_answer_is_sent_in_blocks_with_turns_between_them(large, path, fields):
    turns, sent = 0, []

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def note(message):
        sent.append((turns, len(message["body"]), message["more_body"]))

    counting = asyncio.create_task(count_turns())
    async with client_of(large, note) as client:
        response = await client.post(path, json=body_of(fields))
    counting.cancel()
    assert response.status_code == 200
    assert int(response.headers["content-length"]) == len(response.content) > 2 * BLOCK_BYTES
    times, sizes, more = zip(*sent, strict=True)
    assert max(sizes) <= 2 * BLOCK_BYTES
    assert len(set(times)) == len(times)
    assert [*more] == [True] * (len(more) - 1) + [False]
    assert sizes[-1] > 0, "a client that has all of it may send its next request"
    answer = from_json(response.content)
    assert to_json(answer) == response.content, "it is what would be written at once"
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    for choice in answer["choices"]:
        assert {len(column) for column in (choice["logprobs"] or {}).values() if column} <= {100}


@pytest.mark.parametrize(("path", "fields"), LARGE, ids=NAMES)
async def test_large_answers_follow_each_other_on_one_connection(large, path, fields):
    async with large.over_http() as client:
        answers = [(await client.post(path, json=body_of(fields))).json() for _ in range(3)]
        assert len(large.connections) == 1
    assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]


async def test_client_that_does_not_read_a_large_answer_is_cut_off_and_its_memory_counts_until_then(large):
    unread = asyncio.Event()
    path, fields = LARGE[1]
    async with client_of(large, lambda _: unread.wait()) as client:
        reading = asyncio.create_task(client.post(path, json=body_of(fields)))
        await eventually(lambda: large.router._other_bytes > 2 * BLOCK_BYTES)
        assert large.router.requests == 1
        await eventually(lambda: large.router._other_bytes == large.router.requests == 0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
