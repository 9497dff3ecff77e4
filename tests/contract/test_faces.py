"""What holds for the router's faces alike: REST, server-sent events, WebSocket and gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import websockets
from faces import (
    GRPC,
    NAMES,
    RESPONSES,
    REST,
    STREAMED,
    WEBSOCKET,
    Answer,
    Body,
    Face,
    FailureError,
    names_of,
    part,
    whole,
)
from key_files import KEY, OTHER_KEY, tenant, write
from lockstep_common.errors import MEANINGS, ErrorCode
from minutes import until_room_s
from router_cluster import eventually
from scripted_worker import Script
from systems import Make, System, slow
from websocket_client import socket_of

TEXT: Body = {"model": "reference", "prompt": "hello world", "max_tokens": 20, "seed": 7, "user": "u"}
CHAT: Body = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "seed": 7}
RESPONSE: Body = {"model": "reference", "input": "hi", "max_output_tokens": 20, "seed": 7}
MAX_STREAMS = 4


# Answers.

ANSWERS = {
    "text": ("text", TEXT),
    "token ids": ("text", TEXT | {"prompt": [5, 6, 7]}),
    "choices with log probabilities": ("text", TEXT | {"n": 3, "logprobs": 2}),
    "stop string": ("text", TEXT | {"max_tokens": 40, "stop": ["e", "zzz"]}),
    "stop tokens": ("text", TEXT | {"stop_token_ids": [9], "logit_bias": {"9": 5}, "min_tokens": 2}),
    "sampling": ("text", TEXT | {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5}),
    "conversation": ("chat", CHAT),
    "conversation with log probabilities": ("chat", CHAT | {"logprobs": True, "top_logprobs": 3, "n": 2}),
    "response": (RESPONSES, RESPONSE | {"temperature": 0.3, "top_p": 0.9}),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_are_the_same(system: System, name: str) -> None:
    kind, body = ANSWERS[name]
    for worker in system.workers:
        worker.script = Script(cached_tokens=1)
    answers, submits = {}, {}
    for face in names_of(kind):
        answers[face] = await whole(system.faces[face].ask(kind, body))
        sent = [submit for worker in system.workers for submit in worker.submits]
        submits[face] = sorted((list(each.prompt_ids), str(each.sampling)) for each in sent)
        for worker in system.workers:
            worker.submits.clear()
    first = answers[REST]
    assert len(first.texts) == body.get("n", 1)
    assert first.usage is not None
    if "prompt" in body and isinstance(body["prompt"], str) and "stop" not in body:
        assert first.texts[0] == system.undisturbed(body["prompt"], 7, 20)
    for face in names_of(kind)[1:]:
        assert answers[face].texts == first.texts, face
        assert answers[face].finishes == first.finishes, face
        assert answers[face].logprobs == first.logprobs, face
        assert answers[face].usage == first.usage, face
        assert submits[face] == submits[REST], face
    assert bool(first.logprobs[0]) == bool(body.get("logprobs"))
    assert set(first.finishes.values()) == {"stop" if "stop" in body else "length"}


@pytest.mark.parametrize("name", names_of(RESPONSES))
async def test_response_is_the_answer_to_the_conversation(make: Make, name: str) -> None:
    system = await make(1)
    face = system.faces[name]
    response, chat = await whole(face.ask(RESPONSES, RESPONSE)), await whole(face.ask("chat", CHAT))
    assert (response.texts, response.finishes, response.usage) == (chat.texts, chat.finishes, chat.usage)
    first, second = system.workers[0].submits
    assert (first.prompt_ids, first.sampling) == (second.prompt_ids, second.sampling)


# Errors.

BAD_TEXTS = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": 2.0}, "min_p"),
    ({"frequency_penalty": 3.0}, "frequency_penalty"),
    ({"presence_penalty": -3.0}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a" * 257]}, "stop[0]"),
    ({"stop_token_ids": [4096]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"logit_bias": {"4096": 1.0}}, "logit_bias"),
    ({"logit_bias": {"1": 101.0}}, "logit_bias.1"),
    ({"logit_bias": {str(token): 1.0 for token in range(1025)}}, "logit_bias"),
    ({"min_tokens": 200, "max_tokens": 100}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, 4096]}, "prompt[1]"),
    ({"user": "u" * 1025}, "user"),
    ({"model": ""}, "model"),
]
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "hi", "name": "n" * 257}]}, "messages[0].name"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
]
BAD_RESPONSES = [
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 2.5}, "temperature"),
    ({"input": []}, "input"),
    ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
    ({"store": True}, "store"),
    ({"metadata": {"k": 1}}, "metadata.k"),
    ({"messages": CHAT["messages"]}, "messages"),
]
TOO_LONG = [({"max_tokens": 300}, "max_tokens"), ({"prompt": [1] * 300}, "prompt")]
BAD = [
    *[("text", TEXT | change, "invalid_request", field) for change, field in BAD_TEXTS],
    *[("chat", CHAT | change, "invalid_request", field) for change, field in BAD_CHATS],
    *[(RESPONSES, RESPONSE | change, "invalid_request", field) for change, field in BAD_RESPONSES],
    *[("text", TEXT | change, "context_length_exceeded", field) for change, field in TOO_LONG],
    (RESPONSES, RESPONSE | {"max_output_tokens": 300}, "context_length_exceeded", "max_output_tokens"),
    ("text", TEXT | {"model": "nobody"}, "model_not_found", "model"),
    (RESPONSES, RESPONSE | {"model": "nobody"}, "model_not_found", "model"),
]


async def failure_of(face: Face, kind: str, body: Body, key: str | None = None) -> tuple[str, str | None]:
    with pytest.raises(FailureError) as failed:
        await whole(face.ask(kind, body, key))
    return failed.value.code, failed.value.field


@pytest.mark.parametrize("name", NAMES)
async def test_wrong_fields_have_the_same_errors(make: Make, name: str) -> None:
    system = await make(1)
    for kind, body, code, field in BAD:
        if name not in names_of(kind):
            continue
        if name != GRPC and body.get("temperature") != body.get("temperature"):
            continue  # JSON has no NaN
        assert await failure_of(system.faces[name], kind, body) == (code, field), body
    assert not system.workers[0].submits


@pytest.mark.parametrize("name", NAMES)
async def test_full_router_refuses(make: Make, name: str) -> None:
    system = await make(1, max_streams=MAX_STREAMS)
    slow(system)
    face = system.faces[name]
    assert await failure_of(face, "text", TEXT | {"n": MAX_STREAMS + 1}) == ("overloaded", None)
    running = asyncio.create_task(whole(face.ask("text", TEXT | {"n": MAX_STREAMS, "max_tokens": 100})))
    await eventually(lambda: system.router.streams == MAX_STREAMS)
    assert await failure_of(face, "text", TEXT) == ("overloaded", None)
    assert len((await running).texts) == MAX_STREAMS


@pytest.mark.parametrize("name", NAMES)
async def test_draining_router_finishes_and_takes_nothing_new(system: System, name: str) -> None:
    slow(system)
    face = system.faces[name]
    running = asyncio.create_task(whole(face.ask("text", TEXT | {"max_tokens": 60})))
    await eventually(lambda: system.router.streams == 1)
    draining = asyncio.create_task(system.router.leave())
    await eventually(lambda: system.router.draining)
    if name == WEBSOCKET:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with socket_of(system.http):
                pass
        response = refused.value.response
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert json.loads(response.body or b"")["error"]["code"] == "draining"
    else:
        assert await failure_of(face, "text", TEXT) == ("draining", None)
    assert (await running).texts[0] == system.undisturbed("hello world", 7, 60)
    await draining


@pytest.mark.parametrize("name", NAMES)
async def test_keys_and_limits_of_tenants_hold(make: Make, name: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY, requests_per_minute=2), tenant("chat", OTHER_KEY, concurrent_streams=1))
    system = await make(1, keys_file=str(path))
    face = system.faces[name]
    if name != WEBSOCKET:  # there the handshake is refused: test_websocket.py
        for key in (None, "wrong"):
            assert await failure_of(face, "text", TEXT, key) == ("invalid_api_key", None)
    assert not system.workers[0].submits
    await asyncio.sleep(until_room_s())
    for _ in range(2):
        assert (await whole(face.ask("text", TEXT, KEY))).finishes == {0: "length"}
    assert await failure_of(face, "text", TEXT, KEY) == ("rate_limit_exceeded", "requests_per_minute")
    assert await failure_of(face, "text", TEXT | {"n": 2}, OTHER_KEY) == ("resource_exhausted", "concurrent_streams")
    assert {submit.tenant for submit in system.workers[0].submits} == {"search"}


def test_every_error_has_a_status_of_grpc() -> None:
    assert set(MEANINGS) == set(ErrorCode)
    assert {meaning.grpc_status for meaning in MEANINGS.values()} <= {status.name for status in grpc.StatusCode}


# What happens on the way.


async def collect(given: AsyncIterator[Answer], answers: list[Answer]) -> None:
    async for answer in given:
        answers.append(answer)  # noqa: PERF401 - those before a failure are kept


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("disturb", ["kill", "lose_ranks"])
async def test_failover_changes_nothing(system: System, name: str, disturb: str) -> None:
    slow(system, 0.01)
    own, _ = system.worker_of("user:u")
    running = asyncio.create_task(
        whole(system.faces[name].ask("text", TEXT | {"max_tokens": 60, "logprobs": 1, "n": 2}))
    )
    await eventually(lambda: own.submits)
    await asyncio.sleep(0.15)
    outcome = getattr(own, disturb)()
    if outcome is not None:
        await outcome
    answer = await running
    assert system.router.failovers >= 1
    assert answer.texts[0] == system.undisturbed("hello world", 7, 60)
    assert [len(each) for each in answer.logprobs.values()] == [60, 60]
    assert answer.finishes == {0: "length", 1: "length"}


@pytest.mark.parametrize("name", NAMES)
async def test_client_that_leaves_ends_what_it_does_not_want_to_resume(system: System, name: str) -> None:
    slow(system)
    body = TEXT | {"max_tokens": 200, "resumable": False}
    if name == REST:
        leaving = asyncio.create_task(whole(system.faces[name].ask("text", body)))
        await eventually(lambda: system.router.streams == 1)
        leaving.cancel()
    else:
        await part(system.faces[name].ask("text", body), 3)
    await eventually(lambda: system.router.streams == 0)
    await eventually(lambda: sum(len(worker.cancels) for worker in system.workers) == 1)


@pytest.mark.parametrize("name", NAMES)
async def test_stream_that_fails_has_its_tokens_and_the_error(make: Make, name: str) -> None:
    system = await make(1, max_attempts=1)
    system.workers[0].script = Script(skip_at=6, delay_s=0.005)
    answers: list[Answer] = []
    with pytest.raises(FailureError) as failed:
        await collect(system.faces[name].ask("text", TEXT), answers)
    assert failed.value.code == "worker_lost"
    if name != REST:
        assert answers[-1].texts[0] == system.undisturbed("hello world", 7, 6)


@pytest.mark.parametrize("name", names_of(RESPONSES))
async def test_response_that_fails_has_its_tokens_and_the_error(make: Make, name: str) -> None:
    system = await make(1, max_attempts=1)
    face = system.faces[name]
    undisturbed = (await whole(face.ask(RESPONSES, RESPONSE))).texts[0]
    system.workers[0].script = Script(skip_at=6, delay_s=0.005)
    answers: list[Answer] = []
    with pytest.raises(FailureError) as failed:
        await collect(face.ask(RESPONSES, RESPONSE), answers)
    assert failed.value.code == "worker_lost"
    if name != REST:
        text = answers[-1].texts[0]
        assert text
        assert undisturbed.startswith(text)


@pytest.mark.parametrize("second", STREAMED)
@pytest.mark.parametrize("first", names_of(RESPONSES)[1:])
async def test_response_of_one_face_is_resumed_on_another(system: System, first: str, second: str) -> None:
    """Also over gRPC, which cannot begin one: there its tokens come as those of any answer."""
    slow(system, 0.01)
    body = RESPONSE | {"max_output_tokens": 40, "resumable": True}
    begun = await part(system.faces[first].ask(RESPONSES, body), 9)
    rest = await whole(system.faces[second].resume(begun.stream, begun.last_event_id))
    whole_answer = await whole(system.faces[second].resume(begun.stream, ""))
    assert begun.texts[0]
    assert begun.texts[0] + rest.texts[0] == whole_answer.texts[0]
    assert rest.finishes == whole_answer.finishes == {0: "length"}
    assert rest.usage == whole_answer.usage
    assert whole_answer.usage is not None
    assert whole_answer.usage[1] == 40
    assert sum(len(worker.submits) for worker in system.workers) == 1


@pytest.mark.parametrize("second", STREAMED)
@pytest.mark.parametrize("first", STREAMED)
async def test_stream_of_one_face_is_resumed_on_another(system: System, first: str, second: str) -> None:
    slow(system, 0.01)
    body = TEXT | {"max_tokens": 40, "n": 2, "logprobs": 1, "resumable": True}
    begun = await part(system.faces[first].ask("text", body), 7)
    seen = {index: (text, len(begun.logprobs[index])) for index, text in begun.texts.items()}
    rest = await whole(system.faces[second].resume(begun.stream, begun.last_event_id))
    whole_answer = await whole(system.faces[second].resume(begun.stream, ""))
    for index in (0, 1):
        text, tokens = seen.get(index, ("", 0))
        assert text + rest.texts[index] == whole_answer.texts[index]
        assert tokens + len(rest.logprobs[index]) == 40
    assert whole_answer.texts[0] == system.undisturbed("hello world", 7, 40)
    assert rest.finishes == {0: "length", 1: "length"}
    prompt_tokens = len(system.tokenizer.encode("hello world"))
    assert rest.usage == whole_answer.usage == (prompt_tokens, 80, 0, 0)
    assert sum(len(worker.submits) for worker in system.workers) == 2


@pytest.mark.parametrize("name", STREAMED)
async def test_usage_comes_with_the_last_finish_and_once_more_at_the_end(system: System, name: str) -> None:
    for worker in system.workers:
        worker.script = Script(cached_tokens=1)
    finished, reported, events, answer = "", [], 0, Answer()
    async for answer in system.faces[name].ask("text", TEXT | {"n": 2, "resumable": True}):
        reported += [answer.reported_usage] if len(answer.finishes) == 2 and not finished else []
        if len(answer.finishes) < 2:
            assert answer.reported_usage is None, "not before the last choice has ended"
        elif not finished:
            finished, events = answer.last_event_id, answer.events
    assert answer.usage is not None
    assert reported == [answer.usage]
    assert answer.events == events + 1, "the usage comes by itself, too"
    for second in STREAMED:
        rest = await whole(system.faces[second].resume(answer.stream, finished))
        assert (rest.events, rest.texts, rest.finishes, rest.usage) == (1, {}, {}, answer.usage), second
        # A client that has the usage does not get it again.
        nothing = [each async for each in system.faces[second].resume(answer.stream, answer.last_event_id)]
        assert not any(each.events for each in nothing), second


@pytest.mark.parametrize("name", STREAMED)
async def test_nobody_resumes_the_stream_of_another_tenant(make: Make, name: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY), tenant("chat", OTHER_KEY))
    system = await make(1, keys_file=str(path))
    slow(system)
    face = system.faces[name]
    begun = await part(face.ask("text", TEXT | {"resumable": True}, KEY), 3)
    for stream, key in ((begun.stream, OTHER_KEY), ("r-nobody", KEY)):
        with pytest.raises(FailureError) as failed:
            await whole(face.resume(stream, "", key))
        assert failed.value.code == "stream_not_found"
    with pytest.raises(FailureError) as failed:
        await whole(face.resume(begun.stream, f"{begun.stream}:99", KEY))
    assert failed.value.code == "invalid_request"
    assert (await whole(face.resume(begun.stream, "", KEY))).texts[0] == system.undisturbed("hello world", 7, 20)
