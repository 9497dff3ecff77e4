"""A stream on which nothing happens is kept alive by comments, and still ends with its error or its answer."""

import asyncio
import contextlib
import time

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.replies import Client
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import Tenant
from router_cluster import events_of, eventually
from scripted_worker import Script

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 12, "seed": 7, "user": "u"}
COMMENT = ": keep-alive"


def hold(cluster, tokens):
    """Every worker gives this many tokens and then no more."""
    for worker in cluster.workers:
        worker.script = Script(hang_after=tokens)


async def test_waiting_for_the_first_token_brings_headers_and_comments(make_cluster):
    cluster = await make_cluster(1, keepalive_interval_s=0.1)
    hold(cluster, 0)
    async with (
        cluster.over_http() as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response,
    ):
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        lines = response.aiter_lines()
        assert response.headers["x-lockstep-max-silence"] == "0.125"
        assert [await anext(lines) for _ in range(4)] == [COMMENT, "", COMMENT, ""]


async def test_client_that_comes_back_before_there_is_a_worker_gets_comments_too(make_cluster):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0.1)
    body = BODY | {"stream": True, "resumable": True}
    async with (
        asyncio.timeout(30),
        cluster.over_http() as client,
        client.stream("POST", "/v1/completions", json=body) as first,
    ):
        stream_id = first.headers["x-lockstep-stream-id"]
        async with client.stream("GET", f"/v1/streams/{stream_id}") as response:
            assert (response.status_code, response.headers["x-lockstep-stream-id"]) == (200, stream_id)
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [COMMENT, "", COMMENT, ""]
        foreign = await client.get(f"/v1/streams/{stream_id}", headers={"authorization": "Bearer another-one"})
        assert foreign.status_code == 404


async def test_answer_after_comments_is_whole(make_cluster):
    cluster = await make_cluster(1, keepalive_interval_s=0.1)
    cluster.workers[0].script = Script(delay_s=0.3)
    response = await cluster.complete(stream=True, max_tokens=4)
    assert response.text.startswith(COMMENT)
    assert response.text.count(COMMENT) >= 4
    events = events_of(response)
    assert "".join(data["choices"][0]["text"] for _, data in events[:-1]) == cluster.undisturbed("hello world", 7, 4)
    assert events[-1] == (None, "[DONE]")


async def test_silence_during_a_move_is_filled(make_cluster):
    cluster = await make_cluster(2, keepalive_interval_s=0.1, inter_token_deadline_s=0.5)
    own, _ = cluster.worker_of("user:u")
    own.script, own.steps_advance = Script(hang_after=3), False
    response = await cluster.complete(stream=True)
    _, tokens, rest = response.text.partition("data: ")
    assert tokens
    assert COMMENT in rest
    assert cluster.router.failovers == 1
    assert rest.endswith("data: [DONE]\n\n")


async def test_streams_without_comments_promise_none(make_cluster):
    cluster = await make_cluster(1, keepalive_interval_s=0)
    assert "x-lockstep-max-silence" not in (await cluster.complete(stream=True, max_tokens=1)).headers


async def test_no_comment_while_tokens_come(make_cluster):
    cluster = await make_cluster(1, keepalive_interval_s=30)
    cluster.workers[0].script = Script(delay_s=0.01)
    assert COMMENT not in (await cluster.complete(stream=True)).text


async def test_error_after_the_first_comment_is_an_event(make_cluster):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0.1, max_queue_wait_s=0.5)
    response = await cluster.complete(stream=True)
    assert response.status_code == 200
    assert response.text.startswith(COMMENT)
    ((_, data),) = events_of(response)
    assert data["error"]["code"] == "unavailable"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_head_before_the_first_comment_has_the_id_of_the_stream(make_cluster, path):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0.05, max_queue_wait_s=30)
    body = {"model": "reference", "input": "hi"} if path == "/v1/responses" else BODY
    headers = {"Idempotency-Key": "k"}
    async with cluster.over_http() as client, contextlib.AsyncExitStack() as streams:
        heads = []
        for _ in range(2):  # the second one joins the first
            asking = client.stream("POST", path, json=body | {"stream": True}, headers=headers)
            response = await streams.enter_async_context(asking)
            lines = response.aiter_lines()
            assert await anext(lines) == COMMENT, "there is nothing to give yet"
            heads.append(response.headers)
        assert heads[0]["x-lockstep-stream-id"] == heads[1]["x-lockstep-stream-id"]
        gone = await client.delete(f"/v1/streams/{heads[0]['x-lockstep-stream-id']}")
        assert gone.status_code == 200
        assert "cancelled" in "".join([line async for line in lines])


@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_the_first_comment_is_a_status(make_cluster, stream):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0, max_queue_wait_s=0.3)
    assert (await cluster.complete(stream=stream)).status_code == 503


async def test_whole_answers_get_no_comments(make_cluster):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0.1, max_queue_wait_s=0.5)
    response = await cluster.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_client_that_leaves_a_silent_stream_is_noticed(make_cluster):
    cluster = await make_cluster(1, keepalive_interval_s=0.05)
    hold(cluster, 0)
    async with cluster.over_http() as client:
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}):
            await asyncio.sleep(0.1)
        await eventually(lambda: cluster.workers[0].cancels and cluster.router.requests == 0)


@pytest.mark.parametrize("comes", ["a failure", "an event"])
async def test_what_comes_in_the_turn_of_the_first_comment_follows_it(comes):
    """The comment begins the answer then. A second head, or a comment before the head, would break the connection."""
    settings = RouterSettings(workers=("x:1",), keepalive_interval_s=0.2)
    sent = []

    async def send(message):
        sent.append(message.get("status", message.get("body")))

    async def events():
        yield b"data: 1\n\n"

    async with Router(settings) as router:
        client = Client(send, Record("r", router.limits.account(Tenant("t"))), settings)
        client.watch(lambda: None)
        client.expect_events()

        comes = asyncio.Event()

        async def answer():
            await comes.wait()
            if comes == "an event":
                await client.reply_events(events(), end=lambda: b"data: [DONE]\n\n")
            else:
                await client.fail(LockstepError(ErrorCode.UNAVAILABLE, "no worker"))

        answering = asyncio.ensure_future(answer())
        while client._timer.when() < client._written_at + settings.keepalive_interval_s:
            await asyncio.sleep(0.01)
        loop, comment_at = asyncio.get_running_loop(), client._timer.when()
        loop.call_at(comment_at - 0.001, comes.set)
        time.sleep(max(0.0, comment_at - loop.time()) + 0.01)  # both are due when the loop goes on
        await answering
        await client.stop()
    assert sent[:2] == [200, f"{COMMENT}\n\n".encode()]
    assert all(isinstance(part, bytes) for part in sent[1:])
