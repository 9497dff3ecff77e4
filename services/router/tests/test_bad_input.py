"""Whatever clients send, they get a 4xx that names the field, in OpenAI's shape."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lockstep_common.errors import LockstepError
from lockstep_router.faces.openai.fields import parse
from lockstep_router.faces.openai.responses.schemas import ResponsesRequest
from lockstep_router.faces.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lockstep_router.faces.openai.tool_turns import turns_of

CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = {"model": "reference", "prompt": "hi"}
HUGE = 10**400
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED = {"type": "refusal", "refusal": "no"}
MANY = {f"x{n}": 1 for n in range(40)}
SCHEMA = {"name": "a", "schema": {}}
TOOL_OF_RESPONSES = {"type": "function", "name": "f", "parameters": {"a": {"b": ["LARGE"]}}}


def without(body, field):
    return {key: value for key, value in body.items() if key != field}


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


CHAT_CASES = [
    (without(CHAT, "model"), "model"),
    (without(CHAT, "messages"), "messages"),
    (CHAT | {"model": 3}, "model"),
    (CHAT | {"model": None}, "model"),
    (CHAT | {"model": ""}, "model"),
    (CHAT | {"messages": []}, "messages"),
    (CHAT | {"messages": "hi"}, "messages"),
    (CHAT | {"messages": ["hi"]}, "messages[0]"),
    (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT | {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT | {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (CHAT | {"messages": [{"role": "user", "content": "hi", "color": 1}]}, "messages[0].color"),
    (CHAT | {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    (
        CHAT | {"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "x"}]}]},
        "messages[0].tool_calls[0].type",
    ),
    (CHAT | {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
    (CHAT | {"messages": [{"role": "assistant"}]}, "messages[0].content"),
    (CHAT | {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (CHAT | {"messages": [{"role": "user", "content": "", "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
    (CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (CHAT | {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c1"}]}, "messages[0].tool_call_id"),
    (CHAT | {"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    (CHAT | {"messages": [{"role": "assistant", "content": "x", "refusal": 3}]}, "messages[0].refusal"),
    (CHAT | {"messages": [{"role": "assistant", "content": [REFUSED | {"text": 1}]}]}, "messages[0].content[0].type"),
    (CHAT | user([REFUSED]), "messages[0].content[0].type"),
    (CHAT | user(None), "messages[0].content"),
    (CHAT | user(5), "messages[0].content"),
    (CHAT | user([]), "messages[0].content"),
    (CHAT | user([{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    (CHAT | user([{"type": "text", "text": "a"}, {"type": "text"}]), "messages[0].content[1].text"),
    (CHAT | user([{"type": "text", "text": "a"}, 7]), "messages[0].content[1]"),
    (CHAT | {"logprobs": 1}, "logprobs"),
    (CHAT | {"top_logprobs": 2}, "top_logprobs"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT | {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT | {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (CHAT | {"tools": [TOOL] * 129}, "tools"),
    (CHAT | {"tools": [TOOL, TOOL]}, "tools[1]"),
    (CHAT | {"tools": [TOOL]}, "tools"),  # this model's template has no place for them
    (CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "f" * 65}}]}, "tools[0].function.name"),
    (
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "f"} | MANY}]}, "tools[0].function"),
    (CHAT | {"tool_choice": "required"}, "tool_choice"),
    (CHAT | {"tool_choice": "any"}, "tool_choice"),
    (CHAT | {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
    (CHAT | {"reasoning_effort": "extreme"}, "reasoning_effort"),
    (CHAT | {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    (CHAT | {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    (CHAT | {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    (CHAT | {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b"),
    (CHAT | {"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
    (CHAT | {"chat_template_kwargs": {"a": "x" * 257}}, "chat_template_kwargs.a"),
    (CHAT | {"chat_template_kwargs": {f"a{n}": 1 for n in range(17)}}, "chat_template_kwargs"),
    (CHAT | {"functions": [{}]}, "functions"),
    (CHAT | {"function_call": {"name": "f"}}, "function_call"),
    (CHAT | {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    (CHAT | {"response_format": {"type": "json_object", "json_schema": SCHEMA}}, "response_format.json_schema"),
    (CHAT | {"response_format": {"type": "text", "colour": "red"}}, "response_format.colour"),
    (CHAT | {"structured_outputs": {}}, "structured_outputs"),
    (CHAT | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    (CHAT | {"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    (CHAT | {"structured_outputs": {"regex": "a" * 65537}}, "structured_outputs.regex"),
    (CHAT | {"structured_outputs": {"json": {"enum": ["ä" * 40_000]}}}, "structured_outputs.json"),
    (CHAT | {"structured_outputs": {"json": {"enum": list(range(70_000))}}}, "structured_outputs.json"),
    (CHAT | {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (CHAT | {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    (CHAT | {"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    (CHAT | {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    (CHAT | {"guided_json": {"type": "object"}}, "guided_json"),
    (CHAT | {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT | {"audio": {"voice": "x"}}, "audio"),
    (CHAT | {"prompt": "hi"}, "prompt"),
    (CHAT | {"colour": "red"}, "colour"),
    (CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT | {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (CHAT | {"stream": "yes"}, "stream"),
]

FUNCTION = TOOL["function"] | {"parameters": {"minimum": "LARGE"}}
LARGE_CASES = [
    (ChatCompletionRequest, CHAT | {"temperature": "LARGE"}, "temperature"),
    (ChatCompletionRequest, CHAT | {"tools": [TOOL | {"function": FUNCTION}]}, "tools[0].function.parameters"),
    (ChatCompletionRequest, CHAT | {"chat_template_kwargs": {"a": "LARGE"}}, "chat_template_kwargs.a"),
    (ChatCompletionRequest, CHAT | {"logit_bias": {"5": "LARGE"}}, "logit_bias.5"),
    (
        ChatCompletionRequest,
        CHAT | {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"schema": {"enum": [1, "LARGE"]}}}},
        "response_format.json_schema.schema",
    ),
    (CompletionRequest, PLAIN | {"structured_outputs": {"json": {"a": ["LARGE"]}}}, "structured_outputs.json"),
    (ResponsesRequest, {"model": "m", "input": "a", "tools": [TOOL_OF_RESPONSES]}, "tools[0].parameters"),
    (
        ResponsesRequest,
        {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", "schema": {"const": "LARGE"}}}},
        "text.format.schema",
    ),
]


@pytest.mark.parametrize(("kind", "body", "field"), LARGE_CASES)
@pytest.mark.parametrize("number", ["1e400", "-1e999", "9" * 400 + ".0"])
def test_a_number_that_is_too_large_is_refused(kind, body, field, number):
    text = json.dumps(body).replace('"LARGE"', number).encode()
    with pytest.raises(LockstepError) as refused:
        parse(kind, text)
    assert (refused.value.code, refused.value.field) == ("invalid_request", field)


PLAIN_CASES = [
    (without(PLAIN, "prompt"), "prompt"),
    (PLAIN | {"prompt": None}, "prompt"),
    (PLAIN | {"prompt": ""}, "prompt"),
    (PLAIN | {"prompt": []}, "prompt"),
    (PLAIN | {"prompt": {}}, "prompt"),
    (PLAIN | {"prompt": ["a", 1]}, "prompt[1]"),
    (PLAIN | {"prompt": [1, "a"]}, "prompt[1]"),
    (PLAIN | {"prompt": [1, -1]}, "prompt[1]"),
    (PLAIN | {"prompt": [1, 4096]}, "prompt[1]"),
    (PLAIN | {"prompt": [1, HUGE]}, "prompt[1]"),
    (PLAIN | {"prompt": [[1], []]}, "prompt[1]"),
    (PLAIN | {"prompt": [[1], [2, 9999]]}, "prompt[1][1]"),
    (PLAIN | {"prompt": ["a"] * 65}, "prompt"),
    (PLAIN | {"prompt": ["a", ""]}, "prompt[1]"),
    (PLAIN | {"suffix": "x"}, "suffix"),
    (PLAIN | {"best_of": 0}, "best_of"),
    (PLAIN | {"best_of": 17}, "best_of"),
    (PLAIN | {"best_of": 1, "n": 2}, "best_of"),
    (PLAIN | {"best_of": 2, "stream": True}, "best_of"),
    (PLAIN | {"echo": True, "logprobs": 1}, "echo"),
    (PLAIN | {"logprobs": True}, "logprobs"),
    (PLAIN | {"logprobs": 21}, "logprobs"),
    (PLAIN | {"messages": []}, "messages"),
]

COMMON_CASES = [
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "5", True, HUGE, 2**31)],
    *[({"temperature": value}, "temperature") for value in (-0.1, 2.1, "1", True, HUGE, 1e308)],
    *[({"top_p": value}, "top_p") for value in (-1, 1.1, "x")],
    *[({"top_k": value}, "top_k") for value in (-2, 1.5, HUGE)],
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": HUGE}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
    ({"logit_bias": {"4096": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999"),
    ({"logit_bias": {"\N{ARABIC-INDIC DIGIT ONE}": 1}}, "logit_bias.\N{ARABIC-INDIC DIGIT ONE}"),
    ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [4096]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"min_tokens": 200, "max_tokens": 100}, "min_tokens"),
    ({"user": 5}, "user"),
    ({"user": "u" * 1025}, "user"),
]

CASES = [
    *[("/v1/chat/completions", body, field) for body, field in CHAT_CASES],
    *[("/v1/completions", body, field) for body, field in PLAIN_CASES],
    *[("/v1/completions", PLAIN | extra, field) for extra, field in COMMON_CASES],
    *[("/v1/chat/completions", CHAT | extra, field) for extra, field in COMMON_CASES],
    ("/tokenize", {"model": "reference"}, "prompt"),
    ("/tokenize", PLAIN | CHAT, "prompt"),
    ("/detokenize", {"model": "reference", "tokens": [4096]}, "tokens[0]"),
    ("/detokenize", {"model": "reference", "tokens": "x"}, "tokens"),
    ("/detokenize", {"model": "reference"}, "tokens"),
]


def assert_error(response, status, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    return error


async def test_wrong_fields_are_named(make_cluster):
    cluster = await make_cluster(1)
    for path, body, field in CASES:
        response = await cluster.client.post(path, content=json.dumps(body))
        error = assert_error(response, 400, "invalid_request")
        assert error["param"] == field, (body, error)
        assert field in error["message"], (body, error)
        assert error["type"] == "invalid_request_error"
    assert not cluster.workers[0].submits


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b'{"model": "a" "b"}',
        b"[" * 100_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"1" * 5000,
    ],
    ids=lambda content: repr(content[:12]),
)
async def test_malformed_bodies(make_cluster, content):
    cluster = await make_cluster(1)
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert_error(await cluster.client.post(path, content=content), 400, "invalid_request")


async def test_numbers_that_json_cannot_hold(make_cluster):
    cluster = await make_cluster(1)
    for number in ("1e400", "-1e400", "Infinity", "NaN", "-Infinity"):
        content = f'{{"model": "reference", "prompt": "x", "temperature": {number}}}'
        assert_error(await cluster.client.post("/v1/completions", content=content), 400, "invalid_request")
        content = f'{{"model": "reference", "prompt": "x", "logit_bias": {{"1": {number}}}}}'
        assert_error(await cluster.client.post("/v1/completions", content=content), 400, "invalid_request")


async def test_unknown_model(cluster):
    for response in (await cluster.complete(model="gpt-9"), await cluster.chat(model="gpt-9")):
        error = assert_error(response, 404, "model_not_found")
        assert error["param"] == "model"
        assert "gpt-9" in error["message"]


async def test_context_length(cluster):
    for response, field in (
        (await cluster.complete("hello world", max_tokens=253), "max_tokens"),
        (await cluster.chat(max_tokens=250), "max_tokens"),
        (await cluster.chat(max_tokens=None, max_completion_tokens=250), "max_completion_tokens"),
    ):
        error = assert_error(response, 400, "context_length_exceeded")
        assert error["param"] == field
        assert "256" in error["message"]
    assert "257" in (await cluster.complete("hello world", max_tokens=253)).json()["error"]["message"]
    assert (await cluster.complete("hello world", max_tokens=252)).status_code == 200
    long = "hello world " * 100
    error = assert_error(await cluster.complete(long), 400, "context_length_exceeded")
    assert error["param"] == "prompt"
    assert str(len(cluster.tokenizer.encode(long))) in error["message"]
    long_chat = [{"role": "user", "content": long}]
    assert assert_error(await cluster.chat(messages=long_chat), 400, "context_length_exceeded")["param"] == "messages"


async def test_text_far_beyond_the_context_is_not_even_tokenized(cluster):
    error = assert_error(await cluster.complete("x" * (64 * 256 + 1)), 400, "context_length_exceeded")
    assert "16384" in error["message"]
    messages = [{"role": "user", "content": "x" * 9000}] * 2
    assert_error(await cluster.chat(messages=messages), 400, "context_length_exceeded")


async def test_body_beyond_the_limit(make_cluster):
    cluster = await make_cluster(1, max_body_bytes=2000)
    assert_error(await cluster.complete("x" * 2000), 413, "payload_too_large")
    async with cluster.over_http() as client:
        response = await client.post("/v1/completions", json={"model": "reference", "prompt": "x" * 200_000})
        assert_error(response, 413, "payload_too_large")
        assert (await client.get("/healthz")).status_code == 200

    async def chunks():
        for _ in range(100):
            yield b"x" * 100

    response = await cluster.client.post("/v1/completions", content=chunks())
    assert_error(response, 413, "payload_too_large")


async def test_body_that_does_not_arrive(make_cluster):
    cluster = await make_cluster(1, body_timeout_s=0.05)

    async def chunks():
        yield b"{"
        await asyncio.sleep(0.5)

    error = assert_error(await cluster.client.post("/v1/completions", content=chunks()), 400, "invalid_request")
    assert "0.05" in error["message"]


async def test_client_that_leaves_its_own_body(make_cluster):
    cluster = await make_cluster(1)
    async with cluster.over_http() as client:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        assert (await client.get("/healthz")).status_code == 200
    assert cluster.router.requests == 0


async def test_unknown_address_and_method(cluster):
    assert_error(await cluster.client.get("/v1/nothing"), 404, "not_found")
    assert_error(await cluster.client.post("/v1/completions/"), 404, "not_found")
    response = await cluster.client.get("/v1/completions")
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert_error(await cluster.client.delete("/v1/models"), 405, "method_not_allowed")


async def test_harmless_fields_are_ignored(cluster):
    ignored = {"store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "service_tier": "auto"}
    empty = {"tools": [], "functions": None, "response_format": {"type": "text"}, "modalities": ["text"]}
    plain = await cluster.chat()
    assert (await cluster.chat(**ignored, **empty)).json()["choices"] == plain.json()["choices"]
    assert (await cluster.complete(suffix=None, best_of=1)).status_code == 200
    sent_back = {"role": "assistant", "content": "yes", "provider_specific_fields": {"refusal": None}}
    assert (await cluster.chat(messages=[sent_back])).status_code == 200


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"refusal": "no"}, "no"),
        ({"content": "", "refusal": "no"}, "no"),
        ({"content": "well", "refusal": "no"}, "well\nno"),
        ({"content": [{"type": "text", "text": "well"}], "refusal": "no"}, "well\nno"),
        ({"content": [{"type": "text", "text": "well"}, REFUSED]}, "well\nno"),
        ({"content": "well", "refusal": ""}, "well"),
        ({"content": "well", "annotations": [{"type": "url_citation", "url_citation": {"url": "x"}}]}, "well"),
    ],
)
def test_an_answer_that_refuses_or_cites_may_be_sent_back(message, text):
    body = parse(ChatCompletionRequest, json.dumps(CHAT | {"messages": [{"role": "assistant"} | message]}).encode())
    (turn,) = turns_of(body.messages)
    assert (turn.role, turn.content) == ("assistant", text)


async def test_every_request_has_an_id(cluster):
    assert (await cluster.complete(headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
    made = (await cluster.complete(headers={"x-request-id": "not\tsane"})).headers["x-request-id"]
    assert made != "not\tsane"
    assert "x-request-id" in (await cluster.client.get("/nothing")).headers


async def test_unexpected_failure_is_a_500_in_the_same_shape(cluster):
    cluster.fail_after(0)
    for _ in range(2):
        error = assert_error(await cluster.complete(), 500, "internal")
        assert "secret" not in error["message"]
    assert cluster.router.streams == cluster.router.requests == 0


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "text", "a\0b"])
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
    ["role", "content", "type", "text", "1", "include_usage"]), inner, max_size=3), max_leaves=8)  # fmt: skip


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_json_is_parsed_or_refused_by_name(data):
    model = data.draw(st.sampled_from([ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]))
    body = {name: data.draw(values) for name in data.draw(st.sets(st.sampled_from(sorted(model.model_fields))))}
    try:
        assert parse(model, json.dumps(body).encode()).model
    except LockstepError as caught:
        error = caught
    else:
        return
    assert error.meaning.http_status == 400
    assert error.field is None or error.field.split(".")[0].split("[")[0] in model.model_fields


async def test_one_request_has_a_limit_of_answers(make_cluster):
    cluster = await make_cluster(1, max_streams_per_request=6)
    refused = await cluster.complete(["a", "b"], n=4)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "n")
    assert error["message"] == "n times the number of prompts is 8; a request may have 6 answers"
    assert len((await cluster.complete(["a", "b"], n=3)).json()["choices"]) == 6
    error = (await cluster.complete(["a", "b"], best_of=4)).json()["error"]
    assert error["message"] == "best_of times the number of prompts is 8; a request may have 6 answers"
    assert error["param"] == "best_of"
