"""The Responses API through the official client: sync, async and streamed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from system import MODEL, MOST_TOKENS, System

PROMPT = "It was a dark night, and"
GREEDY = {"model": MODEL, "temperature": 0}
ASK = {**GREEDY, "input": PROMPT, "max_output_tokens": 20}


def test_a_response_has_the_text_of_the_chat_answer(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], max_tokens=20, **GREEDY)
    response = client.responses.create(**ASK)
    assert response.output_text == chat.choices[0].message.content
    assert (response.object, response.model, response.status) == ("response", MODEL, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 20
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    items = [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]
    assert client.responses.create(**(ASK | {"input": items})).output_text == response.output_text


def test_instructions_are_the_system_message(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(messages=messages, max_tokens=20, **GREEDY)
    response = client.responses.create(**ASK, instructions="You tell stories.")
    assert response.output_text == chat.choices[0].message.content


def test_the_events_add_up_to_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_the_asynchronous_client_gets_the_same(client: openai.OpenAI, system: System) -> None:
    whole = client.responses.create(**ASK).output_text
    async with openai.AsyncOpenAI(base_url=system.api, api_key="anybody", max_retries=0) as other:
        assert (await other.responses.create(**ASK)).output_text == whole
        async with other.responses.stream(**ASK) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole


def test_closing_a_stream_frees_its_blocks(
    client: openai.OpenAI, standing_stream: Callable[..., AbstractContextManager[Any]]
) -> None:
    def begin() -> openai.Stream:
        stream = client.responses.create(**(ASK | {"max_output_tokens": MOST_TOKENS}), stream=True)
        for _ in range(8):
            next(stream)
        return stream

    with standing_stream(begin) as stream:
        stream.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]}, "tools"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, fields: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**(ASK | fields))
    assert caught.value.param == param
