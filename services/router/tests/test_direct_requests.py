"""A request that arrives in one piece is answered without ASGI, byte by byte as one that arrives in two."""

import asyncio
import json
import re

import pytest
from lockstep_router.faces.identity import anonymous_tenant
from lockstep_router.faces.rest.generating import DirectFace
from router_cluster import eventually
from scripted_worker import Script

TEXT = {"model": "reference", "prompt": "hello world", "max_tokens": 9, "seed": 7, "user": "u"}
CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 7, "user": "u"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CASES = {
    "text": (COMPLETIONS, TEXT, {}),
    "chat": (CHATS, CHAT, {}),
    "stream": (COMPLETIONS, TEXT | {"stream": True}, {}),
    "stream of a chat": (CHATS, CHAT | {"stream": True, "stream_options": {"include_usage": True}}, {}),
    "stream of one token": (COMPLETIONS, TEXT | {"stream": True, "max_tokens": 1}, {}),
    "stream that closes": (COMPLETIONS, TEXT | {"stream": True}, {"Connection": "close"}),
    "chat with log probabilities": (CHATS, CHAT | {"logprobs": True, "top_logprobs": 2}, {}),
    "several choices": (COMPLETIONS, TEXT | {"n": 3}, {}),
    "echo": (COMPLETIONS, TEXT | {"echo": True}, {}),
    "unknown model": (COMPLETIONS, TEXT | {"model": "none"}, {}),
    "wrong value": (COMPLETIONS, TEXT | {"max_tokens": 0}, {}),
    "unknown field": (CHATS, CHAT | {"unknown": 1}, {}),
    "too many tokens": (COMPLETIONS, TEXT | {"max_tokens": 1 << 20}, {}),
    "wrong header": (COMPLETIONS, TEXT, {"X-Request-Timeout": "soon"}),
    "close": (COMPLETIONS, TEXT, {"Connection": "close"}),
    "HTTP/1.0": (COMPLETIONS, TEXT, {}),
}


def request(path, body, headers, version="1.1"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "router", "X-Request-ID": "same", "Content-Length": str(len(content))} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/{version}\r\n{lines}\r\n".encode(), content


async def read_answer(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    if length := re.search(rb"content-length: (\d+)", head):
        return head + await reader.readexactly(int(length[1]))
    return head + await reader.readuntil(b"\r\n0\r\n\r\n")


def without_time(answer):
    return re.sub(rb'"created":\d+|(?<=\r\n)date: [^\r]+', b"-", answer)


async def exchange(port, pieces):
    """The answer to a request that is sent in these pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02 if len(pieces) > 1 else 0)
    answer = await asyncio.wait_for(read_answer(reader), 60)
    writer.close()
    return without_time(answer)


@pytest.fixture
def served(monkeypatch):
    """The paths that were served without ASGI."""
    paths, serve = [], DirectFace.serve

    async def noting(self, scope, send, channel):
        paths.append(scope["path"])
        await serve(self, scope, send, channel)

    monkeypatch.setattr(DirectFace, "serve", noting)
    return paths


@pytest.mark.parametrize("case", CASES)
async def test_same_bytes(make_cluster, served, case):
    path, body, headers = CASES[case]
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        head, content = request(path, body, headers, "1.0" if case == "HTTP/1.0" else "1.1")
        through_asgi = await exchange(client.base_url.port, [head, content])
        assert not served
        direct = await exchange(client.base_url.port, [head + content])
        assert served == [path]
    assert direct == through_asgi


async def closing_answer(port, pieces):
    """The head and the body of the answer of a router that closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02 if len(pieces) > 1 else 0)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return without_time(answer).split(b"\r\n\r\n", 1)


@pytest.mark.parametrize("case", ["stream", "stream of a chat", "stream of one token", "text"])
async def test_clients_of_http_1_0_get_no_chunks(make_cluster, served, case):
    path, body, headers = CASES[case]
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        port = client.base_url.port
        _, chunked = (await exchange(port, [b"".join(request(path, body, headers))])).split(b"\r\n\r\n", 1)
        head, content = request(path, body, headers | {"Connection": "keep-alive"}, "1.0")
        through_asgi = await closing_answer(port, [head, content])
        direct = await closing_answer(port, [head + content])
        assert len(served) == 2
    assert direct == through_asgi
    assert b"transfer-encoding" not in direct[0].lower()
    assert b"\r\nconnection: close" in direct[0].lower()
    pieces = re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", chunked)
    assert direct[1] == (b"".join(pieces).removesuffix(b"\r\n") if case != "text" else chunked)


async def test_no_face_of_http_1_0_has_chunks(make_cluster):
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        body = {"model": "reference", "input": "hello", "max_output_tokens": 4, "stream": True}
        head, content = request("/v1/responses", body, {"X-Lockstep-Resumable": "true"}, "1.0")
        head, answer = await closing_answer(client.base_url.port, [head + content])
        assert b"transfer-encoding" not in head.lower()
        assert answer.startswith(b"event: response.created\n")
        assert answer.endswith(b"\n\n")
        stream = re.search(rb"x-lockstep-stream-id: ([^\r]+)", head)[1]
        resuming = b"GET /v1/streams/%b HTTP/1.0\r\nHost: router\r\n\r\n" % stream
        head, again = await closing_answer(client.base_url.port, [resuming])
        assert b"transfer-encoding" not in head.lower()
        assert again == answer


async def test_same_bytes_for_what_is_no_json(make_cluster, served):
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        for content in (b"", b"{", b"[]", b"\xff", b'{"model": "reference", "prompt": "a"} x'):
            head, _ = request(COMPLETIONS, content, {})
            halves = [head[:-9], head[-9:] + content]
            answers = [await exchange(client.base_url.port, pieces) for pieces in ([head + content], halves)]
            assert answers[0] == answers[1]
            assert b" 400 " in answers[0]
    assert served


async def test_large_bodies_arrive_through_asgi(make_cluster, served):
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        head, content = request(COMPLETIONS, TEXT | {"prompt": "word " * 20_000}, {})
        assert b" 400 " in await exchange(client.base_url.port, [head + content])
    assert not served


async def test_client_that_leaves_cancels(make_cluster, served):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.script = Script(delay_s=0.05)
    async with cluster.over_http() as client:
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"".join(request(COMPLETIONS, TEXT | {"max_tokens": 200}, {})))
        await eventually(lambda: cluster.router.streams == 1)
        writer.close()
        await eventually(lambda: cluster.router.streams == 0 and worker.cancels)
    assert served
    assert cluster.app.state.bodies.used_bytes == 0


@pytest.mark.parametrize(
    ("proxies", "forwarded", "client"),
    [
        ("127.0.0.0/8", "10.0.0.1", "10.0.0.1"),
        ("127.0.0.1,10.0.0.0/8", "172.16.0.9, 10.0.0.1", "172.16.0.9"),
        ("127.0.0.1", "172.16.0.9, 10.0.0.1", "10.0.0.1"),
        ("10.0.0.0/8", "10.0.0.1", "127.0.0.1"),
    ],
)
async def test_trusted_proxies_name_their_clients_without_asgi(make_cluster, served, proxies, forwarded, client):
    cluster = await make_cluster(1, trusted_proxies=proxies)
    async with cluster.over_http() as http:
        head, content = request(COMPLETIONS, TEXT, {"X-Forwarded-For": forwarded})
        through_asgi = await exchange(http.base_url.port, [head, content])
        assert not served
        assert await exchange(http.base_url.port, [head + content]) == through_asgi
    assert served == [COMPLETIONS]
    assert [each.tenant for each in cluster.workers[0].submits] == [anonymous_tenant(client)] * 2


async def test_one_connection_serves_many(make_cluster, served):
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        answers = [await client.post(COMPLETIONS, json=TEXT) for _ in range(5)]
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [9] * 5
        assert len(cluster.connections) == 1
    assert cluster.app.state.bodies.used_bytes == 0


async def test_stop_string_of_an_answer_in_one_piece_ends_its_stream(make_cluster, served):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.script = Script(delay_s=0.05)
    whole = cluster.undisturbed("hello world", 7, 40)
    async with cluster.over_http() as client:
        body = TEXT | {"max_tokens": 200, "stop": whole[9:13]}
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert answer["choices"][0] == {
            "index": 0,
            "text": whole[: whole.index(whole[9:13])],
            "finish_reason": "stop",
            "logprobs": None,
        }
        await eventually(lambda: worker.cancels and cluster.router.streams == 0)


async def test_unexpected_error_is_a_500_and_ends_the_stream(make_cluster, served):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.script = Script(delay_s=0.02)
    async with cluster.over_http() as client:
        cluster.fail_after(0)
        body = TEXT | {"max_tokens": 200, "stop": "never there"}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 500
        assert "secret detail" not in answer.text
        await eventually(lambda: cluster.router.streams == 0)
