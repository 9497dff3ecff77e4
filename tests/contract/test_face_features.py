"""What requests may ask for besides text, over every face: tools, reasoning, grammars, several prompts, keys; and what
REST and gRPC have besides answers.
"""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
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
    Grpc,
    names_of,
    whole,
)
from key_files import KEY, OTHER_KEY, tenant, write
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_client import AsyncLockstepClient
from router_cluster import eventually
from scripted_worker import VOCAB_SIZE, model_card
from systems import Make, System, slow
from test_infill import with_marks
from tool_models import model_of, says

TEXT: Body = {"model": "reference", "prompt": "hello world", "max_tokens": 20, "seed": 7, "user": "u"}
ASK = [{"role": "user", "content": "Is it raining?"}]
CHAT: Body = {"model": "reference", "messages": ASK, "max_tokens": 300, "seed": 7}
PARAMETERS = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"maxLength": 3}}, "required": ["b"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
ADD = {"type": "function", "function": {"name": "add", "strict": True}}
CALLS = '<think>Rain?</think>Well. <tool_call>{"name": "weather", "arguments": {"b": "é🌨"}}</tool_call>'
CALLS += '<tool_call>{"name": "add"}</tool_call>'
EARLIER = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"b": "x"}'}}
TALK = [
    {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
    *ASK,
    {"role": "assistant", "content": None, "tool_calls": [EARLIER], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
]
TOOLS: dict[str, Body] = {
    "free": {"tools": [WEATHER, ADD]},
    "none": {"tools": [WEATHER], "tool_choice": "none"},
    "required": {"tools": [WEATHER, ADD], "tool_choice": "required"},
    "named": {"tools": [WEATHER, ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "one call": {"tools": [WEATHER, ADD], "parallel_tool_calls": False},
    "conversation": {"tools": [WEATHER], "messages": TALK, "reasoning_effort": "low"},
    "template": {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS, "strict": True}}
GRAMMARS: dict[str, Body] = {
    "text": {"response_format": {"type": "text"}},
    "object": {"response_format": {"type": "json_object"}},
    "schema": {"response_format": SCHEMA},
    "structured schema": {"structured_outputs": {"json": PARAMETERS}},
    "regex": {"structured_outputs": {"regex": "[a-z]+"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no\n"]}},
    "grammar": {"structured_outputs": {"grammar": 'start: "a"'}},
    "structured object": {"structured_outputs": {"json_object": True}},
}


async def answers_of(system: System, kind: str, body: Body) -> tuple[Answer, list[Any]]:
    """The answer and what workers were asked, which must be the same over all faces."""
    answers, submits = {}, {}
    for name in NAMES:
        answers[name] = await whole(system.faces[name].ask(kind, body))
        sent = [submit for worker in system.workers for submit in worker.submits]
        submits[name] = sorted((list(each.prompt_ids), str(each.sampling)) for each in sent)
        for worker in system.workers:
            worker.submits.clear()
    first = answers[REST]
    for name in STREAMED:
        assert answers[name].texts == first.texts, name
        assert answers[name].reasoning == first.reasoning, name
        assert without_ids(answers[name]) == without_ids(first), name
        assert answers[name].finishes == first.finishes, name
        assert answers[name].usage == first.usage, name
        assert submits[name] == submits[REST], name
    return first, submits[REST]


def without_ids(answer: Answer) -> dict[int, list[list[str]]]:
    assert all(call[0] for calls in answer.calls.values() for call in calls)
    return {index: [call[1:] for call in calls] for index, calls in answer.calls.items()}


@pytest.mark.parametrize("name", TOOLS)
async def test_tools_and_reasoning(make: Make, name: str) -> None:
    model = model_of("thinking")
    model["card"].grammar_engine = "compiler 1"
    system = await make(1, model=model)
    says(system, CALLS.removeprefix("<think>"))
    answer, _ = await answers_of(system, "chat", CHAT | TOOLS[name])
    assert answer.reasoning[0] == "Rain?"
    assert answer.usage is not None
    assert answer.usage[3] > 0
    expected = [["weather", '{"b": "é🌨"}'], ["add", "{}"]]
    known = [tool["function"]["name"] for tool in TOOLS[name]["tools"]]
    calls = [] if name == "none" else [call for call in expected if call[0] in known]
    calls = calls[:1] if name in ("one call", "named") else calls
    assert without_ids(answer) == ({0: calls} if calls else {})
    assert answer.finishes == {0: "tool_calls" if calls else "stop"}


@pytest.mark.parametrize("name", names_of(RESPONSES))
async def test_responses_have_the_tools_and_reasoning_of_conversations(make: Make, name: str) -> None:
    system = await make(1, model=model_of("thinking"))
    says(system, CALLS.removeprefix("<think>"))
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
    body = {"model": "reference", "input": ASK, "max_output_tokens": 300, "seed": 7, "tools": tools}
    response = await whole(system.faces[name].ask(RESPONSES, body))
    answer = await whole(system.faces[name].ask("chat", CHAT | {"tools": [WEATHER, ADD]}))
    assert (response.reasoning, response.texts, response.finishes) == (answer.reasoning, answer.texts, answer.finishes)
    assert without_ids(response) == without_ids(answer) == {0: [["weather", '{"b": "é🌨"}'], ["add", "{}"]]}
    assert response.usage == answer.usage
    first, second = system.workers[0].submits
    assert first.prompt_ids == second.prompt_ids


@pytest.mark.parametrize(
    "refused",
    [
        {"content": "Well.", "refusal": "No."},
        {"content": [{"type": "text", "text": "Well."}], "refusal": "No."},
        {"content": [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}], "refusal": ""},
    ],
)
async def test_refusal_that_is_sent_back_is_a_line_of_the_text(make: Make, refused: Body) -> None:
    system = await make(1)
    prompts = []
    for message in (refused, {"content": "Well.\nNo."}):
        body = CHAT | {"max_tokens": 20, "messages": [*ASK, {"role": "assistant"} | message, *ASK]}
        _, ((prompt, _),) = await answers_of(system, "chat", body)
        prompts.append(prompt)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", GRAMMARS)
async def test_grammars(make: Make, name: str) -> None:
    system = await make(1, model={"card": model_card(grammar_engine="compiler 1")})
    _, texts = await answers_of(system, "text", TEXT | GRAMMARS[name])
    _, chats = await answers_of(system, "chat", CHAT | {"max_tokens": 20} | GRAMMARS[name])
    for (_, sampling), *others in (texts, chats):
        assert not others
        assert ("grammar" in sampling) == (name != "text")


@pytest.mark.parametrize(
    "prompts", [["one", "two two"], [[5, 6], [7]], ["one"]], ids=["texts", "lists of ids", "one of a list"]
)
async def test_several_prompts(system: System, prompts: list[Any]) -> None:
    answer, submits = await answers_of(system, "text", TEXT | {"prompt": prompts, "n": 2, "echo": True})
    assert len(answer.texts) == len(submits) == 2 * len(prompts)


async def test_suffix(make: Make) -> None:
    files = with_marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    card = model_card(vocab_size=VOCAB_SIZE + 3, tokenizer_digest=files.digest)
    system = await make(1, model={"files": files, "card": card})
    _, ((prompt, _),) = await answers_of(system, "text", TEXT | {"suffix": " tail"})
    assert prompt == system.tokenizer.encode_infill("hello world", " tail")


BAD: list[tuple[str, Body, str]] = [
    ("chat", {"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tools": [WEATHER]}, "tools"),
    ("chat", {"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages[0].tool_call_id"),
    ("chat", {"messages": [*ASK, {"role": "user", "tool_calls": [EARLIER]}]}, "messages[1].tool_calls"),
    ("chat", {"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    ("chat", {"reasoning_effort": "much"}, "reasoning_effort"),
    ("chat", {"chat_template_kwargs": {"no name": True}}, "chat_template_kwargs.no name"),
    ("chat", {"chat_template_kwargs": {"unknown": 1}}, "chat_template_kwargs.unknown"),
    ("chat", {"suffix": "x"}, "suffix"),
    ("chat", {"echo": True}, "echo"),
    ("text", {"suffix": "x"}, "suffix"),
    ("text", {"best_of": 1, "n": 2}, "best_of"),
    ("text", {"best_of": 17}, "best_of"),
    ("text", {"echo": True, "logprobs": 1}, "echo"),
    ("text", {"prompt": ["x"] * 65}, "prompt"),
    ("text", {"prompt": [[]]}, "prompt[0]"),
    ("text", {"prompt": ["a", ""]}, "prompt[1]"),
    ("text", {"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("text", {"structured_outputs": {"regex": "a" * (65 << 10)}}, "structured_outputs.regex"),
    ("text", {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
    ("text", {"response_format": SCHEMA}, "response_format"),
]
"""No worker takes grammars, the model has no place for tools and no marks for a gap."""


async def failure_of(
    face: Face, kind: str, body: Body, key: str | None = None, name: str = ""
) -> tuple[str, str | None]:
    with pytest.raises(FailureError) as failed:
        await whole(face.ask(kind, body, key, name))
    return failed.value.code, failed.value.field


@pytest.mark.parametrize("name", NAMES)
async def test_wrong_fields_have_the_same_errors(make: Make, name: str) -> None:
    system = await make(1)
    for kind, change, field in BAD:
        body = {"text": TEXT, "chat": CHAT | {"max_tokens": 20}}[kind] | change
        assert await failure_of(system.faces[name], kind, body) == ("invalid_request", field), change
    assert not system.workers[0].submits


@pytest.mark.parametrize("name", STREAMED)
async def test_the_best_answers_are_not_streamed(system: System, name: str) -> None:
    body = TEXT | {"best_of": 3, "n": 2, "resumable": True}
    assert await failure_of(system.faces[name], "text", body) == ("invalid_request", "best_of")
    assert len((await whole(system.faces[name].ask("text", body | {"best_of": 2}))).texts) == 2


# Idempotency keys.


@pytest.mark.parametrize("name", NAMES)
async def test_requests_with_one_key_get_one_answer(system: System, name: str) -> None:
    face, body = system.faces[name], {each: value for each, value in TEXT.items() if each != "seed"}
    answers = await asyncio.gather(*(whole(face.ask("text", body, name="k-1")) for _ in range(3)))
    assert answers[0].texts == answers[1].texts == answers[2].texts
    assert sum(len(worker.submits) for worker in system.workers) == 1
    assert await failure_of(face, "text", body | {"n": 2}, name="k-1") == (
        "idempotency_key_reused",
        {WEBSOCKET: "idempotency_key", GRPC: "idempotency-key"}.get(name, "Idempotency-Key"),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("canceller", NAMES)
async def test_request_is_cancelled_by_its_key(system: System, name: str, canceller: str) -> None:
    slow(system)
    running = asyncio.create_task(
        whole(system.faces[name].ask("text", TEXT | {"max_tokens": 200, "resumable": True}, name="k-1"))
    )
    await eventually(lambda: system.router.streams == 1)
    await system.faces[canceller].cancel("k-1")
    with pytest.raises(FailureError) as failed:
        await running
    assert failed.value.code == "cancelled"
    await eventually(lambda: system.router.streams == 0)
    with pytest.raises(FailureError) as gone:
        await system.faces[canceller].cancel("k-1")
    assert gone.value.code == "stream_not_found"
    assert (await whole(system.faces[name].ask("text", TEXT, name="k-1"))).finishes == {0: "length"}


@pytest.mark.parametrize("name", NAMES)
async def test_nobody_cancels_the_request_of_another_tenant(make: Make, name: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY), tenant("chat", OTHER_KEY))
    system = await make(1, keys_file=str(path))
    slow(system)
    face = system.faces[name]
    running = asyncio.create_task(whole(face.ask("text", TEXT, KEY, "k-1")))
    await eventually(lambda: system.router.streams == 1)
    for unknown, key in (("k-1", OTHER_KEY), ("k-2", KEY)):
        with pytest.raises(FailureError) as failed:
            await face.cancel(unknown, key)
        assert failed.value.code == "stream_not_found"
    with pytest.raises(FailureError) as invalid:
        await face.cancel("a b", KEY)
    assert invalid.value.code == "invalid_request"
    assert (await running).texts[0] == system.undisturbed("hello world", 7, 20)


# What REST and gRPC have besides answers; `lockstep_client` speaks both.


@pytest.fixture
async def clients(make: Make) -> Any:
    card = model_card(embedding=worker_pb2.Embedding(size=8, dimensions=[2, 4]))
    system = await make(1, model={"card": card})
    grpc_face = system.faces[GRPC]
    assert isinstance(grpc_face, Grpc)
    urls = {REST: str(system.http.base_url), GRPC: f"grpc://{grpc_face.address}"}
    made = {name: AsyncLockstepClient(url) for name, url in urls.items()}
    yield system, made
    for client in made.values():
        await client.aclose()


async def test_models_and_tokens_are_the_same(clients: Any) -> None:
    _, both = clients
    rest, over_grpc = both[REST], both[GRPC]
    assert await rest.models() == await over_grpc.models()
    for arguments in ({"prompt": "hello é"}, {"messages": ASK}, {"prompt": "hello", "add_special_tokens": False}):
        assert await rest.tokenize(model="reference", **arguments) == await over_grpc.tokenize(
            model="reference", **arguments
        )
    ids = (await rest.tokenize("hello é", model="reference")).tokens
    assert await rest.detokenize(ids, model="reference") == await over_grpc.detokenize(ids, model="reference")


@pytest.mark.parametrize("given", ["one", ["one", "two two"], [5, 6], [[5, 6], [7]]], ids=str)
async def test_embeddings_are_the_same(clients: Any, given: Any) -> None:
    system, _ = clients
    stub = system.faces[GRPC].stub
    for dimensions in (None, 4):
        body = {"model": "reference", "input": given} | ({"dimensions": dimensions} if dimensions else {})
        answer = (await system.http.post("/v1/embeddings", json=body)).json()
        message = inference_pb2.EmbedRequest(model="reference", dimensions=dimensions)
        match given:
            case str():
                message.text = given
            case [str(), *_]:
                message.texts.texts.extend(given)
            case [int(), *_]:
                message.text_ids.ids.extend(given)
            case _:
                message.text_id_lists.lists.extend(inference_pb2.TokenIds(ids=each) for each in given)
        events = [event async for event in stub.Embed(message)]
        vectors = {event.index: list(event.embedding) for event in events[:-1]}
        assert [vectors[index] for index in sorted(vectors)] == [each["embedding"] for each in answer["data"]]
        assert events[-1].usage.prompt_tokens == answer["usage"]["prompt_tokens"]


async def test_wrong_embeddings_have_the_same_errors(clients: Any) -> None:
    system, _ = clients
    stub = system.faces[GRPC].stub
    for change, field in (({"dimensions": 3}, "dimensions"), ({"model": "x"}, "model"), ({"texts": [""]}, "input")):
        texts = change.get("texts", ["one"])
        body = {"model": "reference", "input": texts} | {k: v for k, v in change.items() if k != "texts"}
        error = (await system.http.post("/v1/embeddings", json=body)).json()["error"]
        fields = {k: v for k, v in body.items() if k != "input"} | {"texts": inference_pb2.Texts(texts=texts)}
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            _ = [event async for event in stub.Embed(inference_pb2.EmbedRequest(**fields))]
        trailing = dict(failed.value.trailing_metadata() or ())
        assert (trailing["lockstep-error-code"], trailing["lockstep-field"]) == (error["code"], error["param"])
        assert error["param"] == field
        assert int(trailing["lockstep-http-status"]) in (400, 404)
    assert system.router.streams == 0
