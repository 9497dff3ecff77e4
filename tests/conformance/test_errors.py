"""Mistakes of a client become the official client's exceptions, with the field at fault in `param`."""

import re

import httpx
import openai
import pytest
from system import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PLAIN = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
SCHEMA_WITH_NOT = {"name": "a", "schema": {"type": "object", "not": {"required": ["b"]}}}


def refusal_of_chat(client: openai.OpenAI, **fields) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**(CHAT | fields))
    return caught.value


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**(CHAT | {"model": "gpt-5", "stream": stream}))
    error = caught.value
    assert (error.status_code, error.code, error.param, error.type) == (
        404,
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    assert "gpt-5" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA_WITH_NOT}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: nothing"}}}, "structured_outputs.grammar"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, fields: dict, param: str) -> None:
    error = refusal_of_chat(client, **fields)
    assert (error.status_code, error.code, error.param) == (400, "invalid_request", param)
    assert error.type == "invalid_request_error"
    assert param in error.message


@pytest.mark.parametrize(
    ("path", "body", "missing"),
    [
        ("/chat/completions", CHAT, "messages"),
        ("/chat/completions", CHAT, "model"),
        ("/completions", PLAIN, "prompt"),
        ("/completions", PLAIN, "model"),
    ],
)
def test_a_missing_field_is_named(http: httpx.Client, path: str, body: dict, missing: str) -> None:
    response = http.post(path, json={key: value for key, value in body.items() if key != missing})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (missing, "invalid_request")
    assert missing in error["message"]


def test_the_error_of_too_long_a_prompt_has_both_numbers(client: openai.OpenAI) -> None:
    error = refusal_of_chat(client, messages=[{"role": "user", "content": "night " * 3000}], max_tokens=100)
    assert error.code == "context_length_exceeded"
    assert error.param in ("messages", "max_tokens")
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", error.message)]
    assert 2048 in numbers
    assert any(3000 <= number < 20_000 for number in numbers)


def test_the_error_of_prompt_and_answer_beyond_the_context_has_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**(PLAIN | {"prompt": list(range(4, 1004)), "max_tokens": 1049}))
    error = caught.value
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    for number in ("1000", "1049", "2048"):
        assert number in error.message.replace(",", "")
    fitting = client.completions.create(**(PLAIN | {"prompt": list(range(4, 1004)), "max_tokens": 3}))
    assert fitting.usage.prompt_tokens == 1000


def test_what_is_not_json_is_refused(http: httpx.Client) -> None:
    for content in (b"", b"{", b"[]", b"\xff\xfe", b'{"model": NaN}'):
        response = http.post("/chat/completions", content=content)
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_paths_and_methods_have_openais_shape(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model=MODEL, input="hi")
    response = http.get("/completions")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_the_system_serves_on_after_all_that(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(**CHAT).usage.completion_tokens == 2
