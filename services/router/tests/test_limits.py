"""Tenants stay within their limits, and each refusal names the limit and when to come back."""

import asyncio
import logging
from types import SimpleNamespace

import httpx
import pytest
from key_files import KEY, OTHER_KEY, SECOND_KEY, bearer, tenant, write
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.tenants import Tenant, TenantLimits
from lockstep_router.tenants.limits import MinuteUsage
from router_cluster import eventually, least_mean_s
from scripted_worker import Script

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 3}


@pytest.fixture
def limited(make_cluster, tmp_path):
    async def make(workers=1, **limits):
        path = tmp_path / "keys.yaml"
        write(path, tenant("search", KEY, SECOND_KEY, **limits), tenant("chat", OTHER_KEY))
        return await make_cluster(workers, keys_file=str(path))

    return make


@pytest.fixture(autouse=True)
def minute(monkeypatch):
    """A minute of the clock does not end within a test: it is over when the test says so."""

    clock = SimpleNamespace(now=1_800_000_000.0, time=lambda: clock.now)
    monkeypatch.setattr("limits.aio.storage.memory.time", clock)
    return clock


def is_limited(response, limit):
    error = response.json()["error"]
    return (
        response.status_code == 429
        and error["type"] == "rate_limit_error"
        and error["code"] == "rate_limit_exceeded"
        and error["param"] == limit
        and limit in error["message"]
        and 1 <= int(response.headers["retry-after"]) <= 120
    )


async def ask(cluster, key=KEY, path="/v1/completions", **fields):
    return await cluster.client.post(path, json=BODY | fields, headers=bearer(key))


async def test_requests_of_a_minute(limited, minute):
    cluster = await limited(requests_per_minute=3)
    for remaining, key in ((2, KEY), (1, SECOND_KEY), (0, KEY)):
        response = await ask(cluster, key)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "3"
        assert response.headers["x-ratelimit-remaining-requests"] == str(remaining)
        assert response.headers["x-ratelimit-reset-requests"] == "120s"
        assert "x-ratelimit-limit-tokens" not in response.headers
    refused = await ask(cluster)
    assert is_limited(refused, "requests_per_minute")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(cluster.workers[0].submits) == 3
    assert (await ask(cluster, OTHER_KEY)).status_code == 200
    assert (await cluster.client.get("/v1/models", headers=bearer(KEY))).status_code == 200
    minute.now += int(refused.headers["retry-after"])
    assert (await ask(cluster)).status_code == 200
    assert is_limited(await ask(cluster), "requests_per_minute")


async def test_requests_count_on_every_endpoint_that_takes_a_body_also_if_it_is_wrong(limited):
    cluster = await limited(requests_per_minute=3)
    assert (await ask(cluster, path="/tokenize", max_tokens=5)).status_code == 400
    assert (await ask(cluster, path="/detokenize")).status_code == 400
    assert (await ask(cluster, path="/v1/chat/completions")).status_code == 400
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions", "/v1/completions"):
        assert is_limited(await ask(cluster, path=path), "requests_per_minute")


async def test_refused_before_the_body_is_read(limited):
    cluster = await limited(requests_per_minute=1)
    assert (await ask(cluster)).status_code == 200
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\ncontent-length: 99\r\n\r\n"
    async with cluster.over_http() as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(head.encode())
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 429 ")
        writer.close()


async def test_refusals_take_little_time(limited):
    cluster = await limited(requests_per_minute=1, tokens_per_minute=1000)
    assert (await ask(cluster)).status_code == 200

    async def refused():
        assert (await ask(cluster)).status_code == 429

    assert await least_mean_s(refused) < 0.01


async def test_tokens_of_prompts_and_answers(limited, minute):
    cluster = await limited(tokens_per_minute=40)
    prompt_tokens = len(cluster.tokenizer.encode("hello world"))
    response = await ask(cluster, max_tokens=20)
    assert response.headers["x-ratelimit-limit-tokens"] == "40"
    assert response.headers["x-ratelimit-remaining-tokens"] == str(40 - prompt_tokens)
    response = await ask(cluster, max_tokens=20)
    assert response.status_code == 200, "an answer may take a tenant beyond its tokens"
    refused = await ask(cluster, max_tokens=1)
    assert is_limited(refused, "tokens_per_minute")
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert (await ask(cluster, OTHER_KEY)).status_code == 200
    minute.now += int(refused.headers["retry-after"]) - 2
    assert is_limited(await ask(cluster, max_tokens=1), "tokens_per_minute")
    minute.now += 60
    assert (await ask(cluster, max_tokens=1)).status_code == 200


class UnreadTransport(httpx.ASGITransport):
    """A client that reads nothing of an answer's body until it leaves."""

    def __init__(self, app):
        self.leaves = asyncio.Event()

        async def unread_app(scope, receive, send):
            body = {"more_body": True}

            async def receive_or_leave():
                nonlocal body
                if body.get("more_body"):
                    body = await receive()
                    return body
                await self.leaves.wait()
                return {"type": "http.disconnect"}

            async def take(message):
                if message["type"] == "http.response.body":
                    await asyncio.Event().wait()
                await send(message)

            await app(scope, receive_or_leave, take)
            await send({"type": "http.response.body"})

        super().__init__(app=unread_app)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_tokens_that_a_client_has_not_read_count(limited, caplog, path):
    cluster = await limited(tokens_per_minute=1000)
    prompt_tokens = len(cluster.tokenizer.encode("hello world"))
    transport = UnreadTransport(cluster.app)
    body = BODY | {"max_tokens": 200, "stream": True}
    if path == "/v1/responses":
        body = {"model": "reference", "input": "hello world", "max_output_tokens": 200, "stream": True}
    with caplog.at_level(logging.INFO, "lockstep.audit"):
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
            asking = asyncio.create_task(client.post(path, json=body, headers=bearer(KEY)))
            await eventually(lambda: cluster.workers[0].ended_streams == 1)
            await eventually(lambda: cluster.router.workers.history.streams[-1].tokens == 200)
            transport.leaves.set()
            await asking
    (line,) = [record for record in caplog.records if record.name == "lockstep.audit"]
    assert (line.status, line.completion_tokens) == (499, 200)
    used = line.prompt_tokens + 200
    response = await ask(cluster, max_tokens=1)
    assert response.headers["x-ratelimit-remaining-tokens"] == str(1000 - used - prompt_tokens)


async def test_prompt_that_does_not_fit_now_waits_and_one_that_never_fits_does_not(limited, minute):
    cluster = await limited(tokens_per_minute=20)
    prompt = "hello world " * 3
    tokens = len(cluster.tokenizer.encode(prompt))
    assert 10 < tokens < 20
    assert (await ask(cluster, prompt=prompt, max_tokens=1)).status_code == 200
    refused = await ask(cluster, prompt=prompt, max_tokens=1)
    assert is_limited(refused, "tokens_per_minute")
    assert len(cluster.workers[0].submits) == 1
    minute.now += int(refused.headers["retry-after"])
    assert (await ask(cluster, prompt=prompt, max_tokens=1)).status_code == 200
    minute.now += 200
    never = await ask(cluster, prompt=prompt * 4, max_tokens=1)
    assert never.status_code == 400
    assert never.json()["error"]["param"] == "tokens_per_minute"
    assert "retry-after" not in never.headers


async def test_request_that_the_router_has_no_room_for_costs_no_tokens(make_cluster, tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY, tokens_per_minute=100), tenant("chat", OTHER_KEY))
    cluster = await make_cluster(1, keys_file=str(path), max_streams=2)
    cluster.workers[0].script = Script(delay_s=20)
    running = asyncio.create_task(ask(cluster, OTHER_KEY, n=2, max_tokens=50))
    await eventually(lambda: cluster.router.streams == 2)
    for _ in range(5):
        assert (await ask(cluster)).status_code == 503
    running.cancel()
    await eventually(lambda: cluster.router.streams == 0)
    cluster.workers[0].script = Script()
    served = await ask(cluster)
    prompt_tokens = len(cluster.tokenizer.encode(BODY["prompt"]))
    assert served.headers["x-ratelimit-remaining-tokens"] == str(100 - prompt_tokens)


async def test_streams_at_a_time(limited):
    cluster = await limited(concurrent_streams=2)
    cluster.workers[0].script = Script(delay_s=0.02)
    running = [asyncio.create_task(ask(cluster, max_tokens=100)) for _ in range(2)]
    await eventually(lambda: cluster.router.streams == 2)
    assert is_limited(await ask(cluster, SECOND_KEY), "concurrent_streams")
    assert is_limited(await ask(cluster, path="/tokenize"), "concurrent_streams")
    assert (await ask(cluster, OTHER_KEY)).status_code == 200
    assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
    assert (await ask(cluster)).status_code == 200


PATHS = {
    "/v1/completions": True,
    "/v1/chat/completions": True,
    "/v1/responses": True,
    "/v1/embeddings": False,
    "/tokenize": False,
    "/detokenize": False,
}
"""Whether an idempotency key can join an earlier answer there."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("limit", ["concurrent_streams", "tokens_per_minute"])
async def test_key_waives_no_limit_where_it_joins_no_answer(limited, path, limit):
    cluster = await limited(**{limit: 20 if limit == "tokens_per_minute" else 1})
    if limit == "concurrent_streams":
        cluster.workers[0].script = Script(hang_after=1)
    running = asyncio.create_task(ask(cluster, max_tokens=60))
    if limit == "concurrent_streams":
        await eventually(lambda: cluster.router.streams == 1)
    else:
        assert (await running).status_code == 200
    # The body is wrong: a client that gets an error about it was let in to send it.
    wrong, with_key = {"model": 5}, bearer(KEY) | {"Idempotency-Key": "k"}
    response = await cluster.client.post(path, json=wrong, headers=with_key)
    if PATHS[path]:
        assert response.status_code == 400
    else:
        assert is_limited(response, limit)
    assert is_limited(await cluster.client.post(path, json=wrong, headers=bearer(KEY)), limit)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_every_choice_of_every_prompt_is_a_stream(limited):
    cluster = await limited(concurrent_streams=4)
    cluster.workers[0].script = Script(delay_s=0.02)
    running = asyncio.create_task(ask(cluster, prompt=["a", "b"], max_tokens=100))
    await eventually(lambda: cluster.router.streams == 2)
    assert is_limited(await ask(cluster, n=3), "concurrent_streams")
    assert (await ask(cluster, n=2)).status_code == 200
    assert (await running).status_code == 200
    always = await ask(cluster, n=5)
    assert always.status_code == 400
    assert always.json()["error"]["param"] == "concurrent_streams"


async def leaves(cluster, client):
    async with client.stream("POST", "/v1/completions", json=streamed(), headers=bearer(KEY)) as response:
        await anext(response.aiter_lines())


async def leaves_before_the_first_token(cluster, client):
    cluster.workers[0].script = Script(hang_after=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.post("/v1/completions", json=streamed(), headers=bearer(KEY))


async def fails_in_the_answer(cluster, client):
    cluster.fail_after(3)
    await client.post("/v1/completions", json=streamed() | {"stream": False}, headers=bearer(KEY))


async def is_invalid(cluster, client):
    assert (await client.post("/v1/completions", json={"prompt": 1}, headers=bearer(KEY))).status_code == 400
    assert (await client.post("/v1/completions", json=streamed() | {"n": 9}, headers=bearer(KEY))).status_code == 400


async def is_too_long(cluster, client):
    body = streamed() | {"prompt": "hello " * 400}
    assert (await client.post("/v1/completions", json=body, headers=bearer(KEY))).status_code == 400


async def has_no_time(cluster, client):
    headers = bearer(KEY) | {"x-request-timeout": "0.2"}
    await client.post("/v1/completions", json=streamed(), headers=headers)


def streamed():
    return BODY | {"max_tokens": 200, "stream": True, "n": 2}


ENDS = [leaves, leaves_before_the_first_token, fails_in_the_answer, is_invalid, is_too_long, has_no_time]


@pytest.mark.parametrize("end", ENDS)
async def test_streams_are_released_however_they_end(limited, end):
    cluster = await limited(concurrent_streams=2)
    cluster.workers[0].script = Script(delay_s=0.02)
    search = Tenant("search")
    async with cluster.over_http() as client:
        await end(cluster, client)
        await eventually(lambda: not cluster.router.limits.streams_of(search))
        await eventually(lambda: not cluster.router.requests)
    cluster.workers[0].script = Script()
    cluster.fail_after(1 << 20)
    assert (await ask(cluster, n=2)).status_code == 200


async def test_tokens_of_an_abandoned_answer_count(limited):
    cluster = await limited(tokens_per_minute=20)
    cluster.workers[0].script = Script(delay_s=0.005)
    async with cluster.over_http() as client:
        body = BODY | {"max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, headers=bearer(KEY)) as response:
            lines = response.aiter_lines()
            for _ in range(90):
                await anext(lines)
        await eventually(lambda: not cluster.router.requests)
    assert is_limited(await ask(cluster), "tokens_per_minute")


async def test_usage_stays_when_keys_or_limits_change(limited, tmp_path):
    cluster = await limited(requests_per_minute=2)
    for _ in range(2):
        assert (await ask(cluster)).status_code == 200
    write(tmp_path / "keys.yaml", tenant("search", SECOND_KEY, requests_per_minute=3))
    cluster.router.keys.check()
    assert (await ask(cluster, SECOND_KEY)).status_code == 200
    assert is_limited(await ask(cluster, SECOND_KEY), "requests_per_minute")


async def test_concurrent_requests_cannot_pass_a_limit_together(limited):
    cluster = await limited(requests_per_minute=5)
    responses = await asyncio.gather(*(ask(cluster) for _ in range(12)))
    assert sorted(response.status_code for response in responses) == [200] * 5 + [429] * 7


@pytest.mark.parametrize(
    ("previous", "current", "left_s"), [(0, 10, 60), (0, 10, 1), (100, 0, 59), (50, 4, 30), (50, 9, 30), (7, 300, 12)]
)
@pytest.mark.parametrize("amount", [1, 5, 10])
async def test_wait_is_as_long_as_it_has_to_be(minute, previous, current, left_s, amount):
    """After the wait that a refusal names there is room, and a second before there is not."""
    limit, search = 10, Tenant("search", tokens_per_minute=10)
    limits = TenantLimits()
    for count, now in ((previous, 1_800_000_000.0), (current, 1_800_000_060.0 + 60 - left_s)):
        minute.now = now
        if count:
            limits.charge(search, "tokens", count)
            await asyncio.sleep(0.01)
    usage = await limits.usage(search, "tokens")
    assert (usage.previous, usage.current) == (previous, current)
    wait_s = usage.wait_s(limit, amount)
    began = minute.now
    minute.now = began + wait_s - 1
    early = await limits.acquire(search, "tokens", limit, amount)
    assert not early or wait_s == 0 or wait_s < 1
    minute.now = began + wait_s + 0.001
    assert early or await limits.acquire(search, "tokens", limit, amount)


def test_empty_window_waits_for_nothing():
    assert MinuteUsage(0, 0, 30.0).wait_s(10, 10) == 0
    assert MinuteUsage(0, 0, 30.0).empty_s == 0


async def test_no_limits_no_counting():
    account = TenantLimits().account(Tenant("free"))
    await account.admit()
    account.expect(1000)
    await account.charge_prompts(10**9)
    account.charge_answers(10**9)
    with account.holding(10**6):
        assert not account.standings


async def test_error_of_a_limit_is_not_the_routers_overload():
    account = TenantLimits().account(Tenant("a", concurrent_streams=1))
    with account.holding(1), pytest.raises(LockstepError) as caught:
        await account.admit()
    assert caught.value.code is ErrorCode.RATE_LIMIT_EXCEEDED
    assert caught.value.meaning.http_status == 429
    assert not caught.value.meaning.retryable
