"""A client that comes back gets the rest of its answer, each event exactly once."""

import asyncio
import gc
import json
import logging
import time
from pathlib import Path

import httpx
import pytest
from key_files import KEY, OTHER_KEY, bearer, tenant, write
from lockstep_api.v1 import worker_pb2
from lockstep_router import metrics
from lockstep_router.generation.generation import Generation
from lockstep_router.resumption.reading import Reading
from lockstep_router.status import status_body
from router_cluster import events_of, eventually
from scripted_worker import Script, ScriptedWorker, model_card

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 12, "seed": 7, "user": "u"}
STREAM = BODY | {"stream": True, "resumable": True}


def slow(cluster, delay_s=0.02):
    for worker in cluster.workers:
        worker.script = Script(delay_s=delay_s)


def text_of(events):
    return "".join(data["choices"][0]["text"] for _, data in events if data != "[DONE]" and data["choices"])


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


async def test_client_that_left_gets_the_rest_while_it_runs(cluster):
    slow(cluster)
    worker, _ = cluster.worker_of("user:u")
    async with cluster.over_http() as client:
        stream_id, before = await leave_after(client, STREAM, 3)
        await eventually(lambda: cluster.router.runs.detached == 1)
        assert status_body(cluster.router)["router"]["resumable"]["detached"] == 1
        response = await resume(client, stream_id, before[-1][0])
    events = events_of(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == (None, "[DONE]")
    assert text_of(before + events) == cluster.undisturbed("hello world", 7, 12)
    assert [event_id.split(":")[0] for event_id, _ in before + events[:-1]] == [stream_id] * (len(events) + 2)
    assert {data["id"] for _, data in before + events[:-1]} == {f"cmpl-{stream_id}"}
    assert len({data["created"] for _, data in before + events[:-1]}) == 1
    assert not worker.cancels
    assert len(worker.submits) == 1


async def test_finished_answer_is_kept_and_given_from_any_event(cluster):
    whole = await cluster.client.post("/v1/completions", json=STREAM | {"stream_options": {"include_usage": True}})
    events = events_of(whole)
    stream_id = whole.headers["x-lockstep-stream-id"]
    assert len(stream_id) >= 2 + 32
    again = await resume(cluster.client, stream_id)
    assert text_of(events_of(again)) == text_of(events)
    for index, (event_id, _) in enumerate(events[:-1]):
        rest = events_of(await resume(cluster.client, stream_id, event_id))
        assert text_of(events[: index + 1] + rest) == cluster.undisturbed("hello world", 7, 12)
        assert rest[-1] == (None, "[DONE]")
        assert sum("usage" in data and bool(data["usage"]) for _, data in rest[:-1]) == (index < len(events) - 2)
    query = await cluster.client.get(f"/v1/streams/{stream_id}?last_event_id={events[3][0]}")
    assert text_of(events[:4] + events_of(query)) == text_of(events)
    await eventually(lambda: cluster.router.requests == 0 and cluster.router.runs.readings == 0)


async def test_chat_opens_each_choice_once(cluster):
    body = {
        "model": "reference",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "seed": 7,
        "n": 3,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 2,
        "resumable": True,
    }
    response = await cluster.client.post("/v1/chat/completions", json=body)
    stream_id, events = response.headers["x-lockstep-stream-id"], events_of(response)[:-1]

    def histories(events):
        """For each choice its roles, text, tokens with log probabilities, and finishes."""
        made = {index: ([], [], [], []) for index in range(3)}
        for _, data in events:
            (choice,) = data["choices"]
            roles, texts, tokens, finishes = made[choice["index"]]
            roles.extend([choice["delta"]["role"]] if "role" in choice["delta"] else [])
            texts.append(choice["delta"].get("content", ""))
            tokens.extend(choice["logprobs"]["content"] if choice["logprobs"] else [])
            finishes.extend([choice["finish_reason"]] if choice["finish_reason"] else [])
        return {index: (roles, "".join(texts), tokens, ends) for index, (roles, texts, tokens, ends) in made.items()}

    expected = histories(events)
    assert all(roles == ["assistant"] and len(tokens) == 5 for roles, _, tokens, _ in expected.values())
    for index, (event_id, _) in enumerate(events):
        rest = events_of(await resume(cluster.client, stream_id, event_id))[:-1]
        assert histories(events[: index + 1] + rest) == expected


async def test_echo_is_given_once(cluster):
    response = await cluster.complete("hello", echo=True, stream=True, resumable=True, n=2)
    stream_id, events = response.headers["x-lockstep-stream-id"], events_of(response)[:-1]
    rest = events_of(await resume(cluster.client, stream_id, events[0][0]))[:-1]
    echoed = [data["choices"][0]["index"] for _, data in rest if data["choices"][0]["text"] == "hello"]
    assert echoed == [1]
    assert (
        sum(
            data["choices"][0]["text"] == "hello" for _, data in events_of(await resume(cluster.client, stream_id))[:-1]
        )
        == 2
    )


async def test_worker_that_dies_between_does_not_show(cluster):
    worker, (other,) = cluster.worker_of("user:u")
    worker.script = Script(delay_s=0.02, die_after=6)
    other.script = Script(delay_s=0.02)
    async with cluster.over_http() as client:
        stream_id, before = await leave_after(client, STREAM, 3)
        await eventually(lambda: cluster.router.failovers == 1)
        rest = events_of(await resume(client, stream_id, before[-1][0]))
    assert text_of(before + rest) == cluster.undisturbed("hello world", 7, 12)
    assert rest[-1] == (None, "[DONE]")
    assert len(other.submits) == 1


async def test_two_clients_read_one_stream(cluster):
    slow(cluster)
    async with cluster.over_http() as client:
        stream_id, before = await leave_after(client, STREAM, 2)
        both = await asyncio.gather(*(resume(client, stream_id, before[-1][0]) for _ in range(2)))
    for response in both:
        assert text_of(before + events_of(response)) == cluster.undisturbed("hello world", 7, 12)
    assert sum(len(worker.submits) for worker in cluster.workers) == 1


@pytest.mark.parametrize("headers", [{"x-lockstep-resumable": "true"}, {"x-lockstep-resumable": "True"}])
async def test_header_asks_for_it_too(cluster, headers):
    response = await cluster.client.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)
    assert (await resume(cluster.client, response.headers["x-lockstep-stream-id"])).status_code == 200


async def test_request_id_of_the_client_is_not_the_streams(cluster):
    response = await cluster.client.post("/v1/completions", json=STREAM, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert (await resume(cluster.client, "mine")).status_code == 404
    assert response.headers["x-lockstep-stream-id"].startswith("r-")


async def test_client_that_did_not_ask_cancels_as_ever(cluster):
    slow(cluster)
    worker, _ = cluster.worker_of("user:u")
    async with cluster.over_http() as client:
        async with client.stream(
            "POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 200}
        ) as response:
            assert "x-lockstep-stream-id" not in response.headers
            await anext(response.aiter_lines())
        await eventually(lambda: worker.cancels)
    assert cluster.router.runs.running == 0


async def test_generation_ends_when_nobody_comes_back(make_cluster):
    cluster = await make_cluster(resume_window_s=0.05)
    slow(cluster)
    worker, _ = cluster.worker_of("user:u")
    async with cluster.over_http() as client:
        stream_id, before = await leave_after(client, STREAM | {"max_tokens": 200}, 2)
        await eventually(lambda: worker.cancels)
        await eventually(lambda: cluster.router.streams == 0 and cluster.router.requests == 0)
        response = await resume(client, stream_id, before[-1][0])
    assert response.status_code == 404
    assert cluster.router.runs.running == cluster.router.runs.detached == 0
    assert cluster.router.journals.size_bytes == 0


async def test_finished_answer_expires(make_cluster):
    cluster = await make_cluster(resume_window_s=0.05)
    response = await cluster.client.post("/v1/completions", json=STREAM)
    stream_id = response.headers["x-lockstep-stream-id"]
    await eventually(lambda: cluster.router.journals.kept == 0)
    assert (await resume(cluster.client, stream_id)).status_code == 404


async def test_oldest_finished_answers_make_room(make_cluster):
    cluster = await make_cluster(max_resumable_streams=3)
    ids = [
        (await cluster.client.post("/v1/completions", json=STREAM)).headers["x-lockstep-stream-id"] for _ in range(5)
    ]
    codes = [(await resume(cluster.client, stream_id)).status_code for stream_id in ids]
    assert codes == [404, 404, 200, 200, 200]


async def test_running_streams_are_never_evicted(make_cluster):
    cluster = await make_cluster(max_resumable_streams=1)
    slow(cluster, 0.1)
    async with cluster.over_http() as client:
        stream_id, before = await leave_after(client, STREAM, 1)
        refused = await client.post("/v1/completions", json=STREAM)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        rest = await resume(client, stream_id, before[-1][0])
    assert text_of(before + events_of(rest)) == cluster.undisturbed("hello world", 7, 12)


async def test_unknown_foreign_and_expired_streams_look_alike(make_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY), tenant("chat", OTHER_KEY))
    cluster = await make_cluster(1, keys_file=str(keys), max_resumable_streams=1)
    mine = {"authorization": bearer(KEY)["authorization"]}
    other = {"authorization": bearer(OTHER_KEY)["authorization"]}
    first, second = [
        (await cluster.client.post("/v1/completions", json=STREAM, headers=mine)).headers["x-lockstep-stream-id"]
        for _ in range(2)
    ]
    assert (await resume(cluster.client, second, **mine)).status_code == 200
    answers = [
        await resume(cluster.client, "r-" + "0" * 32, **mine),
        await resume(cluster.client, second, **other),
        await resume(cluster.client, second, f"{second}:1", **other),
        await resume(cluster.client, first, **mine),
        await cluster.client.delete(f"/v1/streams/{second}", headers=other),
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["error"]["code"] == "stream_not_found"


async def test_api_keys_separate_clients_of_a_router_without_keys(cluster):
    response = await cluster.client.post("/v1/completions", json=STREAM, headers={"authorization": "Bearer one"})
    stream_id = response.headers["x-lockstep-stream-id"]
    assert (await resume(cluster.client, stream_id, authorization="Bearer one")).status_code == 200
    assert (await resume(cluster.client, stream_id, authorization="Bearer two")).status_code == 404
    assert (await resume(cluster.client, stream_id)).status_code == 404


@pytest.mark.parametrize(
    "position",
    ["", "x", "-1", "1,1", "13", "12", "11f", "12f,u,u", "1,u", "1f", "99999999999", "\u0661", "12F", " 1", "f", ","],
)
async def test_positions_that_are_none(cluster, position):
    for worker in cluster.workers:
        worker.script = Script(hang_after=3)
    async with cluster.over_http() as client:
        stream_id, _ = await leave_after(client, STREAM, 2)
        response = await resume(client, stream_id, f"{stream_id}:{position}".encode())
        await client.delete(f"/v1/streams/{stream_id}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Last-Event-ID"


async def test_events_of_other_streams_are_refused(cluster):
    first, second = [
        (await cluster.client.post("/v1/completions", json=STREAM)).headers["x-lockstep-stream-id"] for _ in range(2)
    ]
    for last in (f"{second}:1", "1", f"{first}", "a" * 10_000):
        response = await resume(cluster.client, first, last)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")
    query = await cluster.client.get(f"/v1/streams/{first}?last_event_id=x")
    assert query.json()["error"]["param"] == "last_event_id"


async def test_whole_answer_is_waited_for(cluster):
    slow(cluster)
    async with cluster.over_http() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"resumable": True}))
        await eventually(lambda: cluster.router.streams == 1)
        await eventually(lambda: cluster.router.journals.size_bytes > 0)
        asking.cancel()
        await eventually(lambda: cluster.router.runs.detached == 1)
        (stream_id,) = cluster.router.runs._runs
        response = await resume(client, stream_id)
        again = await resume(client, stream_id)
    assert response.json()["choices"][0]["text"] == cluster.undisturbed("hello world", 7, 12)
    assert response.json()["usage"]["completion_tokens"] == 12
    assert again.json() == response.json()
    part = await resume(cluster.client, stream_id, f"{stream_id}:3")
    assert (part.status_code, part.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_failure_is_given_again(cluster):
    rejected = worker_pb2.Rejected(code="internal", message="bad")
    for worker in cluster.workers:
        worker.script = Script(rejection=rejected, reject_after=2)
    response = await cluster.client.post("/v1/completions", json=STREAM)
    stream_id, events = response.headers["x-lockstep-stream-id"], events_of(response)
    assert events[-1][1]["error"]["message"] == "bad"
    again = events_of(await resume(cluster.client, stream_id, events[0][0]))
    assert again[-1][1] == events[-1][1]
    assert text_of(events[:1] + again[:-1]) == cluster.undisturbed("hello world", 7, 2)
    at_end = await resume(cluster.client, stream_id, events[-2][0])
    assert (at_end.status_code, at_end.json()["error"]["message"]) == (500, "bad")


def alive(kind):
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


async def test_failure_that_is_kept_holds_nothing_but_itself(make_cluster):
    """Neither the generation, nor those who have read it since, nor what they read from."""
    cluster = await make_cluster(1)
    generations, readings = alive(Generation), alive(Reading)
    cluster.workers[0].script = Script(rejection=worker_pb2.Rejected(code="internal", message="bad"), reject_after=2)
    response = await cluster.client.post("/v1/completions", json=STREAM)
    stream_id = response.headers["x-lockstep-stream-id"]
    kept = cluster.router.journals.held(stream_id).outcome.failure
    for _ in range(3):
        assert events_of(await resume(cluster.client, stream_id))[-1][1]["error"]["message"] == "bad"
    assert kept.__traceback__ is None
    assert (alive(Generation), alive(Reading)) == (generations, readings)


async def test_defect_is_a_typed_error(cluster):
    cluster.fail_after(0)
    response = await cluster.client.post("/v1/completions", json=STREAM | {"prompt": [5, 6], "stop": ["x"]})
    error = response.json()["error"] if response.status_code == 500 else events_of(response)[-1][1]["error"]
    assert error["code"] == "internal"
    assert "secret" not in response.text
    await eventually(lambda: cluster.router.streams == 0 and cluster.router.runs.running == 0)


async def test_refused_request_is_an_ordinary_error(cluster):
    response = await cluster.client.post("/v1/completions", json=STREAM | {"model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert cluster.router.runs.running == cluster.router.runs.readings == cluster.router.journals.kept == 0


async def test_delete_ends_a_stream_for_all(cluster):
    slow(cluster)
    worker, _ = cluster.worker_of("user:u")
    async with cluster.over_http() as client:
        stream_id, _ = await leave_after(client, STREAM | {"max_tokens": 200}, 2)
        await eventually(lambda: cluster.router.runs.detached == 1)
        reading = asyncio.create_task(resume(client, stream_id))
        await eventually(lambda: cluster.router.runs.readings == 1)
        deleted = await client.delete(f"/v1/streams/{stream_id}")
        assert deleted.json() == {"id": stream_id, "object": "stream.deleted", "deleted": True}
        await eventually(lambda: worker.cancels)
        assert events_of(await reading)[-1][1]["error"]["code"] == "cancelled"
        assert (await resume(client, stream_id)).status_code == 404
        assert (await client.delete(f"/v1/streams/{stream_id}")).status_code == 404
    kept = await cluster.client.post("/v1/completions", json=STREAM)
    kept_id = kept.headers["x-lockstep-stream-id"]
    assert (await cluster.client.delete(f"/v1/streams/{kept_id}")).status_code == 200
    assert (await resume(cluster.client, kept_id)).status_code == 404


async def test_drain_ends_streams_without_a_client_and_waits_for_the_others(cluster):
    slow(cluster)
    async with cluster.over_http() as client:
        await leave_after(client, STREAM | {"max_tokens": 200}, 1)
        await eventually(lambda: cluster.router.runs.detached == 1)
        reading = asyncio.create_task(client.post("/v1/completions", json=STREAM | {"user": "v"}))
        await eventually(lambda: cluster.router.streams == 2)
        await eventually(lambda: cluster.router.journals.size_bytes and cluster.router.runs.running == 2)
        async with asyncio.timeout(30):
            await cluster.router.leave()
        response = await reading
        assert events_of(response)[-1] == (None, "[DONE]")
        assert (await client.post("/v1/completions", json=STREAM)).json()["error"]["code"] == "draining"
    assert cluster.router.streams == 0


async def test_limits_of_a_tenant_hold_for_departed_clients(make_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY, concurrent_streams=1))
    cluster = await make_cluster(1, keys_file=str(keys))
    slow(cluster, 0.1)
    async with cluster.over_http() as client:
        stream_id, before = await leave_after(client, STREAM, 1, **bearer(KEY))
        await eventually(lambda: cluster.router.runs.detached == 1)
        assert (await client.post("/v1/completions", json=BODY, headers=bearer(KEY))).status_code == 429
        rest = await resume(client, stream_id, before[-1][0], **bearer(KEY))
        assert text_of(before + events_of(rest)) == cluster.undisturbed("hello world", 7, 12)
        assert (await client.post("/v1/completions", json=BODY, headers=bearer(KEY))).status_code == 200


async def test_deadline_holds_without_a_client(cluster):
    slow(cluster)
    async with cluster.over_http() as client:
        body = STREAM | {"max_tokens": 200}
        stream_id, before = await leave_after(client, body, 1, **{"x-request-timeout": "0.5"})
        await eventually(lambda: cluster.router.runs.running == 0)
        rest = events_of(await resume(client, stream_id, before[-1][0]))
    assert rest[-1][1]["error"]["code"] == "deadline_exceeded"


async def test_deadline_that_is_kept_counts_from_the_arrival(make_cluster):
    """Not from when the request's model had its first worker: another router goes by it."""
    cluster = await make_cluster(0, ready=False)
    worker = ScriptedWorker("late", Path(cluster.router.settings.workers[0].removeprefix("unix:")))
    asking = asyncio.create_task(
        cluster.client.post("/v1/completions", json=STREAM, headers={"x-request-timeout": "90"})
    )
    await eventually(lambda: cluster.router.requests == 1)
    latest = time.time() + 90
    await eventually(lambda: time.time() > latest - 89.5)
    await worker.start()
    try:
        stream_id = (await asking).headers["x-lockstep-stream-id"]
        assert latest - 60 < cluster.router.journals.held(stream_id).record.deadline_at <= latest
    finally:
        await worker.kill()


async def test_stream_whose_id_came_with_a_comment_waits_for_its_first_worker_without_a_client(make_cluster):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0.05)
    worker = ScriptedWorker("late", Path(cluster.router.settings.workers[0].removeprefix("unix:")))
    async with cluster.over_http() as client:
        async with client.stream("POST", "/v1/completions", json=STREAM) as response:
            stream_id = response.headers["x-lockstep-stream-id"]
        await eventually(lambda: cluster.router.runs.readings == 0)
        assert (cluster.router.runs.running, cluster.router.runs.detached) == (1, 1)
        await worker.start()
        try:
            assert events_of(await resume(client, stream_id))[-1][1] == "[DONE]"
        finally:
            await worker.kill()


async def test_stream_without_a_worker_ends_when_nobody_comes_back(make_cluster):
    cluster = await make_cluster(0, ready=False, keepalive_interval_s=0.05, resume_window_s=0.2)
    async with cluster.over_http() as client, client.stream("POST", "/v1/completions", json=STREAM):
        pass
    await eventually(lambda: cluster.router.runs.running == 0)
    assert cluster.router.requests == 0


async def test_resumes_are_counted(cluster):
    def count(outcome):
        return metrics.RESUMES.labels(outcome)._value.get()

    before = {outcome: count(outcome) for outcome in ("finished", "not_found", "invalid")}
    stream_id = (await cluster.client.post("/v1/completions", json=STREAM)).headers["x-lockstep-stream-id"]
    await resume(cluster.client, stream_id)
    await resume(cluster.client, "nothing")
    await resume(cluster.client, stream_id, f"{stream_id}:500")
    assert {outcome: count(outcome) - number for outcome, number in before.items()} == dict.fromkeys(before, 1)
    assert metrics.KEPT_STREAMS._value.get() == 1


async def test_event_stream_of_a_reader_that_left_is_detached(cluster):
    slow(cluster)
    async with cluster.over_http() as client:
        stream_id, _ = await leave_after(client, STREAM | {"max_tokens": 100}, 1)
        with pytest.raises(httpx.ReadTimeout):
            await client.get(f"/v1/streams/{stream_id}", timeout=httpx.Timeout(30, read=0.01))
        await eventually(lambda: cluster.router.runs.readings == 0)
        assert cluster.router.runs.detached == 1
        await client.delete(f"/v1/streams/{stream_id}")


async def test_description_names_the_ways_to_come_back(cluster):
    paths = (await cluster.client.get("/openapi.json")).json()["paths"]
    assert set(paths["/v1/streams/{stream_id}"]) == {"get", "delete"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        named = {parameter["name"] for parameter in paths[path]["post"]["parameters"]}
        assert named == {"X-Lockstep-Resumable", "Idempotency-Key", "Last-Event-ID", "X-Lockstep-Event-IDs"}
    named = {parameter["name"] for parameter in paths["/v1/streams/{stream_id}"]["get"]["parameters"]}
    assert named == {"stream_id", "Last-Event-ID", "last_event_id"}


async def test_kept_answers_make_room_for_other_requests(make_cluster):
    cluster = await make_cluster(max_journals_bytes=1 << 20)
    for worker in cluster.workers:
        worker.card = model_card(context_length=1 << 16)
        worker.announce(epoch=2)
    await eventually(lambda: cluster.router.workers.models["reference"].context_length == 1 << 16)
    for _ in range(4):
        kept = await cluster.complete(prompt=[5] * 3000, max_tokens=1, resumable=True)
        assert kept.status_code == 200
    assert cluster.router.journals.kept == 4
    async with asyncio.timeout(30):
        while (await cluster.complete(prompt=[5] * 28_500, max_tokens=1)).status_code != 200:
            await asyncio.sleep(0.05)
    assert cluster.router.journals.kept < 4


async def test_access_log_says_what_was_resumed(cluster, caplog):
    caplog.set_level(logging.INFO, logger="lockstep.router")
    response = await cluster.client.post("/v1/completions", json=STREAM)
    stream_id, events = response.headers["x-lockstep-stream-id"], events_of(response)
    await resume(cluster.client, stream_id, events[8][0])
    lines = [each for each in caplog.records if each.message == "request"]
    assert [(each.resumed, each.completion_tokens) for each in lines] == [(False, 12), (True, 3)]
    assert not any(stream_id in str(vars(each)) for each in caplog.records)
