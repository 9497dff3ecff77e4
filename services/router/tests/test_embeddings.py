"""/v1/embeddings: OpenAI's shapes, the workers' vectors, and streams that move."""

import asyncio
import base64
import gc
import math
import struct

import openai
import pytest
from key_files import KEY, bearer, tenant, write
from lockstep_api.v1 import worker_pb2
from minutes import until_room_s
from router_cluster import eventually
from scripted_worker import Script, model_card, token_at

SIZE = 8


def vector_of(ids, size=SIZE):
    """What scripted workers give."""
    numbers = [token_at(ids, 0, position) - 2048.0 for position in range(size)]
    length = math.hypot(*numbers)
    return list(struct.unpack(f"<{size}f", struct.pack(f"<{size}f", *(number / length for number in numbers))))


async def give_embeddings(cluster, **embedding):
    for worker in cluster.workers:
        worker.card = model_card(embedding=worker_pb2.Embedding(**({"size": SIZE} | embedding)))
        worker.broadcast(worker.hello())
    ready = cluster.router.workers.ready
    await eventually(lambda: all(link.card.HasField("embedding") for link in ready()))
    return cluster


@pytest.fixture
async def embedder(cluster):
    return await give_embeddings(cluster, dimensions=[2, 4])


async def embed(cluster, given, *, headers=None, **fields):
    body = {"model": "reference", "input": given, "user": "u"} | fields
    return await cluster.client.post("/v1/embeddings", json=body, headers=headers)


async def test_one_text(embedder):
    response = await embed(embedder, "hello world")
    ids = embedder.tokenizer.encode("hello world")
    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector_of(ids)}],
        "model": "reference",
        "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids)},
    }
    own, (other,) = embedder.worker_of("user:u")
    (submit,) = own.submits
    assert (submit.embed, list(submit.prompt_ids), list(submit.emitted_ids)) == (True, ids, [])
    assert not other.submits


async def test_every_form_of_input(embedder):
    ids = [embedder.tokenizer.encode(text) for text in ("one", "two two")]
    for given in (["one", "two two"], ids):
        data = (await embed(embedder, given)).json()["data"]
        assert [entry["index"] for entry in data] == [0, 1]
        assert [entry["embedding"] for entry in data] == list(map(vector_of, ids))
    assert (await embed(embedder, ids[0])).json()["data"][0]["embedding"] == vector_of(ids[0])


async def test_base64_has_the_same_bits(embedder):
    (plain,) = (await embed(embedder, "a", encoding_format="float")).json()["data"]
    (packed,) = (await embed(embedder, "a", encoding_format="base64")).json()["data"]
    assert list(struct.unpack(f"<{SIZE}f", base64.b64decode(packed["embedding"]))) == plain["embedding"]


async def test_smaller_sizes_are_the_first_numbers_at_length_1(embedder):
    whole = (await embed(embedder, "a", dimensions=SIZE)).json()["data"][0]["embedding"]
    assert whole == (await embed(embedder, "a")).json()["data"][0]["embedding"]
    for size in (2, 4):
        short = (await embed(embedder, "a", dimensions=size)).json()["data"][0]["embedding"]
        length = math.hypot(*whole[:size])
        assert short == pytest.approx([number / length for number in whole[:size]], rel=1e-6)
        assert math.hypot(*short) == pytest.approx(1, abs=1e-6)


async def test_every_smaller_size_of_a_model_that_offers_them(cluster):
    await give_embeddings(cluster, any_dimension=True)
    assert len((await embed(cluster, "a", dimensions=5)).json()["data"][0]["embedding"]) == 5
    error = (await embed(cluster, "a", dimensions=9)).json()["error"]
    assert (error["param"], error["message"]) == ("dimensions", "dimensions is 9; for 'reference' it may be at most 8")


async def test_a_text_may_fill_the_context(embedder):
    assert (await embed(embedder, [5] * 256)).status_code == 200


REFUSED = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 1]}, "input[1]"),
    ({"input": [1, -1]}, "input[1]"),
    ({"input": [1, 4096]}, "input[1]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": ["a"] * 1025}, "input"),
    ({"input": [5] * 257}, "input"),
    ({"input": ["a", "b " * 400]}, "input[1]"),
    ({"dimensions": 3}, "dimensions"),
    ({"dimensions": 9}, "dimensions"),
    ({"dimensions": 0}, "dimensions"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"model": "nobody"}, "model"),
    ({"temperature": 1}, "temperature"),
    ({"user": 5}, "user"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
async def test_what_cannot_be_is_refused_by_name(embedder, fields, field):
    response = await embed(embedder, "a", **fields)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["param"] == field
    assert not any(worker.submits for worker in embedder.workers)


async def test_a_model_without_embeddings_is_named(cluster):
    error = (await embed(cluster, "a")).json()["error"]
    assert (error["param"], error["message"]) == (
        "model",
        "model 'reference' gives no embeddings (see the workers' setting embeddings)",
    )


async def test_an_answer_has_a_limit(cluster):
    await give_embeddings(cluster, size=1 << 16)
    error = (await embed(cluster, ["a"] * 17)).json()["error"]
    assert error["message"] == "input has 17 texts; at 65536 numbers each, 16 are allowed"


async def test_texts_move_when_their_worker_dies(embedder):
    own, (other,) = embedder.worker_of("user:u")
    own.script = Script(die_after=0)
    texts = [f"text {number}" for number in range(20)]
    data = (await embed(embedder, texts)).json()["data"]
    assert [entry["embedding"] for entry in data] == [vector_of(embedder.tokenizer.encode(text)) for text in texts]
    assert own.submits
    assert other.submits


async def test_an_error_of_a_worker_is_the_clients(embedder):
    for worker in embedder.workers:
        worker.script = Script(
            rejection=worker_pb2.Rejected(code="invalid_request", message="bad", field="embed", retryable=False)
        )
    response = await embed(embedder, ["a"] * 40)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "embed")
    await eventually(lambda: embedder.router.streams == 0)


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<8f", *[float("nan")] * 8)])
async def test_vectors_that_are_none_never_reach_a_client(embedder, content):
    for worker in embedder.workers:
        worker.script = Script(vector=lambda _: content)
    response = await embed(embedder, "a")
    assert response.status_code in (500, 503)


async def test_a_large_request_takes_a_few_streams_at_a_time(embedder):
    own, _ = embedder.worker_of("user:u")
    own.script = Script(delay_s=0.01)
    most = 0

    def note(_submit, _waiting):
        nonlocal most
        most = max(most, own.seats.running)

    own.on_start = note
    data = (await embed(embedder, ["a"] * 50)).json()["data"]
    assert len(data) == 50
    assert 1 < most <= 16


async def test_limits_of_a_tenant(make_cluster, tmp_path):
    limits = {"concurrent_streams": 2, "tokens_per_minute": 100}
    keys = write(tmp_path / "keys.yaml", tenant("search", KEY, **limits))
    cluster = await give_embeddings(await make_cluster(1, keys_file=keys))
    (worker,) = cluster.workers
    worker.script = Script(delay_s=0.005)
    most = []
    worker.on_start = lambda _submit, _waiting: most.append(worker.seats.running)
    await asyncio.sleep(until_room_s())
    assert (await embed(cluster, [[5]] * 10, headers=bearer(KEY))).status_code == 200
    assert max(most) == 2
    assert {submit.tenant for submit in worker.submits} == {"search"}
    refused = await embed(cluster, [[5] * 91], headers=bearer(KEY))
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "tokens_per_minute")
    assert (await embed(cluster, "a")).status_code == 401


async def test_a_client_that_leaves_cancels_its_texts(embedder):
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context["message"]))
    own, _ = embedder.worker_of("user:u")
    own.script = Script(delay_s=60)
    async with embedder.over_http() as client:
        body = {"model": "reference", "input": ["a"] * 5, "user": "u"}
        asking = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await eventually(lambda: len(own.submits) == 5)
        asking.cancel()
        await eventually(lambda: len(own.cancels) == 5)
    assert embedder.router.streams == 0
    gc.collect()
    assert unhandled == []


async def test_texts_that_outlast_the_drain_get_a_typed_error(make_cluster):
    embedder = await give_embeddings(await make_cluster(drain_timeout_s=0.05))
    for worker in embedder.workers:
        worker.script = Script(hang_after=0)
    running = asyncio.create_task(embed(embedder, ["one", "two"]))
    await eventually(lambda: embedder.router.streams == 2)
    async with asyncio.timeout(30):
        await embedder.router.leave()
    answer = await running
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    await eventually(lambda: embedder.router.streams == 0)


async def test_generations_and_embeddings_share_a_worker(embedder):
    embedding, text = await asyncio.gather(embed(embedder, ["a"] * 30), embedder.complete())
    assert len(embedding.json()["data"]) == 30
    assert text.json()["choices"][0]["text"] == embedder.undisturbed("hello world", 7, 12)


async def test_the_official_client(embedder):
    # It asks for base64 unless it is set otherwise, and decodes it itself.
    async with embedder.over_http() as http:
        client = openai.AsyncOpenAI(base_url=f"{str(http.base_url).rstrip('/')}/v1", api_key="k", max_retries=0)
        answer = await client.embeddings.create(model="reference", input=["one", "two"])
        plain = await client.embeddings.create(model="reference", input="one", encoding_format="float", dimensions=2)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model="reference", input="one", dimensions=7)
    expected = [vector_of(embedder.tokenizer.encode(text)) for text in ("one", "two")]
    assert [entry.embedding for entry in answer.data] == [pytest.approx(each) for each in expected]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    assert len(plain.data[0].embedding) == 2
    assert refused.value.param == "dimensions"
