"""The official client's parse and stream helpers on a real model: answers are objects of the caller's types."""

import json
from typing import Annotated, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from system import MODEL, System

QUESTION = "Describe a dark night as JSON."
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 900}
ASK = {"model": MODEL, "input": QUESTION, "max_output_tokens": 900}


class Night(BaseModel):
    """What the answer has."""

    model_config = ConfigDict(extra="forbid")

    dark: bool
    hour: Annotated[int, Field(ge=0, le=23)]
    place: Literal["moor", "house", "sea"]
    ghosts: Annotated[list[Annotated[str, Field(pattern="^[A-Z][a-z]{2,8}$")]], Field(min_length=1, max_length=3)]


@pytest.fixture
async def other(system: System):
    """The asynchronous client."""
    async with openai.AsyncOpenAI(base_url=system.api, api_key="anybody", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_a_response_is_parsed(client: openai.OpenAI, seed: int) -> None:
    response = client.responses.parse(**ASK, text_format=Night, extra_body={"seed": seed})
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Night)
    assert Night.model_validate_json(response.output_text) == response.output_parsed


async def test_a_response_is_parsed_with_asyncio(client: openai.OpenAI, other: openai.AsyncOpenAI) -> None:
    seed = {"seed": 5}
    response = await other.responses.parse(**ASK, text_format=Night, extra_body=seed)
    assert response.output_parsed == client.responses.parse(**ASK, text_format=Night, extra_body=seed).output_parsed


async def test_a_chat_is_parsed_with_asyncio(client: openai.OpenAI, other: openai.AsyncOpenAI) -> None:
    answer = await other.chat.completions.parse(**CHAT, response_format=Night, seed=7)
    night = answer.choices[0].message.parsed
    assert isinstance(night, Night)
    again = client.chat.completions.parse(**CHAT, response_format=Night, seed=7)
    assert again.choices[0].message.parsed == night


def test_a_streamed_response_is_parsed(client: openai.OpenAI) -> None:
    whole = client.responses.parse(**ASK, text_format=Night, extra_body={"seed": 1})
    with client.responses.stream(**ASK, text_format=Night, extra_body={"seed": 1}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_parsed == whole.output_parsed
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.completed"


async def test_a_streamed_response_is_parsed_with_asyncio(other: openai.AsyncOpenAI) -> None:
    async with other.responses.stream(**ASK, text_format=Night, extra_body={"seed": 2}) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert isinstance(final.output_parsed, Night)
    assert kinds.count("response.output_text.done") == 1


async def test_a_streamed_chat_is_parsed(client: openai.OpenAI, other: openai.AsyncOpenAI) -> None:
    with client.chat.completions.stream(**CHAT, response_format=Night, seed=3) as stream:
        kinds = [event.type for event in stream]
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Night)
    assert kinds.count("content.done") == 1
    async with other.chat.completions.stream(**CHAT, response_format=Night, seed=3) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_completion()).choices[0].message.parsed == parsed


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own types
def test_parsed_messages_are_taken_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.parse(**CHAT, response_format=Night, seed=1).choices[0].message
    with client.chat.completions.stream(**CHAT, response_format=Night, seed=1) as stream:
        streamed = stream.get_final_completion().choices[0].message
    nights = []
    for message in (first, streamed):
        assert isinstance(message.parsed, Night)
        more = {"messages": [*CHAT["messages"], message, {"role": "user", "content": "And the next one?"}]}
        answer = client.chat.completions.parse(**CHAT | more, response_format=Night, seed=2)
        nights.append(answer.choices[0].message.parsed)
    assert isinstance(nights[0], Night)
    assert nights[0] == nights[1]


def test_a_response_that_was_left_goes_on_for_its_client(client: openai.OpenAI, http: httpx.Client) -> None:
    """Raw events with ids, as the official client gets them, then the rest by the id of the last one."""
    form = {"format": {"type": "json_schema", "name": "night", "schema": Night.model_json_schema(), "strict": True}}
    body = ASK | {"text": form, "seed": 4, "stream": True, "resumable": True}
    before, last = [], ""
    with http.stream("POST", "/responses", json=body) as response:
        stream_id = response.headers["x-lockstep-stream-id"]
        for line in response.iter_lines():
            last = line.removeprefix("id: ") if line.startswith("id: ") else last
            before += [line] if line else []
            if len(before) > 40 and line.startswith("data: "):
                break
    rest = http.get(f"/streams/{stream_id}", headers={"Last-Event-ID": last}).text
    whole = http.get(f"/streams/{stream_id}").text
    assert before + [line for line in rest.splitlines() if line] == [line for line in whole.splitlines() if line]
    parsed = client.responses.parse(**ASK, text_format=Night, extra_body={"seed": 4})
    last_event = json.loads([line for line in whole.splitlines() if line.startswith("data: ")][-1][6:])
    assert last_event["type"] == "response.completed"
    assert last_event["response"]["output"][0]["content"][0]["text"] == parsed.output_text
