"""The WebSocket face: many requests on one socket that do not disturb each other, within limits."""

import asyncio
import contextlib
import json
import logging
from collections import Counter

import pytest
import websockets
from key_files import KEY, OTHER_KEY, bearer, tenant, write
from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode
from lockstep_common.telemetry import REGISTRY, JsonFormatter, exposition_for
from lockstep_router.faces.websocket import session
from router_cluster import eventually, leaves_as_it_begins
from scripted_worker import Script
from takeover_cluster import Sharing, mirrored_to
from test_connections import connection
from websocket_client import socket_of, text_of

HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@contextlib.asynccontextmanager
async def opened(cluster, **options):
    async with cluster.over_http() as client, socket_of(client, **options) as socket:
        yield socket


async def test_answer_is_the_same_as_over_rest(cluster):
    async with opened(cluster) as socket:
        await socket.generate("a", max_tokens=20)
        messages = await socket.answer("a")
    assert [message["type"] for message in messages[:1] + messages[-1:]] == ["started", "done"]
    assert text_of(messages) == cluster.undisturbed("hello world", 7, 20)
    assert messages[-1]["usage"]["completion_tokens"] == 20
    stream = messages[0]["stream"]
    assert all(each["event_id"].startswith(f"{stream}:") for each in messages if each["type"] == "event")
    assert messages[-2]["data"]["choices"][0]["finish_reason"] == "length"
    assert messages[1]["data"]["id"] == f"cmpl-{stream}"


async def test_requests_share_a_socket(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.005)
    async with opened(cluster) as socket:
        for index in range(8):
            await socket.generate(f"r{index}", prompt=f"prompt {index}", seed=index, user=f"u{index}", max_tokens=30)
        answers = [await socket.answer(f"r{index}") for index in range(8)]
        ids = [message.get("id") for message in socket.messages if message["type"] == "event"]
    for index, answer in enumerate(answers):
        assert text_of(answer) == cluster.undisturbed(f"prompt {index}", index, 30)
    assert ids != sorted(ids), "they run one after the other"


async def test_wrong_messages_are_answered_and_disturb_nothing(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.01)
    wrong = [
        ("{", None, None),
        ("[]", None, None),
        ("[" * 40, None, None),
        ('"x"', None, None),
        ("{}", None, "type"),
        ('{"type":"dance","id":"x"}', "x", "type"),
        ('{"type":7,"id":"x"}', "x", "type"),
        ('{"type":"generate","id":"x"}', "x", "endpoint"),
        ('{"type":"generate","id":"x","endpoint":"embeddings","body":{}}', "x", "endpoint"),
        ('{"type":"generate","id":"x","endpoint":"completions","body":[]}', "x", "body"),
        ('{"type":"generate","id":7,"endpoint":"completions","body":{}}', None, "id"),
        ('{"type":"generate","id":"","endpoint":"completions","body":{}}', None, "id"),
        ('{"type":"generate","id":"x","endpoint":"completions","body":{},"colour":1}', "x", "colour"),
        ('{"type":"generate","id":"x","endpoint":"completions","body":{},"timeout_s":-1}', "x", "timeout_s"),
        ('{"type":"generate","id":"x","endpoint":"completions","body":{"prompt":"a"}}', "x", "model"),
        (
            '{"type":"generate","id":"x","endpoint":"completions","body":{"model":"reference","prompt":"a","stream":0}}',
            "x",
            "stream",
        ),
        ('{"type":"generate","id":"long","endpoint":"completions","body":{}}', "long", "id"),
        ('{"type":"cancel","id":"nobody"}', "nobody", "id"),
        ('{"type":"cancel"}', None, "id"),
    ]
    async with opened(cluster) as socket:
        await socket.generate("long", max_tokens=60)
        for text, client_id, field in wrong:
            before = len([message for message in socket.messages if message["type"] == "error"])
            await socket.connection.send(text)
            await socket.until(lambda before=before: len([m for m in socket.messages if m["type"] == "error"]) > before)
            error = [message for message in socket.messages if message["type"] == "error"][-1]
            assert (error["id"], error["error"]["param"]) == (client_id, field), text
            assert error["error"]["status"] in (400, 404)
        await socket.until(lambda: any(message["type"] == "done" for message in socket.of("long")))
        assert text_of(socket.of("long")) == cluster.undisturbed("hello world", 7, 60)


async def test_cancel_ends_one_request(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    async with opened(cluster) as socket:
        await socket.generate("gone", max_tokens=200)
        await socket.generate("stays", max_tokens=30)
        await socket.until(lambda: len(socket.of("gone")) > 3)
        await socket.send(type="cancel", id="gone")
        assert (await socket.answer("gone"))[-1]["error"]["code"] == "cancelled"
        assert (await socket.answer("stays"))[-1]["type"] == "done"
        await eventually(lambda: sum(len(worker.cancels) for worker in cluster.workers) == 1)
        await socket.generate("gone", max_tokens=2)
        await socket.until(lambda: socket.of("gone")[-1]["type"] == "done")


async def test_ids_and_requests_of_a_socket_are_limited(make_cluster):
    cluster = await make_cluster(1, websocket_max_requests=2)
    cluster.workers[0].script = Script(delay_s=0.02)
    async with opened(cluster) as socket:
        for client_id in ("a", "b"):
            await socket.generate(client_id, max_tokens=40)
        await socket.generate("a")
        await socket.generate("c")
        assert (await socket.answer("c"))[-1]["error"]["code"] == "overloaded"
        assert [m["error"]["param"] for m in socket.of("a") if m["type"] == "error"] == ["id"]
        for client_id in ("a", "b"):
            await socket.until(lambda client_id=client_id: socket.of(client_id)[-1]["type"] == "done")


async def test_errors_have_code_and_status(cluster):
    async with opened(cluster) as socket:
        await socket.generate("a", model="nobody")
        error = (await socket.answer("a"))[-1]["error"]
    assert (error["code"], error["status"], error["type"]) == ("model_not_found", 404, "invalid_request_error")


async def test_ping_is_answered(cluster):
    async with opened(cluster) as socket:
        await socket.send(type="ping")
        await socket.until(lambda: socket.messages == [{"type": "pong"}])
        await (await socket.connection.ping())


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"binary", 1003), ("x" * 5000, 1009), ([b"x"] * 3, 1003), ([""] * 2000, 1008)],
    ids=["binary", "too large", "binary fragments", "too many fragments"],
)
async def test_what_no_socket_may_send_closes_it(make_cluster, data, code):
    cluster = await make_cluster(1, max_body_bytes=4096)
    async with opened(cluster) as socket:
        with contextlib.suppress(websockets.ConnectionClosed):
            await socket.connection.send(data)
        assert await socket.closed() == code


async def test_message_in_fragments_is_one(cluster):
    async with opened(cluster) as socket:
        message = {"type": "generate", "id": "ä", "endpoint": "completions"}
        message["body"] = {"model": "reference", "prompt": "hello world", "max_tokens": 3, "seed": 7}
        text = json.dumps(message, ensure_ascii=False)
        await socket.connection.send([text[at : at + 5] for at in range(0, len(text), 5)])
        assert text_of(await socket.answer("ä")) == cluster.undisturbed("hello world", 7, 3)


async def test_messages_are_bounded_in_time(make_cluster):
    cluster = await make_cluster(1, body_timeout_s=0.2)
    async with cluster.over_http() as client, connection(client, HANDSHAKE + b"\r\n") as (reader, writer):
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81\xfe\x00\xff\x00\x00\x00\x00" + b"x" * 10)  # of 255 bytes
        async with asyncio.timeout(30):
            assert (await reader.readexactly(4))[2:] == (1008).to_bytes(2)


async def test_silent_client_is_pinged_and_cut_off(make_cluster):
    cluster = await make_cluster(1, keepalive_interval_s=0.1, websocket_pong_timeout_s=0.2)
    async with cluster.over_http() as client, connection(client, HANDSHAKE + b"\r\n") as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await reader.readexactly(1)) == b"\x89"
            with contextlib.suppress(ConnectionError):
                await reader.read()


async def test_client_that_answers_pings_is_pinged_again(make_cluster):
    """While a ping has no answer no other is sent, and the time until the client is cut off runs."""
    cluster = await make_cluster(1, keepalive_interval_s=0.1, websocket_pong_timeout_s=3600)
    async with cluster.over_http() as client, connection(client, HANDSHAKE + b"\r\n") as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(30):
            for _ in range(3):
                ping = await reader.readexactly(2 + 4)
                assert ping[:2] == b"\x89\x04"
                writer.write(masked(ping[2:], opcode=10))


async def test_idle_socket_is_closed_and_a_busy_one_is_not(make_cluster):
    cluster = await make_cluster(1, websocket_idle_timeout_s=0.3)
    cluster.workers[0].script = Script(delay_s=0.05)
    async with cluster.over_http() as client, socket_of(client) as idle, socket_of(client) as busy:
        await busy.generate("a", max_tokens=20)
        assert await idle.closed() == 1001
        assert (await busy.answer("a"))[-1]["type"] == "done"
        assert await busy.closed() == 1001


async def test_client_that_does_not_read_is_cut_off(make_cluster):
    cluster = await make_cluster(1, write_timeout_s=0.3, resume_window_s=0.1)
    cluster.workers[0].script = Script(batch=8)
    async with cluster.over_http() as client:
        async with connection(client) as (reader, writer):
            reader._transport.pause_reading()
            writer.write(HANDSHAKE + b"\r\n")
            body = {"model": "reference", "prompt": "hello", "max_tokens": 200, "n": 16, "logprobs": 20}
            await asyncio.sleep(0.1)
            for index in range(8):
                message = {"type": "generate", "id": f"r{index}", "endpoint": "completions", "body": body}
                writer.write(masked(json.dumps(message).encode()))
            await eventually(lambda: cluster.router.streams > 0)
            await eventually(lambda: cluster.router.streams == 0)
        assert (await client.get("/healthz")).status_code == 200


def masked(payload, opcode=1):
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2)
    return bytes([0x80 | opcode]) + length + bytes(4) + payload


async def test_flood_of_pings_leaves_time_to_others(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.002)
    async with cluster.over_http() as client, connection(client, HANDSHAKE + b"\r\n") as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(masked(b"", opcode=9) * 200_000)
        async with socket_of(client) as socket:
            await socket.generate("a", max_tokens=50)
            assert text_of(await socket.answer("a")) == cluster.undisturbed("hello world", 7, 50)
        assert (await reader.readexactly(2)) == b"\x8a\x00"


async def test_flood_while_the_socket_closes_is_not_read(cluster):
    """The client hears why the socket closes, and its pings beyond some hundred get no answer."""
    async with cluster.over_http() as client, connection(client, HANDSHAKE + b"\r\n") as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(masked(b"", opcode=2))
        head = await reader.readexactly(4)
        assert (head[0], int.from_bytes(head[2:])) == (0x88, 1003)
        await reader.readexactly(head[1] - 2)
        received = b""
        with contextlib.suppress(ConnectionError):
            writer.write(masked(b"", opcode=9) * 200_000)
            while piece := await reader.read(1 << 16):
                received += piece
        assert received == b"\x8a\x00" * (len(received) // 2)
        assert len(received) // 2 < 2000


async def test_answer_to_a_close_frame_is_found_behind_what_was_on_its_way(cluster):
    async with cluster.over_http() as client, connection(client, HANDSHAKE + b"\r\n") as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(masked(b"", opcode=2))
        assert (await reader.readexactly(1)) == b"\x88"
        writer.write(masked(b"x" * 50_000) + masked(b"", opcode=9) * 100 + masked((1003).to_bytes(2), opcode=8))
        # Not answered, the connection would be reset.
        assert (await reader.read()).endswith(b"\x8a\x00" * 100)


async def test_socket_that_breaks_ends_what_nobody_comes_back_for(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    async with cluster.over_http() as client, socket_of(client) as socket:
        await socket.generate("a", max_tokens=200, resumable=False)
        await socket.until(lambda: len(socket.messages) > 3)
        socket.connection.transport.abort()
        await eventually(lambda: cluster.router.streams == 0)
        await eventually(lambda: cluster.router.requests == 0)
        assert cluster.app.state.bodies.used_bytes == 0


@pytest.mark.parametrize("before", [b"", masked(b'{"type":"ping"}'), masked(b"{")], ids=["alone", "ping", "wrong"])
async def test_a_cancel_just_before_the_client_closes_ends_the_request(cluster, before):
    """A page that is left cancels and closes in one go: both arrive together."""
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.1)
    async with cluster.over_http() as client, socket_of(client) as socket:
        await socket.generate("a", max_tokens=200)
        await socket.until(lambda: len(socket.messages) > 3)
        cancel, close = masked(b'{"type":"cancel","id":"a"}'), masked((1001).to_bytes(2), opcode=8)
        socket.connection.transport.write(before + cancel + close)
        await eventually(lambda: any(worker.cancels for worker in cluster.workers))
        await eventually(lambda: cluster.router.requests == 0)
        assert cluster.app.state.bodies.used_bytes == 0


async def test_defect_of_a_session_closes_its_socket_and_frees_what_arrives_behind_it(cluster, monkeypatch, caplog):
    class Defect(dict):
        def get(self, *_):
            raise RuntimeError("secret detail")

    monkeypatch.setattr(session, "parse_object", lambda *_: Defect())
    async with cluster.over_http() as client, connection(client, HANDSHAKE + b"\r\n") as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(masked(b'{"type":"ping"}') * 3)
        async with asyncio.timeout(30):
            head = await reader.readexactly(4)
            assert (head[0], int.from_bytes(head[2:])) == (0x88, 1011)
            assert await reader.readexactly(head[1] - 2) == b"something went wrong in the router"
            writer.write(masked(b'{"type":"ping"}') + masked((1011).to_bytes(2), opcode=8))
            assert await reader.read() == b""
        assert cluster.app.state.bodies.used_bytes == 0
    logged = "".join(JsonFormatter("router").format(each) for each in caplog.records)
    assert logged.count("session failed") == 1
    assert "RuntimeError: secret detail" not in logged


async def test_request_that_joined_a_stream_does_not_end_it(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    options = {"max_tokens": 60, "resumable": False, "more": {"idempotency_key": "k"}}
    async with cluster.over_http() as client, socket_of(client) as first:
        await first.generate("a", **options)
        await first.until(lambda: first.of("a"))
        async with socket_of(client) as second:
            await second.generate("a", **options)
            await second.until(lambda: len(second.of("a")) > 3)
            second.connection.transport.abort()
        assert text_of(await first.answer("a")) == cluster.undisturbed("hello world", 7, 60)
        assert not any(worker.cancels for worker in cluster.workers)


async def test_client_comes_back_on_another_socket(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.01)
    async with cluster.over_http() as client:
        async with socket_of(client) as first:
            await first.generate("a", max_tokens=60, n=2)
            await first.until(lambda: len(first.of("a")) > 12)
            seen = first.of("a")[:9]
            first.connection.transport.abort()
        stream = seen[0]["stream"]
        async with socket_of(client) as second:
            await second.send(type="resume", id="b", stream=stream, last_event_id=seen[-1]["event_id"])
            rest = await second.answer("b")
            assert (rest[0]["stream"], rest[-1]["type"]) == (stream, "done")
            assert text_of(seen) + text_of(rest) == cluster.undisturbed("hello world", 7, 60)
            assert rest[-1]["usage"]["completion_tokens"] == 120
            await second.send(type="resume", id="c", stream=stream)
            assert text_of(await second.answer("c")) == cluster.undisturbed("hello world", 7, 60)
            await second.send(type="resume", id="d", stream=stream, last_event_id=f"{stream}:99,99")
            error = (await second.answer("d"))[-1]["error"]
            assert (error["code"], error["param"]) == ("invalid_request", "last_event_id")
            await second.send(type="resume", id="e", stream="r-nobody")
            assert (await second.answer("e"))[-1]["error"]["code"] == "stream_not_found"
    assert sum(len(worker.submits) for worker in cluster.workers) == 2


async def test_cancelled_request_cannot_be_resumed(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    async with opened(cluster) as socket:
        await socket.generate("a", max_tokens=200)
        await socket.until(lambda: len(socket.of("a")) > 3)
        await socket.send(type="cancel", id="a")
        stream = (await socket.answer("a"))[0]["stream"]
        await socket.send(type="resume", id="b", stream=stream)
        assert (await socket.answer("b"))[-1]["error"]["code"] == "stream_not_found"
        assert cluster.router.streams == 0


async def test_a_cancel_at_the_moment_when_the_stream_begins_ends_it(cluster, monkeypatch):
    for worker in cluster.workers:
        worker.script = Script(delay_s=20)
    async with opened(cluster) as socket:
        leaves_as_it_begins(cluster.router, monkeypatch, lambda: socket.send(type="cancel", id="a"))
        await socket.generate("a", max_tokens=200)
        assert [each["type"] for each in await socket.answer("a")] == ["error"]
        await eventually(lambda: (cluster.router.streams, cluster.router.runs.detached) == (0, 0))


async def test_a_cancel_before_there_is_something_to_read_ends_the_stream_that_others_began(make_cluster):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0.05)  # requests wait for a worker
    body = {"model": "reference", "prompt": "hello world", "stream": True}
    async with asyncio.timeout(60), cluster.over_http() as client, socket_of(client) as socket:
        headers = {"idempotency-key": "k"}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            stream = response.headers["x-lockstep-stream-id"]
            await socket.send(type="resume", id="resumed", stream=stream)
            await eventually(lambda: cluster.router.runs.readings == 2)
            await socket.send(type="cancel", id="resumed")
            assert [each["error"]["code"] for each in await socket.answer("resumed")] == ["cancelled"]
            assert '"code":"cancelled"' in (await response.aread()).decode()
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            joining = {"type": "generate", "id": "joined", "endpoint": "completions", "idempotency_key": "k"}
            await socket.send(**joining, body=body)
            await eventually(lambda: cluster.router.runs.readings == 2)
            await socket.send(type="cancel", id="joined")
            assert [each["error"]["code"] for each in await socket.answer("joined")] == ["cancelled"]
            assert '"code":"cancelled"' in (await response.aread()).decode()
        await eventually(lambda: cluster.router.requests == 0)


async def test_full_server_closes_an_idle_socket_and_keeps_a_busy_one(make_cluster):
    cluster = await make_cluster(1, max_connections=2)
    cluster.workers[0].script = Script(delay_s=0.05)
    async with cluster.over_http() as client, socket_of(client) as busy, socket_of(client) as idle:
        await busy.generate("a", max_tokens=40)
        await busy.until(lambda: bool(busy.messages))
        for _ in range(3):
            with contextlib.suppress(Exception):
                await client.get("/healthz")
        assert await idle.closed() == 1013
        assert (await busy.answer("a"))[-1]["type"] == "done"


async def test_drain_says_so_and_closes_after_the_answers(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    async with cluster.over_http() as client, socket_of(client) as busy, socket_of(client) as idle:
        await busy.generate("a", max_tokens=30)
        await busy.until(lambda: len(busy.messages) > 2)
        connections = [each for each in cluster.connections if each.cycle is not None]
        leaving = asyncio.create_task(
            cluster.router.leave(on_drain=lambda: [each.shutdown() for each in list(connections)])
        )
        assert await idle.closed() == 1012
        await busy.until(lambda: {"type": "draining"} in busy.messages)
        await busy.generate("b")
        assert (await busy.answer("b"))[-1]["error"]["code"] == "draining"
        assert (await busy.answer("a"))[-1]["type"] == "done"
        assert text_of(busy.of("a")) == cluster.undisturbed("hello world", 7, 30)
        assert await busy.closed() == 1012
        await leaving


# The handshake.


async def status_of(client, head):
    async with connection(client, head) as (reader, _):
        async with asyncio.timeout(30):
            return int((await reader.readline()).split()[1])


async def test_what_is_no_handshake_is_an_error(cluster):
    async with cluster.over_http() as client:
        response = await client.get("/v1/stream")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
        for bad in (
            HANDSHAKE.replace(b": 13", b": 8"),
            HANDSHAKE.replace(b"AAAA", b"A"),
            HANDSHAKE.replace(b"websocket\r", b"h2c\r"),
            HANDSHAKE.replace(b"GET", b"POST"),
        ):
            assert await status_of(client, bad + b"\r\n") in (400, 405), bad
        assert await status_of(client, HANDSHAKE + b"\r\n" + masked(b"{}")) == 400
        assert await status_of(client, HANDSHAKE.replace(b"/v1/stream", b"/v1/models") + b"\r\n") == 200


async def test_pages_of_other_origins_may_not_connect(make_cluster):
    cluster = await make_cluster(1, websocket_origins="https://chat.example, https://other.example")
    async with cluster.over_http() as client:
        for origin, status in [
            (b"http://127.0.0.1:8000", 101),
            (b"https://chat.example", 101),
            (b"https://evil.example", 403),
            (b"https://chat.example.evil", 403),
            (b"null", 403),
            (b"http://[", 403),
        ]:
            head = HANDSHAKE.replace(b"host: a", b"host: 127.0.0.1:8000")
            assert await status_of(client, head + b"origin: " + origin + b"\r\n\r\n") == status, origin


async def test_own_page_at_another_name_needs_keys_to_connect(make_cluster, tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY))
    head = HANDSHAKE.replace(b"host: a", b"host: evil:8000") + b"origin: http://evil:8000\r\n"
    open_to_all = await make_cluster(1)
    async with open_to_all.over_http() as client:
        assert await status_of(client, head + b"\r\n") == 403, "the name may be another site's"
    with_keys = await make_cluster(1, keys_file=str(path))
    key = b"authorization: Bearer " + KEY.encode() + b"\r\n"
    async with with_keys.over_http() as client:
        assert await status_of(client, head + key + b"\r\n") == 101
        assert await status_of(client, head.replace(b"http://evil", b"http://other") + key + b"\r\n") == 403


async def test_key_is_checked_before_the_upgrade_and_for_each_request(make_cluster, tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY), tenant("chat", OTHER_KEY, concurrent_streams=1))
    cluster = await make_cluster(1, keys_file=str(path))
    cluster.router.keys.check_s = 0.05
    caplog.set_level(logging.INFO, logger="lockstep")
    async with cluster.over_http() as client:
        for headers in (None, bearer("wrong")):
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with socket_of(client, headers=headers):
                    pass
            assert refused.value.response.status_code == 401
        async with (
            socket_of(client, headers=bearer(KEY)) as first,
            socket_of(client, headers=bearer(OTHER_KEY)) as second,
        ):
            await first.generate("a")
            assert (await first.answer("a"))[-1]["type"] == "done"
            await second.generate("a", n=2)
            assert (await second.answer("a"))[-1]["error"]["code"] == "resource_exhausted"
            write(path, tenant("chat", OTHER_KEY))
            await eventually(lambda: not knows(cluster.router.keys, KEY))
            await first.generate("b")
            error = (await first.answer("b"))[-1]["error"]
            assert (error["code"], error["status"]) == ("invalid_api_key", 401)
            await second.generate("b", n=2)
            assert (await second.answer("b"))[-1]["type"] == "done"
    logged = "".join(JsonFormatter("router").format(record) for record in caplog.records)
    assert KEY not in logged
    assert '"face":"websocket"' in logged
    audited = [record for record in caplog.records if record.name == "lockstep.audit" and record.face == "websocket"]
    assert [(record.tenant, record.status) for record in audited][:2] == [("search", 200), ("chat", 400)]


async def test_what_begins_no_request_is_reported_once_like_any_other(make_cluster, tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY))
    cluster = await make_cluster(1, keys_file=str(path), websocket_max_requests=1)
    cluster.workers[0].script = Script(delay_s=0.02)
    caplog.set_level(logging.INFO, logger="lockstep")
    wrong = [
        ("/v1/stream", 400, "{"),
        ("/v1/stream", 400, '{"type":"generate","id":"x","endpoint":"completions","body":[]}'),
        ("/v1/completions", 503, '{"type":"generate","id":"x","endpoint":"completions","body":{}}'),
        ("/v1/completions", 400, '{"type":"generate","id":"long","endpoint":"completions","body":{}}'),
        ("/v1/streams/{stream_id}", 503, '{"type":"resume","id":"x","stream":"s"}'),
        ("/v1/streams/{stream_id}", 404, '{"type":"cancel","id":"x"}'),
        ("/v1/streams/{stream_id}", 404, '{"type":"cancel","idempotency_key":"a-key-that-nobody-has-used"}'),
    ]

    def counted(endpoint, status):
        labels = {"face": "websocket", "endpoint": endpoint, "code": str(status)}
        return REGISTRY.get_sample_value("lockstep_router_requests_total", labels) or 0

    before = {each[:2]: counted(*each[:2]) for each in wrong}
    async with opened(cluster, headers=bearer(KEY)) as socket:
        await socket.generate("long", max_tokens=200)
        for number, (*_, text) in enumerate(wrong):
            await socket.connection.send(text)
            await socket.until(lambda sent=number: len(errors_of(socket)) > sent)
        reported = [each for each in caplog.records if getattr(each, "face", "") == "websocket"]
    assert {each[:2]: counted(*each[:2]) - before[each[:2]] for each in wrong} == Counter(each[:2] for each in wrong)
    for name in ("lockstep.router", "lockstep.audit"):
        assert [(each.endpoint, each.status) for each in reported if each.name == name] == [each[:2] for each in wrong]
    assert {each.tenant for each in reported if each.name == "lockstep.audit"} == {"search"}


def errors_of(socket):
    return [message for message in socket.messages if message["type"] == "error"]


def knows(keys, key):
    try:
        keys.authenticate(key.encode())
    except Exception:
        return False
    return True


async def test_browsers_name_the_key_as_a_subprotocol(make_cluster, tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY))
    cluster = await make_cluster(1, keys_file=str(path))
    async with cluster.over_http() as client:
        async with socket_of(client, subprotocols=["lockstep.v1", f"lockstep.key.{KEY}"]) as socket:
            assert socket.connection.subprotocol == "lockstep.v1"
            await socket.generate("a")
            assert (await socket.answer("a"))[-1]["type"] == "done"
        elsewhere = {"sec-websocket-protocol": f"lockstep.key.{KEY}"}
        assert (await client.get("/v1/models", headers=elsewhere)).status_code == 401


async def test_requests_count_by_face(cluster):
    async with opened(cluster) as socket:
        await socket.generate("a")
        await socket.answer("a")
    await eventually(
        lambda: (
            'lockstep_router_requests_total{code="200",endpoint="/v1/completions",face="websocket"}'
            in exposition_for("")[0].decode()
        )
    )
    await eventually(
        lambda: (
            'lockstep_router_requests_total{code="101",endpoint="/v1/stream",face="http"}'
            in exposition_for("")[0].decode()
        )
    )


async def test_client_timeout_holds(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.05)
    async with opened(cluster) as socket:
        await socket.generate("a", max_tokens=100, more={"timeout_s": 0.3})
        assert (await socket.answer("a"))[-1]["error"]["code"] == ErrorCode.DEADLINE_EXCEEDED


async def test_session_of_a_message_picks_the_worker(cluster):
    async with opened(cluster) as socket:
        for index in range(6):
            await socket.generate(f"r{index}", max_tokens=1, user=f"u{index}", more={"session": "same"})
            await socket.answer(f"r{index}")
    assert sorted(len(worker.submits) for worker in cluster.workers) == [0, 6]


async def test_a_cancel_while_the_request_is_being_cancelled_does_not_take_its_last_message(tmp_path, tokenizer):
    """Nor does one while it ends by itself: the error is what has ended it."""
    refused = worker_pb2.Rejected(code="invalid_request", message="no such token")
    async with Sharing(tmp_path, tokenizer) as sharing:
        cluster = await sharing.router("first")
        for worker in cluster.workers:
            worker.script = Script(delay_s=0.01)
        async with opened(cluster) as socket:
            await socket.generate("cancelled", max_tokens=200)
            await socket.until(lambda: len(socket.of("cancelled")) > 3)
            await mirrored_to(cluster, socket.of("cancelled")[0]["stream"], 1)
            sharing.state.backend.delay_s = 1.0  # a cancel waits until the state server knows it
            for _ in range(2):
                await socket.send(type="cancel", id="cancelled")
            assert (await socket.answer("cancelled"))[-1]["error"]["code"] == "cancelled"
            for worker in cluster.workers:
                worker.script = Script(delay_s=0.01, reject_after=8, rejection=refused)
            await socket.generate("failed", max_tokens=200, resumable=False)
            await socket.until(lambda: len(socket.of("failed")) > 3)
            await eventually(lambda: cluster.router.streams == 0)  # it has failed, and is being forgotten
            await asyncio.sleep(0.05)
            await socket.send(type="cancel", id="failed")
            assert (await socket.answer("failed"))[-1]["error"]["code"] == "invalid_request"
            await socket.send(type="ping")
            await socket.until(lambda: socket.messages[-1]["type"] == "pong")
            assert not [each for each in socket.messages if each["type"] == "error" and each["id"] is None]
