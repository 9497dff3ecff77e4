"""A streamed response that is cut anywhere and continued gives the events of the one that was not cut, to the byte."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.faces.grpc.service import SERVICE
from lockstep_router.faces.openai.chunks import chunks_of, complete_body_of
from lockstep_router.generation.parsing import Parsing
from lockstep_router.generation.style import Style
from lockstep_router.journals import ChoiceRecord, Outcome, Piece
from lockstep_router.resumption import After, Reading
from lockstep_router.text.tokenizer import Tokenizer
from router_cluster import events_of, eventually
from test_replay import Arrival, Growing, pieces_of, stream_of
from test_responses_api import ASK, CALLS, WEATHER
from tool_models import ids_of, model_of, says
from websocket_client import socket_of

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln 😀"}}</tool_call>'
ANSWERS = {
    "text": "</think>Yes, naïve 😀 and more.",
    "reasoning": "Hm, 漢字?</think>\n\nYes.",
    "calls": f"</think>I look. {CALL}{CALL}",
    "calls alone": f"Hm.</think>{CALL}",
    "nothing": "",
    "unfinished call": '</think>I <tool_call>{"name": "weather", "arguments": {"ci',
    "broken call": "</think><tool_call>no JSON</tool_call> so what?",
}
PARSING = Parsing("think", is_open=True, tool_format="hermes", names=frozenset({"weather"}))
OPTIONS = '{"instructions":"Be brief.","tools":[],"temperature":null}'


@pytest.fixture(scope="module")
def thinking():
    return Tokenizer(model_of("thinking")["files"])


def response_of():
    """The record of a streamed response."""
    style = Style("responses", stream=True, include_usage=True, logprobs=False, options=OPTIONS)
    choices = (ChoiceRecord("s-0", inference_pb2.Sampling(max_tokens=6000)),)
    return replace(stream_of(1), style=style, choices=choices, parsing=PARSING)


def reading_of(source, tokenizer, feed=()):
    return Reading(
        response_of(), source, tokenizer, arrival=Arrival(source, iter(feed)), on_close=lambda: None, is_resumed=False
    )


async def read(reading, after=None, events=None):
    """The events of a reading; in `events`, also if it fails."""
    events = [] if events is None else events
    if after is not None:
        await reading.skip(After("r-1", after, "Last-Event-ID"))
    async for chunks in chunks_of(reading):
        events += chunks
    return events


def position_of(chunk):
    return chunk.event_id.removeprefix("r-1:")


async def check_every_cut(feed, tokenizer):
    """Cut the response after every event, and continue it: from what there was then, and from the whole of it."""
    source = Growing(1)
    events = await read(reading_of(source, tokenizer, feed))
    bodies = [json.loads(event.data) for event in events]
    assert [body["sequence_number"] for body in bodies] == list(range(len(events)))
    assert len({event.event_id for event in events}) == len(events)
    assert [event.type for event in events] == [body["type"] for body in bodies]
    for cut, event in enumerate(events, 1):
        resumed = reading_of(source, tokenizer)
        rest = await read(resumed, position_of(event))
        assert rest == events[cut:], event.event_id
        assert resumed.position.has_usage
        partial = Growing(1)
        tokens = int(position_of(event).partition("s")[0].partition(",")[0].rstrip("f").replace("-", "0"))
        partial.logs[0].add(
            Piece(0, 0, source.logs[0].ids[:tokens], (), 0 if "f" not in position_of(event) else LENGTH)
        )
        partial.logs[0].finish = source.logs[0].finish if "f" in position_of(event) else 0
        later = [Piece(0, tokens, source.logs[0].ids[tokens:], (), source.logs[0].finish)]
        assert await read(reading_of(partial, tokenizer, later), position_of(event)) == events[cut:], event.event_id
    return bodies


@given(
    name=st.sampled_from(sorted(ANSWERS)),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 30),
    finish=st.sampled_from([STOP, LENGTH]),
    is_alone=st.booleans(),
)
@settings(max_examples=30, deadline=None)
async def test_every_cut_of_any_response(thinking, name, sizes, cut, finish, is_alone):
    ids = ids_of(thinking, ANSWERS[name])[:cut]
    await check_every_cut(pieces_of(0, ids, sizes, finish=finish, is_alone=is_alone), thinking)


@pytest.mark.parametrize("name", sorted(ANSWERS))
async def test_events_do_not_depend_on_how_tokens_arrive(thinking, name):
    ids = ids_of(thinking, ANSWERS[name])
    one_by_one = await check_every_cut(pieces_of(0, ids, [1], finish=STOP), thinking)
    for sizes in ([len(ids) or 1], [3], [1, 5]):
        for is_alone in (False, True):
            feed = pieces_of(0, ids, sizes, finish=STOP, is_alone=is_alone)
            events = await read(reading_of(Growing(1), thinking, feed))
            assert [json.loads(event.data) for event in events] == one_by_one
    last = one_by_one[-1]["response"]
    assert (last["id"], last["created_at"], last["instructions"]) == ("resp_r-1", 1_700_000_000, "Be brief.")
    source = Growing(1)
    source.logs[0].add(Piece(0, 0, ids, (), STOP))
    assert json.loads(b"".join(await complete_body_of(reading_of(source, thinking)))) == last


@pytest.mark.parametrize(
    "position",
    ["0s0", "-s1", "2s1", "2s99", "0s99", "9s2", "2fs30", "-s99", "0,us99", "3s", "s3", "2sx", "99s99", "2s3s3"],
)
async def test_positions_that_the_response_does_not_have(thinking, position):
    source = Growing(1)
    source.logs[0].add(Piece(0, 0, ids_of(thinking, "</think>Yes, so it is"), (), LENGTH))
    with pytest.raises(LockstepError) as refused:
        await read(reading_of(source, thinking), position)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "Last-Event-ID")


async def test_number_after_the_end_is_refused(thinking):
    source = Growing(1)
    source.logs[0].add(Piece(0, 0, ids_of(thinking, "</think>Yes"), (), LENGTH))
    events = await read(reading_of(source, thinking))
    last = position_of(events[-1])
    assert await read(reading_of(source, thinking), last) == []
    with pytest.raises(LockstepError, match="Last-Event-ID"):
        await read(reading_of(source, thinking), f"{last}9")


async def test_positions_without_numbers_are_between_tokens(thinking):
    """As events of gRPC name them."""
    source = Growing(1)
    source.logs[0].add(Piece(0, 0, ids_of(thinking, ANSWERS["calls"]), (), STOP))
    events = await read(reading_of(source, thinking))
    places = {}
    for index, event in enumerate(events):
        places[position_of(event).rpartition("s")[0]] = index
    for place, index in places.items():
        ends = position_of(events[index]).rpartition("s")[0] != position_of(events[index - 1]).rpartition("s")[0]
        if ends and place != "-":
            assert await read(reading_of(source, thinking), place) == events[index + 1 :]


async def test_long_answers_let_others_run(thinking):
    ids = ids_of(thinking, "</think>") + [ids_of(thinking, "a")[0]] * 5000
    source = Growing(1)
    source.logs[0].add(Piece(0, 0, ids, (), LENGTH))
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    events = await read(reading_of(source, thinking))
    middle = next(event for event in events if position_of(event).startswith("4000s"))
    before = turns
    rest = await read(reading_of(source, thinking), position_of(middle))
    counting.cancel()
    assert rest == events[events.index(middle) + 1 :]
    assert turns - before > 20


@pytest.mark.parametrize(("code", "closers"), [(ErrorCode.INTERNAL, 3), (ErrorCode.DRAINING, 0)])
async def test_failure_of_a_response_is_the_same_for_all(thinking, code, closers):
    """What may go on elsewhere is not closed: it would be closed twice."""
    source = Growing(1)
    source.logs[0].add(Piece(0, 0, ids_of(thinking, "Hm.</think>Yes")))
    source.outcome = Outcome(LockstepError(code, "shutting down"))
    found = []
    for after in (None, "0s1", "1s4"):
        events: list = []
        with pytest.raises(LockstepError, match="shutting down"):
            await read(reading_of(source, thinking), after, events)
        assert events[-1].type == "response.failed"
        found.append(events)
    for events in found[1:]:
        assert events == found[0][-len(events) :]
    failed = json.loads(found[0][-1].data)["response"]
    assert failed["lockstep"] == {"code": code.value}
    assert [each.type.rpartition(".")[2] for each in found[0][-1 - closers : -1]] == ["done"] * closers
    assert len({each.event_id for each in found[0][-2 - closers :]}) == 1, "no client has a part of a failure"


# Over the faces.


@pytest.fixture
async def cluster(make_cluster):
    return await make_cluster(2, model=model_of("thinking"))


STREAM = ASK | {"stream": True, "tools": [WEATHER], "user": "u"}
WANTED = {"x-lockstep-resumable": "true"}


async def events_until(client, count, headers=WANTED, body=STREAM):
    """The first events of a stream whose client leaves then: the id, and the blocks of the events."""
    blocks, block = [], []
    async with client.stream("POST", "/v1/responses", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line:
                block.append(line)
                continue
            blocks.append("\n".join(block))
            block = []
            if len(blocks) == count:
                break
        return response.headers["x-lockstep-stream-id"], blocks


def blocks_of(response):
    return response.text.split("\n\n")[:-1]


def id_of(block):
    return next(line for line in block.split("\n") if line.startswith("id: "))[4:]


async def resume(client, stream_id, last=None):
    headers = {} if last is None else {"last-event-id": last}
    return await client.get(f"/v1/streams/{stream_id}", headers=headers)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
async def test_client_that_left_gets_the_rest(cluster, count):
    says(cluster, f"Hm.</think>I look. {CALLS}", delay_s=0.005)
    async with cluster.over_http() as client:
        stream_id, before = await events_until(client, count)
        await eventually(lambda: cluster.router.runs.detached == 1)
        rest = await resume(client, stream_id, id_of(before[-1]))
        whole = await resume(client, stream_id)
    assert rest.headers["content-type"].startswith("text/event-stream")
    assert before + blocks_of(rest) == blocks_of(whole)
    assert blocks_of(whole)[-1].startswith("event: response.completed\n")
    assert "[DONE]" not in whole.text
    assert sum(len(worker.submits) for worker in cluster.workers) == 1


async def test_worker_that_dies_between_does_not_show(cluster):
    says(cluster, f"Hm.</think>I look. {CALLS}", delay_s=0.005)
    undisturbed = await cluster.client.post("/v1/responses", json=STREAM, headers=WANTED)
    (worker,) = (worker for worker in cluster.workers if worker.submits)
    worker.script = replace(worker.script, die_after=6)
    async with cluster.over_http() as client:
        stream_id, before = await events_until(client, 3)
        await eventually(lambda: cluster.router.failovers == 1)
        rest = await resume(client, stream_id, id_of(before[-1]))

    def texts(blocks):
        bodies = [json.loads(block.rpartition("data: ")[2]) for block in blocks]
        return [(body["sequence_number"], body["type"], body.get("delta")) for body in bodies]

    assert texts(before + blocks_of(rest)) == texts(blocks_of(undisturbed))


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_with_one_key_are_one_generation(cluster, stream):
    says(cluster, f"Hm.</think>I look. {CALLS}", delay_s=0.005)
    body, headers = STREAM | {"stream": stream}, {"idempotency-key": "k"}
    answers = await asyncio.gather(
        *(cluster.client.post("/v1/responses", json=body, headers=headers) for _ in range(4))
    )
    assert len({answer.content for answer in answers}) == 1
    assert {answer.status_code for answer in answers} == {200}
    assert sum(len(worker.submits) for worker in cluster.workers) == 1
    if stream:
        block = blocks_of(answers[0])[4]
        rest = await cluster.client.post("/v1/responses", json=body, headers=headers | {"last-event-id": id_of(block)})
        assert blocks_of(rest) == blocks_of(answers[0])[5:]
    else:
        assert answers[0].json()["output"][-1]["type"] == "function_call"
    other = await cluster.client.post("/v1/responses", json=body | {"input": "x"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_field_asks_for_it_too_and_others_are_as_ever(cluster):
    says(cluster, "</think>Yes.")
    wanted = await cluster.client.post("/v1/responses", json=STREAM | {"resumable": True})
    plain = await cluster.client.post("/v1/responses", json=STREAM)
    assert "x-lockstep-stream-id" not in plain.headers
    assert [each_id for each_id, _ in events_of(plain)] == [None] * len(events_of(plain))

    def shapes(response):
        return [(data["type"], data["sequence_number"], data.get("delta")) for _, data in events_of(response)]

    assert shapes(wanted) == shapes(plain)
    for header in ({"x-lockstep-resumable": "maybe"}, {"idempotency-key": "ü".encode()}):
        refused = await cluster.client.post("/v1/responses", json=STREAM, headers=header)
        assert refused.status_code == 400


async def test_wrong_events_are_refused_with_a_status(cluster):
    says(cluster, "</think>Yes, it is.")
    answer = await cluster.client.post("/v1/responses", json=STREAM, headers=WANTED)
    stream_id = answer.headers["x-lockstep-stream-id"]
    for position in ("1s99", "x", "1", "99s3", "2s0"):
        response = await resume(cluster.client, stream_id, f"{stream_id}:{position}")
        if position == "1":
            assert response.status_code == 200
            continue
        assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID"), position


async def test_numbers_name_no_event_of_other_kinds(cluster):
    body = {"model": "reference", "prompt": "x", "max_tokens": 4, "stream": True, "resumable": True}
    answer = await cluster.client.post("/v1/completions", json=body)
    stream_id = answer.headers["x-lockstep-stream-id"]
    response = await resume(cluster.client, stream_id, f"{stream_id}:2s3")
    assert response.status_code == 400


async def test_failure_is_an_event_for_those_who_resume_too(cluster):
    rejection = worker_pb2.Rejected(code="internal", message="bad")
    says(cluster, "</think>Yes" + " and no" * 9, rejection=rejection, reject_after=6)
    answer = await cluster.client.post("/v1/responses", json=STREAM, headers=WANTED)
    blocks, stream_id = blocks_of(answer), answer.headers["x-lockstep-stream-id"]
    assert blocks[-1].startswith("event: response.failed\n")
    rest = await resume(cluster.client, stream_id, id_of(blocks[3]))
    assert blocks_of(rest) == blocks[4:]
    nothing = await resume(cluster.client, stream_id, id_of(blocks[-1]))
    assert nothing.status_code == 500


async def test_other_faces_give_the_rest(cluster):
    says(cluster, f"Hm.</think>I look. {CALLS}", delay_s=0.002)
    async with cluster.over_http() as client, cluster.over_grpc() as channel, socket_of(client) as socket:
        stream_id, before = await events_until(client, 12)
        whole = blocks_of(await resume(client, stream_id))
        last = id_of(before[-1])
        await socket.send(type="resume", id="a", stream=stream_id, last_event_id=last)
        messages = await socket.answer("a")
        found = [(each["event_id"], each["data"]) for each in messages if each["type"] == "event"]
        assert [event_id for event_id, _ in found] == [id_of(block) for block in whole[12:]]
        assert [data for _, data in found] == [json.loads(block.rpartition("data: ")[2]) for block in whole[12:]]
        assert messages[-1]["type"] == "done"
        call = channel.unary_stream(
            f"/{SERVICE}/Resume",
            request_serializer=inference_pb2.ResumeRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateEvent.FromString,
        )
        everything = [each async for each in call(inference_pb2.ResumeRequest(request_id=stream_id))]
        assert "".join(each.text for each in everything) == "I look."
        assert "".join(each.reasoning for each in everything) == "Hm."
        middle = everything[len(everything) // 2]
        tail = await resume(client, stream_id, middle.event_id)
        assert blocks_of(tail) == whole[-len(blocks_of(tail)) :]
        rest = [
            each
            async for each in call(
                inference_pb2.ResumeRequest(request_id=stream_id, last_event_id=id_of(blocks_of(tail)[0]))
            )
        ]
        assert everything[-1].usage == rest[-1].usage


async def test_websocket_begins_responses(cluster):
    says(cluster, f"Hm.</think>I look. {CALLS}")
    body = {name: value for name, value in STREAM.items() if name != "stream"}
    async with cluster.over_http() as client, socket_of(client) as socket:
        await socket.send(type="generate", id="a", endpoint="responses", body=body)
        messages = await socket.answer("a")
        events = [each["data"] for each in messages if each["type"] == "event"]
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        whole = blocks_of(await resume(client, messages[0]["stream"]))
        assert events == [json.loads(block.rpartition("data: ")[2]) for block in whole]
        await socket.send(type="generate", id="b", endpoint="responses", body=body | {"store": True})
        (failed,) = await socket.answer("b")
        assert failed["error"]["param"] == "store"
