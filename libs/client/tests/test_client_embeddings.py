"""Embeddings: vectors from both forms of an answer, and requests that are sent again when connections break."""

import base64
import json
import struct
from dataclasses import replace
from functools import partial

import pytest
from fake_router import FakeRouter, Network, error, serving, vector_of
from lockstep_client import (
    AsyncLockstepClient,
    ConnectionFailedError,
    InvalidRequestError,
    LockstepClient,
    Policy,
    ProtocolError,
)
from lockstep_client.events import embeddings_of

A, B = "http://10.0.0.1", "http://10.0.0.2"
POLICY = Policy(timeout_s=None)
PATH = "/v1/embeddings"
BODY = {"model": "reference", "input": ["one", "two"], "encoding_format": "base64"}
VECTORS = (vector_of("one"), vector_of("two"))


def vectors(outputs):
    head, content = outputs
    assert head.status == 200
    return embeddings_of(json.loads(content)).vectors


async def embed(url, is_async, *given, **fields):
    options = {"policy": Policy(backoff_s=0.01, timeout_s=30.0)}
    if is_async:
        async with AsyncLockstepClient(url, **options) as client:
            return await client.embed(*given, **fields)
    with LockstepClient(url, **options) as client:
        return client.embed(*given, **fields)


@pytest.fixture(params=[False, True], ids=["blocking", "asyncio"])
def ask(request):
    return lambda url, *given, **fields: embed(url, request.param, *given, **fields)


@pytest.mark.parametrize("given", [["one", "two"], [[5, 6], [7]]])
async def test_vectors_are_in_the_order_of_the_texts(ask, given):
    router = FakeRouter()
    bodies = []
    answer = router.embed
    router.embed = lambda body: bodies.append(body) or answer(body)
    with serving(router) as server:
        got = await ask(server.url, given, model="reference", dimensions=4, user="u", timeout_s=20.0)
    assert got.vectors == tuple(map(vector_of, given))
    assert (got.model, got.prompt_tokens) == ("reference", 7)
    assert bodies == [{"model": "reference", "input": given, "dimensions": 4, "user": "u", "encoding_format": "base64"}]
    [(_, _, headers)] = router.seen
    assert "idempotency-key" not in headers
    assert float(headers["x-request-timeout"]) <= 20


async def test_connection_that_breaks_in_the_answer_is_made_again(ask):
    router = FakeRouter()
    with serving(router, cuts=[0, 30, 100]) as server:
        got = await ask(server.url, ["one", "two"], model="reference")
    assert got.vectors == VECTORS
    assert [method for method, *_ in router.seen] == ["POST"] * 4


async def test_router_that_dies_is_replaced_by_another(ask):
    first, second = FakeRouter("first"), FakeRouter("second")
    with serving(first) as one, serving(second) as two:

        def dying(server, answer, body):
            """The first router that is asked dies with its answer."""
            if len(first.seen + second.seen) == 1:
                server.cuts.append(50)
                server.refuse()
            return answer(body)

        for server in (one, two):
            server.router.embed = partial(dying, server, server.router.embed)
        assert (await ask([one.url, two.url], ["one", "two"], model="reference")).vectors == VECTORS
    assert len(first.seen) == len(second.seen) == 1


async def test_refusal_names_the_field(ask):
    refused = error(400, "invalid_request", "dimensions is 3; for 'reference' it may be one of 4", "dimensions")
    with serving(FakeRouter(refusals=[refused])) as server, pytest.raises(InvalidRequestError) as caught:
        await ask(server.url, "one", model="reference", dimensions=3)
    assert (caught.value.field, caught.value.status) == ("dimensions", 400)


def test_answer_that_is_cut_anywhere_is_asked_for_again():
    whole = len(FakeRouter().embed(BODY))
    for at in range(whole):
        network = Network({A: FakeRouter("first"), B: FakeRouter("second")}, [at])
        assert vectors(network.request(PATH, BODY, POLICY)) == VECTORS
        assert [method for _, method in network.sent] == ["POST", "POST"]


@pytest.mark.parametrize("path", [PATH, "/tokenize", "/detokenize"])
def test_router_that_is_silent_and_lives_gets_more_time(path):
    """It begins again each time, so that the same time would never be enough."""
    network = Network({A: FakeRouter()})
    network.silences = 3
    head, _ = network.request(path, BODY, POLICY)
    assert head.status == 200
    assert network.waits == [45.0, 5.0, 90.0, 5.0, 180.0, 5.0, 360.0]


def test_answer_without_a_key_gets_more_time_and_one_with_a_key_joins():
    for best_of, waits in ((3, [45.0, 5.0, 90.0]), (1, [45.0, 5.0, 45.0])):
        network = Network({A: FakeRouter()})
        network.silences = 1
        body = {"model": "reference", "prompt": "hi", "max_tokens": 5, "best_of": best_of}
        list(network.request("/v1/completions", body, POLICY))
        assert network.waits == waits


def test_tries_are_bounded():
    with pytest.raises(ConnectionFailedError):
        list(Network({A: None, B: None}).request(PATH, BODY, replace(POLICY, retries=1)))


def answer(*data, **changes):
    return {"model": "m", "data": list(data), "usage": {"prompt_tokens": 3, "total_tokens": 3}} | changes


def test_vectors_may_be_lists_or_base64():
    packed = base64.b64encode(struct.pack("<2f", 0.5, -1)).decode()
    data = ({"index": 1, "embedding": [0.25, 1]}, {"index": 0, "embedding": packed})
    assert embeddings_of(answer(*data)).vectors == ((0.5, -1.0), (0.25, 1.0))


@pytest.mark.parametrize(
    "body",
    [
        {},
        answer(usage=None),
        answer({"index": 1, "embedding": []}),
        answer({"index": 0, "embedding": []}, {"index": 0, "embedding": []}),
        answer({"index": 0, "embedding": "AAAA"}),
        answer({"index": 0, "embedding": "*"}),
        answer({"index": 0, "embedding": ["x"]}),
        answer({"index": 0, "embedding": None}),
    ],
)
def test_other_answers_are_no_embeddings(body):
    with pytest.raises(ProtocolError, match="embeddings"):
        embeddings_of(body)
