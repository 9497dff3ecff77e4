"""Events that are written as soon as their tokens arrive are those that a waking task writes, byte by byte."""

import asyncio
import json
import random
import re

import httpx
import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_router.faces.rest.connections import BoundedProtocol
from lockstep_router.faces.rest.response_channel import ResponseChannel
from lockstep_router.lanes import Outlet
from router_cluster import EVENT_IDS, events_of, eventually
from scripted_worker import Script, token_at

TEXT = {"model": "reference", "prompt": "hello world", "max_tokens": 40, "seed": 7, "user": "u", "stream": True}
CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 7}
CHAT |= {"user": "u", "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
def pushed(monkeypatch):
    """Every event that a lane sends. `pushed.send` may be replaced: called with how to send, and with the event."""

    class Pushed(list):
        @staticmethod
        def send(really, event):
            return really(event)

    events = Pushed()
    made = Outlet.__init__

    def observed(self, *parts, send, send_later):
        def observing(event):
            events.append(event)
            return events.send(send, event)

        made(self, *parts, send=observing, send_later=send_later)

    monkeypatch.setattr(Outlet, "__init__", observed)
    return events


@pytest.fixture
def written(monkeypatch, pushed):
    """Every piece that is written at once: by a lane, or without one."""
    write = ResponseChannel.write

    def counting(self, data):
        pushed.append(data)
        write(self, data)

    monkeypatch.setattr(ResponseChannel, "write", counting)
    return pushed


def set_open(monkeypatch, is_open):
    """Decide again for each write whether the channel is open."""
    really = ResponseChannel.is_open.fget
    monkeypatch.setattr(ResponseChannel, "is_open", property(lambda self: is_open() and really(self)))


async def streamed(client, path, body, *, has_ids=True):
    headers = {"X-Request-ID": "same"} | (EVENT_IDS if has_ids else {})
    response = await client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return re.sub(r'"created":\d+', "", response.text)


async def both_ways(cluster, path, body, *, restart=lambda: None, has_ids=True):
    """The answer without a channel, and over a real connection."""
    restart()
    waking = await streamed(cluster.client, path, body, has_ids=has_ids)
    restart()
    async with cluster.over_http() as client:
        direct = await streamed(client, path, body, has_ids=has_ids)
    return waking, direct


def bytes_of_characters(prompt_ids, seed, position):
    """Tokens of which many are single bytes: most are no characters by themselves."""
    return 4 + token_at(prompt_ids, seed, position) % 256


CASES = {
    "text": ("/v1/completions", TEXT, {}),
    "text with usage": ("/v1/completions", TEXT | USAGE, {}),
    "chat with usage": ("/v1/chat/completions", CHAT | USAGE, {}),
    "log probabilities": ("/v1/completions", TEXT | {"logprobs": 3}, {}),
    "log probabilities of a chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, {}),
    "echo": ("/v1/completions", TEXT | {"echo": True} | USAGE, {}),
    "parts of characters": ("/v1/completions", TEXT | {"logprobs": 1}, {"token": bytes_of_characters}),
    "several tokens at once": ("/v1/chat/completions", CHAT | USAGE, {"batch": 7}),
    "the worker's own end": ("/v1/chat/completions", CHAT | USAGE, {"stop_after": 9}),
    "frames that are dropped": ("/v1/completions", TEXT | USAGE, {"noise": True}),
    "tokens without columns": ("/v1/completions", TEXT | USAGE, {"columns": False}),
    "cached tokens": ("/v1/chat/completions", CHAT | USAGE, {"cached_tokens": 2}),
}


LANES = [
    ("/v1/completions", TEXT),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", TEXT | {"echo": True}),
    ("/v1/completions", TEXT | {"model": "reference", "user": "100 %d of %b"}),
]


@pytest.mark.parametrize("has_ids", [True, False], ids=["ids", "no ids"])
@pytest.mark.parametrize("case", CASES)
async def test_same_bytes(make_cluster, written, case, has_ids):
    path, body, script = CASES[case]
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002, **script)
    waking, direct = await both_ways(cluster, path, body, has_ids=has_ids)
    assert direct == waking
    assert direct.endswith("data: [DONE]\n\n")
    assert all(block.startswith("id: same:" if has_ids else "data: {") for block in direct.split("\n\n")[:-2])
    assert written


@pytest.mark.parametrize("more", [{"n": 3}, {"prompt": ["hello", "world", "again"], "echo": True}])
async def test_same_events_of_several_choices(make_cluster, written, more):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002)
    answers = await both_ways(cluster, "/v1/completions", TEXT | more | USAGE)
    waking, direct = (events.split("\n\n") for events in answers)
    # Choices are generated side by side: which of them is ahead differs.
    assert sorted(direct) == sorted(waking)
    assert direct[-3:] == waking[-3:]
    assert written


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_same_bytes_until_a_stop_string(make_cluster, written, path):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.script = Script(delay_s=0.002)
    body = (TEXT if path == "/v1/completions" else CHAT) | USAGE
    whole = await cluster.client.post(path, json={k: v for k, v in body.items() if k not in ("stream", *USAGE)})
    choice = whole.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    waking, direct = await both_ways(cluster, path, body | {"stop": [text[30:36], "never there"]})
    assert direct == waking
    assert '"finish_reason":"stop"' in direct
    assert written
    await eventually(lambda: len(worker.cancels) == 2)


async def test_finished_stream_is_not_cancelled_on_its_worker(make_cluster, written):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002)
    async with cluster.over_http() as client:
        await streamed(client, "/v1/completions", TEXT)
        assert written
        await streamed(client, "/v1/completions", TEXT)
    assert not cluster.workers[0].cancels


async def test_same_bytes_over_a_move(make_cluster, written):
    cluster = await make_cluster(2)
    own, (other,) = cluster.worker_of("user:u")
    other.script = Script(delay_s=0.002)

    def restart():
        own.script = Script(delay_s=0.002, skip_at=11)

    waking, direct = await both_ways(cluster, "/v1/completions", TEXT | USAGE, restart=restart)
    assert direct == waking
    assert cluster.router.failovers >= 1
    assert written


@pytest.mark.parametrize("seed", range(3))
async def test_same_bytes_however_often_the_client_is_behind(make_cluster, monkeypatch, written, seed):
    cluster = await make_cluster(1, max_unread_tokens=8)
    cluster.workers[0].script = Script(delay_s=0.001, batch=2)
    rng = random.Random(seed)
    set_open(monkeypatch, lambda: rng.random() < 0.5)
    body = TEXT | USAGE | {"max_tokens": 200}
    waking, direct = await both_ways(cluster, "/v1/completions", body)
    assert direct == waking, f"seed {seed}"
    assert 5 < len(written) < 95


async def test_comments_do_not_come_between_the_parts_of_an_event(make_cluster, written):
    cluster = await make_cluster(1, keepalive_interval_s=0.04)
    cluster.workers[0].script = Script(delay_s=0.02)
    async with cluster.over_http() as client:
        response = await client.post("/v1/completions", json=TEXT)
    assert written
    text = "".join(data["choices"][0]["text"] for _, data in events_of(response)[:-1])
    assert text == cluster.undisturbed("hello world", 7, 40)


@pytest.mark.parametrize(("path", "more"), LANES)
async def test_lane_sends_the_same_bytes(make_cluster, pushed, path, more):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002)
    waking, direct = await both_ways(cluster, path, more | USAGE | {"max_tokens": 120})
    assert direct == waking
    # Not the first, the last, the proof that the worker is well, and numbers with a digit more; and few have no text.
    assert 100 < len(pushed) < 117


async def test_lane_of_a_connection_with_tls_sends_the_same_bytes(make_cluster, monkeypatch, pushed):
    made = BoundedProtocol.__init__
    monkeypatch.setattr(BoundedProtocol, "__init__", lambda *args, **more: made(*args, **more | {"wire": None}))
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002)
    waking, direct = await both_ways(cluster, "/v1/chat/completions", CHAT | USAGE)
    assert direct == waking
    assert pushed


async def test_lane_gives_way_to_parts_of_characters(make_cluster, pushed):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002, token=bytes_of_characters)
    waking, direct = await both_ways(cluster, "/v1/completions", TEXT | USAGE | {"max_tokens": 120})
    assert direct == waking
    assert pushed


@pytest.mark.parametrize("seed", range(3))
async def test_lane_of_a_connection_that_takes_little_sends_the_same_bytes(make_cluster, pushed, seed):
    rng = random.Random(seed)

    def send(really, event):
        if rng.random() < 0.3:
            raise BlockingIOError
        return really(event[: rng.randrange(1, len(event))] if rng.random() < 0.3 else event)

    pushed.send = send
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002)
    waking, direct = await both_ways(cluster, "/v1/completions", TEXT | USAGE | {"max_tokens": 120})
    assert direct == waking, f"seed {seed}"
    assert len(pushed) > 40


async def test_lane_carries_a_stream_over_a_move(make_cluster, pushed):
    cluster = await make_cluster(2)
    own, (other,) = cluster.worker_of("user:u")
    other.script = Script(delay_s=0.002)

    def restart():
        own.script = Script(delay_s=0.002, skip_at=11)

    waking, direct = await both_ways(cluster, "/v1/completions", TEXT | USAGE, restart=restart)
    assert direct == waking
    assert cluster.router.failovers >= 1
    assert b":5\n" in b"".join(pushed)
    assert b":35\n" in b"".join(pushed)


async def test_lane_does_not_open_before_the_role_is_sent(make_cluster, pushed):
    cluster = await make_cluster(1, keepalive_interval_s=0.1)

    def first_ones_without_text(prompt_ids, seed, position):
        script.delay_s = 0.002
        return token_at(prompt_ids, seed, position) if position > 2 else 0

    script = cluster.workers[0].script = Script(delay_s=0.3, token=first_ones_without_text)
    async with cluster.over_http() as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 30})
    assert response.text.startswith(": keep-alive")
    roles = ["role" in data["choices"][0]["delta"] for _, data in events_of(response)[:-1]]
    assert roles[0]
    assert not any(roles[1:])
    assert pushed


async def test_columns_of_different_lengths_end_the_connection(make_cluster):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.broadcast(worker_pb2.WorkerFrame(epoch=1, tokens=worker_pb2.Tokens(handles=[1], positions=[0])))
    await eventually(lambda: not worker.connected)
    await eventually(lambda: worker.connected)


async def test_columns_of_unknown_streams_are_dropped(make_cluster):
    cluster = await make_cluster(1)
    frame = worker_pb2.Tokens(handles=[77], positions=[0], ids=[5])
    cluster.workers[0].broadcast(worker_pb2.WorkerFrame(epoch=1, tokens=frame))
    response = await cluster.complete()
    assert response.json()["choices"][0]["text"] == cluster.undisturbed("hello world", 7, 12)


async def test_client_that_leaves_ends_a_stream_that_a_lane_carries(make_cluster, pushed):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.script = Script(delay_s=0.01)
    async with (
        cluster.over_http() as client,
        client.stream("POST", "/v1/completions", json=TEXT | {"max_tokens": 200}) as response,
    ):
        async for _ in response.aiter_lines():
            if len(pushed) > 5:
                break
    await eventually(lambda: len(worker.cancels) == 1)
    await eventually(lambda: cluster.router.streams == 0)
    (link,) = cluster.router.workers.links
    assert not link.lanes


async def test_failure_of_a_lane_ends_its_own_stream_only(make_cluster, pushed):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.005)

    def send(really, event):
        if b"id: broken:20\n" in event:
            raise RuntimeError("a defect")
        return really(event)

    pushed.send = send
    async with cluster.over_http() as client:
        sound = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json=TEXT, headers={"X-Request-ID": "broken"} | EVENT_IDS)
        text = "".join(data["choices"][0]["text"] for _, data in events_of(await sound)[:-1])
    assert text == cluster.undisturbed("hello world", 7, 40)
    assert len(cluster.workers[0].submits) == 2, "the link to the worker stays"
    assert cluster.router.failovers == 0


async def test_failure_while_writing_ends_its_own_stream_only(make_cluster, monkeypatch, written):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.005, columns=False)
    write = ResponseChannel.write

    def failing(self, data):
        if b"id: broken:20\n" in data:
            raise RuntimeError("a defect")
        write(self, data)

    monkeypatch.setattr(ResponseChannel, "write", failing)
    async with cluster.over_http() as client:
        sound = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json=TEXT, headers={"X-Request-ID": "broken"} | EVENT_IDS)
        text = "".join(data["choices"][0]["text"] for _, data in events_of(await sound)[:-1])
    assert text == cluster.undisturbed("hello world", 7, 40)
    assert written
    assert len(cluster.workers[0].submits) == 2, "the link to the worker stays"
    assert cluster.router.failovers == 0


@pytest.fixture
def sent(monkeypatch):
    """Everything that connections send, by call."""
    pieces = []
    send = BoundedProtocol.send

    def recording(self, data):
        pieces.append(data)
        send(self, data)

    monkeypatch.setattr(BoundedProtocol, "send", recording)
    return pieces


async def test_head_and_first_event_leave_together(make_cluster, sent):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002)
    async with cluster.over_http() as client:
        await client.post("/v1/completions", json=TEXT)
    assert sent[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\n" in sent[0]
    assert b"data: {" in sent[0]
    assert not any(b"HTTP/1.1" in piece for piece in sent[1:])


async def test_lane_takes_the_second_token_already(make_cluster, pushed):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002)
    async with cluster.over_http() as client:
        response = await client.post("/v1/completions", json=TEXT, headers={"X-Request-ID": "same"} | EVENT_IDS)
    assert b"id: same:2\n" in pushed[0]
    assert response.text.startswith("id: same:1\n")


async def test_whole_answer_is_sent_at_once(make_cluster, sent):
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        response = await client.post("/v1/completions", json=TEXT | {"stream": False})
    assert response.json()["choices"][0]["text"] == cluster.undisturbed("hello world", 7, 40)
    assert len(sent) == 1
    assert sent[0].endswith(response.content)


@pytest.mark.parametrize("max_tokens", [1, 40])
@pytest.mark.parametrize("in_pieces", [False, True], ids=["direct", "through ASGI"])
async def test_what_ends_a_stream_is_one_write(make_cluster, monkeypatch, max_tokens, in_pieces):
    sent, send = [], BoundedProtocol.send

    def noting(self, data):
        sent.append(data)
        send(self, data)

    monkeypatch.setattr(BoundedProtocol, "send", noting)
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.01)
    content = json.dumps(TEXT | USAGE | {"max_tokens": max_tokens}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % len(content)
    async with cluster.over_http() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        for piece in (head, content) if in_pieces else (head + content,):
            writer.write(piece)
            await asyncio.sleep(0.02)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 60)
        writer.close()
    assert answer.endswith(sent[-1])
    assert sent[-1].count(b"data: ") == 3, "the finish, the usage and the end mark"
    assert b'"finish_reason":"length"' in sent[-1]
    assert b'"usage":{' in sent[-1]
    assert b"data: [DONE]" in sent[-1]
    assert len(sent) == 1 if max_tokens == 1 else b"HTTP/1.1" not in sent[-1]
