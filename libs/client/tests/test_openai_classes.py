"""The drop-ins: everything of the official client works, and answers survive."""

import asyncio
import json

import openai
import pytest
from fake_router import FakeRouter, error, serving, text_of
from lockstep_client import InvalidRequestError, Policy, StreamLost
from lockstep_client.openai import AsyncOpenAI, OpenAI, error_of
from pydantic import BaseModel

POLICY = Policy(backoff_s=0.01, timeout_s=30.0)
QUESTION = [{"role": "user", "content": "hi"}]
FIELDS = {"model": "reference", "messages": QUESTION, "max_tokens": 8, "seed": 3}
EXPECTED = text_of(json.dumps(QUESTION), 3, 8)


def text(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.fixture
def router():
    return FakeRouter()


def make(server, **options):
    return OpenAI(base_url=[server.url, "http://127.0.0.1:9/v1"], api_key="k", policy=POLICY, **options)


@pytest.mark.parametrize("cut", [0, 400, 401, 999])
def test_stream_survives(router, cut):
    with serving(router, cuts=[cut, 50]) as server:
        chunks = list(make(server).chat.completions.create(**FIELDS, stream=True))
    assert text(chunks) == EXPECTED
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(router.generations) == 1


@pytest.mark.parametrize("cut", [0, 400, 401, 999])
async def test_async_stream_survives(router, cut):
    with serving(router, cuts=[cut, 50]) as server:
        async with AsyncOpenAI(base_url=server.url, api_key="k", policy=POLICY) as client:
            stream = await client.chat.completions.create(**FIELDS, stream=True)
            assert text([chunk async for chunk in stream]) == EXPECTED
            answer = await client.chat.completions.create(**FIELDS)
            assert answer.choices[0].message.content == EXPECTED


def test_repeat_on_another_router_is_seamless():
    first, second = FakeRouter("first", resumes=False), FakeRouter("second", 3, resumes=False)
    with serving(first, cuts=[900]) as one, serving(second, cuts=[900]) as two:
        client = OpenAI(base_url=[one.url, two.url], api_key="k", policy=POLICY)
        chunks = list(client.chat.completions.create(**FIELDS, stream=True))
    assert text(chunks) == EXPECTED
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_whole_answer_survives(router):
    with serving(router, cuts=[30]) as server:
        assert make(server).completions.create(model="reference", prompt="x", max_tokens=4, seed=1).choices[0].text
    assert len(router.generations) == 1


def test_raw_and_streaming_responses(router):
    with serving(router, cuts=[None, 500]) as server:
        client = make(server)
        raw = client.chat.completions.with_raw_response.create(**FIELDS)
        assert raw.headers["x-lockstep-router"] == "router-0"
        assert raw.parse().choices[0].message.content == EXPECTED
        with client.chat.completions.with_streaming_response.create(**FIELDS, stream=True) as response:
            assert text(list(response.parse())) == EXPECTED
        assert [model.id for model in client.models.list()] == ["reference"]


def test_stream_helper_and_parse(router):
    class Reply(BaseModel):
        word: str

    with serving(router, cuts=[500]) as server:
        client = make(server)
        with client.chat.completions.stream(**FIELDS) as stream:
            assert "".join(event.delta for event in stream if event.type == "content.delta") == EXPECTED
            assert stream.current_completion_snapshot.choices[0].message.content == EXPECTED
        router.whole = lambda path, body: json.dumps(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": '{"word": "yes"}'},
                    }
                ],
            }
        )
        parsed = client.chat.completions.parse(**FIELDS, response_format=Reply)
        assert parsed.choices[0].message.parsed == Reply(word="yes")


def test_addresses_of_grpc_are_refused():
    with pytest.raises(ValueError, match="http"):
        OpenAI(base_url="grpc://host:1", api_key="k")


def test_options_make_a_client_with_the_same_transport(router):
    with serving(router, cuts=[500]) as server:
        client = make(server).with_options(timeout=5.0)
        assert text(client.chat.completions.create(**FIELDS, stream=True)) == EXPECTED


def test_leaving_a_stream_cancels_it(router):
    with serving(router) as server, make(server).chat.completions.create(**FIELDS, stream=True) as stream:
        next(stream)
        stream.close()
        assert [method for method, *_ in router.seen] == ["POST", "DELETE"]


async def test_stream_that_another_task_closes_is_an_official_error(router):
    with serving(router, hangs=[900]) as server:
        async with AsyncOpenAI(base_url=server.url, api_key="k", policy=POLICY) as client:
            stream = await client.chat.completions.create(**FIELDS, stream=True)
            await anext(aiter(stream))
            reading = asyncio.create_task(rest_of(stream))
            await asyncio.sleep(0)
            await stream.close()
            with pytest.raises(openai.APIConnectionError) as failed:
                await asyncio.wait_for(reading, 20)
    assert error_of(failed.value).message == "the stream was closed"
    assert [method for method, *_ in router.seen] == ["POST", "DELETE"]


async def rest_of(stream):
    return [chunk async for chunk in stream]


async def test_stream_that_another_thread_closes_is_an_official_error(router):
    received = []
    with serving(router, hangs=[900]) as server:
        stream = await asyncio.to_thread(make(server).chat.completions.create, **FIELDS, stream=True)
        reading = asyncio.create_task(asyncio.to_thread(lambda: received.extend(stream)))
        async with asyncio.timeout(20):
            while not received:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(stream.close)
        with pytest.raises(openai.APIConnectionError) as failed:
            await asyncio.wait_for(reading, 20)
    assert error_of(failed.value).message == "the stream was closed"
    assert [method for method, *_ in router.seen] == ["POST", "DELETE"]


def test_query_of_the_client_is_in_every_request(router):
    """A gateway may know its clients by it."""
    asked = []
    respond = router.respond

    def without_query(method, path, *rest):
        path, _, query = path.partition("?")
        asked.append((method, query))
        return respond(method, path, *rest)

    router.respond = without_query
    with serving(router, cuts=[500]) as server:
        client = make(server, default_query={"subscription-key": "s"})
        assert text(client.chat.completions.create(**FIELDS, stream=True)) == EXPECTED
        assert client.chat.completions.create(**FIELDS, extra_query={"a": "b"}).choices[0].message.content == EXPECTED
        with client.chat.completions.create(**FIELDS, stream=True) as stream:
            next(stream)
    key = "subscription-key=s"
    assert asked == [("POST", key), ("GET", key), ("POST", f"{key}&a=b"), ("POST", key), ("DELETE", key)]


def test_header_that_cannot_be_sent_is_no_failure_of_a_router(router):
    with serving(router) as server:
        client = make(server)
        with pytest.raises(openai.APIConnectionError) as failed:
            client.chat.completions.create(**FIELDS, extra_headers={"X-Note": "secret\nline"})
        assert isinstance(error_of(failed.value), InvalidRequestError)
        assert "secret" not in str(error_of(failed.value))
        assert client.chat.completions.create(**FIELDS).choices[0].message.content == EXPECTED
        assert [method for method, *_ in router.seen if method == "POST"] == ["POST"]


@pytest.mark.parametrize("url", ["HTTP://Routers.Example:80/v1", "http://routers.example:80/v1/"])
def test_every_form_of_an_address_is_one(router, monkeypatch, url):
    respond = router.respond
    router.respond = lambda method, url, *rest: respond(method, url.removeprefix("http://routers.example"), *rest)
    with serving(router) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        client = OpenAI(base_url=url, api_key="k", policy=POLICY)
        assert client.chat.completions.create(**FIELDS).choices[0].message.content == EXPECTED


def test_errors_have_the_official_classes(router):
    router.refusals = [error(404, "model_not_found", "no model"), error(503, "overloaded", "full")]
    with serving(router) as server:
        client = OpenAI(base_url=server.url, api_key="k", policy=Policy(retries=0))
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.chat.completions.create(**FIELDS)
        with pytest.raises(openai.InternalServerError, match="full"):
            client.chat.completions.create(**FIELDS)
        url = server.url
    with pytest.raises(openai.APIConnectionError) as failed:
        OpenAI(base_url=url, api_key="k", policy=Policy(retries=0)).chat.completions.create(**FIELDS)
    assert error_of(failed.value).code == "connection_failed"


def test_lost_stream_is_an_official_error_with_what_came(router):
    router.resumes = False
    with serving(router, cuts=[900]) as server:
        client = OpenAI(base_url=server.url, api_key="k", policy=Policy(on_lost="error"))
        chunks = []
        with pytest.raises(openai.APIConnectionError) as failed:
            chunks.extend(client.chat.completions.create(**FIELDS, stream=True))
        lost = error_of(failed.value)
    assert isinstance(lost, StreamLost)
    assert EXPECTED.startswith(lost.received.texts[0])


def test_timeout_of_the_official_client_holds(router):
    with serving(router, hangs=[0] * 50) as server, pytest.raises(openai.APITimeoutError):
        OpenAI(base_url=server.url, api_key="k", timeout=0.3).chat.completions.create(**FIELDS)


def test_router_list_from_the_environment(router, monkeypatch):
    with serving(router) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}, http://127.0.0.1:9/v1")
        assert (
            OpenAI(api_key="k", policy=POLICY).chat.completions.create(**FIELDS).choices[0].message.content == EXPECTED
        )
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(ValueError, match="base_url"):
        OpenAI(api_key="k")
