"""Large answers in one piece: no turn of the event loop takes all of one, and a client that does not read holds it."""

import asyncio
import contextlib
import socket
import struct

import httpx
import pytest
from lockstep_router.server import bind
from pydantic_core import from_json, to_json
from router_cluster import eventually
from scripted_worker import model_card, tokenizer_files

LARGE = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}),
    ("/v1/completions", {"prompt": "hello world", "logprobs": 20}),
    ("/v1/completions", {"prompt": 'say "hi" ' * 2_000, "echo": True, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hello world", "logprobs": 20, "resumable": True}),
]
NAMES = ["chat", "completion", "echo", "resumable"]
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
async def make_large(make_cluster):
    """Makes a cluster whose prompts may be long."""

    def make(**settings):
        model = {"card": model_card(context_length=1 << 18), "files": tokenizer_files()}
        return make_cluster(1, model=model, **settings)

    return make


@pytest.fixture
async def large(make_large):
    return await make_large()


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
        assert choice.get("text", "").startswith(fields["prompt"] if "echo" in fields else "")
        assert {len(column) for column in (choice["logprobs"] or {}).values() if column} <= {100}


@pytest.mark.parametrize(("path", "fields"), LARGE, ids=NAMES)
async def test_large_answers_follow_each_other_on_one_connection(large, path, fields):
    async with large.over_http() as client:
        answers = [(await client.post(path, json=body_of(fields))).json() for _ in range(3)]
        assert len(large.connections) == 1
    assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]


def holds_nothing(cluster):
    router = cluster.router
    return router.in_progress.other_bytes == router.requests == router.runs.readings == 0


@pytest.mark.parametrize(("path", "fields"), LARGE[1::2], ids=NAMES[1::2])
async def test_client_that_does_not_read_a_large_answer_is_cut_off_and_its_memory_counts_until_then(
    make_large, path, fields
):
    cluster = await make_large(write_timeout_s=0.3)
    unread = asyncio.Event()
    async with client_of(cluster, lambda _: unread.wait()) as client:
        reading = asyncio.create_task(client.post(path, json=body_of(fields)))
        await eventually(lambda: cluster.router.in_progress.other_bytes > 2 * BLOCK_BYTES)
        assert not holds_nothing(cluster)
        await eventually(lambda: holds_nothing(cluster))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def begun(client, path, fields):
    """A connection for which the kernel holds little, whose large answer has begun."""
    body = to_json(body_of(fields))
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\ncontent-length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.setblocking(False)
        await loop.sock_connect(line, (client.base_url.host, client.base_url.port))
        await loop.sock_sendall(line, head.encode() + body)
        async with asyncio.timeout(60):
            assert (await loop.sock_recv(line, 1024)).startswith(b"HTTP/1.1 200 ")
        yield line


UNREAD = [
    ("/v1/completions", {"prompt": "hello " * 32_000, "echo": True, "max_tokens": 4} | more)
    for more in ({}, {"resumable": True})
]
"""Sixteen echoes are more than the kernel's buffers of both sides hold."""


@pytest.mark.parametrize(("path", "fields"), UNREAD, ids=["completion", "resumable"])
async def test_connection_that_reads_no_large_answer_is_cut_off(make_large, path, fields):
    cluster = await make_large(write_timeout_s=0.3, host="127.0.0.1", port=0)
    # As in production: the kernel gives up what it has for a client that does not read.
    listener = bind(cluster.router.settings)
    async with cluster.over_http(listener) as client, begun(client, path, fields):
        await eventually(lambda: holds_nothing(cluster))
        await eventually(lambda: not cluster.connections)


@pytest.mark.parametrize(("path", "fields"), UNREAD, ids=["completion", "resumable"])
async def test_connection_that_is_reset_within_a_large_answer_holds_nothing(make_large, path, fields):
    cluster = await make_large(write_timeout_s=600)
    async with cluster.over_http() as client:
        async with begun(client, path, fields) as line:
            assert 0 < cluster.router.in_progress.other_bytes < 2 * len(fields["prompt"]), "choices share their prompt"
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await eventually(lambda: holds_nothing(cluster))
        await eventually(lambda: not cluster.connections)


async def test_copies_of_a_kept_answer_are_refused_while_unread_ones_take_all_memory(make_large):
    cluster = await make_large(max_journals_bytes=1 << 20)
    may_read, key = asyncio.Event(), {"Idempotency-Key": "k"}
    path, fields = LARGE[0]
    async with client_of(cluster, lambda _: may_read.wait()) as slow:
        reading = asyncio.create_task(slow.post(path, json=body_of(fields), headers=key))
        await eventually(lambda: cluster.router.in_progress.other_bytes > 1 << 20)
        refused = await cluster.client.post(path, json=body_of(fields), headers=key)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        may_read.set()
        first = await reading
    again = await cluster.client.post(path, json=body_of(fields), headers=key)
    assert again.content == first.content
    assert len(cluster.workers[0].submits) == len(first.json()["choices"]), "the kept answer is not forgotten"
    assert holds_nothing(cluster)
