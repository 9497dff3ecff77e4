"""Structured answers with the official client: every complete answer conforms to what was asked for."""

import json
import re
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from system import MODEL

MESSAGES = [{"role": "user", "content": "Describe a dark night as JSON."}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 900}
PLAIN = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": 120}


class Place(BaseModel):
    """A part of the answer."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern="^[A-Z][a-z]{2,8}$")]
    kind: Literal["moor", "house", "sea"]


class Night(BaseModel):
    """What the answer has."""

    model_config = ConfigDict(extra="forbid")

    dark: bool
    hour: Annotated[int, Field(ge=0, le=23)]
    places: Annotated[list[Place], Field(min_length=1, max_length=2)]
    moon: Literal["new", "full"] | None


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI, seed: int) -> None:
    answer = client.beta.chat.completions.parse(**CHAT, response_format=Night, seed=seed)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    night = choice.message.parsed
    assert isinstance(night, Night)
    assert 1 <= len(night.places) <= 2


def test_a_streamed_answer_conforms(client: openai.OpenAI) -> None:
    import jsonschema  # noqa: PLC0415 - takes a second, and each process of pytest-xdist imports this file

    schema = {"name": "night", "schema": Night.model_json_schema(), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    stream = client.chat.completions.create(**CHAT, response_format=form, seed=1, n=2, stream=True)
    texts, ends = ["", ""], ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert ends == ["stop", "stop"]
    for text in texts:
        jsonschema.validate(json.loads(text), schema["schema"])


def test_a_json_object_is_one_as_far_as_it_goes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, response_format={"type": "json_object"}, temperature=0.8, seed=5)
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_log_probabilities_are_those_of_allowed_tokens(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(**PLAIN, logprobs=5, extra_body=extra, temperature=0)
    assert answer.choices[0].text in ("yes", "no")
    assert all(value <= 0 for value in answer.choices[0].logprobs.token_logprobs)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choice": ['a wild "moor"', "the s\u00e9a"]}, 'a wild "moor"|the s\u00e9a'),
        ({"regex": "[A-Z][a-z]+ [0-9]{4}-[0-9]{2}"}, "[A-Z][a-z]+ [0-9]{4}-[0-9]{2}"),
        ({"grammar": 'start: sum\nsum: NUMBER ("+" NUMBER){1,2}\nNUMBER: /[0-9]{1,3}/'}, r"\d+(\+\d+){1,2}"),
        ({"grammar": 'root ::= ("ab" | "cd"){2,3} "."'}, r"(ab|cd){2,3}\."),
        ({"json": {"enum": ["x", 1, None]}}, r'"x"|1|null'),
    ],
)
def test_structured_outputs(client: openai.OpenAI, form: dict, pattern: str) -> None:
    for seed in range(3):
        answer = client.completions.create(**PLAIN, extra_body={"structured_outputs": form}, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0].text


def test_ignore_eos_does_not_go_past_a_complete_answer(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"regex": "[0-9]{4}"}, "ignore_eos": True, "min_tokens": 50}
    answer = client.completions.create(**PLAIN, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch("[0-9]{4}", answer.choices[0].text)
