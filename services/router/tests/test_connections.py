"""Limits of connections: headers, framing, time, number. A client that disconnects is noticed whatever it has sent."""

import asyncio
import contextlib
import json

import pytest
from lockstep_router import server
from lockstep_router.faces.rest import connections
from router_cluster import eventually
from scripted_worker import Script

BODY = json.dumps({"model": "reference", "prompt": "hello world", "max_tokens": 200, "stream": True}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"


@contextlib.asynccontextmanager
async def connection(client, data=b""):
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(data)
    try:
        yield reader, writer
    finally:
        writer.close()


async def all_of(reader):
    """Everything until the router closes; a reset ends it too."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(30):
            while data := await reader.read(1 << 16):
                received += data
    return received


async def answer_to(client, data):
    async with connection(client, data) as (reader, _):
        return await all_of(reader)


def error_of(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 40_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 400_000,
        b"GET /" + b"x" * 400_000,
        b"GET /healthz HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 200 + b"\r\n",
    ],
)
async def test_large_heads_are_refused_as_they_come(cluster, head):
    async with cluster.over_http() as client:
        answer = await answer_to(client, head)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"connection: close" in answer
        assert error_of(answer)["code"] == "payload_too_large"
        assert (await client.get("/healthz")).status_code == 200


async def test_headers_within_the_limit_are_taken(cluster):
    async with cluster.over_http() as client:
        response = await client.get("/healthz", headers={f"x-{index}": "y" * 900 for index in range(32)})
        assert response.status_code == 200


@pytest.mark.parametrize("sent", [b"GET /healthz HTTP/1.1\r\nhost: a\r\n", b"GET", b""])
async def test_slow_headers_have_a_deadline(make_cluster, sent):
    cluster = await make_cluster(1, header_timeout_s=0.2)
    async with cluster.over_http() as client:
        answer = await answer_to(client, sent)
        assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""


async def test_deadline_for_headers_begins_again_with_each_request(make_cluster):
    cluster = await make_cluster(1, header_timeout_s=0.2)
    async with cluster.over_http() as client, connection(client, HEALTH) as (reader, writer):
        assert b"200 OK" in await reader.readuntil(b"}")
        await asyncio.sleep(0.4)
        writer.write(HEALTH)
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(HEALTH[:10])
        assert (await all_of(reader)).startswith(b"HTTP/1.1 408 ")


async def test_bodies_of_tiny_chunks_are_refused(cluster):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with cluster.over_http() as client:
        async with connection(client, head + b"1\r\n \r\n" * 20_000) as (reader, _):
            assert b"HTTP/1.1 200" not in await all_of(reader)
        async with connection(client, head + b"0\r\n" + b"x: y\r\n" * 20_000) as (reader, _):
            assert b"HTTP/1.1 200" not in await all_of(reader)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:30], BODY[30:]))
        async with connection(client, head + chunks + b"0\r\n\r\n") as (reader, _):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")


async def test_second_request_before_the_answer_is_not_begun(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.005)
    async with cluster.over_http() as client:
        answer = await answer_to(client, REQUEST + HEALTH)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"data: [DONE]" in answer
    assert sum(len(worker.submits) for worker in cluster.workers) == 1


async def test_client_that_pipelines_and_leaves_is_noticed(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.05)
    async with cluster.over_http() as client:
        async with connection(client, REQUEST + REQUEST) as (reader, _):
            await reader.readuntil(b"data: ")
        await eventually(lambda: any(worker.cancels for worker in cluster.workers))
        await eventually(lambda: cluster.router.streams == 0)
    assert not any(worker.ended_streams for worker in cluster.workers)


async def test_client_that_goes_on_sending_is_cut_off(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.05)
    async with cluster.over_http() as client, connection(client, REQUEST + HEALTH * 10_000) as (reader, _):
        answer = await all_of(reader)
    assert b"[DONE]" not in answer
    await eventually(lambda: any(worker.cancels for worker in cluster.workers))


async def test_full_server_closes_the_longest_idle_connection(make_cluster):
    cluster = await make_cluster(1, max_connections=2)
    cluster.workers[0].script = Script(delay_s=0.05)
    async with cluster.over_http() as client, connection(client, REQUEST) as (busy, _):
        await busy.readuntil(b"data: ")
        async with connection(client, HEALTH) as (idle, _):
            await idle.readuntil(b"}")
            async with connection(client, REQUEST) as (second, _):
                assert await all_of(idle) == b""
                await second.readuntil(b"data: ")
                refused = await answer_to(client, HEALTH)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert error_of(refused)["code"] == "overloaded"
        assert b"[DONE]" not in await busy.readuntil(b"data: "), "the busy connection was kept"


async def test_full_server_closes_a_connection_whose_body_is_not_complete(make_cluster):
    cluster = await make_cluster(1, max_connections=3)
    async with cluster.over_http() as client, connection(client, REQUEST) as (busy, _):
        await busy.readuntil(b"data: ")
        async with connection(client, REQUEST[:-1]) as (first, _), connection(client, REQUEST[:-1]) as (second, later):
            await asyncio.sleep(0.05)
            assert b" 200 OK" in await answer_to(client, HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            assert await all_of(first) == b""
            later.write(REQUEST[-1:])
            assert b"[DONE]" in await second.readuntil(b"[DONE]")


async def keep_sending(writer, data):
    """Until the router resets the connection."""
    async with asyncio.timeout(30):
        while True:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.01)


EARLY = [
    b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9%d\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n",
]


@pytest.mark.parametrize("head", EARLY)
async def test_rest_of_a_body_after_its_answer_is_dropped_within_limits(cluster, head):
    async with cluster.over_http() as client:
        async with connection(client, head % (2 << 20)) as (reader, writer):
            for _ in range(32):
                writer.write(b"x" * (64 << 10))
                await writer.drain()
            assert b"\r\nconnection: close\r\n" in (await all_of(reader)).lower()
        async with connection(client, head % (1 << 30)) as (reader, writer):
            with pytest.raises(ConnectionError):
                await keep_sending(writer, b"x" * (1 << 20))


@pytest.mark.parametrize("head", EARLY)
async def test_client_that_does_not_end_its_body_after_the_answer_is_cut_off(cluster, head, monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_BODY_S", 0.2)
    async with cluster.over_http() as client, connection(client, head % (2 << 20)) as (reader, writer):
        assert (await all_of(reader)).startswith(b"HTTP/1.1 ")
        with pytest.raises(ConnectionError):
            await keep_sending(writer, b"x")


async def test_complete_body_keeps_the_connection_whatever_the_answer(cluster):
    head = b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi"
    async with cluster.over_http() as client, connection(client, head + b"") as (reader, writer):
        assert b"connection: close" not in await reader.readuntil(b"}}")
        writer.write(HEALTH)
        assert b" 200 OK" in await reader.readuntil(b"}")


async def test_one_client_address_has_a_limit_of_its_own(make_cluster):
    cluster = await make_cluster(1, max_connections_per_client=2)
    async with cluster.over_http() as client:
        async with connection(client, HEALTH) as (first, _), connection(client, HEALTH) as (second, _):
            await first.readuntil(b"}")
            await second.readuntil(b"}")
            assert (await answer_to(client, HEALTH)).startswith(b"HTTP/1.1 503 ")
        await eventually_answered(client)


async def eventually_answered(client):
    """Closing is seen by the router a moment later."""
    async with asyncio.timeout(30):
        while (await client.get("/healthz")).status_code != 200:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HT"], ids=["new", "begun"])
async def test_request_that_comes_while_the_router_drains_is_answered(cluster, begun):
    """Its client cannot know that the router leaves."""
    async with cluster.over_http() as client, connection(client, begun) as (reader, writer):
        await eventually(lambda: any(each._received_bytes == len(begun) for each in cluster.connections))
        for each in list(cluster.connections):
            each.shutdown()
        writer.write(HEALTH[len(begun) :])
        answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer


async def test_new_connection_does_not_hold_up_the_end(cluster):
    async with cluster.over_http() as client, connection(client) as (reader, _):
        await eventually(lambda: cluster.connections)
        for _ in range(2):
            for each in list(cluster.connections):
                each.shutdown()
        assert await all_of(reader) == b""


async def test_answers_have_the_date_of_their_second(cluster):
    async with cluster.over_http() as client:
        first = (await client.get("/healthz")).headers["date"]
        async with asyncio.timeout(30):
            while (await client.get("/healthz")).headers["date"] == first:
                await asyncio.sleep(0.05)


async def test_line_ends_between_requests_keep_no_connection_open(make_cluster, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.3)
    cluster = await make_cluster(1)
    async with cluster.over_http() as client, connection(client, HEALTH) as (reader, writer):
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert await all_of(reader) == b""


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/completions?a=b"], ids=["direct", "through ASGI"])
async def test_trailers_are_no_headers(cluster, path):
    head = b"POST %s HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" % path
    body = b"%x\r\n%s\r\n0\r\nX-Session-ID: %s\r\n\r\n" % (len(BODY), BODY, b"s" * 2000)
    async with cluster.over_http() as client, connection(client, head + body) as (reader, _):
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n"), "a header like this would be refused"


async def test_bad_framing_in_the_heads_own_segment_is_refused_and_nothing_runs(cluster):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with cluster.over_http() as client:
        answer = await answer_to(client, head + b"zz\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_of(answer)["code"] == "invalid_request"
    assert not cluster.workers[0].submits
