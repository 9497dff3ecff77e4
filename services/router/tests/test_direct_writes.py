"""Events that are written as soon as their tokens arrive are those that a waking task writes, byte by byte."""

import asyncio
import random
import re

import httpx
import pytest
from lockstep_router.faces.rest.connections import BoundedProtocol, _Response
from router_cluster import events_of, eventually
from scripted_worker import Script, token_at

TEXT = {"model": "reference", "prompt": "hello world", "max_tokens": 40, "seed": 7, "user": "u", "stream": True}
CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 7}
CHAT |= {"user": "u", "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
def written(monkeypatch):
    """Every piece that is written at once."""
    pieces = []
    write = _Response.write

    def counting(self, data):
        pieces.append(data)
        write(self, data)

    monkeypatch.setattr(_Response, "write", counting)
    return pieces


def set_open(monkeypatch, is_open):
    """Decide anew for each write whether the channel is open."""
    really = _Response.is_open.fget
    monkeypatch.setattr(_Response, "is_open", property(lambda self: is_open() and really(self)))


async def streamed(client, path, body):
    response = await client.post(path, json=body, headers={"X-Request-ID": "same"})
    assert response.status_code == 200, response.text
    return re.sub(r'"created":\d+', "", response.text)


async def both_ways(cluster, path, body, *, restart=lambda: None):
    """The answer without a channel, and over a real connection."""
    restart()
    waking = await streamed(cluster.client, path, body)
    restart()
    async with cluster.over_http() as client:
        direct = await streamed(client, path, body)
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
    "cached tokens": ("/v1/chat/completions", CHAT | USAGE, {"cached_tokens": 2}),
}


@pytest.mark.parametrize("case", CASES)
async def test_same_bytes(make_cluster, written, case):
    path, body, script = CASES[case]
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.002, **script)
    waking, direct = await both_ways(cluster, path, body)
    assert direct == waking
    assert direct.endswith("data: [DONE]\n\n")
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


async def test_failure_while_writing_ends_its_own_stream_only(make_cluster, monkeypatch, written):
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(delay_s=0.005)
    write = _Response.write

    def failing(self, data):
        if b"id: broken:20\n" in data:
            raise RuntimeError("a defect")
        write(self, data)

    monkeypatch.setattr(_Response, "write", failing)
    async with cluster.over_http() as client:
        sound = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json=TEXT, headers={"X-Request-ID": "broken"})
        text = "".join(data["choices"][0]["text"] for _, data in events_of(await sound)[:-1])
    assert text == cluster.undisturbed("hello world", 7, 40)
    assert written
    assert len(cluster.workers[0].submits) == 2, "the link to the worker stays"
    assert cluster.router.failovers == 0


@pytest.fixture
def sent(monkeypatch):
    """Everything that connections send, by system call."""
    pieces = []
    made = BoundedProtocol.connection_made

    class Recorder:
        def __init__(self, transport):
            self._transport = transport

        def write(self, data):
            pieces.append(data)
            self._transport.write(data)

        def __getattr__(self, name):
            return getattr(self._transport, name)

    monkeypatch.setattr(BoundedProtocol, "connection_made", lambda self, transport: made(self, Recorder(transport)))
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


async def test_whole_answer_is_sent_at_once(make_cluster, sent):
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        response = await client.post("/v1/completions", json=TEXT | {"stream": False})
    assert response.json()["choices"][0]["text"] == cluster.undisturbed("hello world", 7, 40)
    assert len(sent) == 1
    assert sent[0].endswith(response.content)
