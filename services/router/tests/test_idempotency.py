"""A request that is sent again with its idempotency key gets the first one's answer, and starts nothing."""

import asyncio

import pytest
from key_files import KEY, OTHER_KEY, bearer, tenant, write
from lockstep_api.v1 import worker_pb2
from lockstep_router import metrics
from lockstep_router.faces.idempotency import fingerprint_of
from lockstep_router.faces.openai.schemas import CompletionRequest
from minutes import until_room_s
from router_cluster import events_of, eventually
from scripted_worker import Script
from test_resumption import leave_after, slow, text_of

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 12, "user": "u"}
"""Without a seed: two generations would differ."""


async def ask(client, body=BODY, key="k-1", **headers):
    return await client.post("/v1/completions", json=body, headers={"idempotency-key": key} | headers)


def submits(cluster):
    return sum(len(worker.submits) for worker in cluster.workers)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_once_start_one_generation(cluster, stream):
    slow(cluster, 0.005)
    before = metrics.IDEMPOTENT_JOINS._value.get()
    answers = await asyncio.gather(*(ask(cluster.client, BODY | {"stream": stream}) for _ in range(8)))
    assert submits(cluster) == 1
    assert metrics.IDEMPOTENT_JOINS._value.get() == before + 7
    assert len({answer.headers["x-lockstep-stream-id"] for answer in answers}) == 1
    texts = {text_of(events_of(answer)) if stream else answer.json()["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1


async def test_request_that_is_sent_again_joins_the_running_stream(cluster):
    slow(cluster)
    body = BODY | {"stream": True}
    async with cluster.over_http() as client:
        stream_id, before = await leave_after(client, body, 3, **{"idempotency-key": "k-1"})
        rest = events_of(await ask(client, body, **{"last-event-id": before[-1][0]}))
        again = events_of(await ask(client, body))
    assert submits(cluster) == 1
    assert before[0][0].startswith(stream_id)
    assert text_of(before + rest) == text_of(again)


async def test_finished_answer_is_given_again(cluster):
    first, second = [await ask(cluster.client) for _ in range(2)]
    assert first.json() == second.json()
    assert submits(cluster) == 1


class Later(CompletionRequest):
    """The body of another version, which has one field more."""

    added: int | None = None


def test_fingerprint_is_the_same_at_routers_with_more_fields():
    own, later = (fingerprint_of(model.model_validate(BODY), "text") for model in (CompletionRequest, Later))
    assert own == later
    for other in (BODY | {"added": 1}, BODY | {"temperature": 0.5}, BODY | {"prompt": "hello"}):
        assert fingerprint_of(Later.model_validate(other), "text") != own
    assert fingerprint_of(Later.model_validate(BODY), "chat") != own


def test_order_inside_a_field_matters():
    """That of a schema's properties is the order in which they are generated."""
    orders = (["reason", "answer"], ["answer", "reason"])
    first, second = (
        fingerprint_of(CompletionRequest.model_validate(BODY | {"structured_outputs": {"json": schema}}), "text")
        for schema in ({"type": "object", "properties": {name: {} for name in order}} for order in orders)
    )
    assert first != second


async def test_defaults_count_as_not_given(cluster):
    first = await ask(cluster.client)
    again = await ask(cluster.client, {"n": None, "stop": None} | dict(reversed(BODY.items())))
    assert again.json() == first.json()
    assert submits(cluster) == 1
    assert (await ask(cluster.client, BODY | {"n": 2})).status_code == 422


async def test_order_of_fields_and_spaces_do_not_matter(cluster):
    await ask(cluster.client)
    content = b'{ "user":"u", "max_tokens": 12,   "prompt":"hello world", "model":"reference"}'
    again = await cluster.client.post("/v1/completions", content=content, headers={"idempotency-key": "k-1"})
    assert again.status_code == 200
    assert submits(cluster) == 1


async def test_key_with_another_body_is_refused(cluster):
    await ask(cluster.client)
    messages = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for response in (
        await ask(cluster.client, BODY | {"max_tokens": 13}),
        await ask(cluster.client, BODY | {"stream": True}),
        await cluster.client.post("/v1/chat/completions", json=messages, headers={"idempotency-key": "k-1"}),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            422,
            "idempotency_key_reused",
            "Idempotency-Key",
        )
        assert error["type"] == "invalid_request_error"
    assert submits(cluster) == 1
    assert cluster.router.runs.running == cluster.router.runs.readings == 0


async def test_other_keys_start_other_generations(cluster):
    await ask(cluster.client)
    await ask(cluster.client, key="k-2")
    assert submits(cluster) == 2


@pytest.mark.parametrize("key", ["", " ", "a b", "\u00e9", "x" * 256, "a\tb"])
async def test_keys_that_are_none(cluster, key):
    response = await ask(cluster.client, key=key.encode())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_longest_key(cluster):
    assert (await ask(cluster.client, key="~" * 255)).status_code == 200


async def test_tenants_have_keys_of_their_own(make_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY), tenant("chat", OTHER_KEY))
    cluster = await make_cluster(1, keys_file=str(keys))
    first = await ask(cluster.client, **bearer(KEY))
    second = await ask(cluster.client, BODY | {"max_tokens": 3}, **bearer(OTHER_KEY))
    assert (first.status_code, second.status_code) == (200, 200)
    assert submits(cluster) == 2


async def test_tenant_at_its_limit_of_streams_can_send_its_request_again(make_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY, concurrent_streams=1, requests_per_minute=4))
    cluster = await make_cluster(1, keys_file=str(keys))
    slow(cluster)
    await asyncio.sleep(until_room_s())
    answers = await asyncio.gather(*(ask(cluster.client, **bearer(KEY)) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert (await ask(cluster.client, key="k-2", **bearer(KEY))).status_code == 200
    refused = await ask(cluster.client, **bearer(KEY))
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "requests_per_minute")


async def test_tenant_at_its_limit_of_streams_gets_no_second_one(make_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY, concurrent_streams=1))
    cluster = await make_cluster(1, keys_file=str(keys))
    slow(cluster)
    answers = await asyncio.gather(*(ask(cluster.client, key=f"k-{n}", **bearer(KEY)) for n in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 429]


async def test_failed_request_can_be_sent_again(cluster):
    refused = await ask(cluster.client, BODY | {"model": "other"})
    assert refused.status_code == 404
    for worker in cluster.workers:
        worker.script = Script(rejection=worker_pb2.Rejected(code="internal", message="bad"), reject_after=2)
    assert (await ask(cluster.client)).status_code == 500
    slow(cluster, 0)
    assert (await ask(cluster.client)).status_code == 200
    assert submits(cluster) == 2


async def test_key_is_free_when_its_stream_is_gone(make_cluster):
    cluster = await make_cluster(max_resumable_streams=1)
    await ask(cluster.client)
    await ask(cluster.client, key="k-2")
    assert (await ask(cluster.client)).status_code == 200
    assert submits(cluster) == 3
    stream_id = (await ask(cluster.client)).headers["x-lockstep-stream-id"]
    assert submits(cluster) == 3
    await cluster.client.delete(f"/v1/streams/{stream_id}")
    await ask(cluster.client)
    assert submits(cluster) == 4


async def test_event_of_a_stream_that_is_gone_starts_nothing(cluster):
    response = await ask(cluster.client, BODY | {"stream": True}, **{"last-event-id": f"r-{'0' * 32}:3"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "stream_not_found")
    assert submits(cluster) == 0
    assert (await ask(cluster.client, BODY | {"stream": True})).status_code == 200


async def test_client_that_leaves_before_its_prompt_is_ready_leaves_nothing(make_cluster):
    cluster = await make_cluster(0, ready=False)
    async with cluster.over_http() as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(2)]
        await eventually(lambda: cluster.router.runs.readings == 2)
        asking[0].cancel()
        await eventually(lambda: cluster.router.runs.readings == 1)
        assert cluster.router.requests == cluster.router.runs.running == 1, "the other client waits for it"
        asking[1].cancel()
        await eventually(lambda: cluster.router.requests == 0 and cluster.router.runs.running == 0)
    assert not cluster.router.journals._claims
