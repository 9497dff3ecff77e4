"""`response_format` and `structured_outputs`: which grammar workers get, and which workers get it."""

import asyncio
import json

import pytest
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.protocol import MAX_GRAMMAR_BYTES
from router_cluster import eventually
from scripted_worker import model_card

OBJECT = inference_pb2.GRAMMAR_KIND_JSON_OBJECT
SCHEMA = inference_pb2.GRAMMAR_KIND_JSON_SCHEMA
REGEX = inference_pb2.GRAMMAR_KIND_REGEX
LARK = inference_pb2.GRAMMAR_KIND_LARK
DESCRIBED = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": ["\u00e9"]}}, "required": ["b"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": DESCRIBED, "strict": True, "description": "d"}}


@pytest.fixture
async def able(make_cluster):
    """A cluster whose workers take grammars."""
    return await with_engines(make_cluster, "compiler 1", "compiler 1")


async def with_engines(make_cluster, *engines, **settings):
    cluster = await make_cluster(len(engines), **settings)
    for worker, engine in zip(cluster.workers, engines, strict=True):
        await worker.kill()
        worker.card = model_card(grammar_engine=engine)
        await worker.start()
    await eventually(lambda: all_ready(cluster, engines))
    return cluster


def all_ready(cluster, engines):
    ready = cluster.router.workers.ready()
    return sorted(link.grammar_engine for link in ready) == sorted(engines)


def submits(cluster):
    return [submit for worker in cluster.workers for submit in worker.submits]


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, OBJECT, "", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, SCHEMA, "{}", "response_format"),
        ({"response_format": FORMAT}, SCHEMA, json.dumps(DESCRIBED, ensure_ascii=False), "response_format"),
        ({"structured_outputs": {"json": DESCRIBED}}, SCHEMA, None, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"a": 1}'}}, SCHEMA, '{"a": 1}', "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, REGEX, "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, LARK, 'start: "a"', "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, OBJECT, "", "structured_outputs.json_object"),
        (
            {"structured_outputs": {"choice": ['a"b', "c\n"]}},
            LARK,
            'start: CHOICE\nCHOICE: "a\\"b" | "c\\n"',
            "structured_outputs.choice",
        ),
    ],
)
async def test_workers_get_the_grammar(able, fields, kind, text, field):
    for answer in (await able.chat(**fields), await able.complete(**fields)):
        assert answer.status_code == 200, answer.text
    for submit in submits(able):
        grammar = submit.sampling.grammar
        assert (grammar.kind, grammar.field) == (kind, field)
        assert text is None or grammar.text == text
        assert kind != SCHEMA or list(json.loads(grammar.text)) == list(json.loads(text or json.dumps(DESCRIBED)))


async def test_a_grammar_waits_for_a_worker_that_starts(make_cluster):
    """Until it is ready it does not know whether it takes grammars."""
    cluster = await make_cluster(1)
    (worker,) = cluster.workers
    await worker.kill()
    worker.card, worker.state = model_card(), worker_pb2.WORKER_STATE_STARTING
    await worker.start()
    await eventually(lambda: cluster.router.workers.links and not cluster.router.workers.ready())
    asked = asyncio.create_task(cluster.chat(response_format={"type": "json_object"}))
    await asyncio.sleep(0.2)
    assert not asked.done()
    await worker.kill()
    worker.card, worker.state = model_card(grammar_engine="compiler 1"), worker_pb2.WORKER_STATE_READY
    await worker.start()
    assert (await asked).status_code == 200


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
async def test_free_text_has_no_grammar(able, fields):
    assert (await able.chat(**fields)).status_code == 200
    assert not any(submit.sampling.HasField("grammar") for submit in submits(able))


@pytest.mark.parametrize("text", ["a" * MAX_GRAMMAR_BYTES, "é" * (MAX_GRAMMAR_BYTES // 2)])
async def test_a_text_of_the_largest_size_is_accepted_and_a_longer_one_is_not(able, text):
    assert (await able.complete(structured_outputs={"regex": text})).status_code == 200
    answer = await able.complete(structured_outputs={"regex": text + "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs.regex"


async def test_a_deep_schema_reaches_the_worker(able):
    schema = {"type": "null"}
    for _ in range(20):
        schema = {"type": "object", "properties": {"a": schema}}
    assert (await able.complete(structured_outputs={"json": schema})).status_code == 200


async def test_workers_that_know_no_grammars_refuse_by_name(make_cluster):
    cluster = await make_cluster(1)
    answer = await cluster.chat(response_format=FORMAT)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "not supported by the workers" in answer.json()["error"]["message"]
    assert submits(cluster) == []


async def test_only_workers_that_know_grammars_get_them(make_cluster):
    cluster = await with_engines(make_cluster, "", "compiler 1")
    for session in range(8):
        answer = await cluster.complete(user=str(session), structured_outputs={"regex": "a"})
        assert answer.status_code == 200, answer.text
    old, new = cluster.workers
    assert len(old.submits) == 0
    assert len(new.submits) == 8


async def test_a_stream_continues_where_the_same_engine_computes_its_grammar(make_cluster):
    cluster = await with_engines(make_cluster, "compiler 1", "compiler 2", "compiler 1", exact_failover="strict")
    first, other, same = cluster.workers
    for session in range(20):
        before = len(first.submits), len(same.submits)
        first.script.die_after = same.script.die_after = None
        answer = await cluster.complete(user=f"s{session}", max_tokens=3, structured_outputs={"regex": "a"})
        assert answer.status_code == 200
        if len(first.submits) > before[0]:
            break
    else:
        raise AssertionError("no session prefers the first worker")
    first.script.die_after = 1
    others = len(other.submits)
    answer = await cluster.complete(user=f"s{session}", max_tokens=3, structured_outputs={"regex": "a"})
    assert answer.status_code == 200, answer.text
    assert same.submits[-1].attempt == 2
    assert same.submits[-1].sampling.grammar.text == "a"
    assert len(other.submits) == others


async def test_the_fields_are_described(able):
    schemas = (await able.client.get("/openapi.json")).json()["components"]["schemas"]
    assert set(schemas["StructuredOutputs"]["properties"]) == {"json", "regex", "choice", "grammar", "json_object"}
    assert schemas["JsonSchemaFormat"]["required"] == ["name"]
    assert "schema" in schemas["JsonSchemaFormat"]["properties"]
    assert "response_format" in schemas["ChatCompletionRequest"]["properties"]
