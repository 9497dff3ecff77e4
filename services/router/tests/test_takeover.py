"""A stream goes on at another router: each event once, whatever was mirrored and wherever its client was."""

import asyncio
import contextlib
import dataclasses
import json
import time
from types import SimpleNamespace

import openai
import pytest
from key_files import KEY, OTHER_KEY, bearer, tenant, write
from lockstep_api.v1 import inference_pb2, inference_pb2_grpc, state_pb2, worker_pb2
from lockstep_client import AsyncLockstepClient, Policy, TextPiece
from lockstep_client.openai import AsyncOpenAI
from lockstep_common.telemetry import REGISTRY
from lockstep_router import metrics
from lockstep_router.journals import ChoiceLog, Piece
from lockstep_router.journals.stored_form import tenant_of, to_message, to_piece
from lockstep_router.resumption.endings import gone
from lockstep_router.resumption.run import Run
from lockstep_router.status import status_body
from lockstep_router.tenants import Tenant
from router_cluster import events_of, eventually
from scripted_worker import Script, model_card
from takeover_cluster import Sharing, mirrored, mirrored_to
from test_router_deaths import prefer
from websocket_client import socket_of
from websocket_client import text_of as text_of_messages

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 12, "seed": 7, "user": "u"}
STREAM = BODY | {"stream": True, "resumable": True}
CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "seed": 7, "stream": True}
CHAT |= {"resumable": True, "user": "u", "stream_options": {"include_usage": True}}
LONG = STREAM | {"max_tokens": 100}
LONG_FIELDS = {"model": "reference", "prompt": "hello world", "max_tokens": 100, "seed": 7}


@pytest.fixture
async def sharing(tmp_path, tokenizer):
    async with Sharing(tmp_path, tokenizer) as sharing:
        yield sharing


@pytest.fixture
async def routers(sharing):
    return [await sharing.router("first"), await sharing.router("second")]


def slow(sharing, delay_s=0.02):
    for worker in sharing.workers:
        worker.script = Script(delay_s=delay_s)


def text_of(events):
    return "".join(data["choices"][0]["text"] for _, data in events if data != "[DONE]" and data.get("choices"))


async def leave_after(client, body, events, **headers):
    """The first events of a stream whose client leaves then, as (id, data) pairs."""
    gained = []
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        event_id = None
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                gained.append((event_id, json.loads(line[6:])))
                if len(gained) == events:
                    break
        return response.headers["x-lockstep-stream-id"], gained


async def resume(client, stream_id, last=None, **headers):
    headers |= {} if last is None else {"last-event-id": last}
    return await client.get(f"/v1/streams/{stream_id}", headers=headers)


def count(metric, *labels):
    return (metric.labels(*labels) if labels else metric)._value.get()


def takeovers():
    """How many there were of each outcome."""
    (metric,) = metrics.TAKEOVERS.collect()
    return {each.labels["outcome"]: each.value for each in metric.samples if each.name.endswith("_total")}


# Every cut.


def history(events, choices):
    """Everything that a client knows of each choice, and the usage."""
    made = {index: ([], [], [], []) for index in range(choices)}
    usages = []
    for _, data in events:
        if data == "[DONE]":
            continue
        if data.get("usage"):
            usages.append(data["usage"])
        for choice in data["choices"]:
            roles, texts, tokens, finishes = made[choice["index"]]
            delta = choice.get("delta", {"content": choice.get("text", "")})
            roles.extend([delta["role"]] if "role" in delta else [])
            texts.append(delta.get("content") or "")
            tokens.extend((choice.get("logprobs") or {}).get("content") or [])
            finishes.extend([choice["finish_reason"]] if choice["finish_reason"] else [])
    return {
        index: (roles, "".join(texts), tokens, ends) for index, (roles, texts, tokens, ends) in made.items()
    }, usages


def cut(log, length):
    """What a mirror has that was cut off after so many tokens."""
    is_all = length >= len(log.ids)
    part = ChoiceLog()
    finish = log.finish if is_all else 0
    part.add(Piece(0, 0, log.ids[:length], log.logprobs[:length], finish, log.cached_tokens, False, log.numerics))
    return part


async def plant(cluster, stored, request_id, lengths):
    """Put a stream into the state server as a router has left it that died."""
    record = dataclasses.replace(stored.record, request_id=request_id)
    logs = [cut(log, length) for log, length in zip(stored.logs, lengths, strict=True)]
    write = state_pb2.StreamWrite(
        tenant=tenant_of(record.owner),
        stream_id=request_id,
        epoch=1,
        owner="the dead",
        record=to_message(record, None),
        pieces=[to_piece(index, log, 0, len(log.ids)) for index, log in enumerate(logs) if log.ids],
    )
    response = await cluster.router.mirrored.client.append(state_pb2.AppendRequest(writes=[write]))
    assert response.results[0].outcome == state_pb2.WRITE_OUTCOME_OK


ANSWERS = {
    "text": ("/v1/completions", STREAM | {"max_tokens": 6}, 1),
    "two choices with log probabilities": (
        "/v1/chat/completions",
        CHAT | {"n": 2, "max_tokens": 4, "logprobs": True, "top_logprobs": 1},
        2,
    ),
    "echo": ("/v1/completions", STREAM | {"max_tokens": 3, "echo": True, "n": 2}, 2),
    "stop string": ("/v1/completions", STREAM | {"max_tokens": 40, "stop": ["e"]}, 1),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_every_cut_of_the_mirror_and_of_the_client(sharing, routers, answer):
    first, second = routers
    path, body, choices = ANSWERS[answer]
    response = await first.client.post(path, json=body)
    stream_id, events = response.headers["x-lockstep-stream-id"], events_of(response)
    assert events[-1][1] == "[DONE]"
    expected = history(events, choices)
    stored = await first.router.journals.read(stream_id)
    longest = max(len(log.ids) for log in stored.logs)
    number = 0
    for length in range(longest + 1):
        # With two choices the mirror is cut at different places of each.
        lengths = [(length + 2 * index) % (longest + 1) for index in range(choices)]
        for index in range(-1, len(events) - 1):
            number += 1
            planted = f"r-{number}"
            await plant(first, stored, planted, lengths)
            last = None if index < 0 else f"{planted}:{events[index][0].rpartition(':')[2]}"
            rest = events_of(await resume(second.client, planted, last))
            assert rest[-1] == (None, "[DONE]"), (lengths, index, rest)
            assert history(events[: index + 1] + rest, choices) == expected, (lengths, index)
            ids = [event_id for event_id, _ in rest[:-1]]
            assert ids == list(dict.fromkeys(ids)), "no event twice"
            await second.client.delete(f"/v1/streams/{planted}")
    assert count(metrics.TAKEOVERS, "continued") >= number
    await eventually(lambda: second.router.requests == second.router.runs.running == second.router.runs.readings == 0)


async def test_stream_keeps_its_place_in_queues(sharing, routers):
    first, second = routers
    response = await first.client.post("/v1/completions", json=STREAM)
    stored = await first.router.journals.read(response.headers["x-lockstep-stream-id"])
    old = dataclasses.replace(stored, record=dataclasses.replace(stored.record, created=int(time.time()) - 1000))
    await plant(first, old, "r-old", [2])
    events_of(await resume(second.client, "r-old"))
    assert sharing.submits[-1].emitted_ids
    assert sharing.submits[-1].arrived_s < -900


async def test_stream_has_waited_for_its_first_token_once(sharing, routers):
    """At the router that had it then."""
    first, second = routers
    response = await first.client.post("/v1/completions", json=STREAM)
    stored = await first.router.journals.read(response.headers["x-lockstep-stream-id"])

    def waits():
        return REGISTRY.get_sample_value("lockstep_router_time_to_first_token_seconds_count")

    before = waits()
    await plant(first, stored, "r-begun", [2])
    events_of(await resume(second.client, "r-begun"))
    assert sharing.submits[-1].emitted_ids
    assert waits() == before
    await plant(first, stored, "r-waiting", [0])
    events_of(await resume(second.client, "r-waiting"))
    assert waits() == before + 1


# A router that lives.


async def test_client_that_comes_back_elsewhere_gets_the_rest_and_the_first_router_stops(sharing, routers):
    slow(sharing)
    first, second = routers
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG, 3)
        await mirrored_to(first, stream_id, 2)
    rest = asyncio.create_task(resume(second.client, stream_id, before[-1][0]))
    await eventually(lambda: first.router.runs.running == 0)
    events = events_of(await rest)
    assert text_of(before + events) == first.undisturbed("hello world", 7, 100)
    assert events[-1] == (None, "[DONE]")
    submit, again = sharing.submits
    assert submit.sampling == again.sampling
    assert len(again.emitted_ids) >= 2, "what was mirrored is not generated again"
    assert sum(len(worker.cancels) for worker in sharing.workers) == 1
    assert first.router.journals.size_bytes == 0


async def test_reader_at_the_first_router_gets_a_typed_error(sharing, routers):
    slow(sharing)
    first, second = routers
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG, 2)
        await mirrored_to(first, stream_id, 1)
        await eventually(lambda: first.router.runs.detached == 1)
        headers = {"last-event-id": before[-1][0]}
        async with client.stream("GET", f"/v1/streams/{stream_id}", headers=headers) as response:
            pieces = response.aiter_text()
            received = await anext(pieces)
            # The stream was this router's after the reader had come.
            tokens = len((await first.router.journals.read(stream_id)).logs[0].ids)
            await mirrored_to(first, stream_id, tokens + 1)
            whole = events_of(await resume(second.client, stream_id, before[-1][0]))
            lost = events_of(SimpleNamespace(text=received + "".join([piece async for piece in pieces])))
    assert lost[-1][1]["error"]["code"] == "stream_moved"
    assert "another router" in lost[-1][1]["error"]["message"]
    expected = first.undisturbed("hello world", 7, 100)
    assert expected.startswith(text_of(before + lost[:-1]))
    assert text_of(before + whole) == expected


async def test_stream_moves_back_and_forth(sharing, routers):
    slow(sharing)
    events = []
    async with routers[0].over_http() as one, routers[1].over_http() as two:
        stream_id, events = await leave_after(one, LONG | {"max_tokens": 60}, 3)
        await mirrored_to(routers[0], stream_id, 1)
        for turn in range(6):
            client, left = ((two, routers[0]), (one, routers[1]))[turn % 2]
            async with client.stream(
                "GET", f"/v1/streams/{stream_id}", headers={"last-event-id": events[-1][0]}
            ) as response:
                event_id, gained = None, 0
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        event_id = line[4:]
                    elif line.startswith("data: "):
                        events.append((event_id, json.loads(line[6:])))
                        gained += 1
                        if gained == 4:
                            break
            await eventually(lambda left=left: left.router.runs.running == 0)
        events += events_of(await resume(one, stream_id, events[-1][0]))
    assert text_of(events) == routers[0].undisturbed("hello world", 7, 60)
    attempts = [submit.attempt for submit in sharing.submits]
    assert len(attempts) >= 3
    assert len(set(attempts)) == len(attempts), "late tokens of one never count as those of another"


async def test_several_clients_take_it_once(sharing, routers):
    slow(sharing)
    first, second = routers
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG | {"max_tokens": 50}, 2)
        await mirrored_to(first, stream_id, 1)
    answers = await asyncio.gather(*(resume(second.client, stream_id, before[-1][0]) for _ in range(5)))
    for response in answers:
        assert text_of(before + events_of(response)) == first.undisturbed("hello world", 7, 50)
    assert len(sharing.submits) == 2


async def test_finished_answer_is_given_by_all_without_a_worker(sharing, routers):
    first, second = routers
    whole = events_of(await first.client.post("/v1/completions", json=STREAM))
    stream_id = whole[0][0].partition(":")[0]
    await mirrored(first)
    rest = events_of(await resume(second.client, stream_id, whole[3][0]))
    assert text_of(whole[:4] + rest) == text_of(whole)
    assert len(sharing.submits) == 1
    plain = await first.client.post("/v1/completions", json=BODY | {"resumable": True})
    await mirrored(first)
    again = await resume(second.client, plain.headers["x-lockstep-stream-id"])
    assert again.json() == plain.json()


async def test_failure_is_given_again_elsewhere(sharing, routers):
    first, second = routers
    slow(sharing, 0.1)  # the stream would take 10 s
    response = await first.client.post("/v1/completions", json=LONG, headers={"x-request-timeout": "4.0"})
    events = events_of(response)
    assert events[-1][1]["error"]["code"] == "deadline_exceeded"
    await mirrored(first)
    again = events_of(await resume(second.client, events[0][0].partition(":")[0], events[0][0]))
    assert again[-1][1] == events[-1][1]


async def test_deadline_of_the_client_holds_at_the_next_router(sharing, routers):
    first, second = routers
    slow(sharing, 0.1)  # the stream would take 10 s
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG, 1, **{"x-request-timeout": "4.0"})
        await mirrored_to(first, stream_id, 1)
    rest = events_of(await resume(second.client, stream_id, before[-1][0]))
    assert rest[-1][1]["error"]["code"] == "deadline_exceeded"


async def test_other_faces_take_streams_over(sharing, routers):
    slow(sharing)
    first, second = routers
    expected = first.undisturbed("hello world", 7, 60)
    async with first.over_http() as client, second.over_http() as there, second.over_grpc() as channel:
        stream_id, before = await leave_after(client, LONG | {"max_tokens": 60}, 2)
        await mirrored_to(first, stream_id, 1)
        async with socket_of(there) as socket:
            await socket.send(type="resume", id="a", stream=stream_id, last_event_id=before[-1][0])
            answer = await socket.answer("a")
        assert answer[-1]["type"] == "done"
        assert text_of(before) + text_of_messages(answer) == expected
        stream_id, before = await leave_after(client, LONG | {"max_tokens": 60}, 2)
        await mirrored_to(first, stream_id, 1)
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = inference_pb2.ResumeRequest(request_id=stream_id, last_event_id=before[-1][0])
        rest = [event async for event in stub.Resume(message)]
    assert text_of(before) + "".join(event.text for event in rest) == expected


async def test_delete_ends_a_stream_of_another_router(sharing, routers):
    slow(sharing)
    first, second = routers
    async with first.over_http() as client:
        stream_id, _ = await leave_after(client, LONG, 2)
        await mirrored(first)
        assert (await second.client.delete(f"/v1/streams/{stream_id}")).status_code == 200
        await eventually(lambda: first.router.runs.running == 0)
        await eventually(lambda: any(worker.cancels for worker in sharing.workers))
        assert sum(len(worker.cancels) for worker in sharing.workers) == 1
        for cluster in routers:
            assert (await resume(cluster.client, stream_id)).status_code == 404
        assert (await second.client.delete(f"/v1/streams/{stream_id}")).status_code == 404
        await leave_after(client, LONG, 2, **{"idempotency-key": "mine"})
        await mirrored(first)
        headers = {"idempotency-key": "mine"}
        # Clients without an API key differ by their address, here that of the client in the same process.
        assert (await second.client.delete("/v1/streams", headers=headers)).status_code == 200
        await eventually(lambda: first.router.runs.running == 0)


async def test_delete_where_a_stream_was_taken_just_now_ends_it_where_it_goes_on(sharing, routers):
    """The router that had it has not told its readers yet."""
    slow(sharing, 0.3)  # no machine ends it first
    first, second = routers
    state = sharing.state.backend
    may_learn = state.held["head"] = asyncio.Event()
    async with first.over_http() as client, second.over_http() as other_client:
        stream_id, _ = await leave_after(client, LONG, 2)
        await mirrored_to(first, stream_id, 1)
        async with other_client.stream("GET", f"/v1/streams/{stream_id}") as response:
            assert response.status_code == 200
            await eventually(lambda: "head" in state.calls)
            assert (await client.delete(f"/v1/streams/{stream_id}")).status_code == 200
            await eventually(lambda: second.router.runs.running == 0)
    may_learn.set()
    for cluster in routers:
        assert (await resume(cluster.client, stream_id)).status_code == 404


async def test_delete_ends_a_stream_that_is_continued_at_the_same_time(sharing, routers):
    slow(sharing, 0.3)  # no machine ends it first
    first, second = routers
    async with first.over_http() as client:
        stream_id, _ = await leave_after(client, LONG, 2)
    await mirrored_to(first, stream_id, 1)
    state, may_take = sharing.state.backend, asyncio.Event()
    state.held["read"] = may_take
    deleting = asyncio.create_task(second.client.delete(f"/v1/streams/{stream_id}"))
    await eventually(lambda: "read" in state.calls)
    del state.held["read"]
    reading = asyncio.create_task(resume(second.client, stream_id))
    await eventually(lambda: second.router.runs.running == 1)
    may_take.set()
    assert (await deleting).status_code == 200
    assert second.router.runs.running == 0
    response = await reading
    assert response.status_code != 200 or events_of(response)[-1][1]["error"]["code"] == "cancelled"
    await eventually(lambda: first.router.runs.running == 0)
    for cluster in routers:
        assert (await resume(cluster.client, stream_id)).status_code == 404


@pytest.mark.parametrize("at", [0, 1], ids=["here", "elsewhere"])
async def test_deleted_stream_is_gone_for_all_as_soon_as_that_is_acknowledged(sharing, at):
    routers = [await sharing.router(name, state_max_lag_s=0.5) for name in ("first", "second")]
    slow(sharing)
    async with routers[0].over_http() as client:
        stream_id, _ = await leave_after(client, LONG, 2)
        await mirrored_to(routers[0], stream_id, 1)
        assert (await routers[at].client.delete(f"/v1/streams/{stream_id}")).status_code == 200
        assert not routers[at].router.mirrored.mirror.entries, "the state server knows it"
        third = await sharing.router("third")
        assert (await resume(third.client, stream_id)).status_code == 404


@pytest.mark.parametrize("at", [0, 1], ids=["here", "elsewhere"])
async def test_reader_of_a_deleted_stream_is_told_so_wherever_it_was_deleted(sharing, routers, at):
    slow(sharing)
    async with (
        routers[0].over_http() as client,
        client.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        stream_id = response.headers["x-lockstep-stream-id"]
        pieces = response.aiter_text()
        received = await anext(pieces)
        await mirrored_to(routers[0], stream_id, 1)
        assert (await routers[at].client.delete(f"/v1/streams/{stream_id}")).status_code == 200
        events = events_of(SimpleNamespace(text=received + "".join([piece async for piece in pieces])))
    error = events[-1][1]["error"]
    assert (error["code"], error["message"]) == ("cancelled", "the stream was cancelled")


async def test_request_that_is_sent_again_elsewhere_joins_its_stream(sharing, routers):
    slow(sharing)
    first, second = routers
    headers = {"idempotency-key": "mine", "authorization": "Bearer one"}
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG | {"max_tokens": 40}, 3, **headers)
        await mirrored_to(first, stream_id, 1)
        other = await second.client.post("/v1/completions", json=STREAM, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        again = await second.client.post("/v1/completions", json=LONG | {"max_tokens": 40}, headers=headers)
    events = events_of(again)
    assert text_of(events) == first.undisturbed("hello world", 7, 40)
    assert {event_id.partition(":")[0] for event_id, _ in events[:-1]} == {before[0][0].partition(":")[0]}
    assert [bool(submit.emitted_ids) for submit in sharing.submits] == [False, True]


async def preparing(router, headers):
    """A request whose key the router has, and which is prepared until the event is set."""
    prepare, may_go = router.router.prepare, asyncio.Event()

    async def prepare_slowly(request, account):
        await may_go.wait()
        return await prepare(request, account)

    router.router.prepare = prepare_slowly
    granted = metrics.STATE_CLAIMS.labels("granted")
    granted_before = granted._value.get()
    asking = asyncio.create_task(router.client.post("/v1/completions", json=STREAM, headers=headers))
    await eventually(lambda: granted._value.get() > granted_before)
    return asking, may_go


async def test_request_that_is_sent_again_elsewhere_joins_one_that_is_still_prepared(sharing, routers):
    first, second = routers
    headers = {"idempotency-key": "mine", "authorization": "Bearer one"}
    asking, may_go = await preparing(first, headers)
    again = asyncio.create_task(second.client.post("/v1/completions", json=STREAM, headers=headers))
    await asyncio.sleep(1.5)  # longer than an unmarked request is waited for
    assert not again.done()
    may_go.set()
    events = events_of(await again)
    await asking
    assert text_of(events) == first.undisturbed("hello world", 7, 12)
    first_id = (await asking).headers["x-lockstep-stream-id"]
    assert {event_id.partition(":")[0] for event_id, _ in events[:-1]} == {first_id}


async def test_request_that_joins_a_stream_of_another_router_gets_comments_while_that_is_prepared(sharing):
    first, second = await sharing.router("first"), await sharing.router("second", keepalive_interval_s=0.05)
    headers = {"idempotency-key": "mine", "authorization": "Bearer one"}
    asking, may_go = await preparing(first, headers)
    (first_id,) = first.router.runs._runs
    async with (
        second.over_http() as client,
        client.stream("POST", "/v1/completions", json=STREAM, headers=headers) as response,
    ):
        pieces = response.aiter_text()
        received = await anext(pieces)
        assert received.startswith(": keep-alive")
        assert response.headers["x-lockstep-stream-id"] == first_id
        may_go.set()
        events = events_of(SimpleNamespace(text=received + "".join([piece async for piece in pieces])))
    await asking
    assert text_of(events) == first.undisturbed("hello world", 7, 12)


async def test_drained_router_hands_its_streams_over(sharing, routers):
    slow(sharing)
    first, second = routers
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG | {"max_tokens": 80}, 2)
        await mirrored_to(first, stream_id, 1)
        await eventually(lambda: first.router.runs.detached == 1)
        async with asyncio.timeout(30):
            await first.router.leave()
        await eventually(lambda: first.router.runs.running == 0)
    rest = events_of(await resume(second.client, stream_id, before[-1][0]))
    assert text_of(before + rest) == first.undisturbed("hello world", 7, 80)
    assert rest[-1] == (None, "[DONE]")


async def test_continued_stream_ends_when_nobody_comes_back(sharing):
    first = await sharing.router("first")
    second = await sharing.router("second", resume_window_s=0.2)
    slow(sharing)
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG, 2)
        await mirrored_to(first, stream_id, 1)
    async with second.over_http() as client:
        async with client.stream(
            "GET", f"/v1/streams/{stream_id}", headers={"last-event-id": before[-1][0]}
        ) as response:
            await anext(response.aiter_lines())
        await eventually(lambda: second.router.runs.running == 0)
        await eventually(lambda: sum(len(worker.cancels) for worker in sharing.workers) == 2)
    await mirrored(second)
    for cluster in (first, second):
        assert (await resume(cluster.client, stream_id)).status_code == 404


# Which clients may take a stream, and which streams may not be taken.


async def test_foreign_unknown_and_expired_streams_look_alike(sharing, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY), tenant("chat", OTHER_KEY))
    first, second = [await sharing.router(name, keys_file=str(keys)) for name in ("first", "second")]
    mine, other = bearer(KEY), bearer(OTHER_KEY)
    slow(sharing, 0.2)
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG, 2, **mine)
    await mirrored(first)
    answers = [
        await resume(second.client, stream_id, **other),
        await resume(second.client, stream_id, before[-1][0], **other),
        await second.client.delete(f"/v1/streams/{stream_id}", headers=other),
        await resume(second.client, "r-" + "0" * 32, **mine),
        await resume(second.client, "x" * 3000, **mine),
    ]
    assert first.router.runs.running == 1, "it was not ended"
    slow(sharing, 0.0)
    rest = await resume(second.client, stream_id, before[-1][0], **mine)
    assert text_of(before + events_of(rest)) == first.undisturbed("hello world", 7, 100)
    # The first router learns from its next write that the stream was taken, then the state server that it is deleted.
    await eventually(lambda: first.router.runs.running == 0)
    await second.client.delete(f"/v1/streams/{stream_id}", headers=mine)
    await mirrored(second)
    answers.append(await resume(first.client, stream_id, **mine))
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text for answer in answers}) == 1


async def test_limits_of_the_tenant_hold_for_continued_streams(sharing, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY, concurrent_streams=1, tokens_per_minute=1000))
    first, second = [await sharing.router(name, keys_file=str(keys)) for name in ("first", "second")]
    slow(sharing)
    async with first.over_http() as client, second.over_http() as there:
        stream_id, before = await leave_after(client, LONG, 2, **bearer(KEY))
        await mirrored_to(first, stream_id, 1)
        own, _ = await leave_after(there, LONG, 1, **bearer(KEY))
        refused = await resume(there, stream_id, before[-1][0], **bearer(KEY))
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "concurrent_streams")
        await there.delete(f"/v1/streams/{own}", headers=bearer(KEY))
        rest = await resume(there, stream_id, before[-1][0], **bearer(KEY))
    assert text_of(before + events_of(rest)) == first.undisturbed("hello world", 7, 100)


@pytest.mark.parametrize("position", ["13", "12f,u", "99999999999", "x", "1,1", "7", "7f"])
async def test_positions_that_the_stream_never_had(sharing, routers, position):
    for worker in sharing.workers:
        worker.script = Script(delay_s=0.01, stop_after=6)
    first, second = routers
    async with first.over_http() as client, second.over_http() as there:
        stream_id, _ = await leave_after(client, STREAM, 1)
        await mirrored_to(first, stream_id, 1)
        response = await resume(there, stream_id, f"{stream_id}:{position}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize("position", ["x", "1,1", "101", "-f"])
async def test_stream_is_not_taken_for_a_position_that_it_cannot_have(sharing, routers, position):
    slow(sharing, 0.5)
    first, second = routers
    async with first.over_http() as client:
        stream_id, _ = await leave_after(client, LONG, 1)
        await mirrored(first)
        response = await resume(second.client, stream_id, f"{stream_id}:{position}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")
        await goes_on(first)


async def goes_on(cluster):
    """Check that a router still runs its only stream: its next token is mirrored."""
    (run,) = cluster.router.runs._runs.values()
    tokens = len(run.logs[0].ids)
    await eventually(lambda: len(run.logs[0].ids) > tokens)
    await mirrored(cluster)
    assert run.end is None


def nearly_full(cluster, left=0):
    """The router keeps all its memory for journals, but for `left` bytes, for the prompts of a request."""
    router = cluster.router
    size = router.settings.max_journals_bytes - router.journals.size_bytes - left
    return router.reserved(1, size, router.limits.account(Tenant("other")))


@pytest.mark.parametrize("setting", ["max_streams", "max_resumable_streams", "max_journals_bytes"])
async def test_stream_is_not_taken_by_a_router_without_room(sharing, setting):
    slow(sharing, 0.5)
    first = await sharing.router("first")
    limits = {"max_streams": 3, "max_resumable_streams": 1}
    second = await sharing.router("second", **{setting: limits[setting]} if setting in limits else {})
    async with first.over_http() as client, second.over_http() as there:
        with nearly_full(second) if setting == "max_journals_bytes" else contextlib.nullcontext():
            if setting in limits:
                await leave_after(there, LONG, 1)
            stream_id, before = await leave_after(client, LONG | {"n": 3}, 1)
            await mirrored(first)
            response = await resume(there, stream_id, before[-1][0])
            assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
            await goes_on(first)


# Without a state server.


async def test_router_serves_without_the_state_server(sharing):
    first = await sharing.router("first", state_timeout_s=0.05)
    await sharing.state.kill()
    slow(sharing, 0.002)
    headers = {"idempotency-key": "mine"}
    for _ in range(2):
        whole = events_of(await first.client.post("/v1/completions", json=STREAM, headers=headers))
        assert text_of(whole) == first.undisturbed("hello world", 7, 12)
    assert len(sharing.submits) == 1
    await eventually(lambda: first.router.mirrored.client.mirror.is_open)
    assert (await resume(first.client, "r-" + "0" * 32)).status_code == 404
    state = status_body(first.router)["router"]["state"]
    assert (state["reachable"], state["used_by_requests"]) == (False, False)
    await sharing.state.start()
    await eventually(lambda: not first.router.mirrored.client.mirror.is_open)
    second = await sharing.router("second")
    await mirrored(first)
    again = events_of(await resume(second.client, whole[0][0].partition(":")[0]))
    assert text_of(again) == text_of(whole)


async def test_unknown_stream_is_an_error_to_retry_while_the_state_server_fails(sharing):
    """Once its breaker is open, there is none. Each resume counts once."""
    second = await sharing.router("second", state_timeout_s=0.2)
    sharing.state.backend.is_away = True
    before = takeovers()
    response = await resume(second.client, "r-" + "0" * 32)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert response.headers["retry-after"] == "1"
    number = 1
    while not second.router.mirrored.client.mirror.is_open:
        await resume(second.client, "r-" + "0" * 32)
        number += 1
    assert (await resume(second.client, "r-" + "0" * 32)).status_code == 404
    assert (await second.client.delete("/v1/streams/r-" + "0" * 32)).status_code == 404
    assert {each: value - before[each] for each, value in takeovers().items() if value != before[each]} == {
        "away": number + 1
    }


# Failures that may pass.


def fail(sharing, after, code="unavailable"):
    rejection = worker_pb2.Rejected(code=code, message="it failed") if after is not None else None
    for worker in sharing.workers:
        worker.script = Script(delay_s=0.01, rejection=rejection, reject_after=after)


async def over_rest(cluster, stream_id, last):
    async with cluster.over_http() as client:
        return text_of(events_of(await resume(client, stream_id, last)))


async def over_websocket(cluster, stream_id, last):
    async with cluster.over_http() as client, socket_of(client) as socket:
        await socket.send(type="resume", id="a", stream=stream_id, last_event_id=last)
        answer = await socket.answer("a")
    assert answer[-1]["type"] == "done"
    return text_of_messages(answer)


async def over_grpc(cluster, stream_id, last):
    message = inference_pb2.ResumeRequest(request_id=stream_id, last_event_id=last)
    async with cluster.over_grpc() as channel:
        return "".join([event.text async for event in inference_pb2_grpc.InferenceStub(channel).Resume(message)])


@pytest.mark.parametrize("at", [0, 1], ids=["here", "elsewhere"])
@pytest.mark.parametrize("face", [over_rest, over_websocket, over_grpc])
async def test_stream_goes_on_after_a_failure_that_may_pass(sharing, routers, face, at):
    fail(sharing, after=3)
    failed = await routers[0].client.post("/v1/completions", json=LONG | {"max_tokens": 10})
    events = events_of(failed)
    stream_id, error = failed.headers["x-lockstep-stream-id"], events.pop()[1]["error"]
    assert (error["code"], error["message"], len(events)) == ("unavailable", "it failed", 3)
    await mirrored(routers[0])
    fail(sharing, after=None)
    rest = await face(routers[at], stream_id, events[-1][0])
    assert text_of(events) + rest == routers[0].undisturbed("hello world", 7, 10)
    assert [len(submit.emitted_ids) for submit in sharing.submits] == [0, 3]
    await mirrored(routers[at])
    assert await face(routers[1 - at], stream_id, events[-1][0]) == rest


@pytest.mark.parametrize("is_away", [False, True])
async def test_failed_stream_is_continued_where_it_failed_without_the_state_server(sharing, is_away):
    first = await sharing.router("first", **{} if is_away else {"state_server": ""})
    fail(sharing, after=3, code="worker_lost")
    if is_away:
        await sharing.state.kill()
    failed = events_of(await first.client.post("/v1/completions", json=LONG | {"max_tokens": 10}))
    stream_id = failed[0][0].partition(":")[0]
    for _ in range(2):  # it may fail again
        again = await resume(first.client, stream_id, failed[-2][0])
        failed = failed[:-1] + (events_of(again) if again.status_code == 200 else failed[-1:])
    fail(sharing, after=None)
    async with first.over_http() as client:
        rest = events_of(await resume(client, stream_id, failed[-2][0]))
    assert text_of(failed[:-1] + rest) == first.undisturbed("hello world", 7, 10)
    assert first.router.journals.kept == 1


async def test_failed_stream_that_went_on_elsewhere_comes_back_with_what_it_gained(sharing, routers):
    first, second = routers
    fail(sharing, after=3)
    failed = events_of(await first.client.post("/v1/completions", json=LONG | {"max_tokens": 10}))
    stream_id = failed[0][0].partition(":")[0]
    await mirrored(first)
    more = events_of(await resume(second.client, stream_id, failed[-2][0]))
    await mirrored(second)
    assert (len(more), more[-1][1]["error"]["code"]) == (4, "unavailable")
    fail(sharing, after=None)
    rest = events_of(await resume(first.client, stream_id, more[-2][0]))
    assert text_of(failed[:-1] + more[:-1] + rest) == first.undisturbed("hello world", 7, 10)
    assert [len(submit.emitted_ids) for submit in sharing.submits] == [0, 3, 6]


async def test_failed_stream_stays_when_it_cannot_go_on_now(sharing, routers):
    first, _ = routers
    fail(sharing, after=3)
    failed = events_of(await first.client.post("/v1/completions", json=LONG | {"max_tokens": 10}))
    stream_id = failed[0][0].partition(":")[0]
    fail(sharing, after=None)
    with nearly_full(first):
        assert (await resume(first.client, stream_id, failed[-2][0])).status_code == 503
    rest = events_of(await resume(first.client, stream_id, failed[-2][0]))
    assert text_of(failed[:-1] + rest) == first.undisturbed("hello world", 7, 10)


@pytest.mark.parametrize("settings", [{}, {"state_server": ""}], ids=["shared", "alone"])
async def test_failed_stream_stays_when_its_client_leaves_before_it_goes_on(sharing, monkeypatch, settings):
    first = await sharing.router("first", **settings)
    fail(sharing, after=3)
    failed = events_of(await first.client.post("/v1/completions", json=LONG | {"max_tokens": 10}))
    stream_id = failed[0][0].partition(":")[0]
    fail(sharing, after=None)
    begun = asyncio.Event()

    @contextlib.asynccontextmanager
    async def restore(*_, **__):
        begun.set()
        await asyncio.Event().wait()
        yield

    with monkeypatch.context() as patch:
        patch.setattr(first.router, "run", restore)
        resuming = asyncio.create_task(resume(first.client, stream_id, failed[-2][0]))
        await begun.wait()
        resuming.cancel()
        await asyncio.gather(resuming, return_exceptions=True)
        await eventually(lambda: not first.router.runs.running)
    rest = events_of(await resume(first.client, stream_id, failed[-2][0]))
    assert text_of(failed[:-1] + rest) == first.undisturbed("hello world", 7, 10)


async def test_stream_goes_on_after_its_earlier_run_has_closed_the_journal(sharing, monkeypatch):
    first = await sharing.router("first")
    fail(sharing, after=3)
    failed = events_of(await first.client.post("/v1/completions", json=LONG | {"max_tokens": 10}))
    stream_id = failed[0][0].partition(":")[0]
    fail(sharing, after=None)
    runs, read = first.router.runs, first.router.journals.read
    stored = await read(stream_id)
    earlier = Run(stored.record.owner, stored.record.style, stream_id)
    earlier.cancel(gone())

    async def read_while_it_ends(request_id):
        if not earlier.ended.is_set():
            runs._runs[request_id] = earlier
        return await read(request_id)

    monkeypatch.setattr(first.router.journals, "read", read_while_it_ends)
    resuming = asyncio.create_task(resume(first.client, stream_id, failed[-2][0]))
    await eventually(lambda: stream_id in runs._runs)
    await asyncio.sleep(0.05)
    assert runs._runs[stream_id] is earlier
    del runs._runs[stream_id]
    earlier.ended.set()
    assert text_of(failed[:-1] + events_of(await resuming)) == first.undisturbed("hello world", 7, 10)


async def test_stream_whose_tokens_have_no_room_is_not_taken(sharing):
    slow(sharing, 0.5)
    first, second = await sharing.router("first"), await sharing.router("second")
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, LONG, 1)
        await mirrored(first)
        known = await second.router.journals.look_up(
            stream_id, (await first.router.journals.read(stream_id)).record.owner
        )
        with nearly_full(second, left=known.size_bytes):
            response = await resume(second.client, stream_id, before[-1][0])
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        await goes_on(first)


@pytest.mark.parametrize("is_alone", [False, True])
async def test_client_has_a_failed_stream_continued_and_begins_nothing_again(sharing, routers, is_alone):
    fail(sharing, after=5)
    async with routers[0].over_http() as one, routers[1].over_http() as two:
        urls = [f"{str(client.base_url).rstrip(chr(47))}/v1" for client in ((one,) if is_alone else (one, two))]
        async with AsyncLockstepClient(urls, policy=Policy(retries=1, on_lost="error")) as client:
            text = ""
            async with await client.complete(**BODY, stream=True) as stream:
                async for event in stream:
                    text += event.text if isinstance(event, TextPiece) else ""
    assert text == routers[0].undisturbed("hello world", 7, 12)
    first, second, third = (len(submit.emitted_ids) for submit in sharing.submits)
    if is_alone:
        assert (first, second, third) == (0, 5, 10)
    else:  # what was not mirrored yet is computed again
        assert 0 == first < second <= 5
        assert second <= third <= second + 5


async def test_delete_where_a_stream_has_failed_ends_it_where_it_goes_on(sharing, routers):
    first, second = routers
    fail(sharing, after=3)
    failed = events_of(await first.client.post("/v1/completions", json=LONG | {"max_tokens": 200}))
    stream_id = failed[0][0].partition(":")[0]
    await mirrored(first)
    fail(sharing, after=None)
    async with second.over_http() as client:
        reading = asyncio.create_task(resume(client, stream_id, failed[-2][0]))
        await eventually(lambda: second.router.runs.readings == 1 and len(sharing.submits) == 2)
        assert (await first.client.delete(f"/v1/streams/{stream_id}")).status_code in (200, 204)
        await eventually(lambda: second.router.streams == 0)
        assert '"code":"cancelled"' in (await reading).text, "whether or not it has begun"
    for router in routers:
        assert (await resume(router.client, stream_id)).status_code == 404


# Two readers.


async def read_with(client, received):
    """Read a stream with the client library; what ended it."""
    try:
        async for chunk in await client.completions.create(
            **LONG_FIELDS, stream=True, extra_headers={"Idempotency-Key": "both"}
        ):
            received.append(chunk.choices[0].text)
    except openai.APIError as error:
        return error.code
    return None


async def test_older_reader_is_ended_once_and_takes_nothing_back(sharing):
    routers = [await sharing.router(name) for name in ("first", "second", "third")]
    slow(sharing, 0.05)
    before = count(metrics.STREAMS_TAKEN)
    async with contextlib.AsyncExitStack() as stack:
        urls = [f"{(await stack.enter_async_context(each.over_http())).base_url}".rstrip("/") for each in routers]
        readers = []
        for first in range(3):  # each begins at another router
            order = [f"{url}/v1" for url in urls[first:] + urls[:first]]
            client = await stack.enter_async_context(AsyncOpenAI(base_url=order, api_key="k", policy=Policy(retries=3)))
            prefer(client._client._transport._transport, order[0])
            received = []
            readers.append((received, asyncio.create_task(read_with(client, received))))
            await eventually(lambda received=received: len(received) >= 3)
        ends = [await end for _, end in readers]
    assert ends == ["stream_moved", "stream_moved", None]
    assert len(sharing.submits) == 3, "each router has run it once"
    assert count(metrics.STREAMS_TAKEN) - before == 2
    assert "".join(readers[-1][0]) == routers[0].undisturbed("hello world", 7, 100)


async def test_reader_that_came_back_from_where_its_stream_was_taken_may_try_again(sharing, routers):
    slow(sharing, 0.3)
    first, _ = routers
    body = LONG | {"max_tokens": 6}
    async with first.over_http() as client:
        stream_id, before = await leave_after(client, body, 1)
        await eventually(lambda: first.router.runs.detached == 1)
        older = asyncio.create_task(resume(client, stream_id, before[-1][0]))
        await eventually(lambda: first.router.runs.readings == 1)
        # A write is acknowledged after that one has come.
        written_at = first.router.mirrored.mirror.entries[stream_id].written_at
        await eventually(lambda: first.router.mirrored.mirror.entries[stream_id].written_at > written_at)
        tenant = tenant_of((await first.router.journals.read(stream_id)).record.owner)
        request = state_pb2.TakeRequest(tenant=tenant, stream_id=stream_id, owner="dead", ttl_s=60.0)
        assert await first.router.mirrored.client.take(request) is not None
        newer = events_of(await resume(client, stream_id, before[-1][0]))
        error = newer.pop()[1]["error"]
        assert (error["code"], error["message"]) == ("unavailable", "another router has the stream; it can be resumed")
        assert events_of(await older)[-1][1]["error"]["code"] == "stream_moved"
        rest = events_of(await resume(client, stream_id, (before + newer)[-1][0]))
    assert text_of(before + newer + rest) == first.undisturbed("hello world", 7, 6)


async def test_whole_answer_of_a_stream_that_moved_is_refused_for_good(sharing, routers):
    slow(sharing, 0.05)
    first, second = routers
    body = BODY | {"resumable": True, "max_tokens": 100}
    headers = {"idempotency-key": "both", "authorization": "Bearer one"}
    asking = asyncio.create_task(first.client.post("/v1/completions", json=body, headers=headers))
    await eventually(lambda: sharing.submits)
    await mirrored(first)
    there = asyncio.create_task(second.client.post("/v1/completions", json=body, headers=headers))
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stream_moved")
    assert "retry-after" not in answer.headers
    there.cancel()
    await asyncio.gather(there, return_exceptions=True)


# Numerics that the copy does not know.


async def copy_without_tokens(sharing, numerics, **settings):
    """Two routers on workers with these numerics. The second one can take a stream of whose tokens nothing is mirrored,
    and whose client has had three.
    """
    for worker, fingerprint in zip(sharing.workers, numerics, strict=True):
        worker.card = model_card(fingerprint=fingerprint)
    first, second = [await sharing.router(name, **settings) for name in ("first", "second")]
    whole = await first.client.post("/v1/completions", json=STREAM)
    stored = await first.router.journals.read(whole.headers["x-lockstep-stream-id"])
    await plant(first, stored, "r-planted", [0])
    return first, second


def marks_of(events):
    return [data.get("lockstep", {}).get("inexact", False) for _, data in events if data != "[DONE]"]


@pytest.mark.parametrize(
    ("numerics", "position", "is_marked"),
    [(("a", "b"), 3, True), (("a", "b"), 0, False), (("a", "a"), 3, False), (("", ""), 3, True)],
)
async def test_stream_is_marked_if_its_copy_knows_no_numerics(sharing, numerics, position, is_marked):
    first, second = await copy_without_tokens(sharing, numerics)
    events = events_of(await resume(second.client, "r-planted", f"r-planted:{position}"))
    assert events[-1] == (None, "[DONE]")
    assert any(marks_of(events)) is is_marked
    await mirrored(second)
    again = events_of(await resume(first.client, "r-planted", f"r-planted:{position}"))
    assert any(marks_of(again)) is is_marked, "the mark is mirrored"


async def test_reader_that_comes_later_and_is_ahead_is_marked_too(sharing):
    _, second = await copy_without_tokens(sharing, ("a", "b"))
    slow(sharing)
    whole = asyncio.create_task(resume(second.client, "r-planted"))
    await eventually(lambda: second.router.runs.running and len(sharing.submits) == 2)
    ahead = events_of(await resume(second.client, "r-planted", "r-planted:3"))
    assert any(marks_of(ahead))
    assert text_of(ahead) in text_of(events_of(await whole))


async def test_strict_router_refuses_a_stream_whose_numerics_nobody_knows(sharing):
    _, second = await copy_without_tokens(sharing, ("a", "b"), exact_failover="strict")
    assert (await resume(second.client, "r-planted", "r-planted:3")).status_code == 404
    assert len(sharing.submits) == 1, "it was not taken"
    slow(sharing)
    whole = asyncio.create_task(resume(second.client, "r-planted"))
    await eventually(lambda: second.router.runs.running and len(sharing.submits) == 2)
    assert (await resume(second.client, "r-planted", "r-planted:3")).status_code == 404
    assert text_of(events_of(await whole)) == second.undisturbed("hello world", 7, 12)
    assert second.router.runs.readings == 0


async def test_reader_that_comes_after_the_end_and_is_ahead_is_marked_too(sharing):
    """Its first router has died, and the second one has given the whole answer to another client meanwhile."""
    first, second = await copy_without_tokens(sharing, ("a", "b"))
    whole = events_of(await resume(second.client, "r-planted"))
    assert not any(marks_of(whole))
    await mirrored(second)
    for router in (second, first):
        assert any(marks_of(events_of(await resume(router.client, "r-planted", "r-planted:3"))))
        assert not any(marks_of(events_of(await resume(router.client, "r-planted", "r-planted:0"))))


async def test_strict_router_refuses_also_the_end_of_a_stream_whose_numerics_nobody_knows(sharing):
    first, second = await copy_without_tokens(sharing, ("a", "b"), exact_failover="strict")
    whole = await resume(second.client, "r-planted")
    await mirrored(second)
    for router in (second, first):
        assert (await resume(router.client, "r-planted", "r-planted:3")).status_code == 404
        assert text_of(events_of(await resume(router.client, "r-planted"))) == text_of(events_of(whole))
        assert router.router.runs.readings == 0


@pytest.mark.parametrize("exact_failover", ["prefer", "strict"])
async def test_reader_that_is_ahead_of_a_stream_that_began_again_elsewhere_is_told(sharing, exact_failover):
    """A third router finds tokens in the copy, and those are of the second one."""
    _, second = await copy_without_tokens(sharing, ("a", "b"), exact_failover=exact_failover)
    third = await sharing.router("third", exact_failover=exact_failover)
    for worker in sharing.workers:
        worker.script = Script(hang_after=2)
    reading = asyncio.create_task(resume(second.client, "r-planted"))
    await eventually(lambda: "r-planted" in second.router.mirrored.mirror.entries)
    await mirrored_to(second, "r-planted", 2)
    for worker in sharing.workers:
        worker.script = Script()
    ahead = await resume(third.client, "r-planted", "r-planted:3")
    if exact_failover == "strict":
        assert ahead.status_code == 404
        assert second.router.runs.running, "it was not taken"
        await second.client.delete("/v1/streams/r-planted")
    else:
        assert any(marks_of(events_of(ahead)))
        second.router.mirrored.mirror.note_change("r-planted")  # its next write tells it that it has lost the stream
    await reading
