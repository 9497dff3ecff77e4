"""A model's own sampling settings hold for the fields that a client leaves out, on every worker of a stream."""

import pytest
from lockstep_api.v1 import inference_pb2
from router_cluster import eventually
from scripted_worker import Script, model_card
from websocket_client import socket_of

DEFAULTS = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.25}
OTHERS = {"temperature": 1.5, "top_p": 0.25, "top_k": 3, "min_p": 0.5, "repetition_penalty": 2.0}
OFF = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
OF_RESPONSES = ("temperature", "top_p", "top_k", "min_p")
"""Fields that the Responses API has."""


def settings_of(sampling):
    return {field: getattr(sampling, field) for field in DEFAULTS}


@pytest.fixture
async def recommending(make_cluster):
    """A cluster whose model has settings of its own."""
    cluster = await make_cluster()
    for worker in cluster.workers:
        worker.card = model_card(default_sampling=inference_pb2.Sampling(**DEFAULTS))
        worker.broadcast(worker.hello())
    ready = cluster.router.workers.ready
    await eventually(lambda: all(link.card.default_sampling.ListFields() for link in ready()))
    return cluster


@pytest.mark.parametrize("given", [{}, dict.fromkeys(DEFAULTS)])
async def test_fields_that_are_not_set_have_the_models_settings(recommending, given):
    await recommending.complete(**given)
    await recommending.chat(user="u", **given)
    worker, _ = recommending.worker_of("user:u")
    assert [settings_of(submit.sampling) for submit in worker.submits] == [DEFAULTS] * 2


async def respond(cluster, **fields):
    body = {"model": "reference", "input": "hello world", "max_output_tokens": 12, "seed": 7, "user": "u"} | fields
    response = await cluster.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("given", [{}, dict.fromkeys(OF_RESPONSES)])
async def test_responses_have_the_models_settings(recommending, given):
    await respond(recommending, **given)
    body = {"model": "reference", "input": "hello world", "max_output_tokens": 12, "seed": 7, "user": "u"} | given
    async with recommending.over_http() as client, socket_of(client) as socket:
        await socket.send(type="generate", id="a", endpoint="responses", body=body)
        assert (await socket.answer("a"))[-1]["type"] == "done"
    worker, _ = recommending.worker_of("user:u")
    assert [settings_of(submit.sampling) for submit in worker.submits] == [DEFAULTS] * 2


@pytest.mark.parametrize("values", [OTHERS, OFF, OFF | {"top_k": -1}])
async def test_the_clients_values_win_in_responses(recommending, values):
    given = {field: values[field] for field in OF_RESPONSES}
    await respond(recommending, **given)
    for field, value in given.items():
        await respond(recommending, **{field: value})
    worker, _ = recommending.worker_of("user:u")
    together, *alone = [settings_of(submit.sampling) for submit in worker.submits]
    wanted = given | {"top_k": max(0, given["top_k"])}
    assert together == DEFAULTS | wanted
    assert alone == [DEFAULTS | {field: value} for field, value in wanted.items()]


@pytest.mark.parametrize("given", [OTHERS, OFF])
async def test_the_clients_values_win(recommending, given):
    await recommending.complete(**given)
    for field, value in given.items():
        await recommending.complete(**{field: value})
    worker, _ = recommending.worker_of("user:u")
    together, *alone = [settings_of(submit.sampling) for submit in worker.submits]
    assert together == given
    assert alone == [DEFAULTS | {field: value} for field, value in given.items()]


async def test_a_stream_that_moves_keeps_the_settings_it_began_with(recommending):
    own, (other,) = recommending.worker_of("user:u")
    # The other worker's card differs: its operator has turned the settings off.
    other.card = model_card()
    other.broadcast(other.hello())
    links = recommending.router.workers.links
    await eventually(lambda: any(not link.card.default_sampling.ListFields() for link in links))
    own.script = Script(die_after=4)
    response = await recommending.complete()
    assert response.status_code == 200
    assert other.submits[-1].emitted_ids
    assert settings_of(other.submits[-1].sampling) == settings_of(own.submits[0].sampling) == DEFAULTS


async def test_models_are_listed_with_their_settings(recommending):
    worker = recommending.workers[0]
    worker.card = model_card(name="other", default_sampling=inference_pb2.Sampling(temperature=0.7))
    worker.broadcast(worker.hello())
    await eventually(lambda: "other" in recommending.router.workers.models)
    models = (await recommending.client.get("/v1/models")).json()["data"]
    assert {model["id"]: model["default_sampling"] for model in models} == {
        "reference": DEFAULTS,
        "other": {"temperature": 0.7},
    }


async def test_top_k_is_listed_as_an_integer(recommending):
    (model,) = (await recommending.client.get("/v1/models")).json()["data"]
    assert model["default_sampling"] == DEFAULTS
    assert type(model["default_sampling"]["top_k"]) is int
